"""Loads problems: the named sets from the hub, and local files.

A named set is one row of SETS. Rows of any origin are read by one table of
column pairs (LAYOUTS): those of the hub, or plain `problem` with `answer` or
`answers`. A bad row is refused with its file and row number; rows that a
set omits on purpose are counted and logged.
"""

import ast
import collections
from collections.abc import Iterable
import dataclasses
import logging
import math
import os
import pathlib
import re

from tepo_jax import errors
from tepo_jax.tasks import answers, arithmetic
from tepo_jax.tasks import problem as problem_lib
from tepo_jax.tasks import prompts
from tepo_jax.tasks import sources

_LOG = logging.getLogger(__name__)

# (problem column, answer column). The first pair present in a file's first
# row is used for the whole file.
LAYOUTS = (
    ('problem', 'answers'), ('problem', 'answer'), ('Problem', 'Answer'),
    ('question', 'final_answer'), ('question', 'answer'),
    ('prompt', 'reward_model'), ('prompt', 'solution'))

_NAMED = 10  # bad rows that are skipped and named
MAX_CHARS = 10_000  # of a reference answer; Omni-MATH has whole proofs
_LISTED = re.compile(r'\s*\[\s*["\']')  # no interval has a quote

# Optional columns for each field, in order of preference.
OPTIONAL = {
    'id': ('id', 'unique_id', 'ID'),
    'source': ('source',),
    'level': ('level', 'difficulty'),
    'subject': ('subject', 'subfield', 'domain'),
    'unit': ('unit',),
    'abs_error': ('abs_error', 'error'),
}


@dataclasses.dataclass(frozen=True)
class Source:
  """One named set: its origin, and how the paper's evaluation decodes it.

  Attributes:
    hub, config, split: the arguments of `datasets.load_dataset`.
    rows: the expected number of rows; several where copies differ.
    licence: the licence of the data, as stated by its origin.
    temperature, samples: decoding; temperature 0 is greedy. All sets: at most
      8,192 new tokens, top-p 1, no top-k.
    leave_out: the rows to omit, keys of LEAVE_OUT.
  """
  hub: str
  config: str | None
  split: str
  rows: tuple[int, ...]
  licence: str
  temperature: float = 0.0
  samples: int = 1
  leave_out: tuple[str, ...] = ()


LEAVE_OUT = {
    'repeated': 'problems that repeat an earlier one, up to spaces',
    'contradictory': 'problems that come with different answers',
    'above 2^53': 'integer answers above 2^53, corrupted by a float',
    'empty': 'rows without an answer',
}

SETS = {
    'dapo_math': Source(
        'open-r1/DAPO-Math-17k-Processed', 'all', 'train',
        (17398, 14116, 3282, 1_791_700), 'Apache-2.0', 1.0, 8,
        leave_out=('repeated', 'contradictory', 'above 2^53')),
    'gsm8k': Source('openai/gsm8k', 'main', 'test', (1319, 7473), 'MIT'),
    'math500': Source('HuggingFaceH4/MATH-500', None, 'test', (500,), 'MIT'),
    'aime24': Source(
        'HuggingFaceH4/aime_2024', None, 'train', (30,), '(c) MAA', 0.6, 32),
    'aime25': Source(
        'math-ai/aime25', None, 'test', (30,), '(c) MAA', 0.6, 32),
    'amc': Source(
        'AI-MO/aimo-validation-amc', None, 'train', (83,), '(c) MAA', 0.6, 32),
    # The paper uses the rule-gradable subset: give its file, omni_math:FILE.
    'omni_math': Source(
        'KbsdJames/Omni-MATH', None, 'test', (4428, 2821), 'Apache-2.0',
        leave_out=('empty',)),
    'olympiadbench': Source(
        'Hothan/OlympiadBench', 'OE_TO_maths_en_COMP', 'train', (674, 675),
        'Apache-2.0'),
    'minerva': Source(
        'math-ai/minervamath', None, 'test', (272,), 'CC BY-NC-SA'),
}


def load(name_or_path: str, split: str | None = None, limit: int | None = None,
         skip_bad: int = 0) -> list[problem_lib.Problem]:
  """Loads problems by name or from a file.

  Args:
    name_or_path: 'arithmetic' (embedded, 10,000 problems unless limited); a
      name in SETS, loaded from the hub; 'NAME:PATH', a local copy of that
      set; or a PATH: a .jsonl or .parquet file, or a folder that the
      `datasets` library can read.
    split: split of arithmetic (default 'train'), hub set or folder.
    limit: return only the first `limit` problems.
    skip_bad: skip up to so many bad rows; they are counted and logged.

  Raises:
    InputError: no such set or file, or more bad rows; the message names the
      file, the row number (from 1) and what is wrong.
  """
  if name_or_path == 'arithmetic':
    return _embedded(split or 'train', 10_000 if limit is None else limit)
  name, colon, path = name_or_path.partition(':')
  if name not in SETS:
    name, path = None, name_or_path
  if not name_or_path:
    raise errors.InputError('the name of a data set is empty')
  if colon and not path:
    raise errors.InputError(f'{name_or_path}: no path after the colon')
  if path:
    if not os.path.exists(path):
      raise errors.InputError(
          f'{path}: no such file, folder or set; the sets are arithmetic, '
          f'{", ".join(SETS)}')
    origin, rows = path, sources.local_rows(pathlib.Path(path), split)
  else:
    source, split = SETS[name], split or SETS[name].split
    origin = f'{source.hub} ({split})'
    rows = sources.dataset_rows(source.hub, source.config, split)
  problems = _convert(rows, origin, name, skip_bad)
  _LOG.info('%s: %d problems', name_or_path, len(problems))
  return problems[:limit]


