"""Reads a row of a data set as a Problem, by the names of its columns."""

import ast
from collections.abc import Mapping
import dataclasses
import math
import re

from tepo_jax import errors
from tepo_jax import grading
from tepo_jax.data import problem as problem_lib
from tepo_jax.data import prompts

# (problem column, answer column), unless the config names them. The first pair
# present in a file's first row is used for the whole file.
LAYOUTS = (
    ('problem', 'answers'), ('problem', 'answer'), ('Problem', 'Answer'),
    ('question', 'final_answer'), ('question', 'answer'),
    ('prompt', 'reward_model'), ('prompt', 'solution'))

MAX_CHARS = 10_000  # of a reference answer; Omni-MATH has whole proofs
_LISTED = re.compile(r'\s*\[\s*["\']')  # no interval has a quote
_SHOWN = 12  # columns in a message

# Optional columns for each field, in order of preference.
OPTIONAL = {
    'id': ('id', 'unique_id', 'ID'),
    'source': ('source',),
    'level': ('level', 'difficulty'),
    'subject': ('subject', 'subfield', 'domain'),
    'unit': ('unit',),
    'abs_error': ('abs_error', 'error'),
}


class Reader:
  """Reads the rows of one file; the first readable one decides its layout."""

  def __init__(self, origin: str, label: str, source: str | None = None,
               may_be_empty: bool = False,
               columns: Mapping[str, str | None] | None = None):
    """Makes a reader.

    Args:
      origin: what messages call the file.
      label: prefix of the ids of problems without one, and their source.
      source: the source of all problems, whatever the rows say.
      may_be_empty: accept rows without a reference answer.
      columns: {'problem': its column, 'answer': its column}, as in
        config.data.columns; None or absent: found by LAYOUTS.
    """
    self._origin, self._label = origin, label
    self._fixed = {'source': source} if source else {}
    self._may_be_empty = may_be_empty
    self._columns = {field: column for field, column in (columns or {}).items()
                     if column is not None}
    self._layout, self._ids = None, set()

  def read(self, number: int, row: object) -> problem_lib.Problem:
    """The problem of a row; raises InputError if it is bad."""
    where = f'{self._origin}: row {number}'
    if isinstance(row, errors.InputError):
      raise row
    if not isinstance(row, dict):
      raise errors.InputError(f'{where}: not an object but {_type(row)}')
    layout = self._layout or _find_layout(row, self._columns, where)
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


def _find_layout(row, columns, where):
  """The (problem column, answer column) of a row; `columns` are by the user."""
  for field, column in columns.items():
    if column not in row:
      raise errors.InputError(f'{where}: no column {column!r}, which is '
                              f'data.columns.{field}; {_has(row)}')
  layouts = list(dict.fromkeys(
      (columns.get('problem', problem), columns.get('answer', answer))
      for problem, answer in LAYOUTS))
  for layout in layouts:
    if all(column in row for column in layout):
      return layout
  wanted = ' or '.join('+'.join(layout) for layout in layouts)
  raise errors.InputError(
      f'{where}: {_has(row)}; needs {wanted}, or columns named by '
      'data.columns.problem and data.columns.answer')


def _has(row):
  names = [name if str(name).isprintable() else repr(name) for name in row]
  return f'has columns {errors.listed(list(map(str, names)), _SHOWN)}'


def _cell(row, column, where):
  if column not in row:
    raise errors.InputError(f'{where}: missing column {column!r}; {_has(row)}')
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
  text = (grading.extract(text, 'boxed') or text).strip()
  digits = max(map(len, re.findall(r'\d+', text)), default=0)
  if len(text) > MAX_CHARS or digits > grading.MAX_CHARS:
    raise errors.InputError(
        f'{where} has {len(text)} characters, {digits} digits in '
        f'a row; at most {MAX_CHARS} and {grading.MAX_CHARS} are read')
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
