"""Decides whether two structured answers are equivalent.

Order matters in pairs and intervals, whose brackets must agree, but not in
sets and bare lists. An inequality equals the interval of its solutions; `x=`
before a value is dropped. Units are compared and converted where both answers
have a known one (5 m = 500 cm, 5 m != 5 cm); other words are ignored.

Rounding. Values are compared exactly, with these exceptions, where a decimal
is a number written with a point or exponent, not a formula containing one:
  - absolute tolerances of the data set replace all of the following;
  - integers are exact: nothing rounds to or from one;
  - a decimal next to a decimal or a rational: relative 1e-6;
  - a decimal answer to an irrational reference (roots, pi, e): relative 1e-8,
    so 3.14159 is not pi but 3.14159265 is;
  - an exact answer to a decimal reference of at least three digits: correct if
    it rounds to these digits (22/7 for 3.14);
  - infinities equal only themselves; arithmetic on them has no value.
"""

import dataclasses
import fractions

from tepo_jax.grading import expressions
from tepo_jax.grading import structures
from tepo_jax.grading import units
from tepo_jax.grading import values

DECIMAL_TOLERANCE = fractions.Fraction(1, 10**6)  # relative
IRRATIONAL_TOLERANCE = fractions.Fraction(1, 10**8)
_ROUNDING = fractions.Fraction(1, 10**12)
_FLIPPED = {'<': '>', '>': '<', '<=': '>=', '>=': '<='}
_COLLECTIONS = frozenset(('value', 'tuple', 'set', 'list', 'matrix', 'union'))
_ONE_LETTER_UNITS = frozenset('msgh')


def same(reference: structures.Node, answer: structures.Node,
         abs_error: float | None = None) -> bool | None:
  """Whether answer and reference are equivalent; None if undecided."""
  try:
    return _same(reference, answer, abs_error)
  except (expressions.Undefined, expressions.TooLarge):
    return False
  except expressions.Unreadable:
    return None


def _same(reference, answer, abs_error=None):
  reference, answer = _unnamed(reference, answer)
  if reference.kind == 'named':  # and answer
    if reference.text != answer.text:
      return False
    return _same(reference.parts[0], answer.parts[0], abs_error)
  if {reference.kind, answer.kind} == {'tuple', 'chain'}:
    reference, answer = (_interval(node)[1] if node.kind == 'chain' else node
                         for node in (reference, answer))
  reference, answer = (_ungrouped(reference, answer),
                       _ungrouped(answer, reference))
  kinds = {reference.kind, answer.kind}
  if kinds == {'value'}:
    return _same_value(reference, answer, abs_error)
  for kind, compare in _SPECIAL.items():
    if kind in kinds:
      return compare(*sorted(
          (reference, answer), key=lambda node: node.kind != kind))
  if kinds == {'chain'}:
    return _same_chain(reference, answer)
  if kinds == {'matrix', 'tuple'}:
    return _same_matrix(reference, answer)
  if kinds in ({'tuple'}, {'matrix'}):
    return reference.text == answer.text and _in_order(
        reference.parts, answer.parts)
  if kinds == {'tuple', 'list'}:
    brackets = reference.text + answer.text
    return brackets == '()' and _in_order(reference.parts, answer.parts)
  if kinds <= _COLLECTIONS | {'chain'} and kinds & {'set', 'list', 'union'}:
    return _any_order(_members(reference), _members(answer))
  if (reference.kind, answer.kind) == ('chain', 'value') and (
      reference.text == '=' and reference.parts[0][0] == 'sum'
      and expressions.symbols(reference.parts[0])):
    return False  # `x+y=5` is no name for 5.
  return False if kinds <= _COLLECTIONS else None


def _ungrouped(node, other):
  """Reads the list `12,345` as a number unless the other one is a list."""
  if node.kind == 'list' and node.text and other.kind in ('value', 'based'):
    return structures.Node('value', (expressions.parse(node.text),), node.text)
  return node


def _same_time(time, other):
  """A time of day without am or pm has that of the other one."""
  if other.kind == 'time':
    return time.text == other.text
  return other.text in (time.text[:-3], time.text[:-3].removesuffix(':00'))


