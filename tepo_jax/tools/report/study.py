"""Writes the report of runs: report.html, and its figures as PNG and SVG."""

from collections.abc import Mapping, Sequence
import dataclasses
import json
import pathlib
import time
from typing import Any

from configs import base as base_config
from tepo_jax import errors
from tepo_jax.job import statistics
from tepo_jax.runtime import files
from tepo_jax.tools.report import claims
from tepo_jax.tools.report import figures
from tepo_jax.tools.report import overview
from tepo_jax.tools.report import page
from tepo_jax.tools.report import runs as runs_lib
from tepo_jax.tools.report import significance


def write(out: pathlib.Path, runs: Sequence[runs_lib.Run],
          tables: Mapping[str, Sequence[str]],
          inspectors: Sequence[dict[str, Any]] = (),
          more: Sequence[tuple[str, str]] = (),
          place: files.Path | None = None) -> pathlib.Path:
  """Writes the report into `out`; returns the page's path.

  Args:
    tables: title of a panel of Table 3 -> its methods.
    inspectors: from `inspector.payload`.
    more: further sections, (heading, HTML).
    place: where `out` will be uploaded to, for links; None: it stays.
  """
  groups = runs_lib.group(runs)
  panels = [_panel(groups, panel, out) for panel in figures.panels(runs)]
  sections = [('Results', overview.results(groups, place or out))]
  drawn = 'Figures', page.figures(panels, figures.bands(groups))
  if len(runs) == 1:
    sections.insert(0, drawn)  # its learning curve comes before any table
  else:
    if len(groups) > 1:
      sections.append(('The paper\'s claims', _claims(groups)))
    sections.append(drawn)
  if any(_is_papers(group) and group.label in rows for group in groups
         for rows in tables.values()):
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
  files.replace_text(path, page.render(
      'Runs: ' + ', '.join(labels),
      f'<p class="muted">{errors.counted(len(runs), "run")}, {done} finished. '
      f'Report of {now}.</p>' + overview.header(groups),
      sections, {
          'labels': labels, 'panels': panels, 'windows': figures.WINDOWS,
          'window': figures.WINDOW, 'inspectors': list(inspectors)}))
  return path


def _panel(groups, panel, out):
  """Writes the files; returns the data that the page draws."""
  drawn, caption = figures.curves(groups, panel), figures.caption(panel, groups)
  figures.draw(panel, drawn, caption, out)
  base = claims.baseline(groups)
  if base is not None and panel.is_compared:
    figures.draw_differences(
        panel, figures.differences(groups, base, panel), base.label, out)
  return {'name': panel.name, 'title': panel.title, 'unit': panel.unit,
          'has_mean': panel.has_mean, 'is_machine': panel.is_machine,
          'curves': list(map(dataclasses.asdict, drawn))}


def _is_papers(group):
  """Whether the runs were trained on the paper's data."""
  fields = group.runs[0].fields
  return fields is not None and fields.get('data.name') == (
      base_config.FIELDS['data']['name'].default)


def _tables(groups, tables):
  """Returns a table per panel of Table 3, in the paper's order."""
  by_label = {group.label: group for group in groups if _is_papers(group)}
  return ''.join(
      f'<h3>Panel {page.text(title)}</h3>{overview.accuracies(present)}'
      for title, methods in tables.items() if (present := [
          by_label[name] for name in methods if name in by_label]))


def _claims(groups):
  """Compares each method with the baseline, by measure."""
  base, found = claims.baseline(groups), claims.contrasts(groups)
  head = ['method', 'measure', 'result', 'paired difference', 'value',
          f'value of {base.label}', 'seeds', 'claim of the paper']
  return (
      f'<p>Each method compared with {page.text(base.label)}, paired by seed, '
      'over the steps that both runs have. The result is "supported" or '
      '"contradicted" only if a paired t-test is significant at '
      f'{1 - statistics.LEVEL:.0%} after Holm\'s correction over the claims of '
      'the method. Else, "equal within" says of the final accuracy that two '
      'one-sided tests at the same level exclude a difference of '
      f'{claims.POINTS:g} points or more; else the half width of the '
      'uncorrected interval is given. '
      'The paper makes these claims for TEPO only.</p>'
      + page.table(head, [
          [c.label, c.measure.heading + (f' ({c.note})' if c.note else ''),
           c.verdict,
           *(overview.with_interval(overview.shown_interval(x, len(c.pairs)))
             for x in (c.difference, c.own, c.base)),
           len(c.pairs), c.measure.claim] for c in found], (6,))
      + f'<p class="caption">{overview.INTERVAL} "Steps to accuracy": the '
      'first step whose training samples reach it; the '
      f'target is {claims.TARGET:.0%} of the final accuracy of '
      f'{page.text(base.label)}.</p>' + _power(claims.power(found)))


def _power(power):
  """Returns a table of the differences of accuracy that these seeds find, and
  of the seeds that others need."""
  if not power:
    return ''
  return page.table(
      ['method', 'found by these seeds, points',
       *(f'seeds for {effect:g}' for effect in claims.EFFECTS)],
      [[label, f'{points:.2g}', *seeds]
       for label, (points, seeds) in power.items()], (1, 2, 3, 4)) + (
          '<p class="caption">Differences of final accuracy to the baseline '
          f'that are found with probability {significance.POWER:.0%}, one '
          'claim tested, if the paired differences spread as they do '
          'here.</p>')


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
        if name not in ('step', 'started', 'command'):
          found.setdefault(name, {}).setdefault(str(value), {})[run.name] = None
  if not found:
    return '<p class="muted">Not recorded.</p>'
  return page.table(['', 'value'], [[name, '; '.join(
      value if len(members) == 1
      else f'{value} ({errors.listed(list(names), 3)})'
      for value, names in members.items())] for name, members in found.items()])
