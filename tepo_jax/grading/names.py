"""Compares what answers name: values of several unknowns, functions."""

import re

from tepo_jax.grading import nodes
from tepo_jax.grading import trees

_APPLIED = re.compile(r"([a-zA-Z](?:_\w)?'*)\(([a-z](?:,[a-z])*)\)")


class Different(Exception):
  """The two cannot be equal, whatever their parts are."""


def system(node):
  """Reads `x=5,y=2` or `p=5,q=2;p=7,q=2`: (names, rows of values), or None."""
  if node.kind == 'named' and node.text.startswith('(') and (
      node.parts[0].kind == 'tuple'):
    return tuple(node.text.strip('()').split(',')), [node.parts[0].parts]
  if node.kind != 'list' or any(part.kind != 'named' for part in node.parts):
    return None
  names = [part.text for part in node.parts]
  width = len(set(names))
  if width == 1 or len(names) % width or any(
      set(names[i:i + width]) != set(names)
      for i in range(0, len(names), width)):
    return None
  rows = []
  for i in range(0, len(names), width):
    found = {part.text: part.parts[0] for part in node.parts[i:i + width]}
    rows.append(tuple(found[name] for name in names[:width]))
  return tuple(names[:width]), rows


def ordered(reference, answer):
  """The answer's values in the order of the reference's names."""
  names, rows = answer
  if set(names) != set(reference[0]) or any(
      len(row) != len(names) for row in rows):
    raise Different
  places = [names.index(name) for name in reference[0]]
  return reference, (
      reference[0], [tuple(row[i] for i in places) for row in rows])


def tuples(rows):
  """A tuple, or a list of tuples."""
  found = tuple(nodes.Node('tuple', row, '()') for row in rows)
  return found[0] if len(found) == 1 else nodes.Node('list', found)


def _applied(name):
  """The function and the variables of `f(x)`; None of another name."""
  match = _APPLIED.fullmatch(name.replace(' ', ''))
  return (match[1], *match[2].split(',')) if match else None


def renamed(reference, answer):
  """Functions: `f(n)=2n` is `f(x)=2x`, and `y=2x` too."""
  wanted, given = (
      _applied(node.text) for node in (reference, answer))
  if wanted is None or given is None:
    arguments = wanted or given
    if arguments is None:
      return reference, answer
    # y = and f(x) =, but not x = and f(x) =
    plain = (reference if wanted is None else answer).text
    return [reference.parts[0], answer.parts[0]] if len(plain) == 1 and (
        plain not in arguments and len(arguments[0]) == 1) else [
            reference, answer]
  node = answer.parts[0]
  if len(wanted) != len(given) or wanted[0] != given[0]:
    raise Different
  if node.kind == 'value' and wanted != given:
    tree = trees.renamed(node.parts[0], dict(zip(given, wanted)))
    node = nodes.Node('value', (tree,))
  return [reference.parts[0], node]
