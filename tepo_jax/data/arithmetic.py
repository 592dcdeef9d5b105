"""The embedded task: chains of small sums.

  Start with 7 (1) * 6 (2) + 8 (3) - 5.

One of the tasks of `embedded`. It is sized for two CPU cores: a prompt has at
most 24 tokens, a solution at most 38.

A problem of level n has n operations on operands 1..9, evaluated from left to
right; `*` can only come first. Only the last operation may make the running
total negative.
"""

import operator
import random
import re
from typing import Any

LEVELS = (3, 4, 5)
TEST_SHARE = 8

# Real corpora mix bare and worked answers; so do the demonstrations.
OPENINGS = {
    'direct': ('The answer is ', 'I guess '),
    'worked': ('Step by step:', 'Let us see:', 'One by one:'),
}

_OPERATIONS = {'+': operator.add, '-': operator.sub, '*': operator.mul}

WORDS = (
    *'0123456789', *(f' ({number}) ' for number in range(1, 10)),
    '+ ', '- ', '* ', ' = ', '-', '.', ' ', '\n',
    'user\n', 'assistant\n', 'system\n', 'Start with ', '\\boxed{', '}',
    *OPENINGS['direct'], *OPENINGS['worked'])


def draw(rng: random.Random, level: int) -> dict[str, Any]:
  """Draws a problem: its fields `problem` and `answers`.

  Levels go up to 9, the last step number in WORDS.
  """
  total = rng.randint(1, 9)
  text = f'Start with {total}'
  for number in range(1, level + 1):
    operand = rng.randint(1, 9)
    sign = rng.choice('+-*' if number == 1 else '+-')
    if sign == '-' and total < operand and number < level:
      sign = '+'
    total = _OPERATIONS[sign](total, operand)
    text += f' ({number}) {sign} {operand}'
  return dict(problem=f'{text}.', answers=(str(total),))


def demonstration(problem, rng: random.Random, style: str) -> str:
  r"""Writes a correct solution, without the end-of-turn token.

  Args:
    problem: a problem.Problem of this task.
    rng: chooses among OPENINGS[style].
    style: 'direct', `I guess \boxed{45}`, which a small model cannot compute
      in one step; or 'worked', with the running total after each operation:
      `One by one: (1) * 6 = 42 (2) + 8 = 50 (3) - 5 = 45 \boxed{45}`.
  """
  chain = _chain(problem.problem) if style == 'worked' else ''
  return (f'{rng.choice(OPENINGS[style])}{chain}'
          f'\\boxed{{{problem.answers[0]}}}')


def _chain(text):
  total = int(re.search(r'\d+', text)[0])
  chain = ''
  for number, sign, operand in re.findall(r'\((\d+)\) (.) (\d+)', text):
    total = _OPERATIONS[sign](total, int(operand))
    chain += f' ({number}) {sign} {operand} = {total}'
  return f'{chain} '
