r"""Extracts a completion's final answer and normalises its spelling."""

from collections.abc import Callable, Iterator
import decimal
import fractions
import functools
import re
import unicodedata

STYLES = ('boxed', 'answer')
MAX_CHARS = 2000

_BOX = re.compile(r'\\boxed|\\fbox')
# What is in a box without braces: a number, a command with its arguments, or a
# letter; not the next character of a sentence on boxes.
_TOKEN = (r'-?\d+(?:,\d{3})*(?:\.\d+)?|[a-zA-Z](?![a-zA-Z])'
          r'|\\(?!boxed|fbox)[a-zA-Z]++(?:\{[^{}]*\})*+(?!\{)')
# An escaped backslash must not hide the \boxed that follows it.
_BRACES = re.compile(
    r'\\(?:boxed|fbox)(?![a-zA-Z])\s*(?:(?P<box>\{)|(?P<bare>' + _TOKEN
    + r'))|\\[{}]|\\\\(?!boxed|fbox)|\{|\}')
_ANSWER_LINE = re.compile(r'Answer[\s*]*[:：][\s*]*([^\n]+)', re.IGNORECASE)
_WRAPPERS = re.compile(
    r'\\\((.*)\\\)|\\\[(.*)\\\]|\*\*([^*]*)\*\*'
    r'|\\(?:boxed|fbox|mathbf)\s*\{([^{}]*)\}|\\text\s*\{'
    # Letters alone stay in \text{}: a word, no product of variables.
    r'((?!\s*[a-zA-Z]{2,}[\s.]*\})[^{}]*)\}', re.DOTALL)
_PREFIX = re.compile(
    r'\s*(?:\*\*|\\text\s*\{)?\s*(?:(?:the )?(?:final )?answer)\s*(?:is\b)?'
    r'[\s:}*]*(?=[^\s:}*])|\s*=(?!=)', re.IGNORECASE)
_NUMBER = re.compile(
    r'(?P<mantissa>[-+]?(?:(?:\d+|[1-9]\d{0,2}(?:,\d{3})+)(?:\.\d*)?|\.\d+))'
    r'(?:(?:[eE]|(?:\\times|\\cdot|\*)\s?10\^)'
    r'(?:(?P<exponent>[-+]?\d{1,4})|\{(?P<braced>[-+]?\d{1,4})\}))?')
_UNICODE = str.maketrans({
    '−': '-', '–': '-', '‐': '-', '‑': '-', '×': '\\times ', '·': '\\cdot ', '÷': '\\div ',
    'π': '\\pi ', '√': '\\sqrt ', '∞': '\\infty ', '≤': '\\le ', '≥': '\\ge ',
    '≠': '\\ne ', '±': '\\pm ', '∪': '\\cup ', '∈': '\\in ', '°': '^\\circ ',
    'θ': '\\theta ', '∅': '\\emptyset ', 'Ø': '\\emptyset ', '⋯': '\\ldots ',
    '⁄': '/', '∕': '/', '¢': '\\text{ cents}', '€': '', '£': '', '¥': '',
    '₹': '', '∖': '\\setminus ', 'ℝ': '\\mathbb{R}', '∠': '\\angle '} | {
        # Invisible: soft hyphens, joiners, marks of direction and byte order.
        chr(code): '' for code in (0xad, *range(0x200b, 0x2010),
                                   *range(0x202a, 0x202f), 0x2060, 0xfeff)})
_GREEK = re.compile('[Α-Ωα-ω]')
_FOREIGN = re.compile(r'(?<=[\d}])\s*([^\W\d_a-zA-Z]{1,12})(?=\s*\}?$)')
_VULGAR = re.compile('[¼-¾⅐-⅞]')
_ROOT = re.compile(r'√\s*(\d+(?:\.\d+)?)')
_RAISED = re.compile('[⁰¹²³⁴-⁹⁺⁻]+')
_LOWERED = re.compile('[₀-₉]+')
_IGNORED = re.compile(r'\\!\s*|\\[,;:>]|\\?\$')
_CURRENCY = re.compile(r'USD|EUR|GBP|INR|Rs')
_CURRENCIES = re.compile(rf'(?:\\text\s*\{{\s*)?\b(?:{_CURRENCY.pattern})\b'
                         r'\.?\s*\}?(?=\s*[\d.])')
