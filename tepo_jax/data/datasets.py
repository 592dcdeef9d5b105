"""Loads problems: the named sets from the hub, and any file or hub data set.

A named set is one row of SETS. `sources` finds the rows of a file or hub id,
`rows` reads each by its columns. A bad row is refused with its file and row
number; rows that a set omits on purpose are counted and logged.
"""

import collections
from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import difflib
import logging
import pathlib
import re
import unicodedata

from tepo_jax import errors
from tepo_jax import grading
from tepo_jax.data import embedded
from tepo_jax.data import problem as problem_lib
from tepo_jax.data import rows as rows_lib
from tepo_jax.data import sources

_LOG = logging.getLogger(__name__)

_NAMED = 10  # bad rows that are skipped and named


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
    trains: whether it is a training set; the others are benchmarks.
  """
  hub: str
  config: str | None
  split: str
  rows: tuple[int, ...]
  licence: str
  temperature: float = 0.0
  samples: int = 1
  leave_out: tuple[str, ...] = ()
  trains: bool = False


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
        leave_out=('repeated', 'contradictory', 'above 2^53'), trains=True),
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


@dataclasses.dataclass(frozen=True)
class Loaded:
  """A data set, and which of its rows are no problems of it.

  Attributes:
    origin: the file, folder or hub id, as messages call it.
    rows: how many the origin has.
    omitted: key of LEAVE_OUT -> numbers of the rows, from 1.
    bad: a message for each bad row, which names it.
  """
  origin: str
  problems: list[problem_lib.Problem]
  rows: int
  omitted: dict[str, list[int]] = dataclasses.field(default_factory=dict)
  bad: list[str] = dataclasses.field(default_factory=list)


def load(name_or_path: str, split: str | None = None, limit: int | None = None,
         skip_bad: int = 0, columns: Mapping[str, str | None] | None = None
         ) -> list[problem_lib.Problem]:
  """The problems of `read`, the first `limit` of them; see there."""
  return read(name_or_path, split, limit, skip_bad, columns).problems[:limit]


def read(name_or_path: str, split: str | None = None, limit: int | None = None,
         skip_bad: int = 0, columns: Mapping[str, str | None] | None = None,
         share: sources.Share | None = None) -> Loaded:
  """Reads problems by name, from a file or from the hub.

  Args:
    name_or_path: an `embedded` task, with or without levels (`limit` or 10,000
      problems); a name in SETS, loaded from the hub; a file, folder or hub id
      that `sources.find` accepts; or 'NAME:' and one of these, a copy of that
      set.
    split: of an embedded task (default 'train'), hub set or folder.
    limit: of an embedded task only.
    skip_bad: skip up to so many bad rows; they are counted and logged.
    columns: {'problem': column, 'answer': column} of files, folders and hub ids
      that are not read as a named set; None or absent: found by rows.LAYOUTS.
    share: as of `sources.on_hub`, for a job none of whose processes has the
      set as a file (`is_on_hub`).

  Raises:
    InputError: no such set or file, or more bad rows; the message names the
      file, the row number (from 1), the column and what is wrong.
  """
  if not name_or_path:
    raise errors.InputError('the name of a data set is empty')
  if embedded.is_task(name_or_path):
    problems = embedded.problems(name_or_path, split or 'train',
                                 10_000 if limit is None else limit)
    return Loaded(name_or_path, problems, len(problems))
  name, colon, path = name_or_path.partition(':')
  if name not in SETS:
    name, path = None, name_or_path
  elif colon and not path:
    raise errors.InputError(f'{name_or_path}: no path after the colon')
  if path:
    origin = sources.find(path, split, (*embedded.TASKS, *SETS), share)
  else:
    origin = sources.on_hub(SETS[name].hub, SETS[name].config,
                            split or SETS[name].split, share)
  leave_out = SETS[name].leave_out if name else ()
  loaded = _convert(origin, rows_lib.Reader(
      origin.name, name or origin.label, name, 'empty' in leave_out,
      None if name else columns), leave_out, skip_bad)
  _report(loaded, SETS[name].rows if name else ())
  _LOG.info('%s: %s', name_or_path,
            errors.counted(len(loaded.problems), 'problem'))
  return loaded


def is_on_hub(name_or_path: str) -> bool:
  """Whether `read` asks the hub for the set, as it is no file here."""
  name, _, path = name_or_path.partition(':')
  return not embedded.is_task(name_or_path) and (
      name_or_path in SETS
      or not sources.is_here(path if name in SETS else name_or_path))


def is_named(name_or_path: str) -> bool:
  """Whether `read` takes the columns from a named set, not from the caller."""
  return name_or_path.partition(':')[0] in (*embedded.TASKS, *SETS)


def decoding(name_or_path: str, samples: int | None, temperature: float | None
             ) -> tuple[int, float]:
  """(samples, temperature) of an evaluation set, its own where None.

  Raises:
    InputError: one is None, and only the named sets of SETS have their own.
  """
  source = SETS.get(name_or_path.partition(':')[0])
  if source is not None:
    samples = source.samples if samples is None else samples
    temperature = source.temperature if temperature is None else temperature
  if samples is None or temperature is None:
    near = difflib.get_close_matches(name_or_path, SETS, 1, 0.8)
    raise errors.InputError(
        f'{name_or_path} has no default decoding: '
        + (f'did you mean {near[0]}? Else ' if near else '')
        + 'set config.eval.samples and config.eval.temperature (1 and 0 decode '
        'greedily)')
  return samples, temperature


def _convert(origin: sources.Origin, reader: rows_lib.Reader,
             leave_out: Sequence[str], skip_bad: int) -> Loaded:
  """Reads the rows, without those that are bad or that the set omits."""
  found, answers_of, bad = [], {}, []
  for number, row in origin.rows:
    try:
      problem = reader.read(number, row)
    except errors.InputError as error:
      bad.append(str(error))
      if len(bad) > skip_bad:
        if not skip_bad:
          raise
        raise errors.InputError(
            f'{origin.name}: more than skip_bad={skip_bad} bad rows; the '
            f'first: {bad[0]}; the last: {error}') from error
      continue
    reason = _reason_to_leave_out(
        _one_spaced(problem.text), problem.answers, answers_of)
    if reason in leave_out:  # Of millions of repeated rows, free the columns.
      problem = dataclasses.replace(problem, row=None)
    found.append((number, problem, reason))
  problems, omitted = [], collections.defaultdict(list)
  for number, problem, reason in found:
    if len(answers_of[_one_spaced(problem.text)]) > 1:
      reason = 'contradictory'
    if reason in leave_out:
      omitted[reason].append(number)
    else:
      problems.append(problem)
  if not problems:
    raise errors.InputError(f'{origin.name}: no problems')
  return Loaded(origin.name, problems, len(found) + len(bad), omitted, bad)


def overlap(problems: Iterable[problem_lib.Problem],
            others: Iterable[problem_lib.Problem]) -> int:
  """Counts the problems that equal another but for white space, letter case,
  dollar signs, braces and punctuation."""
  texts = {_normalized(other.text) for other in others}
  return sum(_normalized(problem.text) in texts for problem in problems)


# What differs between copies of a problem, and is no operator: 3-1, 5!, 2*3.
# Each alternative begins with its character, which is ten times as fast.
_LOOK = re.compile(
    r'[\s$"„“”\'`‘’{}]|\\(?:[()\[\],;:! ]|(?:left|right)(?![a-z])|(?=[%$]))'
    r'|-(?<=[a-z]{2}-)(?=[a-z]{2})')
_PUNCTUATION = re.compile(r'[.,;:?。](?:(?<!\d.)|(?!\d))')  # (1,2) is not (12)
_SAME = str.maketrans({'−': '-', '–': '-', '×': r'\times', '÷': r'\div',
                       '·': r'\cdot', '⋅': r'\cdot', '∗': '*'})


def _normalized(text):
  text = unicodedata.normalize('NFKC', text).translate(_SAME)
  return _PUNCTUATION.sub('', _LOOK.sub('', text)).lower()


def short_name(name_or_path: str) -> str:
  """A set's name for metrics: 'gsm8k:FILE' -> 'gsm8k', 'a/b.jsonl' -> 'b'."""
  name = name_or_path.partition(':')[0]
  if name in SETS:
    return name
  path = pathlib.Path(name_or_path)
  return path.stem if path.suffix in sources.READERS else path.name


