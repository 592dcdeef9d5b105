"""Rewrites trees of `expressions`, and says how they are written."""

from collections.abc import Mapping
import fractions

from tepo_jax.grading import expressions


def is_number(tree: tuple) -> bool:
  """Whether it is written as a number: integer, decimal, or fraction in lowest
  terms; 60/12 and 0.1/0.4 are still to be computed."""
  if tree[0] == 'negative':
    return is_number(tree[1])
  if tree[0] == 'quotient':
    above, below = tree[1:]
    if above[0] == 'negative':
      above = above[1]
    return above[0] == below[0] == 'number' and (
        1 < below[1] == (above[1] / below[1]).denominator)
  return tree[0] == 'number' or expressions.is_decimal(tree)


def normal(tree: tuple) -> tuple:
  """Sorts sums and products, and leaves out what changes no value: +0, ·1, /1."""
  operation, *parts = (
      normal(part) if isinstance(part, tuple) else part for part in tree)
  if operation in ('sum', 'product'):
    parts = [factor for part in parts for factor in (
        part[1:] if part[0] == operation else (part,))]
    unit = ('number', fractions.Fraction(operation == 'product'))
    parts = sorted((part for part in parts if part != unit), key=repr) or [unit]
    return parts[0] if len(parts) == 1 else (operation, *parts)
  if operation == 'quotient' and parts[1] == ('number', fractions.Fraction(1)):
    return parts[0]
  return (operation, *parts)


def without_calls(tree: tuple) -> tuple:
  """Reads `a(b)` as a product everywhere, and `a(b)^2` as a times b^2."""
  if tree[0] == 'power' and tree[1][0] == 'opaque':
    (_, name, inside), exponent = tree[1:]
    tree = ('product', ('symbol', name), ('power', inside, exponent))
  elif tree[0] == 'opaque':
    tree = ('product', ('symbol', tree[1]), tree[2])
  return tuple(without_calls(part) if isinstance(part, tuple) else part
               for part in tree)


def renamed(tree: tuple, names: Mapping[str, str]) -> tuple:
  """The tree with other variables; one whose name another takes is marked."""
  if tree[0] == 'symbol':
    name = names.get(tree[1], tree[1] + "'" * (tree[1] in names.values()))
    return ('symbol', name)
  return tuple(renamed(part, names) if isinstance(part, tuple) else part
               for part in tree)
