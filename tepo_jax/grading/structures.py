r"""Parses an answer's structure: value, pair, interval, set, equation."""

import dataclasses
import functools
import keyword
import re

from tepo_jax.grading import expressions
from tepo_jax.grading import units
from tepo_jax.grading import values

MAX_DEPTH = 6
MAX_ITEMS = 50

_TOKEN = re.compile(r'\\[a-zA-Z]+|\\.|.', re.DOTALL)
_OPENING = frozenset(r'( [ { \{ \langle \lfloor \lceil \begin'.split())
_CLOSING = frozenset(r') ] } \} \rangle \rfloor \rceil \end'.split())
_RELATIONS = {'=': '=', '<': '<', '>': '>', '\\le': '<=', '\\ge': '>=',
              '\\in': 'in', ':': ':', '\\approx': '~'}
_UNREADABLE = frozenset(
    r'\ne \equiv \sim \mid \to \Rightarrow \iff \sum \int '
    r'\prod'.split())
_OR = re.compile(r'\\(?:text|mathrm|mbox)\s*\{\s*or\s*\}'
                 r'|(?<![a-zA-Z\\])(?:or|OR)(?![a-zA-Z])'
                 r'|\\(?:vee|lor)(?![a-zA-Z])')
_AND = re.compile(r'\\(?:text|mathrm|mbox)\s*\{\s*,?\s*and\s*\}'
                  r'|(?<![a-zA-Z\\]),?\s*and(?![a-zA-Z])|;')
_WORD = re.compile(r"[A-Za-z][A-Za-z' ]{3,}")
_CHOICE = re.compile(r'\(?\s*([A-Z])\s*\)?')
_SCIENTIFIC = re.compile(r'(?<![\w.])(\d+\.?\d*)[eE]([-+]?\d{1,4})(?![\w.])')
_SHORT_WORDS = frozenset(('yes', 'no', 'odd', 'all', 'any'))
_EMPTY = re.compile(
    r'\\emptyset|(?:the )?(?:empty|null) set|no (?:real )?solutions?')
_TIME = re.compile(r'(\d{1,2})(?::(\d\d))? ([apAP])m')
_BASED = re.compile(r'(\()?([0-9A-Fa-f]+)(?(1)\))(?:_(?:base)?|base)'
                    r'(\()?(-?\d{1,3}|[a-z]{3,6})(?(3)\))')
_BASES = {name: base for base, name in enumerate(
    'two three four five six seven eight nine ten eleven twelve'.split(), 2)}
_MATRIX = re.compile(r'\\begin\{([pbB]?)(?:matrix|array)\}(?:\{[lcr|]*\})?(.*)'
                     r'\\end\{\1(?:matrix|array)\}', re.DOTALL)
_FENCES = {'(': ')', '[': ']', '\\{': '\\}', '{': '}', '\\langle': '\\rangle'}
_NAMED = re.compile(
    r'(?:\\(?:text|mathrm|mbox|operatorname)\s*\{[a-zA-Z ]+\}|\\?[a-zA-Z]+)'
    r"(?:_(?:\{(?:[^{}]|\{[^{}]*\})*\}|\w))?'*(?:\([^()]*\))?"
    r'|\([a-zA-Z](?:,[a-zA-Z])+\)')
# A number with thousands separators: followed by something else, or alone.
_THOUSANDS = re.compile(r'[-+]?\d{1,3}(?:,\d{3})+(?:\.\d+)?[^,\d][^,]*')
_GROUPED = re.compile(r'[-+]?\d{1,3}(?:,\d{3})+')
# Certainly one number: no list has the item 000.
_ZEROS = re.compile(r'(?<![\d.,])\d{1,3}(?:,\d{3})*,0\d\d(?:,\d{3})*(?!\d)')
_LABEL = re.compile(r'[a-zA-Z ]{3,}')
_CODE = frozenset(keyword.kwlist) - {'and', 'for', 'from', 'in', 'is', 'or'}