def _embedded(split, count):
  if split not in arithmetic.SPLITS:
    raise errors.InputError(f'arithmetic: no split {split!r}, only '
                            f'{" and ".join(arithmetic.SPLITS)}')
  try:
    return arithmetic.problems(split, count)
  except ValueError as error:
    raise errors.InputError(f'{count} problems of {error}') from error


def _convert(rows: Iterable[tuple[int, object]], origin: str,
             name: str | None, skip_bad: int) -> list[problem_lib.Problem]:
  """Checks the rows; counts and logs those that are bad or that the set omits.
  """
  leave_out = SETS[name].leave_out if name else ()
  reader = _Reader(origin, name)
  problems, reasons, answers_of, bad = [], [], {}, []
  for number, row in rows:
    try:
      problem = reader.read(number, row)
    except errors.InputError as error:
      bad.append(str(error))
      if len(bad) > skip_bad:
        if not skip_bad:
          raise
        raise errors.InputError(
            f'{origin}: more than data.skip_bad={skip_bad} bad rows; the '
            f'first: {bad[0]}; the last: {error}') from error
      continue
    reason = _reason_to_leave_out(
        _one_spaced(problem.problem), problem.answers, answers_of)
    if reason in leave_out:  # Of millions of repeated rows, free the columns.
      problem = dataclasses.replace(problem, row=None)
    reasons.append(reason)
    problems.append(problem)
  for index, problem in enumerate(problems):
    if len(answers_of[_one_spaced(problem.problem)]) > 1:
      reasons[index] = 'contradictory'
  left_out = collections.Counter(r for r in reasons if r in leave_out)
  problems = [problem for problem, reason in zip(problems, reasons)
              if reason not in leave_out]
  if not problems:
    raise errors.InputError(f'{origin}: no problems')
  for text in bad[:_NAMED]:
    _LOG.warning('skipped: %s', text)
  if bad:
    _LOG.warning('%s: skipped %d bad rows of %d', origin, len(bad),
                 len(bad) + len(reasons))
  _report(origin, len(reasons), left_out, SETS[name].rows if name else ())
  return problems


class _Reader:
  """Reads the rows of one file; the first readable one decides its layout."""

  def __init__(self, origin: str, name: str | None):
    self._origin, self._name = origin, name
    self._label = name or pathlib.Path(origin).stem
    self._fixed = {'source': name} if name else {}
    self._may_be_empty = bool(name) and 'empty' in SETS[name].leave_out
    self._layout, self._ids = None, set()

  def read(self, number: int, row: object) -> problem_lib.Problem:
    """The problem of a row; raises InputError if it is bad."""
    where = f'{self._origin}: row {number}'
    if isinstance(row, errors.InputError):
      raise row
    if not isinstance(row, dict):
      raise errors.InputError(f'{where}: not an object but {_type(row)}')
    layout = self._layout or _find_layout(row, where)
    problem = problem_lib.Problem(
        problem=_problem_text(row, layout[0], where),
        answers=_answers(row, layout[1], where, self._may_be_empty),
        row=row, **{
            'id': f'{self._label}/{number}', 'source': self._label,
            **_optional_fields(row, where), **self._fixed})
    if problem.id in self._ids:  # The AMC set joins two exams.
      problem = dataclasses.replace(problem, id=f'{problem.id}/row{number}')
    self._ids.add(problem.id)
    self._layout = layout
    return problem


def overlap(problems: Iterable[problem_lib.Problem],
            others: Iterable[problem_lib.Problem]) -> int:
  """Counts the problems whose letters and digits equal those of another."""
  texts = {_letters(other.problem) for other in others}
  return sum(_letters(problem.problem) in texts for problem in problems)


def _letters(text):
  return re.sub(r'\W', '', text.lower())


def _one_spaced(text):
  return ' '.join(text.split())


def _reason_to_leave_out(key, references, answers_of):
  """Records the answers seen with each text in answers_of."""
  seen = answers_of.setdefault(key, set())
  is_first = not seen
  seen.add(tuple(map(answers.canonical, references)))
  if not references:
    return 'empty'
  if not is_first:
    return 'repeated'
  digits = [reference.removeprefix('-') for reference in references]
  return 'above 2^53' if any(
      text.isdecimal() and int(text) > 2**53 for text in digits) else None


