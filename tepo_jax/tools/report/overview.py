"""The report's first sections: what ran, and what came of it."""

from collections.abc import Callable, Sequence
import math
import os

import numpy as np

from tepo_jax import errors
from tepo_jax.job import description
from tepo_jax.job import statistics
from tepo_jax.runtime import files
from tepo_jax.runtime import progress
from tepo_jax.tools.report import claims
from tepo_jax.tools.report import figures
from tepo_jax.tools.report import one_run
from tepo_jax.tools.report import page
from tepo_jax.tools.report import runs as runs_lib
from tepo_jax.tools.report import significance
from tepo_jax.tools.report import tables

INTERVAL = (f'Intervals: {statistics.LEVEL:.0%}, Student\'s t over three or '
            'more seeds; the range of two.')
_OF_EVALUATIONS = (f'{INTERVAL} Of one run: {statistics.LEVEL:.0%}, bootstrap '
                   'over the problems.')
# The evaluations of a run that tables show: which step of {step: value}.
POINTS = {'first': min, 'last': max,
          'best': lambda series: max(series, key=series.get)}
_NOTES = f"""{_OF_EVALUATIONS} Accuracy of training samples: mean over the first
and the last {claims.FINAL:.0%} of the steps. The best is chosen on these same
problems, so it is a little too high. Unfinished runs count with the steps they
have."""


def header(groups: Sequence[runs_lib.Seeds]) -> str:
  """Returns what ran: model, data, sizes, duration, machine, commit."""
  if len(groups) == 1 and len(groups[0].runs) == 1:
    run = groups[0].runs[0]
    return one_run.header(run, seconds(run))
  by_run = [(run.name, run) for group in groups for run in group.runs]
  by_group = [(group.label, group) for group in groups]
  facts = {
      'model': _each(by_run, lambda run: _field(
          run, 'model', lambda name: name or 'embedded')),
      'parameters': _each(by_run, lambda run: _started(run, 'parameters')),
      'data': _each(by_run, lambda run: description.data(run.fields or {})),
      'steps': _each(by_run, lambda run: _field(run, 'steps')),
      'seeds': _each(by_group, lambda group: ', '.join(
          str(run.seed) for run in group.runs)),
      'duration': _durations([run for _, run in by_run]),
      'devices': _each(by_run, lambda run: _started(run, 'devices')),
      'commit': _each(by_run, lambda run: _started(run, 'commit')),
      'config': _differences(groups)}
  return page.facts(facts.items())


def _each(named, value):
  """Returns the value that all share, or each value with its names."""
  found = {}
  for name, item in named:
    found.setdefault(value(item), []).append(name)
  if len(found) == 1:
    return next(iter(found))
  return '; '.join(f'{text} ({errors.listed(names, 3)})'
                   for text, names in found.items())


def _field(run, name, shown=str):
  return '–' if run.fields is None or name not in run.fields else shown(
      run.fields[name])


def _started(run, name):
  """Returns a value of the run's last start."""
  value = run.starts[-1].get(name) if run.starts else None
  return '–' if value is None else (
      f'{value:,}' if isinstance(value, int) else str(value))


def seconds(run: runs_lib.Run) -> float:
  """Returns the seconds of a run's steps and evaluations."""
  return sum(record.get(name) or 0 for record in run.records
             for name in ('seconds/step', 'seconds/eval'))


def _durations(runs):
  values = sorted(seconds(run) for run in runs if run.records)
  low, middle, high = (progress.duration(x) for x in (
      values[0], float(np.median(values)), values[-1]))
  return low if len(values) == 1 else f'{middle} a run ({low} to {high})'


def _differences(groups):
  names = runs_lib.differing([group.runs[0] for group in groups])
  if not names:
    return 'the same for all'
  return f'they differ in {errors.listed(names)}'


def results(groups: Sequence[runs_lib.Seeds], out: files.Path) -> str:
  """Returns a table of the groups' accuracies, and one of the runs.

  `out` is the folder of the page, from which the runs are linked.
  """
  rows = [[_link(run, out), group.label,
           run.seed, run.state, progress.duration(seconds(run)),
           '; '.join(run.notes)] for group in groups for run in group.runs]
  return (accuracies(groups) + f'<p class="caption">{page.text(_NOTES)}</p>'
          + page.table(['run', 'method', 'seed', 'state', 'duration', 'notes'],
                       rows))


def _link(run, out):
  """A link to the run's folder that works where the page is."""
  if files.is_remote(run.path) == files.is_remote(out):
    return page.link(os.path.relpath(run.path, out), run.name)
  if files.is_remote(out):
    return run.name
  return page.link(files.browser_address(run.path), run.name)


def accuracies(groups: Sequence[runs_lib.Seeds]) -> str:
  """Returns a table: a row for each evaluation of each group."""
  rows = []
  for group in groups:
    rows += [[group.label, name, count, *(
        f'{_formatted(interval)} at step {where}'
        for interval, where in points)]
             for name, count, points in _evaluations(group)]
    rows += filter(None, [_trained(group)])
  return page.table(['method', 'accuracy, %', 'seeds', *POINTS],
                    rows, range(2, 6))


