"""The figures: their panels, the data of the curves, and PNG and SVG files.

page.py draws the same curves with JavaScript.
"""

from collections.abc import Callable, Iterable, Sequence
import dataclasses
import pathlib
import textwrap
from typing import Any

import numpy as np

from tepo_jax.tasks import statistics
from tepo_jax.tools.report import runs as runs_lib

SMOOTHING = 5  # steps of the centred moving mean; evaluations are not smoothed

# Okabe and Ito's colours for colour-blind readers; then dashes.
COLOURS = ('#0072b2', '#d55e00', '#009e73', '#cc79a7', '#e69f00', '#56b4e9',
           '#8c6d31', '#7f7f7f')
_DASHES = ('-', '--', ':', '-.')


def clip_ratio(record: dict[str, Any]) -> float | None:
  """Returns the share of tokens that are clipped or that Clip-Cov drops."""
  parts = [record.get(f'clip_fraction_{part}')
           for part in ('low', 'high', 'covariance')]
  return None if None in parts else sum(parts)


@dataclasses.dataclass(frozen=True)
class Panel:
  """A figure of one metric.

  name: of its files. metric: a recorded name, or a function of a record.
  scale: factor from the recorded value to `unit`.
  """
  name: str
  title: str
  metric: str | Callable[[dict], float | None]
  unit: str = ''
  scale: float = 1.0
  smoothing: int = SMOOTHING


PANELS = (
    Panel('figure2a_clip_ratio', 'Clip ratio (Figure 2a)', clip_ratio,
          '% of tokens', 100),
    Panel('figure2b_seconds', 'Time of a step (Figure 2b)', 'seconds/step',
          'seconds'),
    Panel('figure2b_length', 'Response length (Figure 2b)',
          'response_length_mean', 'tokens'),
    Panel('figure3a_reward', 'Reward (Figure 3a)', 'reward', '%', 100),
    Panel('figure3b_grad_norm', 'Gradient norm (Figure 3b)', 'grad_norm'),
    Panel('accuracy', 'Accuracy of the samples', 'accuracy', '%', 100),
    Panel('entropy', 'Entropy', 'entropy', 'nats'),
    Panel('kl', 'KL(policy ‖ old policy), k3 estimate', 'kl_k3', 'nats'),
    Panel('mask_share', 'Tokens in the penalty\'s region M', 'region_share',
          '% of tokens', 100),
    Panel('mixed_share', 'Groups with mixed rewards', 'mixed_share', '%', 100),
    Panel('truncated_share', 'Truncated completions', 'truncated_share', '%',
          100),
    Panel('sampler_gap', 'Sampler gap, mean |Δ log π|', 'logp_gap_mean',
          'nats'),
    Panel('tokens_per_second', 'Speed', 'tokens_per_second', 'tokens/s'),
    Panel('host_memory', 'Memory of the host\'s process',
          'host/resident_bytes', 'MB', 1e-6, 1),
    Panel('open_files', 'Its open files', 'host/open_files', smoothing=1),
    Panel('processes', 'Processes it started (graders)', 'host/processes',
          smoothing=1),
    Panel('compilations', 'Programs compiled', 'compilations', smoothing=1),
)


def panels(runs: Iterable[runs_lib.Run]) -> list[Panel]:
  """Returns a panel for each evaluation's avg@k, then PANELS."""
  return [Panel(name.replace('/', '_').replace('@', '_'),
                'Evaluation: ' + name.removeprefix('eval/'), name, '%', 100, 1)
          for name in accuracies(runs)] + list(PANELS)


def accuracies(runs: Iterable[runs_lib.Run]) -> list[str]:
  """Returns the recorded names of evaluation accuracies."""
  return sorted({name for run in runs for record in run.records
                 for name in record
                 if name.startswith('eval/') and '/avg@' in name})


@dataclasses.dataclass(frozen=True)
class Curve:
  """One group in one panel: lists by step, in the panel's unit.

  mean, low, high: `seeds.interval` over the seeds that have the step; count:
  their number. seeds: run name -> {step: value}. Runs are smoothed first.
  """
  label: str
  step: list[int]
  mean: list[float]
  low: list[float]
  high: list[float]
  count: list[int]
  seeds: dict[str, dict[int, float]]