def _report(origin, total, left_out, expected):
  for reason, count in left_out.items():
    _LOG.info('%s: omitted %d %s', origin, count, LEAVE_OUT[reason])
  if expected and total not in expected:
    _LOG.warning('%s: %d rows, expected %s', origin, total,
                 ' or '.join(map(str, expected)))


def _find_layout(row, where):
  for layout in LAYOUTS:
    if all(column in row for column in layout):
      return layout
  wanted = ' or '.join('+'.join(layout) for layout in LAYOUTS)
  raise errors.InputError(
      f'{where}: has columns {", ".join(row)}; needs {wanted}')


def _cell(row, column, where):
  if column not in row:
    raise errors.InputError(f'{where}: missing column {column!r}')
  return row[column]


def _problem_text(row, column, where):
  value, where = _cell(row, column, where), f'{where}: {column!r}'
  if isinstance(value, list):  # chat turns, as in DAPO and verl
    users = [turn['content'] for turn in value
             if isinstance(turn, dict) and turn.get('role') == 'user'
             and 'content' in turn]
    value = users[-1] if users else value
  if not isinstance(value, str):
    raise errors.InputError(f'{where} is {_type(value)}, not text')
  text = prompts.strip_dapo(_checked(value, where)).strip()
  if not text:
    raise errors.InputError(f'{where} is empty')
  return text


def _answers(row, column, where, may_be_empty):
  """Returns the reference answers; () if there are none and may_be_empty."""
  value = _cell(row, column, where)
  if column == 'reward_model' and isinstance(value, dict):
    column, value = 'ground_truth', _cell(value, 'ground_truth', where)
  where = f'{where}: {column!r}'
  if isinstance(value, str) and _LISTED.match(value):
    value = _listed(value, where)
  values = value if isinstance(value, list) else [value]
  references = tuple(_reference(value, where) for value in values)
  if references and all(references):
    return references
  if may_be_empty:
    return ()
  raise errors.InputError(f'{where} is empty')


def _reference(value, where):
  r"""Reads a reference answer as text: 142.0 -> 142, GSM8K's `... #### 1,080`
  -> 1080, Omni-MATH's `\[\boxed{x}\]` -> x."""
  text = _scalar(value, where)
  if '####' in text:
    text = text.rpartition('####')[2].replace(',', '')
  text = (answers.extract(text, 'boxed') or text).strip()
  digits = max(map(len, re.findall(r'\d+', text)), default=0)
  if len(text) > MAX_CHARS or digits > answers.MAX_CHARS:
    raise errors.InputError(
        f'{where} has {len(text)} characters, {digits} digits in '
        f'a row; at most {MAX_CHARS} and {answers.MAX_CHARS} are read')
  return text


def _listed(text, where):
  """Reads a list of texts written as text: '["5", "6"]'."""
  try:
    texts = ast.literal_eval(text.strip())
    if all(text.isprintable() for text in texts):  # "\f" of \frac is not
      return texts
  except (AttributeError, MemoryError, RecursionError, SyntaxError, TypeError,
          ValueError):
    pass
  raise errors.InputError(f'{where} is text that looks like a list but is '
                          'none; write a list of answers')


def _scalar(value, where):
  if isinstance(value, float) and value.is_integer():
    value = int(value)
  if isinstance(value, bool) or not isinstance(value, str | int | float) or (
      isinstance(value, float) and not math.isfinite(value)):
    raise errors.InputError(
        f'{where} is {_type(value)}, neither text nor a number')
  try:
    text = str(value)
  except ValueError as error:  # an integer of more than 4,300 digits
    raise errors.InputError(f'{where}: {error}') from error
  return _checked(text, where)


def _checked(text, where):
  if not text.isascii() and any('\ud800' <= c <= '\udfff' for c in text):
    raise errors.InputError(
        f'{where} has a lone surrogate, which is no character')
  return text


def _type(value):
  return 'null' if value is None else type(value).__name__


def _optional_fields(row, where):
  """Returns Problem's fields for the OPTIONAL columns of the row."""
  fields = {}
  for field, columns in OPTIONAL.items():
    present = [c for c in columns if row.get(c) not in (None, '')]
    if present:
      value, column = row[present[0]], f'{where}: {present[0]!r}'
      parts = value if isinstance(value, list) else [value]
      fields[field] = '; '.join(_scalar(part, column) for part in parts)
  if 'abs_error' in fields:
    try:
      tolerance = float(fields['abs_error'])
    except ValueError:
      tolerance = math.nan
    if not 0 <= tolerance < math.inf:
      raise errors.InputError(f'{where}: tolerance {fields["abs_error"]!r} is '
                              'not a number from 0 up')
    fields['abs_error'] = tolerance
  return fields