_FONT = (r'\\(?:boldsymbol|bm|pmb|underline|bf|it|sf)(?![a-zA-Z])'
         r'|\\(?:text)?color(?:box)?\s*\{[^{}]*\}')
_FONTED = re.compile(_FONT + r'|\\math(?:bf|rm)')
_FONTS = (
    # Some digits of a number: in braces they would be a factor of the others.
    (re.compile(rf'(?<![\^_a-zA-Z])(?:{_FONT}|\\math(?:bf|rm))\s*'
                r'\{([\d.,]+)\}'), r'\1'),
    (re.compile(rf'(?<=[a-zA-Z])(?:{_FONT})'), ' '),
    (re.compile(_FONT), ''))
_DOTS = re.compile(r'\\[lcvd]?dots[bcimo]?(?![a-zA-Z])|\.\.\.+')
_NO_PLURAL = r'(?![\s-]+[a-zA-Z]+s\b)'
# Words that change the number before them.
_SCALES = {
    'hundred': r'\cdot 10^{2}', 'thousand': r'\cdot 10^{3}',
    'million': r'\cdot 10^{6}', 'billion': r'\cdot 10^{9}',
    'trillion': r'\cdot 10^{12}', 'dozens?': r'\cdot 12', 'squared': '^{2}',
    'cubed': '^{3}', 'factorial': '!'} | {
        # 2 fifths miles and 1 fifth mile; 30 fifth graders are 30.
        rf'(?:{name}s|{name}{_NO_PLURAL})': f'/{number}' for number, name in {
            3: 'third', 4: '(?:quarter|fourth)', 5: 'fifth', 6: 'sixth',
            7: 'seventh', 8: 'eighth', 9: 'ninth', 10: 'tenth',
            100: 'hundredth', 1000: 'thousandth'}.items()} | {
                f'(?:halves|half{_NO_PLURAL})': '/2'}
_SCALE = f'(?P<scale>{"|".join(_SCALES)})(?![a-zA-Z])'
_BLANKS = re.compile(r'\\(?:quad|qquad|enspace|hspace\{[^{}]*\})(?![a-zA-Z])'
                     r'|(?<!\\)\\\s|(?<!\\)~')
_DEGREE = (r'\s*(?:\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![a-zA-Z]))'
           r'|\\degrees?(?![a-zA-Z]))')
_DEGREES = re.compile(_DEGREE)
# At the end of a number; elsewhere degrees are left out.
_LAST_DEGREES = re.compile(_DEGREE + r'(?=\s*(?:$|[,;)\]}]|\\\}))')
_TEMPERATURES = re.compile(
    _DEGREE + r'\s*(?:\\\s)?(?:\\(?:text|mathrm)\s*\{)?\s*([CF])\s*\}?$')
_SINES = re.compile(r'(?<!arc)(?<!a)(?:sin|cos|tan|cot|sec|csc)(?![a-gi-z])')
_TEXTS = re.compile(
    r'\\(?:text(?:bf|it|rm|sf|tt|normal|up)?|mathrm|mbox|rm)\s*\{')
_DOUBLED = re.compile(r'\\\\(?=[a-zA-Z])')
# `1, 234` is a list: this space stays.
_LOOSE_SPACE = re.compile(
    r'(?<![a-zA-Z0-9])(?<!\d,)\s+|(?<=\d,)\s+(?!\d{3}(?!\d))'
    r'|\s+(?![a-zA-Z0-9])')
