"""Decides whether two structured answers are equivalent.

Order matters in pairs and intervals, whose brackets must agree, but not in
sets and bare lists. An inequality equals the interval of its solutions; `x=`
before a value is dropped. Where both answers carry a unit the units must agree,
known ones after conversion (5 m = 500 cm, 5 m != 5 cm, 3 eggs != 3 apples);
where one has none, that of the other is ignored. The conventions are listed in
grading/README.md.

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
from tepo_jax.grading import names
from tepo_jax.grading import nodes as nodes_lib
from tepo_jax.grading import trees
from tepo_jax.grading import units
from tepo_jax.grading import values

DECIMAL_TOLERANCE = fractions.Fraction(1, 10**6)  # relative
IRRATIONAL_TOLERANCE = fractions.Fraction(1, 10**8)
_ROUNDING = fractions.Fraction(1, 10**12)
_COLLECTIONS = frozenset(('value', 'tuple', 'set', 'list', 'matrix', 'union'))


def same(reference: nodes_lib.Node, answer: nodes_lib.Node,
         abs_error: float | None = None) -> bool | None:
  """Whether answer and reference are equivalent; None if undecided."""
  try:
    return _same(reference, answer, abs_error)
  except (expressions.Undefined, expressions.TooLarge, names.Different):
    return False
  except expressions.Unreadable:
    return None


def _same(reference, answer, abs_error=None):
  if reference.kind == answer.kind == 'chain' and reference.unit and (
      answer.unit) and reference.unit != answer.unit:
    return False
  reference, answer = _unnamed(reference, answer)
  if reference.kind == 'named':  # and answer
    return reference.text == answer.text and _same(
        reference.parts[0], answer.parts[0], abs_error)
  if {reference.kind, answer.kind} in _OF_INTERVALS:
    reference, answer = (
        nodes_lib.interval(node)[1] if node.kind == 'chain' else node
        for node in (reference, answer))
  if reference.text != answer.text:
    reference, answer = (
        nodes_lib.Node('set') if (node.kind, node.text) == (
            'list', nodes_lib.NO_NUMBER) else node
        for node in (reference, answer))
  kinds = {reference.kind, answer.kind}
  if kinds == {'value'}:
    return _same_value(reference, answer, abs_error)
  for kind, compare in _SPECIAL.items():
    if kind in kinds:
      return compare(reference, answer)
  if kinds == {'chain'}:
    return _same_chain(reference, answer)
  if kinds == {'chain', 'value'}:
    return _same_result(reference, answer, abs_error)
  if kinds == {'matrix', 'tuple'}:
    return _same_matrix(reference, answer, abs_error)
  if kinds in ({'tuple'}, {'matrix'}):
    return reference.text == answer.text and _in_order(
        reference.parts, answer.parts, abs_error)
  if kinds == {'tuple', 'list'}:
    brackets = reference.text + answer.text
    return brackets == '()' and _in_order(
        reference.parts, answer.parts, abs_error)
  if kinds <= _COLLECTIONS | {'chain'} and kinds & {'set', 'list', 'union'}:
    members = _members(reference), _members(answer)
    if 'set' in kinds:
      members = map(_distinct, members)
    return _any_order(*members, abs_error)
  return False if kinds <= _COLLECTIONS else None


_OF_INTERVALS = ({'tuple', 'chain'}, {'union', 'chain'})


def _same_result(reference, answer, abs_error):
  """An equation for a number counts if its sides are equal: 3+7=10 for 10. Of
  a reference such as a/b=10, the left side is what the problem asks for."""
  chain, value = ((reference, answer) if reference.kind == 'chain'
                  else (answer, reference))
  is_ratio = chain is reference and chain.parts[0][0] == 'quotient' and (
      len(chain.parts) == 2 and not expressions.symbols(chain.parts[1]))
  if set(chain.text.split()) != {'='} or not is_ratio and (
      not values.all_equal(chain.parts)):
    return False
  last = nodes_lib.Node('value', chain.parts[-1:])
  return (_same_value(last, value, abs_error) if chain is reference
          else _same_value(value, last, abs_error))


def _distinct(nodes):
  """A set's members, each once."""
  found = []
  for node in nodes:
    if not any(_same(other, node) for other in found):
      found.append(node)
  return tuple(found)


def _same_time(reference, answer):
  """A time of day without am or pm has that of the other one."""
  time, other = ((reference, answer) if reference.kind == 'time'
                 else (answer, reference))
  plain = time.text[:-3]
  return other.text in (time.text, plain, plain.removesuffix(':00'))