def _evaluations(group):
  """Yields each evaluation's name, the number of its runs, and (interval,
  steps) of the first, the last and the best."""
  for name in figures.accuracies(group.runs):
    if runs := [(run, series) for run in group.runs
                if (series := run.series(name))]:
      yield name.removeprefix('eval/'), len(runs), [
          _at(runs, name, choose) for choose in POINTS.values()]


def _at(runs, name, choose: Callable[[dict[int, float]], int]):
  """Returns the accuracy at a step of each run: (value, low, high), steps."""
  steps = [choose(series) for _, series in runs]
  values = [100 * series[step] for (_, series), step in zip(runs, steps)]
  interval = significance.over_seeds(values)
  if len(runs) == 1:
    interval = (values[0], *_bootstrapped(runs[0][0], name, steps[0]))
  where = str(min(steps)) if min(steps) == max(steps) else (
      f'{min(steps)}–{max(steps)}')
  return interval, where


def _bootstrapped(run, name, step):
  """Returns the recorded interval; () for runs that did not record it."""
  head = name.rpartition('/')[0]
  ends = [run.series(f'{head}/{end}').get(step) for end in ('low', 'high')]
  return [] if None in ends else [100 * end for end in ends]


def _trained(group):
  """Returns a row of the accuracy of training samples."""
  series = [list(values.values()) for run in group.runs
            if (values := run.series('accuracy'))]
  if not series:
    return None
  first, last = (_formatted(shown_interval(significance.over_seeds([
      100 * reduce(values) for values in series]), len(series)))
      for reduce in (claims.initial, claims.final))
  return [group.label, 'training samples', len(series), first, last, '']


def shown_interval(interval: Sequence[float], count: int) -> Sequence[float]:
  """Returns (mean, low, high) of `count` values, or (mean,) of a single one."""
  return interval[:3 if count > 1 else 1]


def with_interval(interval: Sequence[float]) -> str:
  """Formats (mean, low, high), or (value,), with the same number of decimals:
  that which shows three digits of the largest."""
  largest = max(map(abs, interval))
  digits = 2 - math.floor(math.log10(largest)) if largest else 0
  return _formatted(interval, min(max(digits, 0), 9))


def _formatted(interval, digits=1, sign=''):
  value, *ends = (f'{x:{sign}.{digits}f}' for x in interval)
  return f'{value} [{", ".join(ends)}]' if ends else value


def comparison(groups: Sequence[runs_lib.Seeds], form: str) -> str:
  """Returns the methods' evaluations, for a paper: one of `tables.FORMATS`.

  A row of the CSV file is a method, a set and a point of the runs (first, last
  or best evaluation): mean, interval and n, the number of seeds, in per cent;
  then the difference from the baseline, which LaTeX has for the last one.

  Raises:
    errors.InputError: no run has an evaluation.
  """
  base = claims.baseline(groups)
  found = [(group.label, name, count, points, _contrasts(group, base, name))
           for group in groups for name, count, points in _evaluations(group)]
  if not found:
    raise errors.InputError('no run of --runs has an evaluation')
  if form == 'csv':
    return tables.csv_of(
        ('method set point steps n mean low high baseline pairs difference '
         'difference_low difference_high').split(),
        [[label, name, point, where, count, *_numbers(interval),
          *_against(base, changes.get(point))]
         for label, name, count, points, changes in found
         for point, (interval, where) in zip(POINTS, points)])
  about = f'% Accuracies in per cent. {_OF_EVALUATIONS}\n'
  if base is not None:
    about += (f'% Last - {tables.latex_text(base.label)}: paired by seed, at '
              'the last evaluation that both runs of a pair have.\n')
  return about + tables.latex_of(
      ['method', 'set', 'n', *POINTS,
       *([f'last − {base.label}'] if base else [])],
      [[label, name, str(count),
        *(_formatted(interval) for interval, _ in points),
        *([_signed(changes.get('last'))] if base else [])]
       for label, name, count, points, changes in found], labels=2)


def _contrasts(group, base, name):
  """{point of POINTS: claims.Contrast or None} of an evaluation and that of the
  baseline; empty for the baseline itself."""
  if base is None or group is base:
    return {}
  return {point: claims.contrast(group, base, claims.Measure(
      name, '', f'eval/{name}',
      lambda values, choose=choose: values[choose(dict(enumerate(values)))],
      +1, 100)) for point, choose in POINTS.items()}


def _numbers(interval):
  return [*(f'{x:.4f}' for x in interval), *[''] * (3 - len(interval))]


def _against(base, change):
  """The cells of a CSV file on a difference."""
  if change is None:
    return [''] * 5
  return [base.label, len(change.pairs), *_numbers(
      shown_interval(change.difference, len(change.pairs)))]


def _signed(change):
  return '' if change is None else _formatted(
      shown_interval(change.difference, len(change.pairs)), 1, '+')
