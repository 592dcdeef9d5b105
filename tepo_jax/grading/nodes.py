"""What answers are read as, and the sets of numbers that conditions describe."""

from collections.abc import Sequence
import dataclasses

from tepo_jax.grading import expressions
from tepo_jax.grading import units
from tepo_jax.grading import values

_FLIPPED = {'<': '>', '>': '<', '<=': '>=', '>=': '<='}


@dataclasses.dataclass(frozen=True)
class Node:
  """A structured answer.

  kind: 'value' (parts: the tree; text: its digits if it is a plain number, or
    its letters if it has no others), 'word' (text), 'based' (text; parts: the
    base), 'tuple' (text: brackets), 'set', 'list', 'union',
    'matrix' (of tuples), 'named' (text: the name; parts: what it equals),
    'chain' (text: relations; parts: trees), 'time' (text), 'dots',
    'option' (text: its letter; parts: what it says), 'residue' (text: the
    modulus; parts: a representative).
  """
  kind: str
  parts: tuple = ()
  text: str = ''
  unit: units.Unit | None = None
  is_percent: bool = False


def both(conditions):
  """The numbers that satisfy all conditions, `x>=1, x<=2` or `x!=0, x!=1`;
  None of other nodes."""
  if any(node.kind != 'chain' for node in conditions):
    return None
  relations = [node.text for node in conditions]
  if set(relations) == {'!='}:
    name, points = conditions[0].parts[0], [n.parts[1] for n in conditions]
    return named(name, excluding(points)) if all(
        node.parts[0] == name for node in conditions) else None
  try:
    (name, first), (other, second) = map(interval, conditions)
  except (expressions.Unreadable, ValueError):
    return None
  infinite = [[expressions.infinity(end.parts[0]) != 0 for end in node.parts]
              for node in (first, second)]
  if name != other or sorted(infinite) != [[False, True], [True, False]]:
    return None
  low, high = (first, second) if infinite[0][1] else (second, first)
  return named(name, Node('tuple', (low.parts[0], high.parts[1]),
                          low.text[0] + high.text[1]))


def named(variable: tuple, numbers: Node) -> Node:
  """The statement that a variable is in a set."""
  return Node('named', (numbers,), variable[1])


def interval(chain: Node) -> tuple[tuple, Node]:
  """Solves `a<x<b`, `x>=a`, `x!=a` and the like: (variable, set of numbers).

  Raises:
    expressions.Unreadable: it is no such condition on one variable.
  """
  relations, sides_ = chain.text.split(), list(chain.parts)
  places = [i for i, side in enumerate(sides_) if side[0] == 'symbol']
  if relations == ['!='] and places == [0]:
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
      return sides_[place], Node(
          'tuple', tuple(Node('value', (end,)) for end in ends), brackets)
  raise expressions.Unreadable('no interval')


def excluding(points: Sequence[tuple]) -> Node:
  """All real numbers but the constants `points`, as a union of intervals."""
  if any(map(expressions.symbols, points)):
    raise expressions.Unreadable('no constants')
  infinity = ('constant', 'inf')
  ends = [Node('value', (end,)) for end in (
      ('negative', infinity), *sorted(points, key=values.order), infinity)]
  pairs = tuple(Node('tuple', pair, '()') for pair in zip(ends, ends[1:]))
  return pairs[0] if len(pairs) == 1 else Node('union', pairs)
