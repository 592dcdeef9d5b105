"""The embedded task for pretrained models: sums of two numbers.

  What is 47 - 8?

The answer is a line such as `Answer: 39`. The second number of a problem of
level n is one from 9 n - 8 to 9 n. No model is made for this task: it has no
tokenizer and no demonstrations.
"""

import random
from typing import Any

LEVELS = (1,)
# Of 2,160 problems, half are for tests, more than 1,000. With larger numbers
# the pretrained model is almost never right: 7 % of its samples are right with
# numbers up to 130, 1 % with numbers up to 699.
_FIRST = 11, 130
TEST_SHARE = 2


def draw(rng: random.Random, level: int) -> dict[str, Any]:
  """Draws a problem: its fields `problem` and `answers`."""
  first = rng.randint(*_FIRST)
  second = rng.randint(9 * level - 8, 9 * level)
  sign = rng.choice('+-')
  total = first + second if sign == '+' else first - second
  return dict(problem=f'What is {first} {sign} {second}?',
              answers=(str(total),))