def _same_option(reference, answer):
  """Of `(C) 5`, the letter counts where a letter is asked for, else the 5."""
  nodes = []
  for node, other in ((reference, answer), (answer, reference)):
    if node.kind == 'option':
      is_letter = other.kind in ('option', 'word') and len(other.text) == 1
      node = nodes_lib.Node('word', text=node.text) if is_letter else (
          node.parts[0])
    nodes.append(node)
  return _same(*nodes)


def _members(node):
  return node.parts if node.kind in ('set', 'list', 'union') else (node,)


def _unnamed(reference, answer):
  """Drops `x=` where only one of the two has it, or where both name the same;
  orders the values of several names as the reference does."""
  systems = [names.system(node) for node in (reference, answer)]
  if None not in systems:
    systems = names.ordered(*systems)
  elif systems != [None, None] and any(
      part.kind == 'named' for system, node in zip(systems, (reference, answer))
      if system is None and node.kind == 'list' for part in node.parts):
    raise names.Different
  nodes = [node if system is None else names.tuples(system[1])
           for node, system in zip((reference, answer), systems)]
  kinds = {node.kind for node in nodes}
  if kinds == {'named'}:
    nodes = names.renamed(*nodes)
    kinds = {node.kind for node in nodes}
  if kinds <= {'named', 'chain'}:
    return _as_sets(*nodes) or [_as_chain(node) for node in nodes]
  return [n.parts[0] if n.kind == 'named' else n for n in nodes]


def _as_sets(*nodes):
  """The nodes as `x in S`; None if one of them is an equation."""
  try:
    return [node if node.kind == 'named' else nodes_lib.named(
        *nodes_lib.interval(node)) for node in nodes]
  except expressions.Unreadable:
    return None


def _as_chain(node):
  if node.kind == 'chain' or node.parts[0].kind != 'value':
    return node
  return nodes_lib.Node(
      'chain', (expressions.parse(node.text), *node.parts[0].parts), '=')


def _same_chain(reference, answer):
  if len({any(map(expressions.symbols, node.parts))
          for node in (reference, answer)}) == 2:
    return False
  if set(reference.text.split()) | set(answer.text.split()) == {'='} and any(
      map(expressions.symbols, reference.parts)):
    if len(reference.parts) == len(answer.parts) == 2:
      return values.proportional(*(
          ('sum', node.parts[0], ('negative', node.parts[1]))
          for node in (reference, answer)))
    return None if len(reference.parts) == len(answer.parts) else False
  if reference.text == answer.text and _all(map(
      values.equal, reference.parts, answer.parts)):
    return True
  return None


def _same_matrix(reference, answer, abs_error):
  """Compares matrices, one row or column as a vector."""
  reference, answer = (
      node if node.kind == 'tuple' or len(node.parts) > 1 and any(
          len(row.parts) > 1 for row in node.parts)
      else nodes_lib.Node(
          'tuple', sum((row.parts for row in node.parts), ()), '()')
      for node in (reference, answer))
  return reference.kind == answer.kind and _same(reference, answer, abs_error)


def _same_base(reference, answer):
  """A number without a base has that of the reference, but gives none to it:
  13_{12} is 15."""
  if reference.kind == answer.kind:
    return reference.text == answer.text and reference.parts == answer.parts
  if reference.kind == 'based':
    return reference.text == answer.text if answer.kind == 'value' else None
  if reference.kind != 'value':
    return None
  try:
    value = int(answer.text, *answer.parts)
  except ValueError:  # a negative base, or digits that it does not have
    return False
  return values.equal(reference.parts[0], ('number', fractions.Fraction(value)))


def _same_word(reference, answer):
  """Words have no order of factors. Case counts for letters outside of text."""
  if reference.kind == answer.kind:
    folded = reference.text.casefold() == answer.text.casefold()
    return folded and (len(reference.text) > 1
                       or reference.text == answer.text)
  word, other = ((reference, answer) if reference.kind == 'word'
                 else (answer, reference))
  if other.kind != 'value' or word.text in ('yes', 'no'):
    return False if word.text in ('yes', 'no') else None
  if other.text.isalpha() and len(word.text) > 1:
    is_text = word.text.islower()
    return word.text == (other.text.casefold() if is_text else other.text)
  if not word.text.isupper():
    return None
  letter = nodes_lib.Node('value', (expressions.parse(word.text),))
  return (_same_value(letter, other, None) if word is reference
          else _same_value(other, letter, None))