@dataclasses.dataclass(frozen=True)
class Node:
  """A structured answer.

  kind: 'value' (parts: the tree; text: its digits if it is a plain number),
    'word' (text), 'based' (text; parts: the base), 'tuple' (text: brackets),
    'set', 'list' (text: its digits if it may be one number), 'union',
    'matrix' (of tuples), 'named' (text: the name; parts: what it equals),
    'chain' (text: relations; parts: trees), 'time' (text), 'dots'.
  """
  kind: str
  parts: tuple = ()
  text: str = ''
  unit: units.Unit | None = None
  is_percent: bool = False


@functools.lru_cache(65536)
def read(text: str, depth: int = 0) -> Node:
  """Parses canonical text (`answers.canonical`).

  Raises:
    expressions.Unreadable: the text has none of the structures of Node.
  """
  text = text.strip()
  if not text or depth > MAX_DEPTH:
    raise expressions.Unreadable(text)
  if match := _MATRIX.fullmatch(text):
    return _matrix(match[2], depth)
  if match := _TIME.fullmatch(text):
    return Node('time', text=(
        f'{match[1]}:{match[2] or "00"} {match[3].lower()}m'))
  text = _ZEROS.sub(lambda match: match[0].replace(',', ''), text)
  for words, kind in ((_OR, 'union'), (_AND, 'list')):
    if words.search(text) and not _is_word(text):
      return _joined(kind, words.split(text), depth)
  tokens = _TOKEN.findall(text)
  if not _UNREADABLE.isdisjoint(tokens):
    raise expressions.Unreadable(text)
  if '\\cup' in tokens:
    return _joined('union', _split(tokens, {'\\cup'})[0], depth)
  items, _ = _split(tokens, {','})
  if len(items) > 1 and not _THOUSANDS.fullmatch(text):
    node = _joined('list', items, depth)
    return node if not _GROUPED.fullmatch(text) else dataclasses.replace(
        node, text=text.replace(',', ''))
  sides, relations = _split(tokens, _RELATIONS)
  if relations[-1:] == ['\\approx']:
    return _rounded(text.rpartition('\\approx')[0], sides[-1], depth)
  if relations:
    return _related(sides, [_RELATIONS[r] for r in relations], depth)
  return _fenced(tokens, depth) or _single(text, depth)


def _joined(kind, texts, depth):
  parts = _items([text for text in texts if text.strip(' ,')], depth, kind)
  if not parts:
    raise expressions.Unreadable(kind)
  if kind == 'union' and all(part.kind in ('value', 'named') for part in parts):
    kind = 'list'  # `x=1 or x=2`
  return Node(kind, parts) if len(parts) > 1 else parts[0]


def sides(text: str) -> list[str]:
  """Splits canonical text at relations and commas outside all brackets."""
  return _split(_TOKEN.findall(text), {*_RELATIONS, ',', '\\equiv'})[0]


def _split(tokens, separators):
  """Splits at separators outside all brackets: (texts, separators)."""
  parts, found, depth = [[]], [], 0
  for token in tokens:
    depth += (token in _OPENING) - (token in _CLOSING)
    if depth == 0 and token in separators:
      found.append(token)
      parts.append([])
    else:
      parts[-1].append(token)
  return [''.join(part) for part in parts], found


def _related(sides, relations, depth):
  if set(relations) <= {'=', 'in'} and _NAMED.fullmatch(sides[0].strip()) or (
      relations == [':'] and _LABEL.fullmatch(sides[0].strip())
      and not set(sides[0].split()) & _CODE):
    return Node('named', (read(sides[-1], depth + 1),), sides[0].strip())
  if relations == [':']:  # a ratio
    return Node('value', (
        ('quotient', *(expressions.parse(side) for side in sides)),),
                ':'.join(sides))
  if not {'in', ':', '~'}.isdisjoint(relations):
    raise expressions.Unreadable(relations)
  return Node('chain', tuple(map(expressions.parse, sides)),
              ' '.join(relations))