def short_names(names: Sequence[str]) -> list[str]:
  """`short_name` of each; where two would be the same, as they are."""
  short = list(map(short_name, names))
  return [each if short.count(each) == 1 else name
          for each, name in zip(short, names)]


def _one_spaced(text):
  return ' '.join(text.split())


def _reason_to_leave_out(key, references, answers_of):
  """Records the answers seen with each text in answers_of."""
  seen = answers_of.setdefault(key, set())
  if not references:
    return 'empty'
  is_first = not seen
  seen.add(tuple(map(grading.canonical, references)))
  if not is_first:
    return 'repeated'
  digits = [reference.removeprefix('-') for reference in references]
  return 'above 2^53' if any(
      text.isdecimal() and int(text) > 2**53 for text in digits) else None


def _report(loaded, expected):
  for text in loaded.bad[:_NAMED]:
    _LOG.warning('skipped: %s', text)
  if loaded.bad:
    _LOG.warning('%s: skipped %d bad rows of %d', loaded.origin,
                 len(loaded.bad), loaded.rows)
  for reason, numbers in loaded.omitted.items():
    _LOG.info('%s: omitted %d %s', loaded.origin, len(numbers),
              LEAVE_OUT[reason])
  total = loaded.rows - len(loaded.bad)
  if expected and total not in expected:
    _LOG.warning('%s: %d rows, expected %s', loaded.origin, total,
                 ' or '.join(map(str, expected)))
