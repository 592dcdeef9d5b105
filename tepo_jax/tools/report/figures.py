"""The figures: their panels, the data of the curves, and PNG and SVG files.

Curves are what was measured. A trailing mean, which sees no later step, is
drawn over them; no statistic uses it. charts.js draws the same.
"""

from collections.abc import Callable, Iterable, Sequence
import dataclasses
import pathlib
import textwrap
from typing import Any

import numpy as np

from tepo_jax.job import results
from tepo_jax.job import statistics
from tepo_jax.tools.report import drawing
from tepo_jax.tools.report import runs as runs_lib
from tepo_jax.tools.report import significance

WINDOWS = (1, 5, 20)  # steps of the trailing mean that the page offers
WINDOW = 5  # of the files, and of the page at first

# Okabe and Ito's colours for colour-blind readers; then dashes.
COLOURS = ('#0072b2', '#d55e00', '#009e73', '#cc79a7', '#e69f00', '#56b4e9',
           '#8c6d31', '#7f7f7f')
_DASHES = ('-', '--', ':', '-.')
HIGHLIGHTED = 'tepo'  # among the differences to the baseline


def clip_ratio(record: dict[str, Any]) -> float | None:
  """Returns the share of tokens that are clipped or that Clip-Cov drops."""
  parts = [record.get(f'clip_fraction_{part}')
           for part in ('low', 'high', 'covariance')]
  return None if None in parts else sum(parts)


@dataclasses.dataclass(frozen=True)
class Panel:
  """A figure of one metric.

  name: of its files. metric: a recorded name, or a function of a record.
  scale: factor from the recorded value to `unit`. has_mean: whether the
  trailing mean is drawn. is_machine: shown apart from the learning's figures.
  is_compared: whether differences to the baseline are drawn too.
  """
  name: str
  title: str
  metric: str | Callable[[dict], float | None]
  unit: str = ''
  scale: float = 1.0
  has_mean: bool = True
  is_machine: bool = False
  is_compared: bool = False


PANELS = (
    Panel('figure2a_clip_ratio', 'Clip ratio (Figure 2a)', clip_ratio,
          '% of tokens', 100, is_compared=True),
    Panel('figure2b_seconds', 'Time of a step (Figure 2b)', 'seconds/step',
          'seconds'),
    Panel('figure2b_length', 'Response length (Figure 2b)',
          'response_length_mean', 'tokens'),
    Panel('figure3a_reward', 'Reward (Figure 3a)', 'reward', '%', 100),
    Panel('figure3b_grad_norm', 'Gradient norm (Figure 3b)', 'grad_norm',
          is_compared=True),
    Panel('accuracy', 'Accuracy of the samples', 'accuracy', '%', 100,
          is_compared=True),
    Panel('entropy', 'Entropy', 'entropy', 'nats', is_compared=True),
    Panel('kl', 'KL(policy ‖ old policy), k3 estimate', 'kl_k3', 'nats'),
    Panel('mask_share', 'Tokens in the penalty\'s region M', 'region_share',
          '% of tokens', 100),
    Panel('mixed_share', 'Groups with mixed rewards', 'mixed_share', '%', 100),
    Panel('truncated_share', 'Truncated completions', 'truncated_share', '%',
          100),
    Panel('sampler_gap', 'Sampler gap, mean |Δ log π|', 'logp_gap_mean',
          'nats'),
    Panel('tokens_per_second', 'Speed', 'tokens_per_second', 'tokens/s',
          is_machine=True),
    Panel('host_memory', 'Memory of the host\'s process',
          'host/resident_bytes', 'MB', 1e-6, False, True),
    Panel('open_files', 'Its open files', 'host/open_files', '', 1, False,
          True),
    Panel('processes', 'Processes it started (graders)', 'host/processes', '',
          1, False, True),
    Panel('compilations', 'Programs compiled', 'compilations', '', 1, False,
          True),
)


# Drawn only where a run's own values differ: most runs are without these.
IF_VARYING = (
    Panel('kl_reference', 'KL(policy ‖ reference policy), its estimate',
          'kl_reference', 'nats'),
    Panel('learning_rate', 'Learning rate', 'optimizer/learning_rate',
          has_mean=False),
    Panel('left_out_in_a_row', 'Steps left out in a row, so far',
          'left_out_in_a_row', 'steps', has_mean=False),
    Panel('carry_age_mean', 'Age of the tokens trained on, mean',
          'carry/age_mean', 'rollout steps'),
    Panel('carry_age_max', 'Age of the tokens trained on, oldest',
          'carry/age_max', 'rollout steps', has_mean=False),
)

