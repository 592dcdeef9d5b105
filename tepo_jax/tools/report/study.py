"""Writes the report of runs: report.html, and its figures as PNG and SVG."""

from collections.abc import Mapping, Sequence
import dataclasses
import json
import pathlib
import time
from typing import Any

from tepo_jax.tasks import statistics
from tepo_jax.tools.report import claims
from tepo_jax.tools.report import figures
from tepo_jax.tools.report import page
from tepo_jax.tools.report import runs as runs_lib

_INTERVAL = (f'Intervals: {statistics.LEVEL:.0%}, Student\'s t over three or '
             'more seeds; the range of two.')


def write(out: pathlib.Path, runs: Sequence[runs_lib.Run],
          tables: Mapping[str, Sequence[str]],
          inspectors: Sequence[dict[str, Any]] = (),
          more: Sequence[tuple[str, str]] = ()) -> pathlib.Path:
  """Writes the report into `out`; returns the page's path.

  Args:
    tables: title of a panel of Table 3 -> its methods.
    inspectors: from `inspector.payload`.
    more: further sections, (heading, HTML).
  """
  groups = runs_lib.group(runs)
  panels = [_panel(groups, panel, out) for panel in figures.panels(runs)]
  sections = [('Results', _results(groups))]
  if len(groups) > 1:
    sections.append(('The paper\'s claims', _claims(groups)))
  sections.append(('Figures', page.figures(panels)))
  if any(group.label in rows for group in groups for rows in tables.values()):
    sections.append(('The panels of Table 3', _tables(groups, tables)))
  sections += more
  if inspectors:
    sections.append(('Token inspector', page.INSPECTOR))
  sections += [('Configs', _configs(groups)),
               ('Environment', _environment(runs))]
  now = time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime())
  done = sum(run.state == 'finished' for run in runs)
  labels = [group.label for group in groups]
  path = out / 'report.html'
  path.write_text(page.render(
      'Runs: ' + ', '.join(labels), f'<p class="muted">{len(runs)} runs, '
      f'{done} finished. Report of {now}.</p>', sections,
      {'labels': labels, 'panels': panels, 'inspectors': list(inspectors)}),
                  'utf-8')
  return path


def _panel(groups, panel, out):
  """Writes the files; returns the data that the page draws."""
  drawn, caption = figures.curves(groups, panel), figures.caption(panel, groups)
  figures.draw(panel, drawn, caption, out)
  return {'name': panel.name, 'title': panel.title, 'unit': panel.unit,
          'caption': caption, 'curves': list(map(dataclasses.asdict, drawn))}


def _results(groups):
  """Returns a table of the groups, and one of the runs."""
  runs = [[run.name, group.label, run.seed, run.state, '; '.join(run.notes)]
          for group in groups for run in group.runs]
  return (_accuracies(groups)
          + f'<p class="caption">Accuracy of training samples: mean over the '
          f'last {claims.FINAL:.0%} of the steps. {_INTERVAL} Unfinished runs '
          'count with the steps they have.</p>'
          + page.table(['run', 'method', 'seed', 'state', 'notes'], runs))


def _accuracies(groups):
  names = figures.accuracies(run for group in groups for run in group.runs)
  head = ['method', 'seeds', *(f'{name.removeprefix("eval/")} %, last'
                               for name in names), 'training samples %']
  rows = [[group.label, len(group.runs),
           *(_over_seeds(group, name, lambda x: x[-1]) for name in names),
           _over_seeds(group, 'accuracy', claims.final)] for group in groups]
  return page.table(head, rows, range(1, len(head)))


def _tables(groups, tables):
  """Returns a table per panel of Table 3, in the paper's order."""
  by_label = {group.label: group for group in groups}
  return ''.join(
      f'<h3>Panel {page.text(title)}</h3>{_accuracies(present)}'
      for title, methods in tables.items() if (present := [
          by_label[name] for name in methods if name in by_label]))


def _over_seeds(group, metric, reduce):
  values = [100 * reduce(list(series.values())) for run in group.runs
            if (series := run.series(metric))]
  return _with_interval(statistics.over_seeds(values), len(values)) if (
      values) else '–'


def _with_interval(interval, count):
  mean, low, high = (f'{value:.3g}' for value in interval)
  return f'{mean} [{low}, {high}]' if count > 1 else mean


def _claims(groups):
  """Compares each method with the baseline, by measure."""
  base = claims.baseline(groups)
  head = ['method', 'measure', 'value', f'value of {base.label}',
          'paired difference', 'seeds', 'claim of the paper', 'result']
  return (
      f'<p>Each method compared with {page.text(base.label)}, paired by seed, '
      'over the steps that both runs have. The result is "as the paper says" '
      'or "against the paper" only if the interval of the paired difference '
      'excludes 0. The paper makes these claims for TEPO only.</p>'
      + page.table(head, [
          [c.label, f'{c.title}{f", {c.unit}" if c.unit else ""}'
           + (f' ({c.note})' if c.note else ''),
           *(_with_interval(x, c.pairs) for x in (c.own, c.base, c.difference)),
           c.pairs, c.claim, c.verdict] for c in claims.contrasts(groups)],
                   (5,))
      + f'<p class="caption">{_INTERVAL} "Steps to accuracy" uses the accuracy '
      f'of training samples, smoothed over {figures.SMOOTHING} steps; the '
      f'target is {claims.TARGET:.0%} of the final accuracy of '
      f'{page.text(base.label)}.</p>')


def _configs(groups):
  """Returns a table of the fields that differ between the methods."""
  heads = [group.runs[0] for group in groups]
  names = runs_lib.differing(heads)
  if not names:
    return '<p class="muted">No field differs except seed and steps.</p>'
  return page.table(
      ['field', *(group.label for group in groups)],
      [[name, *('–' if run.fields is None or name not in run.fields
                else json.dumps(run.fields[name]) for run in heads)]
       for name in names])


def _environment(runs):
  """Returns a table of values; where runs differ, with the names of runs."""
  found = {}  # {name: {value: {name of a run: None}}}
  for run in runs:
    for start in run.starts:
      for name, value in start.items():
        if name not in ('step', 'started'):
          found.setdefault(name, {}).setdefault(str(value), {})[run.name] = None
  if not found:
    return '<p class="muted">Not recorded.</p>'
  return page.table(['', 'value'], [[name, '; '.join(
      value if len(members) == 1 else f'{value} ({_some(list(names))})'
      for value, names in members.items())] for name, members in found.items()])


def _some(names):
  more = f' and {len(names) - 3} more' if len(names) > 3 else ''
  return ', '.join(names[:3]) + more
