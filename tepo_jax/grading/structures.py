r"""Parses an answer's structure: value, pair, interval, set, equation.

A condition on one variable (`1\le x\le2`, `x\ne0`, `x\in[1,2]`) and a set of
such numbers (`\{x\mid 1\le x\le2\}`, `\mathbb R\setminus\{0\}`) are read
as the interval or the union of intervals that they describe.
"""

import dataclasses
import functools
import itertools
import keyword
import re

from tepo_jax.grading import comparison
from tepo_jax.grading import expressions
from tepo_jax.grading import nodes
from tepo_jax.grading import sentences
from tepo_jax.grading import trees
from tepo_jax.grading import units
from tepo_jax.grading import values

MAX_DEPTH = 6
MAX_ITEMS = 50

_TOKEN = re.compile(r'\\[a-zA-Z]+|\\.|.', re.DOTALL)
_OPENING = frozenset(r'( [ { \{ \langle \lfloor \lceil \begin'.split())
_CLOSING = frozenset(r') ] } \} \rangle \rfloor \rceil \end'.split())
_RELATIONS = {'=': '=', '<': '<', '>': '>', '\\le': '<=', '\\ge': '>=',
              '\\in': 'in', ':': ':', '\\approx': '~', '\\ne': '!='}
_RELATING = frozenset(_RELATIONS)
_OR = re.compile(r'(?:(?<![a-zA-Z\\])(?:or|OR)|\\lor)(?![a-zA-Z])')
_AND = re.compile(r'\\text\s*\{\s*,?\s*and\s*\}'
                  r'|(?<![a-zA-Z\\]),?\s*and(?![a-zA-Z])')
_WORD = re.compile(r"[A-Za-z][A-Za-z' ]{3,}")
_CAPITALISED = re.compile(r'[A-Z][a-z]*[aeiou][a-z]+')
_CHOICE = re.compile(r'(?:option|choice)?\s*\(?\s*(?:\\text\{\s*)?\(?'
                     r'([A-Z])\)?\s*\}?\s*\)?[:.]?', re.IGNORECASE)
_LABELLED = re.compile(r'(?:\(([A-Z])\)|\\text\{\s*\(?([A-Z])[).:]\s*\}'
                       r'|([A-Z])[.)](?![A-Z]\b))\s*(.+)', re.DOTALL)
_LETTERS = re.compile(r'\\text\{\s*([a-zA-Z]{2,})[\s.]*\}')
_RESIDUE = re.compile(
    r'(?:\s*(\\?[a-zA-Z]+)\s*\\equiv)?([^=]*?)(?:\\pmod|\(\s*\\?mod)\s*(?:\{([^{}]*)\}|(\w+))\s*\)?')
_REALS = re.compile(r'\\mathbb\s*\{?\s*R\s*\}?|(?:\\text\{\s*)?'
                    r'(?:the set of )?all real(?: number)?s?\s*\}?', re.I)
_POSITIVE = re.compile(
    r'\\mathbb\s*\{?\s*R\s*\}?\s*(?:[\^_]\s*\{?\s*\+\s*\}?|_\s*\{\s*>\s*0\s*\})'
    r'|(?:\\text\{\s*)?(?:all )?positive real(?: number)?s?\s*\}?', re.I)
_WITHOUT = re.compile(r'(?:\\(?:setminus|backslash)|(?<=\})\s*-)\s*(?=\\\{)')
_SUCH_THAT = {'\\mid', '|', ':', '\\vert'}
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
    r'(?:\\(?:angle|triangle)\s*)?(?:\\(?:text|operatorname)\s*\{[a-zA-Z ]+\}'
    r'|\\(?:vec|hat|bar|overline|overrightarrow|widehat|mathbf|mathbb|tilde)\s*'
    r'(?:\{\\?[a-zA-Z]+\}|[a-zA-Z])|\\?[a-zA-Z]+)'
    r"(?:_(?:\{(?:[^{}]|\{[^{}]*\})*\}|\w))?'*(?:\([^()]*\)|\[[^][]*\])?"
    r'|\|[a-zA-Z]+\||\([a-zA-Z](?:,[a-zA-Z])+\)')
# A number with thousands separators: followed by something else, or alone, of
# at most five groups. With a space after a comma it is a list.
_THOUSANDS = re.compile(r'[-+]?[1-9]\d{0,2}(?:,\d{3})+(?:\.\d+)?[^,\d][^,]*')
_GROUPED = re.compile(r'[-+]?[1-9]\d{0,2}(?:,\d{3}){1,5}')
# Certainly one number: no list has the item 000.
_ZEROS = re.compile(r'(?<![\d.,])[1-9]\d{0,2}(,\d{3})*,0\d\d(,\d{3})*(?!\d)')
_LABEL = re.compile(r'[a-zA-Z ]{3,}')
_FOR = re.compile(r'\\text\s*\{[^{}]*\b(?:for|if|when|where|with)\b')
_CODE = frozenset(keyword.kwlist) - {'and', 'for', 'from', 'in', 'is', 'or'}