# What is drawn by data set too, where a run has several.
BY_SET = ('reward', 'accuracy', 'response_length_mean', 'mixed_share')


def panels(runs: Iterable[runs_lib.Run]) -> list[Panel]:
  """Returns a panel for each evaluation's avg@k and each text, then PANELS, the
  accuracy of the samples first, then those of IF_VARYING that vary, and those
  by data set."""
  return [Panel(name.replace('/', '_').replace('@', '_'),
                'Evaluation: ' + name.removeprefix('eval/'), name, '%', 100,
                False, is_compared=True)
          for name in accuracies(runs)] + [
              Panel(name.replace('/', '_'),
                    'Text: ' + name.removeprefix('eval/'), name, 'nats',
                    has_mean=False)
              for name in texts(runs)] + sorted(
                  PANELS, key=lambda panel: panel.name != 'accuracy'
              ) + [
                  panel for panel in IF_VARYING
                  if any(len(set(run.series(panel.metric).values())) > 1
                         for run in runs)] + _by_set(runs)


def _by_set(runs):
  """The panels of BY_SET for each data set of runs with several."""
  names = _recorded(runs, 'data/', '')
  return [dataclasses.replace(
      panel, name=name.replace('/', '_'), metric=name, is_compared=False,
      title=f'{name.removeprefix("data/").removesuffix(f"/{panel.metric}")}: '
            f'{panel.title.partition(" (")[0].lower()}')
          for panel in PANELS if panel.metric in BY_SET
          for name in names if name.endswith(f'/{panel.metric}')]


def accuracies(runs: Iterable[runs_lib.Run]) -> list[str]:
  """Returns the recorded names of evaluation accuracies."""
  return _recorded(runs, 'eval/', '/avg@')


def texts(runs: Iterable[runs_lib.Run]) -> list[str]:
  """Returns the recorded names of the texts' nats per token."""
  return _recorded(runs, 'eval/', f'/{results.NATS}')


def _recorded(runs, begin, part):
  return sorted({name for run in runs for record in run.records
                 for name in record
                 if name.startswith(begin) and part in name})


@dataclasses.dataclass(frozen=True)
class Curve:
  """One group in one panel: lists by step, as measured, in the panel's unit.

  mean, low, high: `significance.over_seeds` of the seeds that have the step;
  count: their number. seeds: run name -> {step: value}.
  """
  label: str
  step: list[int]
  mean: list[float]
  low: list[float]
  high: list[float]
  count: list[int]
  seeds: dict[str, dict[int, float]]


def curves(groups: Sequence[runs_lib.Seeds], panel: Panel) -> list[Curve]:
  """Returns the panel's curves; empty for a group without the metric.

  That of a fork begins at its parent's last value before it.
  """
  return [_curve(group.label, {
      run.name: values and _scaled(run.joint(panel.metric), panel) | values
      for run in group.runs for values in [measured(run, panel)]})
          for group in groups]


def _curve(label, seeds):
  """A Curve of {run: {step: value}}."""
  steps = sorted(set().union(*seeds.values()))
  at = [[values[step] for values in seeds.values() if step in values]
        for step in steps]
  mean, low, high = map(list, zip(*map(
      significance.over_seeds, at))) if at else ([], [], [])
  return Curve(label, steps, mean, low, high, list(map(len, at)), seeds)


def differences(groups: Sequence[runs_lib.Seeds], base: runs_lib.Seeds,
                panel: Panel) -> list[Curve]:
  """Returns the other groups' curves minus the baseline's, paired by seed.

  Empty for a group that shares no seed or no step with the baseline.
  """
  theirs = {run.seed: measured(run, panel) for run in base.runs
            if run.seed is not None}
  return [_curve(group.label, {
      run.name: {step: value - other[step] for step, value in
                 measured(run, panel).items() if step in other}
      for run in group.runs if (other := theirs.get(run.seed)) is not None})
          for group in groups if group is not base]


def measured(run: runs_lib.Run, panel: Panel) -> dict[int, float]:
  """Returns {step: value} in the panel's unit."""
  return _scaled(run.series(panel.metric), panel)


def _scaled(series, panel):
  return {step: panel.scale * value for step, value in series.items()}


def trailing_mean(steps: Sequence[int], values: Sequence[float], window: int
                  ) -> list[float]:
  """Returns, at each step s, the mean of the values of steps s − window + 1 to
  s, as far as there are any."""
  return [float(np.mean([value for other, value in zip(steps, values)
                         if step - window < other <= step])) for step in steps]