_INTEGER = re.compile(r'[-+]?[0-9]+')
# 0.1\overline{6} is the fraction (16 - 1) / 90; \dot{1}2\dot{3} is 123.
_REPEATING = re.compile(
    r'(\d*)\.(\d*)\\(?:overline|bar|dot)\s*\{?(\d{1,20})(?:\}|(?=\D|$))'
    r'(?:(\d{0,18})\\dot\s*\{?(\d)\}?)?')
_Replacement = str | Callable[[re.Match[str]], str]
_COMMAND = re.compile(r'\\([a-zA-Z]+)')
_COMMANDS = {'imath': 'i ', 'varnothing': r'\emptyset', 'O': r'\emptyset',
             'bigcup': r'\cup', 'lt': '<', 'gt': '>', 'lbrace': r'\{',
             'rbrace': r'\}', 'neq': r'\ne'} | {
    name: '' for name in (
        'left right displaystyle limits nolimits large Large LARGE huge Huge '
        'small').split()} | {
    f'{size}{side}': '' for size in ('big', 'bigg', 'Big', 'Bigg')
    for side in ('', 'l', 'r')} | {
    f'{letter}frac': r'\frac' for letter in 'dtc'} | {
    f'{name}{end}': f'\\{name}' for name in ('le', 'ge')
    for end in ('q', 'qslant', 'qq')}
# (a part of every match, pattern, replacement)
_SYNONYMS: tuple[tuple[str, re.Pattern[str], _Replacement], ...] = (
    ('\\operatorname', re.compile(r'\\operatorname\s*\{\s*([ie])\s*\}'),
     r' \1 '),
    *(('\\text', pattern, to) for pattern, to in (
        (re.compile(r'\\text\{\s*([ie])\s*\}'), r' \1 '),
        (re.compile(r'\\text\{\s*infinity\s*\}', re.I), r'\\infty '),
        (re.compile(r'^\\text\{\s*([a-zA-Z ]{3,}:)\s*\}'), r'\1 '),
        (re.compile(r'(?<=[\d}])\s*(?:\^\s*)?\{?\s*\\text\{(?:st|nd|rd|th)\}'
                    r'\s*\}?'), ''),
        (re.compile(r'(?<=[\d}])\s*\\text\{\s*(?:percent(?:age)?|per cent|pct)'
                    r'\.?\s*\}'), r'\\%'),
        (re.compile(r'\\text\{(\s*(?:or|and)\b[^{}]*|\s*)\}'), r' \1 '),
        (re.compile(r'\s*\\text\{\s*([aApP])\.?\s*[mM]\.?\s*\}'), r' \1m'),
        (re.compile(r'\\text\{\s*' + _SCALE + r'([^{}]*)\}'),
         lambda match: _scaled(match['scale']) + (
             f'\\text{{{match[2]}}}' if match[2].strip() else '')))),
    ('\\\\', re.compile(r'(\\\\)\s*\[[\d.]+\s*(?:pt|em|ex|mm|cm)\]'), r'\1'),
    ('\\{', re.compile(r'^\\\{\s*\\\}$'), r'\\emptyset'),
    ('\\prime', re.compile(
        r'\s*\^\s*(?:\{\s*\\prime\s*\}|\\prime(?![a-zA-Z]))'), "'"),
    ('.', _REPEATING, lambda match: '\\frac{%d}{%d}' % _repeating(match)),
    ('=', re.compile(r'([<>])='), lambda match: {
        '<': '\\le ', '>': '\\ge '}[match[1]]),
    ('!=', re.compile(r'(?<=[a-zA-Z])\s+!=(?!=)'), r'\\ne '),
    ('U', re.compile(r'(?<=[)\]}])\s*U\s*(?=[(\[\\])'), r'\\cup'),
)
_CHOOSE = re.compile(r'\{([^{}]+?)\\choose(?![a-zA-Z])([^{}]+)\}')
_COUNTED = re.compile(r'\d[\s-]*[a-zA-Z]')
_COUNTED_SYNONYMS = (
    (re.compile(r'(?<=\d)\s*([aApP])\.?\s*[mM]\.?$'), r' \1m'),
    (re.compile(r'(?<=\d)[\s-]*' + _SCALE),
     lambda match: _scaled(match['scale'])),
    (re.compile(r'(?<=\d)(?:st|nd|rd|th)$'), ''),
    (re.compile(r'(?<=\d)\s*(?:percent(?:age)?|per cent|pct)\.?$'), '%'),
)
_INFINITY = re.compile(r'(?<![a-zA-Z\\])infinity(?![a-zA-Z])', re.I)