@functools.lru_cache(65536)
def read(text: str, depth: int = 0) -> nodes.Node:
  """Parses canonical text (`answers.canonical`).

  Raises:
    expressions.Unreadable: the text has none of the structures of nodes.Node.
  """
  text = text.strip()
  if not text:
    raise expressions.Unreadable(text)
  if depth > MAX_DEPTH:
    raise expressions.TooLarge(text)
  if match := _MATRIX.fullmatch(text):
    return _matrix(match[2], depth)
  if match := _TIME.fullmatch(text):
    return nodes.Node('time', text=(
        f'{match[1]}:{match[2] or "00"} {match[3].lower()}m'))
  if match := _RESIDUE.fullmatch(text):
    node = nodes.Node('residue', (read(match[2], depth + 1),), match[3] or match[4])
    return nodes.Node('named', (node,), match[1]) if match[1] else node
  text = _ZEROS.sub(lambda match: match[0].replace(',', ''), text)
  if not _is_word(text):
    text = _WITHOUT.sub(r'\\setminus ', _AND.sub(';', _OR.sub(r'\\vee ', text)))
  tokens = _TOKEN.findall(text)
  if tokens[0] == '\\{' and tokens[-1] == '\\}' and (
      not _SUCH_THAT.isdisjoint(tokens)) and _encloses(tokens) and (
          node := _described(tokens[1:-1], depth)):
    return node
  return _separated(text, tokens, depth)


def _separated(text, tokens, depth):
  """Reads what separators, relations or `\\setminus` join, or one item."""
  for separator, kind in (('\\vee', 'union'), (';', 'list'), ('\\cup', 'union')):
    if separator in tokens and (
        items := _split(tokens, {separator})[0])[1:]:
      return _joined(kind, items, depth, separator)
  items, _ = _split(tokens, {','})
  if _GROUPED.fullmatch(text):
    text = text.replace(',', '')
  elif len(items) > 1 and not _THOUSANDS.fullmatch(text):
    return _joined('list', items, depth, ',')
  sides, relations = _split(tokens, _RELATING)
  if relations[-1:] == ['\\approx']:
    return _rounded(text.rpartition('\\approx')[0], sides[-1], depth)
  if relations:
    return _related(sides, [_RELATIONS[r] for r in relations], depth)
  whole, *without = _split(tokens, {'\\setminus'})[0]
  if len(without) == 1:
    return nodes.without(read(whole, depth + 1), read(without[0], depth + 1))
  return _fenced(tokens, depth) or _single(text, depth)


@functools.lru_cache(65536)
def try_read(text: str, unit: str | None = None) -> nodes.Node | None:
  """Reads canonical text with the unit of its data set; None if unreadable.

  Raises:
    expressions.TooLarge: the text exceeds a bound.
  """
  try:
    return _with_unit(read(text), unit and units.read(unit))
  except expressions.TooLarge:
    raise
  except expressions.Unreadable:
    return None


def _joined(kind, texts, depth, separator=None):
  parts = _items([text for text in texts if text.strip(' ,')], depth, kind)
  if not parts:
    raise expressions.Unreadable(kind)
  if len(parts) == 1:
    return parts[0]
  if separator == '\\cup' and all(part.kind == 'set' for part in parts):
    return nodes.Node('set', sum((part.parts for part in parts), ()))
  if kind == 'union' and not any(
      part.kind in ('tuple', 'chain', 'set', 'union')
      or part.kind == 'named' and part.parts[0].kind in ('tuple', 'union')
      for part in parts):
    kind = 'list'  # `x=1 or x=2`, `21, 16 or 11`
    parts = sum((part.parts if part.kind == 'list' else (part,)
                 for part in parts), ())
    if len(parts) > MAX_ITEMS:
      raise expressions.TooLarge('items')
  found = nodes.both(parts) if kind == 'list' else None
  if found and found.parts == (nodes.Node('set'),):
    # Of `x<1, x>2` the author means "or".
    return nodes.Node('list', parts, '' if separator == ',' else nodes.NO_NUMBER)
  return found or nodes.Node(kind, parts)