def _rounded(exact, decimal, depth):
  r"""Reads `2\sqrt2 \approx 2.83` as the exact side, if it rounds to the other."""
  rounded = read(decimal, depth + 1)
  if not exact.strip():
    return rounded
  if _NAMED.fullmatch(exact.strip()):
    return Node('named', (rounded,), exact.strip())
  node = read(exact, depth + 1)
  value = node.parts[0] if node.kind == 'named' else node
  if value.kind == rounded.kind == 'value' and '.' in rounded.text and (
      not expressions.symbols(value.parts[0])) and values.rounds_to(
          rounded.parts[0], value.parts[0], rounded.text):
    return node
  raise expressions.Unreadable(decimal)


def _fenced(tokens, depth):
  """Reads a text enclosed in one pair of brackets, else None."""
  opening, closing = tokens[0], tokens[-1]
  if _FENCES.get(opening) != closing and (opening, closing) not in (
      ('(', ']'), ('[', ')')):
    return None
  level = 0
  for token in tokens[:-1]:
    level += (token in _OPENING) - (token in _CLOSING)
    if level == 0:
      return None
  inside = tokens[1:-1]
  items, _ = _split(inside, {','})
  if len(items) == 1 and opening != '\\{':
    if opening in '({' or opening == '[' and inside[:1] == ['\\begin']:
      return read(''.join(inside), depth + 1)
    return None
  if opening in ('{', '\\{'):
    return Node('set', _items(items, depth))
  brackets = '()' if opening == '\\langle' else opening + closing
  return Node('tuple', _items(items, depth), brackets)


def _items(texts, depth, kind='list'):
  """Reads items; one of this kind is joined: `1 \\pm 2, 5` is one list."""
  if len(texts) > MAX_ITEMS:
    raise expressions.Unreadable('too many items')
  parts = []
  for text in texts:
    node = read(text, depth + 1)
    parts += node.parts if node.kind == kind else (node,)
  return tuple(parts)


def _matrix(body, depth):
  rows = [row.split('&') for row in body.split('\\\\') if row.strip()]
  return Node('matrix', tuple(Node('tuple', tuple(
      read(cell, depth + 1) for cell in row), '()') for row in rows))


def _single(text, depth):
  """Reads a value, a word, a time of day or a number in a base."""
  if match := _BASED.fullmatch(re.sub(r'\\(?:text|mathrm)|[{}\s]', '', text)):
    base = _BASES.get(match[4]) or (
        int(match[4]) if match[4].lstrip('-').isdigit() else 0)
    if abs(base) > 1 and (match[2][0].isdigit() or abs(base) > 10):
      return Node('based', (base,), match[2].upper())
  if text == '\\ldots':
    return Node('dots')
  if _EMPTY.fullmatch(text.casefold()):
    return Node('set')
  if match := _CHOICE.fullmatch(text):
    return Node('word', text=match[1])
  if _is_word(text):
    return Node('word', text=text.casefold().strip())
  if '\\pm' in text or '\\mp' in text:
    plus = text.replace('\\pm', '+').replace('\\mp', '-')
    minus = text.replace('\\pm', '-').replace('\\mp', '+')
    return _joined('list', (plus, minus), depth)
  return _value(text)


def _is_word(text):
  return _WORD.fullmatch(text) or text.casefold() in _SHORT_WORDS


def _value(text):
  text, unit = units.split(text)
  is_percent = text.endswith('%')
  text = text.rstrip('%').rstrip('\\').strip() if is_percent else text
  if re.fullmatch(r'[-+]?\d{1,3}([ ,]\d{3})+(\.\d+)?', text):
    text = text.replace(',', '').replace(' ', '')
  digits = text if re.fullmatch(r'[-+]?(\d+\.?\d*|\.\d+)', text) else ''
  # Python's spelling of `np.exp(1)` and `8.7e8`
  text = _SCIENTIFIC.sub(
      r'(\1*10^{\2})', re.sub(r'\b(?:np|numpy|math)\.', '', text))
  return Node('value', (expressions.parse(text),), digits, unit, is_percent)


def with_unit(node: Node, unit: units.Unit | None) -> Node:
  """Adds the data set's unit to a value without one."""
  if unit is None or node.kind != 'value' or node.unit is not None:
    return node
  return dataclasses.replace(node, unit=unit)
