"""Compares two evaluations, by their results.json and samples.jsonl."""

import json
import os

import numpy as np

from tepo_jax import errors
from tepo_jax.job import results
from tepo_jax.job import sample_file
from tepo_jax.job import statistics
from tepo_jax.runtime import files
from tepo_jax.tools.report import significance

# The fields that are read.
_RESULTS = {'first_decodings': list}
_SAMPLE = {'set': str, 'id': str, 'sample': int, 'correct': bool}


def read(folder: str | os.PathLike) -> tuple[dict, list[dict]]:
  """Reads results.json and the lines of samples.jsonl from a folder.

  Raises:
    errors.InputError: the evaluation is unfinished, or a file is damaged.
  """
  folder = files.path(folder)
  try:
    found, samples = ((folder / name).read_text('utf-8')
                      for name in (results.RESULTS, results.SAMPLES))
  except FileNotFoundError as error:
    raise errors.InputError(
        f'{error.filename} is missing: {folder} holds no finished evaluation; '
        f'make one: python -m tepo_jax.evaluate --config=FILE.py:METHOD '
        f'--checkpoint={folder} --out=DIR') from error
  except ValueError as error:
    raise errors.InputError(f'{folder}: {error}') from error
  lines = [_parsed(folder / results.SAMPLES, line, _SAMPLE)
           for line in samples.splitlines()]
  return _parsed(folder / results.RESULTS, found, _RESULTS), lines


def settings_that_differ(first: str | os.PathLike, second: str | os.PathLike
                         ) -> list[str]:
  """How completions were asked for and graded otherwise in two evaluations:
  'eval.max_tokens (48, 20)'."""
  one, other = map(sample_file.read_identity, (first, second))
  return [f'{name} ({one[name]}, {other[name]})'
          for name in sorted(one.keys() & other.keys())
          if '.' in name and ' ' not in name and one[name] != other[name]]


def _parsed(path, text, fields):
  """Parses a JSON object, which must have these fields, of these types."""
  try:
    found = json.loads(text)
  except (ValueError, RecursionError) as error:
    raise errors.InputError(f'{path}: {error}') from error
  if not isinstance(found, dict) or not all(
      name in found and type(found[name]) is kind
      for name, kind in fields.items()):
    raise errors.InputError(f'{path}: not written by evaluate: {text[:60]!r}')
  return found


def compare(first: tuple[dict, list[dict]],
            second: tuple[dict, list[dict]]) -> list[dict]:
  """Compares two evaluations: second − first, paired by problem.

  Returns a row for each set that both have, under each decoding, and a row
  avg_micro as in `results.averages`: over the sets' first decodings, if one
  evaluation has the same multiple of the other's samples in all of them.

  Args:
    first, second: results.json and the lines of samples.jsonl, from `read`.

  Raises:
    errors.InputError: the two share no set, or differ in a set's problems.
  """
  a, b = (results.grouped(lines, 'set') for _, lines in (first, second))
  names = [name for name in a if name in b]
  if not names:
    raise errors.InputError(
        f'the evaluations share no set: {", ".join(a)}; {", ".join(b)}')
  pairs, rows = {}, []
  for name in names:
    groups, others = (results.by_problem(each[name]) for each in (a, b))
    if groups.keys() != others.keys():
      raise errors.InputError(f'{name}: the two have different problems')
    pairs[name] = tuple(map(
        results.verdicts, (groups, {g: others[g] for g in groups})))
    rows.append({'set': name} | _compared([pairs[name]]))
  main, other = (found['first_decodings'] for found, _ in (first, second))
  shared = [name for name in main if name in other and name in pairs]
  # Otherwise the two would weight the sets differently.
  ratios = {pairs[name][0].size / pairs[name][1].size for name in shared}
  if len(ratios) == 1 and len(names) > 1:
    title = ('avg_micro' if set(main) == set(other)
             else 'avg_micro of the shared sets')
    rows.append({'set': title} | _compared([pairs[name] for name in shared]))
  elif len(ratios) > 1:
    errors.note('no average over the sets: the two evaluations differ in '
                'samples by other factors from set to set')
  return rows


def _compared(pairs):
  first, second = zip(*pairs)
  row = {'problems': sum(map(len, first)),
         'first': statistics.micro(first), 'second': statistics.micro(second),
         **significance.difference(first, second)}
  if all(array.shape[1] == 1 for array in first + second):
    row['mcnemar'] = significance.mcnemar(
        *(np.concatenate(arrays)[:, 0] for arrays in (first, second)))
  return row