def _members(node):
  return node.parts if node.kind in ('set', 'list', 'union') else (node,)


def _unnamed(reference, answer):
  """Drops `x=` where only one of the two has it."""
  nodes = reference, answer
  kinds = {node.kind for node in nodes}
  if kinds == {'named'} and reference.text == answer.text:
    return nodes
  if kinds <= {'named', 'chain'}:
    return map(_as_chain, nodes)
  return (n.parts[0] if n.kind == 'named' else n for n in nodes)


def _as_chain(node):
  if node.kind == 'chain' or node.parts[0].kind != 'value':
    return node
  return structures.Node(
      'chain', (expressions.parse(node.text), *node.parts[0].parts), '=')


def _interval(chain):
  """Solves `a<x<b`, `x>=a` and the like: (variable, interval as a Node)."""
  relations, sides = chain.text.split(), list(chain.parts)
  places = [i for i, side in enumerate(sides) if side[0] == 'symbol']
  if len(places) == 1 and len(sides) <= 3:
    place = places[0]
    bounds = {}
    if place > 0:
      bounds[relations[place - 1]] = sides[place - 1]
    if place < len(sides) - 1:
      bounds[_FLIPPED.get(relations[place])] = sides[place + 1]
    low = next((r for r in ('<', '<=') if r in bounds), None)
    high = next((r for r in ('>', '>=') if r in bounds), None)
    if len(bounds) == len(sides) - 1 == (low is not None) + (high is not None):
      infinity = ('constant', 'inf')
      ends = (bounds.get(low, ('negative', infinity)),
              bounds.get(high, infinity))
      brackets = ('[' if low == '<=' else '(') + (']' if high == '>=' else ')')
      return sides[place], structures.Node(
          'tuple', tuple(
              structures.Node('value', (end,)) for end in ends), brackets)
  raise expressions.Unreadable('no interval')


def _same_chain(reference, answer):
  if len({any(map(expressions.symbols, node.parts))
          for node in (reference, answer)}) == 2:
    return False
  if set(reference.text.split()) | set(answer.text.split()) == {'='}:
    if len(reference.parts) == len(answer.parts) == 2:
      return values.proportional(*(
          ('sum', node.parts[0], ('negative', node.parts[1]))
          for node in (reference, answer)))
    return None
  if reference.text == answer.text and _all(map(
      values.equal, reference.parts, answer.parts)):
    return True
  if '=' in reference.text.split() or '=' in answer.text.split():
    return None
  (variable, reference), (other, answer) = map(_interval, (reference, answer))
  return variable == other and _same(reference, answer)


def _same_matrix(reference, answer):
  """Compares matrices, one row or column as a vector."""
  reference, answer = (
      node if node.kind == 'tuple' or len(node.parts) > 1 and any(
          len(row.parts) > 1 for row in node.parts)
      else structures.Node(
          'tuple', sum((row.parts for row in node.parts), ()), '()')
      for node in (reference, answer))
  return reference.kind == answer.kind and _same(reference, answer)


def _same_base(based, other):
  """A number written without a base has the base of the other one."""
  if other.kind == 'based':
    return based.text == other.text and based.parts == other.parts
  return based.text == other.text if other.kind == 'value' else None


def _same_word(word, other):
  if other.kind == 'word':
    return word.text == other.text
  if word.text in ('yes', 'no'):  # not n * o
    return False
  if len(word.text) == 1 and other.kind == 'value':
    letter = structures.Node('value', (('symbol', word.text),))
    return _same_value(letter, other, None)
  return None


# Kinds compared with any other one: (node of that kind, the other node).
_SPECIAL = {'based': _same_base, 'word': _same_word,
            'dots': lambda dots, other: other.kind == 'dots',
            'time': _same_time}


def _in_order(references, answers):
  return len(references) == len(answers) and _all(
      map(_same, references, answers))


def _all(verdicts):
  verdicts = list(verdicts)
  return False if False in verdicts else None if None in verdicts else True


