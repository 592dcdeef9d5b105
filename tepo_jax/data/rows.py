"""Reads a row of a data set as a Problem, by the names of its columns."""

from collections.abc import Mapping
import dataclasses
import math

from tepo_jax import errors
from tepo_jax import grading
from tepo_jax.data import problem as problem_lib
from tepo_jax.data import prompts
from tepo_jax.data import references

# (problem column, answer column), unless the config names them. The first pair
# present in a file's first row is used for the whole file.
LAYOUTS = (
    ('problem', 'answers'), ('problem', 'answer'), ('Problem', 'Answer'),
    ('question', 'final_answer'), ('question', 'answer'),
    ('prompt', 'reward_model'), ('prompt', 'solution'))

_SHOWN = 12  # columns in a message
_ROLES = ('system', 'user', 'assistant')  # of chat turns

# Optional columns for each field, in order of preference. A value that cannot
# be read, or is no text or number, is ignored: no run needs it.
OPTIONAL = {
    'id': ('id', 'unique_id', 'ID'),
    'source': ('source',),
    'level': ('level', 'difficulty'),
    'subject': ('subject', 'subfield', 'domain'),
}

# The unit and the absolute tolerance of the reference, by the set that
# documents such columns; None: files and hub data sets without a name. They
# change verdicts, so that a value that cannot be read is an error; but not a
# `unit` of a file without a name, which may mean anything.
UNITS = {'olympiadbench': ('unit',), None: ('unit',)}
TOLERANCES = {'olympiadbench': ('error', 'abs_error'), None: ('abs_error',)}

# The sets that document sentences as answers. Elsewhere a sentence in which no
# answer is found is a solution.
TEXTS = ('omni_math', 'olympiadbench')


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
    self._source = source
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
      raise errors.InputError(
          f'{where}: not an object but {references.type_name(row)}')
    layout = self._layout or _find_layout(row, self._columns, where)
    text, turns = _conversation(row, layout[0], where)
    problem = problem_lib.Problem(
        problem=text, turns=turns, number=number,
        answers=_answers(row, layout[1], where, self._may_be_empty,
                         may_be_text=self._source in TEXTS),
        row=row,
        unit=_unit(row, UNITS.get(self._source, ()), where,
                   is_documented=self._source is not None),
        abs_error=_tolerance(row, TOLERANCES.get(self._source, ()), where),
        **{'id': f'{self._label}/{number}', 'source': self._label,
           **_optional_fields(row),
           **({'source': self._source} if self._source else {})})
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
  if len(set(columns.values())) < len(columns):
    raise errors.InputError(
        f'{where}: data.columns.problem and data.columns.answer are the same '
        f'column, {columns["problem"]!r}')
  layouts = [pair for pair in dict.fromkeys(
      (columns.get('problem', problem), columns.get('answer', answer))
      for problem, answer in LAYOUTS) if len(set(pair)) == 2]
  for layout in layouts:
    if all(column in row for column in layout):
      return layout
  wanted = ' or '.join('+'.join(layout) for layout in layouts)
  raise errors.InputError(
      f'{where}: {_has(row)}; needs {wanted}, or columns named by '
      'data.columns.problem and data.columns.answer')


def _has(row):
  names = [name if (text := str(name)).isprintable() and text == text.strip()
           else repr(name) for name in row]
  return f'has columns {errors.listed(list(map(str, names)), _SHOWN)}'


def _cell(row, column, where):
  if column not in row:
    raise errors.InputError(f'{where}: missing column {column!r}; {_has(row)}')
  return row[column]


def _conversation(row, column, where):
  """(the problem's text, the (role, text) turns before it) in a cell."""
  value, where = _cell(row, column, where), f'{where}: {column!r}'
  turns, problem = (), value
  if isinstance(value, list):  # chat turns, as in DAPO and verl
    turns = tuple(_turn(turn, where) for turn in value)
    if not turns or turns[-1][0] != 'user':
      raise errors.InputError(
          f'{where} must end with a user turn, which is the problem; its '
          f'turns: {errors.listed([role for role, _ in turns]) or "none"}')
    (_, problem), turns = turns[-1], turns[:-1]
  if not isinstance(problem, str):
    raise errors.InputError(
        f'{where} is {references.type_name(problem)}, not text')
  references.refuse_nested(problem, where)
  text = prompts.strip_dapo(references.checked(problem, where)).strip()
  if not text:
    raise errors.InputError(f'{where} is empty')
  return text, turns


def _turn(turn, where):
  """The (role, text) of a chat turn."""
  if not isinstance(turn, dict) or not {'role', 'content'} <= turn.keys():
    raise errors.InputError(f'{where}: a turn must have role and content')
  if turn['role'] not in _ROLES:
    raise errors.InputError(
        f'{where}: role {turn["role"]!r} is not one of {", ".join(_ROLES)}')
  if not isinstance(turn['content'], str):
    raise errors.InputError(
        f'{where}: the content of a {turn["role"]} turn is '
        f'{references.type_name(turn["content"])}, not text')
  if turn['role'] != 'assistant':  # whose answer may be JSON
    references.refuse_nested(turn['content'], where)
  return turn['role'], references.checked(turn['content'], where)


def _answers(row, column, where, may_be_empty, may_be_text):
  """Returns the reference answers; () if there are none and may_be_empty."""
  value = _cell(row, column, where)
  if column == 'reward_model' and isinstance(value, dict):
    column, value = 'ground_truth', _cell(value, 'ground_truth', where)
  where = f'{where}: {column!r}'
  found = references.read(value, where, may_be_text=may_be_text)
  if found and all(map(grading.canonical, found)):  # '$$' is empty too
    return found
  if may_be_empty:
    return ()
  raise errors.InputError(f'{where} is empty')


def _optional_fields(row):
  """Returns Problem's fields for the OPTIONAL columns of the row."""
  fields = {}
  for field, columns in OPTIONAL.items():
    texts = (_label(row[column]) for column in columns if column in row)
    if text := next(filter(None, texts), None):
      fields[field] = text
  return fields


def _label(value):
  """A text, number or list of these as text; None if it is something else."""
  parts = value if isinstance(value, list) else [value]
  try:
    return '; '.join(references.scalar(part, '') for part in parts)
  except errors.InputError:
    return None


def _filled(row, columns):
  """(column, value) of the first column with a value, or None. A NaN is how
  pandas writes a missing value."""
  return next((
      (column, row[column]) for column in columns
      if column in row and row[column] not in (None, '')
      and row[column] == row[column]), None)


def _unit(row, columns, where, is_documented):
  try:
    if found := _filled(row, columns):
      return references.scalar(found[1], f'{where}: {found[0]!r}')
  except errors.InputError:
    if is_documented:
      raise
  return None


def _tolerance(row, columns, where):
  found = _filled(row, columns)
  if found is None:
    return None
  try:
    tolerance = float(references.scalar(found[1], f'{where}: {found[0]!r}'))
  except ValueError:
    tolerance = math.nan
  if not 0 <= tolerance < math.inf:
    raise errors.InputError(f'{where}: tolerance {found[1]!r} is '
                            'not a number from 0 up')
  return tolerance
