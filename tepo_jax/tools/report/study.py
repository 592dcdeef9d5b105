"""The report of some runs: report.html, and its figures as PNG and SVG."""

from collections.abc import Mapping, Sequence
import dataclasses
import json
import pathlib
import time
from typing import Any

from tepo_jax.tools.report import claims
from tepo_jax.tools.report import figures
from tepo_jax.tools.report import page
from tepo_jax.tools.report import runs as runs_lib
from tepo_jax.tools.report import seeds as seeds_lib

_INTERVAL = (f'Intervals: {seeds_lib.LEVEL:.0%}, Student\'s t over seeds, '
             'from three seeds on; of two seeds, their range.')


def write(out: pathlib.Path, runs: Sequence[runs_lib.Run],
          tables: Mapping[str, Sequence[str]],
          inspectors: Sequence[dict[str, Any]] = (),
          more: Sequence[tuple[str, str]] = ()) -> pathlib.Path:
  """Writes the report into `out`; returns the page's path.

  Args:
    tables: a panel's title -> the methods it has, see `_tables`.
    inspectors: of `inspector.payload`.
    more: further sections: (heading, HTML).
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
    sections.append(('Token inspector', page.inspector()))
  sections += [('Configs', _configs(groups)),
               ('Environment', _environment(runs))]
  path = out / 'report.html'
  path.write_text(page.render(
      'Runs: ' + ', '.join(group.label for group in groups), _intro(runs),
      sections, {'labels': [group.label for group in groups],
                 'panels': panels, 'inspectors': list(inspectors)}), 'utf-8')
  return path


def _panel(groups, panel, out):
  """Draws the files; returns what the page draws."""
  drawn, caption = figures.curves(groups, panel), figures.caption(panel, groups)
  figures.draw(panel, drawn, caption, out)
  return {'name': panel.name, 'title': panel.title, 'unit': panel.unit,
          'caption': caption, 'curves': list(map(dataclasses.asdict, drawn))}


def _intro(runs):
  made = time.strftime('%Y-%m-%d %H:%M UTC', time.gmtime())
  done = sum(run.state == 'finished' for run in runs)
  return (f'<p class="muted">{len(runs)} runs, {done} finished. Made {made}.'
          '</p>')


def _results(groups):
  """A table of the groups, and one of the runs."""
  runs = [[run.name, group.label, run.seed, run.state, '; '.join(run.notes)]
          for group in groups for run in group.runs]
  return (_accuracies(groups)
          + f'<p class="caption">Accuracy of samples: mean over the last '
          f'{claims.FINAL:.0%} of the steps. {_INTERVAL}'
          f'{_unfinished(groups)}</p>'
          + page.table(['run', 'method', 'seed', 'state', 'notes'], runs))


def _unfinished(groups):
  if all(run.state == 'finished' for group in groups for run in group.runs):
    return ''
  return ' Runs that are not finished count with what they have.'


def _accuracies(groups):
  names = sorted({name for group in groups for run in group.runs
                  for record in run.records for name in record
                  if figures.is_accuracy(name)})
  head = ['method', 'seeds', *(f'{name.removeprefix("eval/")} %, last'
                               for name in names), 'accuracy of samples %']
  rows = [[group.label, len(group.runs), *(
      _over_seeds([_last(run.series(name)) for run in group.runs])
      for name in names), _over_seeds([claims.final(run.series('accuracy'))
                                       for run in group.runs])]
          for group in groups]
  return page.table(head, rows, range(1, len(head)))


def _tables(groups, tables):
  """The methods panel by panel, in the paper's order."""
  by_label = {group.label: group for group in groups}
  parts = []
  for title, methods in tables.items():
    there = [by_label[name] for name in methods if name in by_label]
    if there:
      parts.append(f'<h3>Panel {page.text(title)}</h3>{_accuracies(there)}')
  return ''.join(parts)


def _last(series):
  return list(series.values())[-1] if series else None


def _over_seeds(values):
  values = [100 * value for value in values if value is not None]
  return _with_interval(seeds_lib.interval(values), len(values)) if (
      values) else '–'


def _with_interval(interval, count=2):
  mean, low, high = (f'{value:.3g}' for value in interval)
  return f'{mean} [{low}, {high}]' if count > 1 else mean


def _claims(groups):
  """Each method against the baseline, measure by measure."""
  base = claims.baseline(groups)
  rows = claims.rows(groups)
  head = ['method', 'measure', 'its value', f'{base.label}\'s',
          'paired difference', 'seeds', 'the paper', 'seen here']
  return (
      f'<p>Every method against {page.text(base.label)}, by pairs of the same '
      'seed over the steps that both runs have. "As the paper says" and '
      '"against the paper" only where the interval of the paired difference '
      'leaves out 0. The paper claims these of TEPO alone.</p>'
      + page.table(head, [
          [row.label, f'{row.title}{f", {row.unit}" if row.unit else ""}'
           + (f' ({row.note})' if row.note else ''),
           _with_interval(row.own, row.pairs),
           _with_interval(row.base, row.pairs),
           _with_interval(row.difference, row.pairs), row.pairs, row.claim,
           row.verdict] for row in rows], (5,))
      + f'<p class="caption">{_INTERVAL} Steps to an accuracy: of the samples, '
      f'smoothed over {figures.SMOOTHING} steps; the accuracy is '
      f'{claims.TARGET:.0%} of {page.text(base.label)}\'s final one.</p>')


def _configs(groups):
  """Only what differs between the methods."""
  heads = [group.runs[0] for group in groups]
  names = runs_lib.differing(heads)
  if not names:
    return '<p class="muted">No field differs but the seed.</p>'
  return page.table(
      ['field', *(group.label for group in groups)],
      [[name, *('–' if run.fields is None or name not in run.fields
                else json.dumps(run.fields[name]) for run in heads)]
       for name in names])


def _environment(runs):
  """One line each where all runs agree, else the values with their runs."""
  starts = [(run.name, start) for run in runs for start in run.starts]
  if not starts:
    return '<p class="muted">Not recorded.</p>'
  rows = []
  for name in dict.fromkeys(key for _, start in starts for key in start):
    by_value = {}
    for run, start in starts:
      if name in start:
        by_value.setdefault(str(start[name]), []).append(run)
    if name in ('step', 'started'):
      continue
    rows.append([name, '; '.join(
        value if len(by_value) == 1 else f'{value} ({_some(members)})'
        for value, members in by_value.items())])
  return page.table(['', 'value'], rows)


def _some(names):
  names = list(dict.fromkeys(names))
  more = f' and {len(names) - 3} more' if len(names) > 3 else ''
  return ', '.join(names[:3]) + more
