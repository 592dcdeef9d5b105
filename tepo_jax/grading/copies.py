r"""Detects answers that copy the problem's own text.

What stands in the problem is no answer to it, whatever its value: `99^2+99+1`
for 9901, `3x+4y=10` for 10, `(x+1)^2` for x^2+2x+1. An answer is a copy if it
has the form of a formula of the problem and the reference answer has another
form. The form is what is written, without names before `=`, spaces, fonts and
brackets that change nothing, the order of sums and products, +0, ·1 and /1.

No copies are: numbers (but for quotients to be computed), unless the problem
asks for another notation ("as a decimal", or "as a sum" where the reference is
uncomputed: 1/8 + 1/12 + 1/24 for 1/4), and answers to problems that ask to
choose among options.

Copies in other words are operations that a problem asks for: remainders, gcd,
lcm, max and min of numbers, unless the reference has one too.
"""

import functools
import re

from tepo_jax.grading import answers
from tepo_jax.grading import expressions
from tepo_jax.grading import nodes
from tepo_jax.grading import structures
from tepo_jax.grading import trees

# Formulas of a problem: between signs, or a run of numbers and operations.
_MARKED = re.compile(
    r'(?:\$\$?|\\[(\[])(.{1,1000}?)(?:\$\$?|\\[)\]])', re.DOTALL)
_UNMARKED = re.compile(r'[\d(](?:[-+*/^().\d ]{0,200}[)\d])?')
_OPTIONS = re.compile(
    r'(?<!for )(?<!in )(?<!at )(?<!of )\bwhich\b'
    r'|(?<!\\)\b(?:choose|select|options?|choices|either|whether)\b|\(\s*A\s*\)'
    r'|\\text\w*\s*\{\s*\(?A\)|(?:\$|\\\))\s*,?\s*or\b[^.?]{0,20}?(?:\$|\\\()',
    re.IGNORECASE)
_NOTATION = re.compile(
    r'\b(?:decimal|fraction|percent\w*|mixed|lowest|simplest|simplif\w+|reduced?'
    r'|scientific|notation|convert|round\w*|form)\b', re.IGNORECASE)
# Where the reference is uncomputed.
_UNCOMPUTED = re.compile(
    _NOTATION.pattern + r'|\b(?:write|express|decompose|represent|as an? (?:\w+ ){0,3}'
    r'(?:sum|product|difference|power)s?)\b', re.IGNORECASE)


def is_copied(answer: str, reference: str, problem: str) -> bool:
  r"""Whether an answer that is not the reference's own spelling copies the
  problem. A number for a number does not. Canonical texts have fractions for
  repeating decimals, so `0.\overline{7}` is sought as it is written.

  Raises:
    expressions.TooLarge: a text exceeds a bound.
  """
  repeated = answers.repeating(answer.rpartition('=')[2])
  if repeated & answers.repeating(problem if repeated else '') and (
      _NOTATION.search(problem)) and not answers.repeating(reference):
    return True
  texts = [answers.canonical(text) for text in (answer, reference)]
  if texts[0] == texts[1] or None not in map(answers.number, texts):
    return False
  node, right = map(structures.try_read, texts)
  if node and _is_undone(_form(node)) and not (
      right and _has_operation(_form(right))):
    return True
  spellings, forms = _formulas(problem)
  if node is None:
    return ''.join(texts[0].split()) in spellings and not _is_choice(problem)
  if (node.kind, right and right.kind) == ('chain', 'value') and (
      set(node.text.split()) == {'='}):
    node = nodes.Node('value', node.parts[-1:])
  form, wanted = _form(node), right and _form(right)
  if form == wanted or form not in forms or _is_choice(problem):
    return False
  if not _is_number(form):
    return True
  asked = _NOTATION if wanted and _is_number(wanted) else _UNCOMPUTED
  return bool(wanted and wanted[0] == 'value' and asked.search(problem))


def _is_undone(form):
  r"""Whether it has an operation on numbers such as `2^{2024}\bmod 9`; what is
  done, `3\bmod 9`, names the modulus only."""
  if form[0] == 'remainder' and form[1][0] == form[2][0] == 'number' and (
      0 <= form[1][1] < form[2][1]):
    return False
  return form[0] in ('remainder', 'fold') and not expressions.symbols(
      form) or any(map(_is_undone, expressions.subtrees(form)))


def _has_operation(form):
  return form[0] in ('remainder', 'fold', 'residue') or any(
      map(_has_operation, expressions.subtrees(form)))


def without_question(node: nodes.Node, reference: nodes.Node, problem: str
                     ) -> nodes.Node | None:
  """The right side of an equation whose left side the problem asks for, and
  the digits of a number in the base that the problem asks for."""
  if reference.kind != 'value':
    return node
  if node.kind == 'based' and re.search(r'\bbase\b', problem, re.IGNORECASE):
    return structures.try_read(node.text)
  if (node.kind, node.text) != ('chain', '='):
    return node
  forms = _formulas(problem)[1]
  is_asked = _value_form(node.parts[0]) in forms and _form(node) not in forms
  return nodes.Node('value', node.parts[1:]) if is_asked else node


@functools.lru_cache(4096)
def _is_choice(problem):
  return bool(_OPTIONS.search(problem))


@functools.lru_cache(4096)
def _formulas(problem):
  """The formulas of a problem and the sides of its equations: (texts without
  spaces, forms of those that can be read)."""
  parts = _MARKED.split(problem)
  found = parts[1::2] + [
      formula for text in parts[::2] for formula in _UNMARKED.findall(text)]
  found = [answers.canonical(formula.rstrip('?, ')) for formula in found]
  found += [side for formula in found for side in structures.sides(formula)]
  forms = set()
  for formula in found:
    try:
      node = structures.try_read(formula)
    except expressions.TooLarge:
      continue
    if node is not None:
      forms.add(_form(node))
  return frozenset(''.join(formula.split()) for formula in found), forms


def _form(node):
  """What is written, without names and the order of sums and products; of an
  equation of constants, its last side."""
  if node.kind == 'named':
    return _form(node.parts[0])
  if node.kind == 'value':
    return _value_form(node.parts[0])
  if node.kind == 'chain':
    if set(node.text.split()) == {'='} and not any(
        map(expressions.symbols, node.parts)):
      return _value_form(node.parts[-1])
    return (node.kind, node.text, *map(trees.normal, node.parts))
  return (node.kind, node.text, *(
      _form(part) if isinstance(part, nodes.Node) else part
      for part in node.parts))


def _value_form(tree):
  tree = trees.normal(tree)
  if tree[0] == 'decimal' and tree[1].denominator == 1:
    tree = ('number', tree[1])  # 142.0
  return ('value', tree)


def _is_number(form):
  return form[0] == 'value' and trees.is_number(form[1])
