"""From the lines of samples.jsonl to results.json.

A line is one completion: set, id, problem, answers, sample, completion,
correct, tokens, truncated, and level and subject where the data has them.
"""

import collections
import json
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from tepo_jax import errors
from tepo_jax.tasks import answers
from tepo_jax.tasks import grading
from tepo_jax.tasks import statistics

SAMPLES, RESULTS = 'samples.jsonl', 'results.json'

_SAMPLE = {'set', 'id', 'sample', 'correct'}  # what a comparison reads


def summarize(lines: Sequence[dict], style: str) -> dict[str, Any]:
  """What is said of one set under one decoding.

  avg@k with its interval, pass@1…k, maj@1…k (powers of 2, and k), shares
  without an answer and truncated, mean length, and avg@k by level and
  subject.
  """
  groups = by_problem(lines)
  verdict_Nk = verdicts(groups)
  samples = verdict_Nk.shape[1]
  ks = sorted({samples, *(2**i for i in range(samples.bit_length()))})
  ballots = [_ballot(group, style) for group in groups.values()]
  low, high = statistics.interval([verdict_Nk])
  return {
      f'avg@{samples}': float(verdict_Nk.mean()), 'low': low, 'high': high,
      **{f'pass@{k}': float(np.mean([statistics.pass_at_k(
          samples, int(correct), k) for correct in verdict_Nk.sum(1)]))
         for k in range(1, samples + 1)},
      **{f'maj@{k}': float(np.mean([
          statistics.maj_at_k(*ballot, k) for ballot in ballots]))
         for k in ks if samples > 1},
      'no_answer': sum(blanks for _, blanks in ballots) / verdict_Nk.size,
      'truncated': float(np.mean([line['truncated'] for line in lines])),
      'mean_length': float(np.mean([line['tokens'] for line in lines])),
      'problems': len(groups),
      **{f'by_{field}': _by(groups, field) for field in ('level', 'subject')
         if any(field in line for line in lines)}}


def brief(summary: dict[str, Any]) -> dict[str, float]:
  """The numbers of a summary that are worth a line, k a power of 2 or n."""
  ks = {name.partition('@')[2] for name in summary if name.startswith('maj@')}
  return {name: value for name, value in summary.items()
          if isinstance(value, float | int) and name not in ('low', 'high')
          and (not name.startswith('pass@') or name[5:] in ks | {'1'})}


def by_problem(lines: Iterable[dict]) -> dict[str, list[dict]]:
  """The lines of each problem, in the order of their samples."""
  groups = collections.defaultdict(list)
  for line in lines:
    groups[line['id']].append(line)
  return {name: sorted(groups[name], key=lambda line: line['sample'])
          for name in groups}


def verdicts(groups: dict[str, list[dict]]) -> np.ndarray:
  """[N, k] of 0/1."""
  return np.array([[line['correct'] for line in group]
                   for group in groups.values()], float)


def _ballot(group, style):
  """What `maj_at_k` takes: votes by answer, and blanks."""
  right = collections.defaultdict(list)
  for line in group:
    answer = answers.extract(line['completion'], style)
    if answer is not None and not line['truncated']:
      right[grading.canonical_key(answer)].append(line['correct'])
  votes = {key: (len(r), sum(r) / len(r)) for key, r in right.items()}
  return votes, len(group) - sum(map(len, right.values()))


def _by(groups, field):
  parts = collections.defaultdict(list)
  for group in groups.values():
    if field in group[0]:
      parts[group[0][field]].append(
          np.mean([line['correct'] for line in group]))
  return {name: {'accuracy': float(np.mean(parts[name])),
                 'problems': len(parts[name])} for name in sorted(parts)}


def averages(sets: Sequence[Sequence[dict]]) -> dict[str, Any]:
  """avg_micro (the paper's Avg.) and avg_macro, with their intervals."""
  arrays = [verdicts(by_problem(lines)) for lines in sets]
  found = {}
  for name, average in (('micro', statistics.micro),
                        ('macro', statistics.macro)):
    low, high = statistics.interval(arrays, average)
    found[f'avg_{name}'] = average(arrays)
    found[f'avg_{name}_interval'] = [low, high]
  return found


def read(folder: str | pathlib.Path) -> tuple[dict, list[dict]]:
  """results.json and the lines of samples.jsonl of a finished evaluation.

  Raises:
    errors.InputError: they are not there, or not what they should be.
  """
  folder = pathlib.Path(folder)
  try:
    found = _parsed(folder / RESULTS, (folder / RESULTS).read_text('utf-8'))
    samples = (folder / SAMPLES).read_text('utf-8').splitlines()
  except FileNotFoundError as error:
    raise errors.InputError(
        f'{error.filename}: is missing; no finished evaluation is '
        'there') from error
  except ValueError as error:
    raise errors.InputError(f'{folder}: {error}') from error
  return found, [_parsed(folder / SAMPLES, line, _SAMPLE) for line in samples]


def _parsed(path, text, fields=frozenset()):
  """The JSON object, which must have these fields."""
  try:
    found = json.loads(text)
  except (ValueError, RecursionError) as error:
    raise errors.InputError(f'{path}: {error}') from error
  if not isinstance(found, dict) or not fields <= found.keys():
    raise errors.InputError(f'{path}: not of an evaluation: {text[:60]!r}')
  return found


def compare(first: Sequence[dict], second: Sequence[dict]) -> list[dict]:
  """Of each set in both and of all of them: second − first, paired.

  Raises:
    errors.InputError: no common set, or a set with other problems.
  """
  a, b = _by_set(first), _by_set(second)
  names = [name for name in a if name in b]
  if not names:
    raise errors.InputError(
        f'no set in both: {", ".join(a)}; {", ".join(b)}')
  pairs, rows = {}, []
  for name in names:
    groups, others = by_problem(a[name]), by_problem(b[name])
    if groups.keys() != others.keys():
      raise errors.InputError(f'{name}: the two have different problems')
    pairs[name] = verdicts(groups), verdicts({g: others[g] for g in groups})
    rows.append({'set': name} | _compared([pairs[name]]))
  if len(names) > 1:
    rows.append({'set': 'avg_micro'} | _compared(list(pairs.values())))
  return rows


def _compared(pairs):
  first, second = zip(*pairs)
  row = {'first': statistics.micro(first), 'second': statistics.micro(second),
         **statistics.difference(first, second)}
  if all(array.shape[1] == 1 for array in first + second):
    row['mcnemar'] = statistics.mcnemar(
        *(np.concatenate(arrays)[:, 0] for arrays in (first, second)))
  return row


def _by_set(lines):
  sets = collections.defaultdict(list)
  for line in lines:
    sets[line['set']].append(line)
  return sets