def extract(completion: str, style: str) -> str | None:
  r"""Returns the completion's final answer, or None if it has none.

  'boxed': the last content, blanks aside, of a `\boxed{...}` or `\fbox{...}`
  whose brace is closed, or if there is none, what LaTeX boxes without braces
  (`\boxed 2`, `\fbox\pi`). 'answer': the text after the last
  `Answer:`, or the content of the box in it. An answer longer than MAX_CHARS
  does not count.
  """
  if style not in STYLES:
    raise ValueError(f'unknown answer style {style!r}: use one of {STYLES}')
  if style == 'boxed':
    answer = _last_box(completion)
  else:
    lines = _ANSWER_LINE.findall(completion)
    answer = lines[-1].strip(' *') if lines else None
    if answer and len(answer) <= MAX_CHARS:
      answer = _last_box(answer) or answer
  if answer is None or len(answer) > MAX_CHARS:
    return None
  return answer.strip() or None


def boxes(text: str) -> Iterator[str]:
  """The contents of boxes without another inside, in linear time: of those
  whose brace is closed, and of those that have none."""
  return (content for content, _ in _boxes(text))


def _boxes(text):
  """Yields (content, whether it has braces)."""
  start = _BOX.search(text)
  stack = []  # of open braces: [match, whether a box has ended inside]
  for match in _BRACES.finditer(text, start.start()) if start else ():
    if match['bare']:
      yield match['bare'], False
      if stack:
        stack[-1][1] = True
    elif match['box'] or match[0] == '{':
      stack.append([match, False])
    elif match[0] == '}' and stack:
      opening, has_inner = stack.pop()
      if opening['box'] and not has_inner:
        yield text[opening.end():match.start()], True
      if stack and (opening['box'] or has_inner):
        stack[-1][1] = True


def _last_box(text):
  """The last box with content. One without braces counts only if all others
  are empty: a sentence may mention `\\boxed` before a word of one letter."""
  found = list(_boxes(text))
  filled = [content for content, has_braces in found
            if has_braces and content.strip()]
  return filled[-1] if filled else found[-1][0] if found else None


@functools.lru_cache(8192)
def canonical(text: str) -> str:
  r"""Normalises spelling.

  Removes wrappers, fonts, colours, `$`, `\left`, needless spaces, degree and
  dollar signs; replaces synonyms (`\dfrac`, `\leqslant`, `−`) by one command
  each, and repeating decimals by their fractions.
  """
  if _INTEGER.fullmatch(text):
    return text
  if not text.isascii():
    text = _ascii(text)
  if '\\\\' in text and '\\begin' not in text:  # where it ends a row
    text = _DOUBLED.sub(r'\\', text)
  if '.' in text or 'dots' in text:
    text = _DOTS.sub(r'\\ldots ', text)
  text = _PREFIX.sub('', text, count=1) if _PREFIX.match(text) else text
  text = text.strip().rstrip('.')
  if '\\' in text or '$' in text:
    text = _without_dress(text)
  if _CURRENCY.search(text):
    text = _CURRENCIES.sub('', text)
  text = text.replace('{,}', ',').replace('{:}', ':')
  text = _BLANKS.sub(' ', text)
  if 'circ' in text or '\\degree' in text:
    text = _with_degrees(text)
  while match := _WRAPPERS.fullmatch(text.strip()):
    text = match[match.lastindex or 0].strip().rstrip('.')
  for part, pattern, replacement in _SYNONYMS:
    if part in text:
      text = pattern.sub(replacement, text)
  if _COUNTED.search(text):
    for pattern, replacement in _COUNTED_SYNONYMS:
      text = pattern.sub(replacement, text)
  if 'nfin' in text.lower():
    text = _INFINITY.sub(r'\\infty ', text)
  return _LOOSE_SPACE.sub('', ' '.join(text.split())).strip()


