"""An evaluation's accuracies, from samples.jsonl to results.json.

A line of samples.jsonl is one completion: set, id, problem, answers, sample,
completion, correct, tokens, truncated, and level and subject where the data
has them. A set that is also decoded greedily has a second name, 'SET/greedy'.
"""

import collections
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from tepo_jax import grading
from tepo_jax.job import statistics

SAMPLES, RESULTS = 'samples.jsonl', 'results.json'
NATS = 'nats_per_token'  # of a text, see `texts`


def summarize(lines: Sequence[dict], style: str, too_long: int = 0
              ) -> dict[str, Any]:
  """Returns the metrics of one set under one decoding.

  These are avg@k with its interval, pass@1…k, maj@1…k (powers of 2, and k),
  the shares of completions without an answer and truncated, the mean length,
  and avg@k by level and subject. All of them are over the problems whose
  prompts were short enough; `too_long` others were skipped.
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
      'problems': len(groups), 'too_long': too_long,
      **{f'by_{field}': _by(groups, field) for field in ('level', 'subject')
         if any(field in line for line in lines)}}


def brief(summary: dict[str, Any]) -> dict[str, float]:
  """Returns the summary's main numbers, and avg@k's interval as low and high:
  k is a power of 2 or n."""
  ks = {name.partition('@')[2] for name in summary if name.startswith('maj@')}
  return {name: value for name, value in summary.items()
          if isinstance(value, float | int)
          and (not name.startswith('pass@') or name[5:] in ks | {'1'})}


def by_problem(lines: Iterable[dict]) -> dict[str, list[dict]]:
  """Groups lines by problem, each in the order of its samples."""
  return {name: sorted(group, key=lambda line: line['sample'])
          for name, group in grouped(lines, 'id').items()}


def verdicts(groups: dict[str, list[dict]]) -> np.ndarray:
  """Returns whether each sample is correct: [N, k] of 0/1."""
  return np.array([[line['correct'] for line in group]
                   for group in groups.values()], float)


def _ballot(group, style):
  """Returns the arguments of `maj_at_k`: votes by answer, and blanks."""
  correct = collections.defaultdict(list)
  for line in group:
    answer = grading.extract(line['completion'], style)
    if answer is not None and not line['truncated']:
      correct[grading.canonical_key(answer)].append(line['correct'])
  votes = {key: (len(c), sum(c) / len(c)) for key, c in correct.items()}
  return votes, len(group) - sum(map(len, correct.values()))


def _by(groups, field):
  parts = collections.defaultdict(list)
  for group in groups.values():
    if field in group[0]:
      parts[group[0][field]].append(
          np.mean([line['correct'] for line in group]))
  return {name: {'accuracy': float(np.mean(part)), 'problems': len(part)}
          for name, part in sorted(parts.items(), key=lambda item: item[0])}


def averages(sets: Sequence[Sequence[dict]]) -> dict[str, Any]:
  """Returns avg_micro and avg_macro, each with its interval.

  avg_micro, the paper's "Avg.", is the mean over all graded samples; avg_macro
  is the mean of the sets' means.

  Args:
    sets: the lines of each set's first (main) decoding. Greedy decodings that
      only accompany it do not belong here.
  """
  arrays = [verdicts(by_problem(lines)) for lines in sets]
  found = {}
  for name, average in (('micro', statistics.micro),
                        ('macro', statistics.macro)):
    found[f'avg_{name}'] = average(arrays)
    found[f'avg_{name}_interval'] = list(statistics.interval(arrays, average))
  return found


def table(found: Mapping[str, Any]) -> str:
  """Formats results.json: a line for each set, and the averages."""
  rows = [('', 'accuracy', '95 % interval', 'pass@n', 'maj@n', 'no answer',
           'truncated', 'tokens', 'problems')]
  for name, summary in found['sets'].items():
    average = next(key for key in summary if key.startswith('avg@'))
    samples = average.removeprefix('avg@')
    rows.append((
        name, f'{average} {summary[average]:.1%}',
        f'{summary["low"]:.1%} … {summary["high"]:.1%}',
        f'{summary[f"pass@{samples}"]:.1%}',
        f'{summary[f"maj@{samples}"]:.1%}' if samples != '1' else '',
        f'{summary["no_answer"]:.1%}', f'{summary["truncated"]:.1%}',
        f'{summary["mean_length"]:.1f}', _problems(summary)))
  for name in ('avg_micro', 'avg_macro'):
    low, high = found[f'{name}_interval']
    rows.append((name, f'{found[name]:.1%}', f'{low:.1%} … {high:.1%}',
                 *[''] * 6))
  widths = [max(map(len, column)) for column in zip(*rows)]
  return '\n'.join('  '.join(
      cell.ljust(width) if i == 0 else cell.rjust(width)
      for i, (cell, width) in enumerate(zip(row, widths))).rstrip()
                   for row in rows)


def _problems(summary):
  """'497 of 500' if the prompts of 3 problems were too long. Evaluations of
  earlier versions do not say."""
  count, skipped = summary['problems'], summary.get('too_long')
  return f'{count} of {count + skipped}' if skipped else str(count)


def grouped(lines: Iterable[dict], field: str) -> dict[str, list[dict]]:
  """Groups lines by a field, in their order."""
  groups = collections.defaultdict(list)
  for line in lines:
    groups[line[field]].append(line)
  return groups
