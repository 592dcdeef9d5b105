r"""Reads the reference answers of a row: a cell, a list, or a worked solution.

A solution's answer is in its boxes: `\boxed{2}`, `\fbox{2}`, also without
braces (`\boxed 2`, as MATH's training split writes it), or after GSM8K's
`####`. If several boxes differ, all of them together, a set, are the answer.
"""

import ast
import math
import re

from tepo_jax import errors
from tepo_jax import grading

MAX_CHARS = 10_000  # of a reference answer; Omni-MATH has whole proofs
MAX_WORDS = 5  # of a text without a box; more are a sentence, not an answer

_LISTED = re.compile(r'\s*\[\s*["\']')  # no interval has a quote
# Python joins texts without a comma between them: numpy prints ['5' '6'].
_NO_COMMA = re.compile(r'(["\'])\s+\1')
# The text of a list of texts, from its first bracket and quote to its last, as
# Python, JSON or numpy writes it: array(['1+1?'], dtype=object).
_TEXTS = re.compile(
    r'\s*(?:(?:array|list|tuple)?[\[(]\s*)+(["\']).*["\']\s*(?:,\s*)?[\])]'
    r'[\])\s]*(?:,\s*dtype=[^,\s]*\))?\s*', re.DOTALL)
_OBJECT = re.compile(
    r'\s*(?:(?:array|list|tuple)?[\[(]\s*)*\{\s*(["\'])[^"\'{}]+\1\s*:')
# What "\frac", "\beta" and "\text" become in a JSON file, where a command of
# LaTeX has two backslashes; Omni-MATH has such answers.
_UNESCAPED = re.compile(
    r'[\a\b\f\v](?=[a-z])|\t(?=(?:an|au|binom|ext|frac|heta|ilde|imes|o|riangle)'
    r'(?![a-z]))|\r(?=(?:angle|ho|ight)(?![a-z]))')
_ESCAPES = dict(zip('\a\b\f\v\t\r', 'abfvtr'))
_CONTROL = re.compile(r'[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]')
_NO_WORDS = re.compile(r'\$[^$]*\$|\\\(.*?\\\)|\\\[.*?\\\]|\\[a-zA-Z]+',
                       re.DOTALL)
_THOUSANDS = re.compile(r'(?<=\d),(?=\d{3}(?!\d))')
_WORD = re.compile(r'[^\W\d_]{2,}')


def read(value: object, where: str, may_be_text: bool) -> tuple[str, ...]:
  """The reference answers in a cell; a correct answer equals any of them.

  Args:
    value: of the cell: text, a number, a list of these, or a list as text.
    where: file, row and column, for messages.
    may_be_text: whether a sentence without a box is an answer: the column is
      known to hold answers, not solutions.

  Raises:
    InputError: the cell cannot be read. An empty text is not an error.
  """
  if isinstance(value, str):
    refuse_objects(value, where)
    if _LISTED.match(value):
      value = _listed(value, where)
  values = value if isinstance(value, list) else [value]
  return tuple(_reference(value, where, may_be_text) for value in values)


def refuse_nested(text: str, where: str) -> None:
  """Raises InputError for what `refuse_objects` refuses and for the text of a
  list of texts. A text such as "[1, 2]", without quotes, is mathematics."""
  if _TEXTS.fullmatch(text):
    _refuse(where)
  refuse_objects(text, where)


def refuse_objects(text: str, where: str) -> None:
  """Raises InputError for the text of a list or object, as CSV files made from
  nested columns hold it."""
  if _OBJECT.match(text):
    _refuse(where)


def _refuse(where):
  raise errors.InputError(
      f'{where} is the text of a list or an object; use the parquet or JSON '
      'file that it was made from')


def scalar(value: object, where: str) -> str:
  """A text, or a number as text: 142.0 is 142.

  Raises:
    InputError: it is neither, or not finite.
  """
  if isinstance(value, float) and value.is_integer():
    value = int(value)
  if isinstance(value, float) and not math.isfinite(value):
    raise errors.InputError(f'{where} is {value}, not a finite number')
  if isinstance(value, bool) or not isinstance(value, str | int | float):
    raise errors.InputError(
        f'{where} is {type_name(value)}, neither text nor a number')
  return checked(str(value), where)


def checked(text: str, where: str) -> str:
  """The text, if it can be encoded; else raises InputError."""
  if not text.isascii() and any('\ud800' <= c <= '\udfff' for c in text):
    raise errors.InputError(
        f'{where} has a lone surrogate, which is no character')
  return text


def type_name(value: object) -> str:
  """A value's type, for messages."""
  return 'null' if value is None else type(value).__name__


def _reference(value, where, may_be_text):
  r"""Reads a reference answer as text: 142.0 -> 142, GSM8K's `... #### 1,080`
  -> 1080, Omni-MATH's `\[\boxed{x}\]` -> x."""
  text = _UNESCAPED.sub(
      lambda match: '\\' + _ESCAPES[match[0]], scalar(value, where))
  if found := _CONTROL.search(text):
    raise errors.InputError(
        f'{where} has the control character {found[0]!r}')
  _, mark, last = map(str.strip, text.rpartition('####'))
  # Else it is a heading of Markdown.
  if is_found := bool(mark) and '\n' not in last:
    text = _THOUSANDS.sub('', last)
  if boxes := _boxes(text):
    is_found = True
    text = boxes[0] if len(boxes) == 1 else rf'\{{{", ".join(boxes)}\}}'
  text = text.strip()
  digits = max(map(len, re.findall(r'\d+', text)), default=0)
  if len(text) > MAX_CHARS or digits > grading.MAX_CHARS:
    raise errors.InputError(
        f'{where} has {len(text)} characters, {digits} digits in '
        f'a row; at most {MAX_CHARS} and {grading.MAX_CHARS} are read')
  if not (is_found or may_be_text):
    words = len(_WORD.findall(_NO_WORDS.sub(' ', text)))
    if words > MAX_WORDS:
      raise errors.InputError(
          f'{where} is a text of {words} words without an answer in '
          '\\boxed{} or after ####; if another column has the answers, set '
          'data.columns.answer, and give the file without the name of a set')
  return text


def _boxes(text):
  """The different contents of all innermost boxes, in their order."""
  found = {}
  for content in filter(None, map(str.strip, grading.boxes(text))):
    found.setdefault(grading.canonical(content), content)
  return list(found.values())


def _listed(text, where):
  """Reads a list of texts written as text: '["5", "6"]'."""
  try:
    texts = ast.literal_eval(text.strip())
    if not _NO_COMMA.search(text) and all(
        text.isprintable() for text in texts):  # "\f" of \frac is not
      return texts
  except (AttributeError, MemoryError, RecursionError, SyntaxError, TypeError,
          ValueError):
    pass
  raise errors.InputError(f'{where} is text that looks like a list but is '
                          'none; write a list of answers')
