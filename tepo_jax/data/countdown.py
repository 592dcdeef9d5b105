r"""The embedded task Countdown: make a number from others.

  Make 13 from 1 4 9.

An answer such as `\boxed{(4+9)*1}` uses each number exactly once. It is graded
by `grading.arithmetic.is_solution`: a problem has many answers, which nobody
lists.

A problem of level n has n numbers 1..12; its target is the value of a random
expression of them. Sized for two CPU cores: a prompt has at most 19 tokens, a
solution at most 58.
"""

import operator
import random
from typing import Any

from tepo_jax.data import arithmetic

LEVELS = (3,)
TEST_SHARE = 8
OPENINGS = arithmetic.OPENINGS
WORDS = (
    *'0123456789', '+', '-', '*', '/', '(', ')', '=', ' ', '.', '\n',
    ' no ', ' yes ', 'user\n', 'assistant\n', 'system\n', 'Make ', ' from ',
    '\\boxed{', '}', *OPENINGS['direct'], *OPENINGS['worked'])

_LARGEST_NUMBER = 12
_LARGEST_VALUE = 99  # of every step of an expression that is drawn
_TRIES = 3  # in a worked solution

_DRAWN = {'+': operator.add, '-': operator.sub, '*': operator.mul}


def draw(rng: random.Random, level: int) -> dict[str, Any]:
  """Draws a problem: its fields `problem`, `answers` and `numbers`."""
  numbers = tuple(sorted(
      rng.randint(1, _LARGEST_NUMBER) for _ in range(level)))
  _, _, target = _attempt(rng, numbers)
  return dict(problem=f'Make {target} from {" ".join(map(str, numbers))}.',
              answers=(str(target),), numbers=numbers)


def _attempt(rng, numbers):
  """A random expression from the left: (its text, its steps, its value)."""
  first, *others = rng.sample(numbers, len(numbers))
  text, steps, value = str(first), str(first), first
  for number in others:
    sign = rng.choice([
        sign for sign, operation in _DRAWN.items()
        if 0 < operation(value, number) <= _LARGEST_VALUE])
    value = _DRAWN[sign](value, number)
    text = f'{text if text.isdigit() else f"({text})"}{sign}{number}'
    steps += f'{sign}{number}={value}'
  return text, steps, value


def demonstration(problem, rng: random.Random, style: str) -> str:
  r"""Writes a solution, without the end-of-turn token.

  Args:
    problem: a problem.Problem of this task.
    rng: draws the attempts.
    style: 'direct', a random expression, `I guess \boxed{(1+4)*9}`, which is
      mostly wrong; or 'worked', up to two attempts that fail and one that does
      not: `One by one:9+1=10*4=40 no 4+9=13*1=13 yes \boxed{(4+9)*1}`.
  """
  opening = rng.choice(OPENINGS[style])
  text, steps, value = _attempt(rng, problem.numbers)
  failed = []
  while style == 'worked' and str(value) != problem.answers[0]:
    failed.append(f'{steps} no ')
    text, steps, value = _attempt(rng, problem.numbers)
  if style == 'worked':
    opening += ''.join(failed[:rng.randrange(_TRIES)]) + f'{steps} yes '
  return f'{opening}\\boxed{{{text}}}'
