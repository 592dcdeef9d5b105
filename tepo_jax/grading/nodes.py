"""What answers are read as, and the sets of numbers that conditions describe."""

from collections.abc import Sequence
import dataclasses
import functools
import itertools

from tepo_jax.grading import expressions
from tepo_jax.grading import units
from tepo_jax.grading import values

_MIRROR = str.maketrans('()[]', ')(][')
NO_NUMBER = 'and'  # of a list: x<1 and x>2
MAX_CONDITIONS = 10  # on one variable
MAX_PAIRS = 100  # of intervals that are intersected
_FLIPPED = {'<': '>', '>': '<', '<=': '>=', '>=': '<='}


@dataclasses.dataclass(frozen=True)
class Node:
  """A structured answer.

  kind: 'value' (parts: the tree; text: its digits if it is a plain number, or
    its letters if it has no others), 'word' (text), 'based' (text; parts: the
    base), 'tuple' (text: brackets), 'set', 'list' (text: NO_NUMBER, or none), 'union',
    'matrix' (of tuples), 'named' (text: the name; parts: what it equals),
    'chain' (text: relations; parts: trees), 'time' (text), 'dots',
    'option' (text: its letter; parts: what it says), 'residue' (text: the
    modulus; parts: a representative).
  """
  kind: str
  parts: tuple = ()
  text: str = ''
  unit: units.Unit | None = None


def both(conditions: Sequence[Node]) -> Node | None:
  """The numbers that satisfy all conditions, `x>=1, x<=2` or `0<x<2, x!=1`;
  None of other nodes and of more than MAX_CONDITIONS."""
  if len(conditions) > MAX_CONDITIONS or any(
      node.kind != 'chain' for node in conditions):
    return None
  try:
    names, sets = zip(*map(interval, conditions))
    pieces = functools.reduce(_common, map(_pieces, sets))
  except expressions.Unreadable:
    return None
  return named(names[0], united(pieces)) if len(set(names)) == 1 else None


def without(numbers: Node, points: Node) -> Node:
  """An interval or a union of intervals without the members of a set.

  Raises:
    expressions.Unreadable: they are something else.
  """
  if points.kind != 'set' or any(
      point.kind != 'value' for point in points.parts):
    raise expressions.Unreadable('no set of values')
  others = excluding([point.parts[0] for point in points.parts])
  return united(_common(_pieces(numbers), _pieces(others)))


def _pieces(node):
  pieces = node.parts if node.kind == 'union' else (node,)
  if any(piece.kind != 'tuple' or len(piece.parts) != 2 or any(
      end.kind != 'value' for end in piece.parts) for piece in pieces):
    raise expressions.Unreadable('no intervals')
  return pieces


def united(intervals: Sequence[Node]) -> Node:
  """Their union; the empty set of none."""
  if len(intervals) == 1:
    return intervals[0]
  return Node('union' if intervals else 'set', tuple(intervals))


def _common(first, second):
  """The intersections of each interval of one union with each of the other."""
  if len(first) * len(second) > MAX_PAIRS:
    raise expressions.TooLarge('intervals')
  found = []
  for pair in itertools.product(first, second):
    (low, left), (high, right) = (_inner(*pair, side) for side in (0, 1))
    ends = [end.parts[0] for end in (low, high)]
    if not any(map(expressions.symbols, ends)):
      gap = values.order(ends[1]) - values.order(ends[0])
      if gap < 0 or gap == 0 and left + right != '[]':
        continue
    found.append(Node('tuple', (low, high), left + right))
  return found


def _inner(first, second, side):
  """The end on this side of the intersection of two intervals: (end, bracket)."""
  (a, left), (b, right) = (
      (node.parts[side], node.text[side]) for node in (first, second))
  for end, other in ((a, (b, right)), (b, (a, left))):
    if expressions.infinity(end.parts[0]) != 0:
      return other
  if any(expressions.symbols(end.parts[0]) for end in (a, b)):
    raise expressions.Unreadable('no order')
  gap = values.order(a.parts[0]) - values.order(b.parts[0])
  if gap == 0:
    return a, left if left in '()' else right
  return (a, left) if (gap > 0) == (side == 0) else (b, right)


def named(variable: tuple, numbers: Node) -> Node:
  """The statement that a variable is in a set.

  Raises:
    expressions.Unreadable: it is no variable.
  """
  if variable[0] != 'symbol':
    raise expressions.Unreadable('no variable')
  return Node('named', (numbers,), variable[1])


def interval(chain: Node) -> tuple[tuple, Node]:
  """Solves `a<x<b`, `|x|>=a`, `x!=a` and the like: (variable, set of numbers).

  Raises:
    expressions.Unreadable: it is no such condition on one variable.
  """
  relations, sides_ = chain.text.split(), list(chain.parts)
  places = [i for i, side in enumerate(sides_) if side[0] == 'symbol'] or [
      i for i, side in enumerate(sides_)
      if side[:2] == ('call', 'abs') and side[2][0] == 'symbol']
  if relations == ['!='] and sides_[0][0] == 'symbol' and places == [0]:
    return sides_[0], excluding(sides_[1:])
  if len(places) == 1 and len(sides_) <= 3:
    place = places[0]
    bounds = {}
    if place > 0:
      bounds[relations[place - 1]] = sides_[place - 1]
    if place < len(sides_) - 1:
      bounds[_FLIPPED.get(relations[place])] = sides_[place + 1]
    low = next((r for r in ('<', '<=') if r in bounds), None)
    high = next((r for r in ('>', '>=') if r in bounds), None)
    if len(bounds) == len(sides_) - 1 == (low is not None) + (high is not None):
      infinity = ('constant', 'inf')
      ends = (bounds.get(low, ('negative', infinity)),
              bounds.get(high, infinity))
      brackets = ('[' if low == '<=' else '(') + (']' if high == '>=' else ')')
      numbers = Node(
          'tuple', tuple(Node('value', (end,)) for end in ends), brackets)
      variable = sides_[place]
      return (variable, numbers) if variable[0] == 'symbol' else (
          variable[2], _of_absolute(numbers))
  raise expressions.Unreadable('no interval')


def _of_absolute(numbers):
  """The numbers whose absolute values are in an interval."""
  if any(expressions.symbols(end.parts[0]) for end in numbers.parts):
    raise expressions.Unreadable('no constants')
  mirrored = Node('tuple', tuple(
      Node('value', (('negative', end.parts[0]),))
      for end in reversed(numbers.parts)), numbers.text[::-1].translate(_MIRROR))
  if expressions.infinity(numbers.parts[0].parts[0]) == -1:
    return Node('tuple', (mirrored.parts[0], numbers.parts[1]),
                mirrored.text[0] + numbers.text[1])
  if values.order(numbers.parts[0].parts[0]) < 0:
    raise expressions.Unreadable('no absolute value')
  return Node('union', (mirrored, numbers))


def excluding(points: Sequence[tuple]) -> Node:
  """All real numbers but the constants `points`, as a union of intervals."""
  if any(map(expressions.symbols, points)):
    raise expressions.Unreadable('no constants')
  infinity = ('constant', 'inf')
  ends = [Node('value', (end,)) for end in (
      ('negative', infinity), *sorted(points, key=values.order), infinity)]
  pairs = tuple(Node('tuple', pair, '()') for pair in zip(ends, ends[1:]))
  return united(pairs)
