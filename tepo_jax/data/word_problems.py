"""The embedded task for pretrained models: word problems of one step.

  Mia has 4 bags with 6 pens in each. How many pens are there in all?

The answer is a worked line, `4 * 6 = 24. Answer: 24`. The second number of a
problem of level n is at most 8 n + 1. No model is made for this task: it has no
tokenizer and no demonstrations.
"""

import random
from typing import Any

LEVELS = (1,)
TEST_SHARE = 8

_NAMES = ('Ann', 'Ben', 'Carla', 'David', 'Emma', 'Felix', 'Grace', 'Henry')
_THINGS = ('apples', 'books', 'coins', 'marbles', 'pencils', 'shells',
           'stamps', 'cards')
_LARGEST = 12  # of the first number

# Texts, each with the answer of its two numbers a and b.
_TEMPLATES = (
    ('{name} has {a} {things} and gets {b} more. How many {things} does {name} '
     'have now?', lambda a, b: a + b),
    ('{name} has {total} {things} and gives away {b}. How many {things} are '
     'left?', lambda a, b: a),
    ('{name} has {b} boxes with {a} {things} in each. How many {things} are '
     'there in all?', lambda a, b: a * b),
    ('{name} shares {product} {things} equally among {b} friends. How many '
     '{things} does each friend get?', lambda a, b: a))


def draw(rng: random.Random, level: int) -> dict[str, Any]:
  """Draws a problem: its fields `problem` and `answers`."""
  text, answer = rng.choice(_TEMPLATES)
  a, b = rng.randint(2, _LARGEST), rng.randint(2, 8 * level + 1)
  return dict(
      problem=text.format(
          name=rng.choice(_NAMES), things=rng.choice(_THINGS), a=a, b=b,
          total=a + b, product=a * b),
      answers=(str(answer(a, b)),))