def _described(inside, depth):
  r"""Reads `x\mid 1\le x\le2`; None if it is no set of a variable."""
  separator = next(token for token in inside if token in _SUCH_THAT)
  place = inside.index(separator)
  variable, condition = ''.join(inside[:place]), ''.join(inside[place + 1:])
  name, _, domain = variable.partition('\\in')
  if not re.fullmatch(r'\s*\\?[a-zA-Z]+\s*', name) or domain and (
      not _REALS.fullmatch(domain.strip())):
    return None
  node = read(condition, depth + 1)
  found = {part.text if part.kind == 'named' else nodes.interval(part)[0][1]
           for part in (node.parts if node.kind == 'union' else (node,))
           if part.kind in ('named', 'chain')}
  if found != {name.strip().lstrip('\\')}:
    raise expressions.Unreadable(condition)
  return node


def sides(text: str) -> list[str]:
  """Splits canonical text at relations and commas outside all brackets."""
  return _split(_TOKEN.findall(text), {*_RELATIONS, ',', '\\equiv'})[0]


def _split(tokens, separators):
  """Splits at separators outside all brackets: (texts, separators)."""
  if separators.isdisjoint(tokens):
    return [''.join(tokens)], []
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
  if relations == ['='] and _NAMED.fullmatch(sides[1].strip()) and (
      not _NAMED.fullmatch(sides[0].strip())):
    sides = sides[::-1]  # 12 = n
  is_equation = relations[0] in ('=', 'in') and set(relations[1:]) <= {'='}
  if any(map(_FOR.search, sides[1:-1])):
    raise expressions.Unreadable(relations)  # x_i = 2i for i = 1
  if is_equation and _NAMED.fullmatch(sides[0].strip()) and not any(
      _differ(*pair, depth) for pair in zip(sides[1:], sides[2:])) or (
      relations == [':'] and _LABEL.fullmatch(sides[0].strip())
      and not set(sides[0].split()) & _CODE):
    return nodes.Node('named', (read(sides[-1], depth + 1),), sides[0].strip())
  if relations == [':']:  # a ratio
    return nodes.Node('value', (
        ('quotient', *(expressions.parse(side) for side in sides)),),
                ':'.join(sides))
  if not {'in', ':', '~'}.isdisjoint(relations):
    raise expressions.Unreadable(relations)
  if relations == ['!='] and sides[1].startswith('\\{'):
    return nodes.named(expressions.parse(sides[0]), nodes.without(
        nodes.excluding(()), read(sides[1], depth + 1)))
  if any(map(sentences.PROSE.search, sides)):
    raise expressions.Unreadable(sides)
  values_, found = zip(*map(units.split, sides))
  return nodes.Node('chain', tuple(map(expressions.parse, values_)),
                    ' '.join(relations), next(filter(None, found), None))


def _differ(first, second, depth):
  r"""Whether two sides contradict each other, as those of n=7=6 do: both are
  functions of the same variables, and no rounding or unit makes them equal.
  Of `A=\frac12 bh=12` nothing is known."""
  try:
    pair = [read(side, depth + 1) for side in (first, second)]
    if any(node.kind != 'value' for node in pair):
      return False
    trees_ = [trees.without_calls(node.parts[0]) for node in pair]
    names = set(map(expressions.symbols, trees_))
    if len(names) == 2 or values.equal(*trees_) is not False:
      return False
    has_decimal = any(map(expressions.has_decimal, trees_))
    if names != {frozenset()}:
      return not has_decimal
    # arccos(1/2) = 60 degrees: a side without a unit may be in radians.
    pairs = [pair, [node if node.unit else dataclasses.replace(
        node, unit=units.RADIANS) for node in pair]]
    return not any(comparison.same(*order) for one, other in pairs
                   for order in ((one, other), (other, one))) and not any(
        values.rounds_to(one.parts[0], other.parts[0], one.text)
        for one, other in (pair, pair[::-1]) if '.' in one.text or (
            has_decimal and one.text.lstrip('+-').isdigit()))
  except expressions.Unreadable:
    return False


def _rounded(exact, decimal, depth):
  r"""Reads `2\sqrt2 \approx 2.83` as the exact side, if it rounds to the other."""
  rounded = read(decimal, depth + 1)
  if not exact.strip():
    return rounded
  if _NAMED.fullmatch(exact.strip()):
    return nodes.Node('named', (rounded,), exact.strip())
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
      ('(', ']'), ('[', ')')) or not _encloses(tokens):
    return None
  inside = tokens[1:-1]
  items, _ = _split(inside, {','})
  if len(items) == 1:
    items, _ = _split(inside, {';'})
  if len(items) == 1 and opening != '\\{':
    if opening in '({' or opening == '[' and inside[:1] == ['\\begin']:
      while _is_enclosed(inside) and _is_enclosed(inside[1:-1]):
        inside = inside[1:-1]  # The last pair may be that of a tuple.
      return read(''.join(inside), depth + 1)
    return None
  if opening in ('{', '\\{'):
    return nodes.Node('set', _items(items, depth))
  brackets = '()' if opening == '\\langle' else opening + closing
  return nodes.Node('tuple', _items(items, depth), brackets)