def _any_order(references, answers):
  if len(references) != len(answers):
    return False
  if any(node.kind == 'dots' for node in references):
    return _in_order(references, answers)
  left, unsure = list(answers), False
  for reference in references:
    verdicts = [_same(reference, answer) for answer in left]
    if True in verdicts:
      left.pop(verdicts.index(True))
    elif None in verdicts:
      unsure = True
    else:
      return False
  return None if unsure else True


def _same_value(reference, answer, abs_error):
  reference, answer = (_without_letter(reference, answer),
                       _without_letter(answer, reference))
  scales = [fractions.Fraction(1)]
  if reference.unit and answer.unit:
    if reference.unit[0] != answer.unit[0]:
      return False
    scales = [answer.unit[1] / reference.unit[1]]
  if reference.is_percent != answer.is_percent:  # 9% is 9 or 0.09
    scales.append(scales[0] / 100 if answer.is_percent else scales[0] * 100)
  verdicts = [_same_tree(reference, answer, s, abs_error) for s in scales]
  return True if True in verdicts else None if None in verdicts else False


def _without_letter(node, other):
  """Reads `37/4 m` as a number and a unit where the other one is a number."""
  tree = node.parts[0]
  if (tree[0] == 'product' and tree[2][0] == 'symbol'
      and tree[2][1] in _ONE_LETTER_UNITS
      and not expressions.symbols(other.parts[0])):
    return dataclasses.replace(
        node, parts=(tree[1],), unit=units.read(tree[2][1]))
  return node


def _same_tree(reference, answer, scale, abs_error):
  tree, other = reference.parts[0], answer.parts[0]
  if scale != 1:
    other = ('product', ('number', scale), other)
  # A letter before brackets is a factor where it is a variable of the other one.
  product = expressions.without_calls(other)
  if expressions.symbols(product) <= expressions.symbols(tree):
    other = product
  product = expressions.without_calls(tree)
  if expressions.symbols(product) <= expressions.symbols(other):
    tree = product
  if not (expressions.symbols(tree) or expressions.symbols(other)):
    if abs_error is not None:
      return values.is_within(
          tree, other, fractions.Fraction(str(abs_error)) + _ROUNDING)
    if (expressions.has_decimal(tree) or expressions.has_decimal(other)) and (
        _rounds_to(reference, tree, answer, other)):
      return True
  try:
    verdict = values.equal(tree, other)
  except expressions.TooLarge:  # equal only if written the same way
    verdict = expressions.normal(tree) == expressions.normal(other)
  # A reference has both readings of `1/2x`. An answer has one: with two it could
  # be right for two references.
  return None if expressions.is_loose(tree) and not verdict else verdict


def _rounds_to(reference, tree, answer, other):
  """Applies the rules on rounding in the module's docstring."""
  answer_tree = answer.parts[0]
  digits = reference.text.lstrip('+-0.').replace('.', '')
  if '.' in reference.text and len(digits) >= 3 and not (
      expressions.has_decimal(answer_tree)) and (
          values.rounds_to(tree, other, reference.text)):
    return True
  exact, is_decimal = values.rational(tree), expressions.is_decimal(tree)
  if _is_integer(exact) or _is_integer(values.rational(other)) or not (
      is_decimal or expressions.is_decimal(answer_tree)):
    return False
  tolerance = (IRRATIONAL_TOLERANCE if exact is None and not is_decimal
               else DECIMAL_TOLERANCE)
  return values.is_within(tree, other, relative=tolerance)


def _is_integer(value):
  return value is not None and value.denominator == 1


def key(node: structures.Node) -> tuple:
  """A hashable key, the same for equivalent nodes (to 15 digits)."""
  parts = node.parts
  if node.kind == 'named':
    return key(parts[0])
  if node.kind == 'value':
    return ('value', *map(values.fingerprint, parts))
  if node.kind == 'chain':
    try:
      return key(_interval(node)[1])
    except expressions.Unreadable:
      return ('chain', node.text, *map(values.fingerprint, parts))
  if node.kind == 'based':
    return ('based', node.text, parts)
  keys = map(key, parts)
  if node.kind in ('set', 'list', 'union'):
    return ('set', *sorted(keys, key=repr))
  return (node.kind, node.text, *keys)
