r"""Extracts a completion's final answer and normalises its spelling."""

import decimal
import re
import unicodedata

STYLES = ('boxed', 'answer')
MAX_CHARS = 2000

_BOX = re.compile(r'\\boxed|\\fbox')
# An escaped backslash must not hide the \boxed that follows it.
_BRACES = re.compile(
    r'(?P<box>\\(?:boxed|fbox)\s*\{)|\\[{}]|\\\\(?!boxed|fbox)|\{|\}')
_ANSWER_LINE = re.compile(r'Answer\s*:\s*([^\n]+)', re.IGNORECASE)
_WRAPPERS = re.compile(
    r'\\\((.*)\\\)|\\\[(.*)\\\]|\\(?:boxed|fbox|text|mathrm|textbf|mathbf'
    r'|textit|mbox)\s*\{([^{}]*)\}', re.DOTALL)
_NUMBER = re.compile(
    r'(?P<mantissa>[-+]?(?:(?:\d+|\d{1,3}(?:,\d{3})+)(?:\.\d*)?|\.\d+))'
    r'(?:(?:[eE]|(?:\\times|\\cdot|\*)\s?10\^)'
    r'(?:(?P<exponent>[-+]?\d{1,4})|\{(?P<braced>[-+]?\d{1,4})\}))?')
_UNICODE = str.maketrans({
    '−': '-', '–': '-', '×': '\\times ', '·': '\\cdot ', '÷': '\\div ',
    'π': '\\pi ', '√': '\\sqrt ', '∞': '\\infty ', '≤': '\\le ', '≥': '\\ge ',
    '≠': '\\ne ', '±': '\\pm ', '∪': '\\cup ', '∈': '\\in ', '°': '^\\circ ',
    'θ': '\\theta ', '∅': '\\emptyset ', 'Ø': '\\emptyset ', '⋯': '\\ldots ',
    '⁄': '/', '∕': '/', '¢': '\\text{ cents}', '€': '', '£': '', '¥': '',
    '₹': ''})
_VULGAR = re.compile('[¼-¾⅐-⅞]')
_RAISED = re.compile('[⁰¹²³⁴-⁹⁺⁻]+')
_LOWERED = re.compile('[₀-₉]+')
_IGNORED = re.compile(
    r'\\(?:left|right|[bB]igg?[lr]?|displaystyle|limits|nolimits|,|;|!|:|>)'
    r'(?![a-zA-Z])|\\[!,;:>]|(?<!\\)\$|\\\$'
    r'|(?:\\text\s*\{\s*)?\b(?:USD|EUR|GBP|INR|Rs)\b\.?\s*\}?(?=\s*[\d.])')
_FONT = (r'\\(?:boldsymbol|bm|pmb|underline|bf|it|sf)(?![a-zA-Z])'
         r'|\\(?:text)?color\s*\{[^{}]*\}')
_FONTS = (
    # Some digits of a number: in braces they would be a factor of the others.
    (re.compile(rf'(?<![\^_a-zA-Z])(?:{_FONT}|\\math(?:bf|rm))\s*'
                r'\{([\d.,]+)\}'), r'\1'),
    (re.compile(rf'(?<=[a-zA-Z])(?:{_FONT})'), ' '),
    (re.compile(_FONT), ''))
_DOTS = re.compile(r'\\[lcvd]?dots[bcimo]?(?![a-zA-Z])|\.\.\.+')
_SCALES = {'thousand': 3, 'million': 6, 'billion': 9, 'trillion': 12}
_SCALE = f'(?P<scale>{"|".join(_SCALES)})(?![a-zA-Z])'
_BLANKS = re.compile(r'\\(?:quad|qquad|enspace|hspace\{[^{}]*\})(?![a-zA-Z])'
                     r'|(?<!\\)\\\s|(?<!\\)~')
_DEGREES = re.compile(r'\s*\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![a-zA-Z]))'
                      r'|\\degrees?(?![a-zA-Z])')