def _encloses(tokens):
  """Whether the first bracket is closed by the last token only."""
  level = 0
  for token in tokens[:-1]:
    level += (token in _OPENING) - (token in _CLOSING)
    if level == 0:
      return False
  return True


def _is_enclosed(tokens):
  return len(tokens) > 2 and tokens[0] + tokens[-1] in ('()', '{}') and (
      _encloses(tokens))


def _items(texts, depth, kind='list'):
  """Reads items; one of this kind is joined: `1 \\pm 2, 5` is one list."""
  parts = []
  for text in texts:
    node = read(text, depth + 1)
    parts += node.parts if node.kind == kind else (node,)
    if len(parts) > MAX_ITEMS:  # `\\pm` makes several of one
      raise expressions.TooLarge('items')
  return tuple(parts)


def _matrix(body, depth):
  rows = [row.split('&') for row in body.split('\\\\') if row.strip()]
  return nodes.Node('matrix', tuple(nodes.Node('tuple', tuple(
      read(cell, depth + 1) for cell in row), '()') for row in rows))


def _single(text, depth):
  """Reads a value, a word, a time of day or a number in a base."""
  if ('_' in text or 'base' in text) and (match := _BASED.fullmatch(
      re.sub(r'\\(?:text|mathrm)|[{}\s]', '', text))):
    base = _BASES.get(match[4]) or (
        int(match[4]) if match[4].lstrip('-').isdigit() else 0)
    is_name = not match[2][0].isdigit() and (abs(base) < 11 or (
        len(match[2]) == 1 and (match[2].islower() or base not in (12, 16))))
    if abs(base) > 1 and not is_name:  # a_{20} is a term of a sequence
      return nodes.Node('based', (base,), match[2].upper())
  if _REALS.fullmatch(text):
    return nodes.excluding(())
  if _POSITIVE.fullmatch(text):
    return read('(0,\\infty)')
  if text == '\\ldots':
    return nodes.Node('dots')
  if _EMPTY.fullmatch(text.casefold()):
    return nodes.Node('set')
  if (match := _CHOICE.fullmatch(text)) and match[1].isupper():
    return nodes.Node('word', text=match[1])
  if match := _LABELLED.fullmatch(text):
    return nodes.Node('option', (read(match[4], depth + 1),),
                match[1] or match[2] or match[3])
  if match := _LETTERS.fullmatch(text):
    return nodes.Node('word', text=match[1].casefold())
  if text.isalpha() and text.isupper():  # HTH, no product
    return nodes.Node('word', text=text)
  if _is_word(text) or _CAPITALISED.fullmatch(text):
    return nodes.Node('word', text=text.casefold().strip())
  if '\\pm' in text:
    return _joined('list', _signed(text), depth)
  return _value(text)


def _signed(text):
  r"""Both readings of `\pm`; of several, all combinations."""
  parts = text.split('\\pm')
  if len(parts) > 5:
    raise expressions.TooLarge(text)
  return [parts[0] + ''.join(map(''.join, zip(signs, parts[1:])))
          for signs in itertools.product('+-', repeat=len(parts) - 1)]


def _is_word(text):
  return _WORD.fullmatch(text) or text.casefold() in _SHORT_WORDS


def _value(text):
  text, unit = units.split(text)
  if text.endswith('%'):
    text, unit = text.rstrip('%').rstrip('\\').strip(), units.PERCENT
  if re.fullmatch(r'[-+]?\d{1,3}([ ,]\d{3})+(\.\d+)?', text):
    text = text.replace(',', '').replace(' ', '')
  digits = text if re.fullmatch(
      r'[-+]?(\d+\.?\d*|\.\d+)|[a-zA-Z]+', text) else ''
  # Python's spelling of `np.exp(1)` and `8.7e8`
  text = _SCIENTIFIC.sub(
      r'(\1*10^{\2})', re.sub(r'\b(?:np|numpy|math)\.', '', text))
  return nodes.Node('value', (expressions.parse(text),), digits, unit)


def _with_unit(node, unit):
  """Adds the data set's unit to a value without one."""
  if unit is None or node.kind != 'value' or node.unit is not None:
    return node
  return dataclasses.replace(node, unit=unit)