def _without_dress(text):
  r"""Removes fonts, `\left`, `$`, thin spaces; replaces synonymous commands."""
  if _FONTED.search(text):
    for pattern, replacement in _FONTS:
      text = pattern.sub(replacement, text)
  text = _TEXTS.sub(r'\\text{', without_choose(text))
  text = _COMMAND.sub(
      lambda match: _COMMANDS.get(match[1], match[0]), text)
  return _IGNORED.sub('', text)


def without_choose(text: str) -> str:
  r"""Writes `{n \choose k}` as `\binom{n}{k}`."""
  if '\\choose' not in text:
    return text
  return _CHOOSE.sub(
      lambda match: f'\\binom{{{match[1].strip()}}}{{{match[2].strip()}}}', text)


def _with_degrees(text):
  if _SINES.search(text):  # a factor there, else a unit
    return _DEGREES.sub(r'\\frac{\\pi}{180}', text)
  text = _TEMPERATURES.sub(r'\\text{ degree \1}', text)
  return _DEGREES.sub(' ', _LAST_DEGREES.sub(r'\\text{ degree}', text))


def _ascii(text):
  """Replaces Unicode fractions, raised and lowered digits, and symbols."""
  def fraction(match):
    above, below = unicodedata.normalize('NFKC', match[0]).split('⁄')
    return f'\\frac{above}{_braced(below)} '

  text = _VULGAR.sub(fraction, text)
  text = _ROOT.sub(r'\\sqrt{\1}', text)
  text = _RAISED.sub(_raised, text)
  text = _LOWERED.sub(lambda match: '_' + _braced(match[0]), text)
  text = unicodedata.normalize('NFKC', text.translate(_UNICODE)).translate(
      _UNICODE)
  return _FOREIGN.sub(r'\\text{ \1}', _GREEK.sub(_greek, text))


def _greek(match):
  kind, name = unicodedata.name(match[0]).split(' LETTER ')
  name = name.removeprefix('FINAL ').replace('LAMDA', 'LAMBDA').lower()
  return f'\\{name.title() if "CAPITAL" in kind else name} '


def _raised(match):
  following = match.string[match.end():match.end() + 1]
  return f'^{_braced(match[0])}' + ' ' * following.isdigit()


def _braced(text):
  return text if len(text) == 1 else f'{{{text}}}'


def _scaled(name):
  return next(new for pattern, new in _SCALES.items()
              if re.fullmatch(pattern, name))


def _repeating(match):
  """The numerator and the denominator of a repeating decimal."""
  whole, fixed, *repeated = match.groups(default='')
  repeated = ''.join(repeated)
  above = int((whole + fixed + repeated) or 0) - int((whole + fixed) or 0)
  return above, int('9' * len(repeated) + '0' * len(fixed))


def repeating(text: str) -> frozenset[fractions.Fraction]:
  r"""The values of the repeating decimals in a text: 34/9 of `3.\overline{7}`."""
  return frozenset(
      fractions.Fraction(*_repeating(match))
      for match in (_REPEATING.finditer(text) if '\\' in text else ()))


def number(text: str) -> decimal.Decimal | None:
  r"""Reads canonical `1,234`, `-0.5`, `8.7e8`, `8.7\times 10^8`; else None."""
  match = _NUMBER.fullmatch(text)
  if not match:
    return None
  exponent = match['exponent'] or match['braced'] or '0'
  return decimal.Decimal(f'{match["mantissa"].replace(",", "")}e{exponent}')