_SINES = re.compile(r'(?<!arc)(?<!a)(?:sin|cos|tan|cot|sec|csc)(?![a-gi-z])')
_DOUBLED = re.compile(r'\\\\(?=[a-zA-Z])')
_LOOSE_SPACE = re.compile(r'(?<![a-zA-Z0-9])\s+|\s+(?![a-zA-Z0-9])')
_INTEGER = re.compile(r'[-+]?[0-9]+')
_SYNONYMS = (
    (re.compile(r'\\(?:mathrm|text|operatorname)\s*\{\s*([ie])\s*\}'), r' \1 '),
    (re.compile(r'\\(?:text|mbox)\s*\{(\s*(?:or|and)\b[^{}]*|\s*)\}'), r' \1 '),
    (re.compile(r'\\imath(?![a-zA-Z])'), 'i '),
    (re.compile(r'\\(?:varnothing|O)(?![a-zA-Z])|^\\\{\s*\\\}$'),
     r'\\emptyset'),
    (re.compile(r'\\bigcup(?![a-zA-Z])'), r'\\cup'),
    (re.compile(r'\s*\\(?:text|mathrm|mbox)\s*\{\s*([aApP])\.?\s*[mM]\.?\s*\}'),
     r' \1m'),
    (re.compile(r'\\(?:text|mathrm|mbox)\s*\{\s*' + _SCALE + r'([^{}]*)\}'),
     lambda match: _scaled(match['scale']) + (
         f'\\text{{{match[2]}}}' if match[2].strip() else '')),
    (re.compile(r'\s*\^\s*(?:\{\s*\\prime\s*\}|\\prime(?![a-zA-Z]))'), "'"),
    (re.compile(r'\\[dtc]frac(?![a-zA-Z])'), r'\\frac'),
    (re.compile(r'\\([lg]e)q(?:slant|q)?(?![a-zA-Z])'), r'\\\1'),
    (re.compile(r'\\neq(?![a-zA-Z])'), r'\\ne'),
    (re.compile(r'\\([lg]t|[lr]brace)(?![a-zA-Z])'), lambda match: {
        'lt': '<', 'gt': '>', 'lbrace': '\\{', 'rbrace': '\\}'}[match[1]]),
    # 0.1\overline{6} is the fraction (16 - 1) / 90.
    (re.compile(r'(\d*)\.(\d*)\\(?:overline|bar)\s*\{(\d{1,20})\}'),
     lambda match: _repeating(*match.groups())),
)
_PLAIN_SYNONYMS = (
    (re.compile(r'(?<=[)\]}])\s*U\s*(?=[(\[\\])'), r'\\cup'),
    (re.compile(r'(?<=\d)\s*([aApP])\.?\s*[mM]\.?$'), r' \1m'),
    (re.compile(r'(?<=\d)\s*' + _SCALE), lambda match: _scaled(match['scale'])),
)


def extract(completion: str, style: str) -> str | None:
  r"""Returns the completion's final answer, or None if it has none.

  'boxed': the content of the last `\boxed{...}` or `\fbox{...}` whose brace
  is closed; unterminated ones are skipped. 'answer': the text after the last
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


def _last_box(text):
  """Scans once from the first box on: linear time whatever the nesting."""
  start = _BOX.search(text)
  stack, last = [], None
  for match in _BRACES.finditer(text, start.start()) if start else ():
    if match['box'] or match[0] == '{':
      stack.append(match)
    elif match[0] == '}' and stack:
      opening = stack.pop()
      if opening['box'] and (last is None or opening.end() > last[0]):
        last = opening.end(), match.start()
  return None if last is None else text[slice(*last)]


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
  if '\\begin' not in text:  # where it ends a row
    text = _DOUBLED.sub(r'\\', text)
  if '.' in text or 'dots' in text:
    text = _DOTS.sub(r'\\ldots ', text)
  text = text.strip().rstrip('.')
  for pattern, replacement in _FONTS if '\\' in text else ():
    text = pattern.sub(replacement, text)
  text = _IGNORED.sub('', text).replace('{,}', ',').replace('{:}', ':')
  # Degrees matter inside a sine; as a unit they may be omitted.
  degree = r'\\frac{\\pi}{180}' if _SINES.search(text) else ' '
  text = _DEGREES.sub(degree, _BLANKS.sub(' ', text))
  while match := _WRAPPERS.fullmatch(text.strip()):
    text = match[match.lastindex or 0].strip().rstrip('.')
  for pattern, replacement in (
      *(_SYNONYMS if '\\' in text else ()), *_PLAIN_SYNONYMS):
    text = pattern.sub(replacement, text)
  return _LOOSE_SPACE.sub('', ' '.join(text.split())).strip()


def _ascii(text):
  """Replaces Unicode fractions, raised and lowered digits, and symbols."""
  def fraction(match):
    above, below = unicodedata.normalize('NFKC', match[0]).split('⁄')
    return f'\\frac{above}{_braced(below)} '

  text = _VULGAR.sub(fraction, text)
  text = _RAISED.sub(lambda match: '^' + _braced(match[0]), text)
  text = _LOWERED.sub(lambda match: '_' + _braced(match[0]), text)
  return unicodedata.normalize('NFKC', text.translate(_UNICODE)).translate(
      _UNICODE)


def _braced(text):
  return text if len(text) == 1 else f'{{{text}}}'


def _scaled(name):
  return rf'\cdot 10^{{{_SCALES[name]}}}'


def _repeating(whole, fixed, repeated):
  above = int((whole + fixed + repeated) or 0) - int((whole + fixed) or 0)
  below = '9' * len(repeated) + '0' * len(fixed)
  return f'\\frac{{{above}}}{{{below}}}'


def number(text: str) -> decimal.Decimal | None:
  r"""Reads canonical `1,234`, `-0.5`, `8.7e8`, `8.7\times 10^8`; else None."""
  match = _NUMBER.fullmatch(text)
  if not match:
    return None
  exponent = match['exponent'] or match['braced'] or '0'
  return decimal.Decimal(f'{match["mantissa"].replace(",", "")}e{exponent}')