def bands(groups: Sequence[runs_lib.Seeds]) -> str:
  """Describes the bands."""
  most = max(sum(bool(run.records) for run in group.runs) for group in groups)
  if most >= 3:
    return (f'Band: {statistics.LEVEL:.0%} interval of the mean over seeds at '
            'each step (Student\'s t).')
  return 'Band: the range of the two seeds.' if most == 2 else ''


def caption(panel: Panel, groups: Sequence[runs_lib.Seeds]) -> str:
  """Describes the lines and the bands of a file."""
  lines = (f'Faint: as measured; bold: mean of the last {WINDOW} steps.'
           if panel.has_mean else 'As measured.')
  return f'{lines} {bands(groups)}'.rstrip()


def draw(panel: Panel, drawn: Sequence[Curve], text: str,
         directory: pathlib.Path) -> list[pathlib.Path]:
  """Writes NAME.png and NAME.svg; returns their paths."""
  figure = drawing.canvas(6, 3.8)
  axes, handles = figure.subplots(), []
  for index, curve in enumerate(drawn):
    style = dict(color=COLOURS[index % len(COLOURS)],
                 linestyle=_DASHES[index // len(COLOURS) % len(_DASHES)])
    bold = curve.mean
    if panel.has_mean:
      bold = trailing_mean(curve.step, curve.mean, WINDOW)
      axes.plot(curve.step, curve.mean, linewidth=0.8, alpha=0.4, **style)
    handles += _plot(axes, curve, bold, linewidth=1.8, **style)
  axes.set_title(drawing.drawable(panel.title, 60))
  axes.set_xlabel('\n'.join(['rollout step', *textwrap.wrap(text, 78)]),
                  fontsize='small')
  axes.set_ylabel(panel.unit)
  if min((min(curve.mean) for curve in drawn if curve.step), default=0) >= 0:
    axes.set_ylim(bottom=max(0, axes.get_ylim()[0]))
  drawing.plain(axes)
  # Explicit handles: labels that start with '_' would be left out. A long
  # legend must not shrink the axes.
  axes.legend(handles, [drawing.drawable(curve.label, 40) for curve in drawn],
              fontsize='small', frameon=False, labelcolor=drawing.INK
              ).set_in_layout(False)
  return drawing.save(figure, directory / panel.name)


def draw_differences(panel: Panel, drawn: Sequence[Curve], base: str,
                     directory: pathlib.Path) -> list[pathlib.Path]:
  """Writes difference_NAME.png and .svg: a small figure for each curve.

  Args:
    drawn: of `differences`. base: the baseline's label.
  """
  shown = [curve for curve in drawn if curve.step]
  if not shown:
    return []
  columns = min(3, len(shown))
  rows = -(-len(shown) // columns)
  figure = drawing.canvas(2.7 * columns + 0.4, 2 * rows + 0.7)
  grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
  for axes, curve in zip(grid.flat, shown):
    is_tepo = curve.label == HIGHLIGHTED
    colour = drawing.HIGHLIGHT if is_tepo else drawing.OTHERS
    axes.axhline(0, color=drawing.INK, linewidth=0.8)
    _plot(axes, curve, curve.mean, linewidth=1.5, color=colour)
    drawing.plain(axes)
    axes.set_title(drawing.drawable(curve.label, 40), fontsize='small',
                   color=colour if is_tepo else drawing.INK,
                   fontweight='bold' if is_tepo else 'normal')
  for index in range(len(shown), grid.size):
    grid.flat[index].set_visible(False)
    grid.flat[index - columns].tick_params(labelbottom=True)
  figure.suptitle(drawing.drawable(f'{panel.title}: difference to {base}', 60),
                  fontsize='medium', color=drawing.INK)
  figure.supxlabel(f'rollout step; band: {statistics.LEVEL:.0%} interval, '
                   'paired by seed', fontsize='small', color=drawing.INK)
  unit = 'points' if panel.unit == '%' else panel.unit
  figure.supylabel(unit, fontsize='small', color=drawing.INK)
  return drawing.save(figure, directory / f'difference_{panel.name}')


def _plot(axes, curve, values, *, color, **style):
  """A line with the curve's band; a short one has markers. Its handles."""
  axes.fill_between(curve.step, curve.low, curve.high, alpha=0.2, linewidth=0,
                    color=color)
  return axes.plot(curve.step, values, color=color, markersize=3,
                   marker='o' if len(curve.step) < 12 else None, **style)