def _same_residue(reference, answer):
  r"""`8\pmod 5` is `3\pmod 5`; without a modulus the numbers must be equal."""
  if reference.kind != answer.kind:
    return _same(*(node.parts[0] if node.kind == 'residue' else node
                   for node in (reference, answer)))
  if reference.text != answer.text:
    return False
  nodes = reference.parts[0], answer.parts[0]
  if reference.text.isdigit() and {node.kind for node in nodes} == {'value'}:
    modulus = ('number', fractions.Fraction(reference.text))
    return values.equal(*(
        ('remainder', node.parts[0], modulus) for node in nodes))
  return _same(*nodes)


# Kinds compared with any other one.
_SPECIAL = {'residue': _same_residue, 'option': _same_option,
            'based': _same_base, 'word': _same_word,
            'dots': lambda reference, answer: reference.kind == answer.kind,
            'time': _same_time}


def _in_order(references, answers, abs_error):
  return len(references) == len(answers) and _all(
      _same(*pair, abs_error) for pair in zip(references, answers))


def _all(verdicts):
  verdicts = list(verdicts)
  return False if False in verdicts else None if None in verdicts else True


def _any_order(references, answers, abs_error):
  if len(references) != len(answers):
    return False
  if any(node.kind == 'dots' for node in references):
    return _in_order(references, answers, abs_error)
  left, unsure = list(answers), False
  for reference in references:
    verdicts = [_same(reference, answer, abs_error) for answer in left]
    if True in verdicts:
      left.pop(verdicts.index(True))
    elif None in verdicts:
      unsure = True
    else:
      return False
  return None if unsure else True


def _same_value(reference, answer, abs_error):
  found = _without_letter(reference, answer)
  if found.unit:  # An answer's letter is a variable otherwise.
    answer = _without_letter(answer, reference)
  reference = found
  scales = [fractions.Fraction(1)]
  degrees = [_is_degrees(node) for node in (reference, answer)]
  if reference.unit and answer.unit:
    if reference.unit[0] == answer.unit[0]:
      scales = [answer.unit[1] / reference.unit[1]]
    elif {reference.unit, answer.unit} != {units.DEGREES, units.RADIANS}:
      return False
    else:
      scales = []
  if any(degrees) and not all(degrees):
    reference, answer = (_in_radians(reference), _in_radians(answer)) if (
        not scales or _has_pi(answer if degrees[0] else reference)) else (
            reference, answer)
    scales = scales or [fractions.Fraction(1)]
  is_percent = answer.unit == units.PERCENT
  if is_percent != (reference.unit == units.PERCENT):  # 9% is 9 or 0.09
    scales.append(fractions.Fraction(1, 100) if is_percent else
                  fractions.Fraction(100))
  verdicts = [_same_tree(reference, answer, s, abs_error) for s in scales]
  return True if True in verdicts else None if None in verdicts else False


def _is_degrees(node):
  return node.unit == units.DEGREES


def _has_pi(node):
  return 'pi' in repr(node.parts[0])


def _in_radians(node):
  if not _is_degrees(node):
    return node
  factor = expressions.parse(r'\frac{\pi}{180}')
  return dataclasses.replace(
      node, parts=(('product', node.parts[0], factor),), unit=units.RADIANS)


def _without_letter(node, other):
  """Reads `37/4 m` as a number and a unit where the other one is a number, or
  a number and such a letter too."""
  tree = node.parts[0]
  if _has_letter(tree) and (_has_letter(other.parts[0]) or not (
      expressions.symbols(other.parts[0]))):
    return dataclasses.replace(
        node, parts=(tree[1],), unit=units.read(tree[2][1]))
  return node


def _has_letter(tree):
  return (tree[0] == 'product' and tree[2][0] == 'symbol'
          and units.is_letter(tree[2][1]) and not expressions.symbols(tree[1]))


def _same_tree(reference, answer, scale, abs_error):
  tree, other = reference.parts[0], answer.parts[0]
  if scale != 1:
    other = ('product', ('number', scale), other)
  # A letter before brackets is a factor where it is a variable of the other one.
  product = trees.without_calls(other)
  if expressions.symbols(product) <= expressions.symbols(tree):
    other = product
  product = trees.without_calls(tree)
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
    verdict = trees.normal(tree) == trees.normal(other)
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
