"""Checks an arithmetic expression that must use given numbers (Countdown)."""

import ast
from collections.abc import Sequence
import fractions
import operator
import re

_MAX_CHARS = 100  # of an answer
_ALLOWED = {ast.Add: operator.add, ast.Sub: operator.sub,
            ast.Mult: operator.mul, ast.Div: operator.truediv}
_ALPHABET = re.compile(r'[-+*/() 0-9]*')


def is_solution(answer: str, numbers: Sequence[int], target: str) -> bool:
  """Whether an expression equals `target` and has each of `numbers` once.

  It may hold decimal numbers without a sign, + - * / between two operands,
  parentheses and spaces, in at most 100 characters; nothing else, such as "=".
  Values are exact fractions. Python's parser reads it; nothing is executed.
  """
  if len(answer) > _MAX_CHARS or not _ALPHABET.fullmatch(answer):
    return False
  used = []
  try:
    value = _value(ast.parse(answer.strip(), mode='eval').body, used)
  except (MemoryError, RecursionError, SyntaxError, ZeroDivisionError):
    return False
  return value == int(target) and sorted(used) == sorted(numbers)


def _value(node, used):
  """The value of a node; appends its numbers to `used`."""
  if isinstance(node, ast.Constant) and isinstance(node.value, int):
    used.append(node.value)
    return fractions.Fraction(node.value)
  if isinstance(node, ast.BinOp) and type(node.op) in _ALLOWED:
    return _ALLOWED[type(node.op)](
        _value(node.left, used), _value(node.right, used))
  raise SyntaxError  # a sign, a power, a call