def curves(groups: Sequence[runs_lib.Group], panel: Panel) -> list[Curve]:
  """Returns the panel's curves; empty for a group without the metric."""
  found = []
  for group in groups:
    seeds = {run.name: smoothed(run, panel) for run in group.runs}
    steps = sorted(set().union(*seeds.values()))
    at = [[values[step] for values in seeds.values() if step in values]
          for step in steps]
    mean, low, high = map(list, zip(*map(statistics.over_seeds, at))) if at else (
        [], [], [])
    found.append(Curve(group.label, steps, mean, low, high,
                       list(map(len, at)), seeds))
  return found


def smoothed(run: runs_lib.Run, panel: Panel) -> dict[int, float]:
  """Returns {step: value}, smoothed and in the panel's unit."""
  series = run.series(panel.metric)
  values = smooth(list(series.values()), panel.smoothing)
  return {step: panel.scale * value for step, value in zip(series, values)}


def caption(panel: Panel, groups: Sequence[runs_lib.Group]) -> str:
  """Describes the smoothing and the bands."""
  text = ('Not smoothed.' if panel.smoothing == 1 else
          f'Smoothed: centred moving mean of {panel.smoothing} steps.')
  most = max(len(group.runs) for group in groups)
  if most >= 3:
    text += (f' Band: {statistics.LEVEL:.0%} interval of the mean over seeds '
             '(Student\'s t).')
  elif most == 2:
    text += ' Band: the range of the two seeds.'
  return text


def draw(panel: Panel, drawn: Sequence[Curve], text: str,
         directory: pathlib.Path) -> list[pathlib.Path]:
  """Writes NAME.png and NAME.svg; returns their paths."""
  import matplotlib.figure  # takes a second, so only where it is needed
  figure = matplotlib.figure.Figure((6, 3.8), layout='constrained')
  axes, handles = figure.subplots(), []
  for index, curve in enumerate(drawn):
    style = dict(color=COLOURS[index % len(COLOURS)],
                 linestyle=_DASHES[index // len(COLOURS) % len(_DASHES)])
    handles += axes.plot(curve.step, curve.mean, linewidth=1.8,
                         marker='o' if len(curve.step) < 2 else None, **style)
    axes.fill_between(curve.step, curve.low, curve.high, alpha=0.18,
                      linewidth=0, color=style['color'])
  axes.set_title(_drawable(panel.title, 60))
  axes.set_xlabel(f'rollout step\n{text}', fontsize='small')
  axes.set_ylabel(panel.unit)
  axes.grid(alpha=0.25)
  axes.spines[['top', 'right']].set_visible(False)
  # Explicit handles: labels that start with '_' would be left out. A long
  # legend must not shrink the axes.
  axes.legend(handles, [_drawable(curve.label, 40) for curve in drawn],
              fontsize='small', frameon=False).set_in_layout(False)
  return _save(figure, directory / panel.name)


def draw_heat_map(names: Sequence[str], matrix: Any, title: str,
                  path: pathlib.Path) -> None:
  """Writes PATH.png and PATH.svg of cosines, −1 … 1."""
  import matplotlib.figure
  names = [_drawable(name, 40) for name in names]
  side = 2 + 0.38 * len(names)
  figure = matplotlib.figure.Figure((side + 1, side), layout='constrained')
  axes = figure.subplots()
  image = axes.imshow(matrix, vmin=-1, vmax=1, cmap='RdBu_r')
  axes.set_xticks(range(len(names)), names, rotation=90, fontsize='small')
  axes.set_yticks(range(len(names)), names, fontsize='small')
  axes.set_title(_drawable(f'Cosines of gradients: {title}', 60),
                 fontsize='small')
  for i, row in enumerate(matrix):
    for j, value in enumerate(row):
      axes.text(j, i, f'{value:.2f}', ha='center', va='center', fontsize=5,
                color='white' if abs(value) > 0.7 else 'black')
  figure.colorbar(image, shrink=0.8)
  _save(figure, path)


def _drawable(text, width):
  """Wraps a text; replaces what the font lacks and what starts a formula."""
  from matplotlib import font_manager
  font = font_manager.get_font(
      font_manager.findfont(font_manager.FontProperties()))
  text = ''.join(c if font.get_char_index(ord(c)) else '?' for c in text)
  return '\n'.join(textwrap.wrap(text.replace('$', r'\$'), width))


def _save(figure, path):
  paths = [path.with_name(f'{path.name}.{form}') for form in ('png', 'svg')]
  for written in paths:
    figure.savefig(written, dpi=160)
  return paths


def smooth(values: Sequence[float], width: int) -> list[float]:
  """Returns the centred mean of `width` (odd) values, fewer at both ends."""
  half = width // 2
  return [float(np.mean(values[max(0, i - half):i + half + 1]))
          for i in range(len(values))]
