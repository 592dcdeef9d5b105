"""Canvases for light and dark pages, and the plots that are no curves."""

from collections.abc import Mapping, Sequence
import dataclasses
import pathlib
import textwrap
from typing import Any

import numpy as np

from tepo_jax.runtime import disk

INK = '#757c86'  # text and axes: contrast 4.2 and more on white and on black
HIGHLIGHT, OTHERS = '#d55e00', '#2b86c5'  # what stands out, and the rest


def canvas(width: float, height: float) -> Any:
  """Returns an empty matplotlib figure, in inches."""
  import matplotlib.figure  # takes a second, so only where it is needed
  return matplotlib.figure.Figure((width, height), layout='constrained')


def plain(axes: Any) -> None:
  """Gives axes ink that is readable on light and on dark pages; no frame."""
  axes.grid(alpha=0.25, color=INK)
  axes.spines[['top', 'right']].set_visible(False)
  axes.spines[['left', 'bottom']].set_color(INK)
  axes.tick_params(colors=INK)
  for text in (axes.title, axes.xaxis.label, axes.yaxis.label):
    text.set_color(INK)
  axes.patch.set_visible(False)


def drawable(text: str, width: int) -> str:
  """Wraps a text; replaces what the font lacks and what starts a formula."""
  from matplotlib import font_manager
  font = font_manager.get_font(
      font_manager.findfont(font_manager.FontProperties()))
  text = ''.join(c if font.get_char_index(ord(c)) else '?' for c in text)
  return '\n'.join(textwrap.wrap(text.replace('$', r'\$'), width))


def save(figure: Any, path: pathlib.Path) -> list[pathlib.Path]:
  """Writes PATH.png and PATH.svg; returns their paths."""
  paths = [path.with_name(f'{path.name}.{form}') for form in ('png', 'svg')]
  for written in paths:  # an SVG has the background of its page
    with disk.naming(written):
      figure.savefig(written, dpi=160, transparent=written.suffix == '.svg')
  return paths


def draw_heat_map(names: Sequence[str], matrix: Any, title: str,
                  path: pathlib.Path) -> None:
  """Writes PATH.png and PATH.svg of cosines, −1 … 1."""
  draw_matrix(names, names, matrix, f'Cosines of gradients: {title}', path,
              '.2f', (-1, 1), 'RdBu_r')


def draw_matrix(rows: Sequence[str], columns: Sequence[str], matrix: Any,
                title: str, path: pathlib.Path, form: str,
                limits: tuple[float, float] | None = None,
                colours: str = 'viridis') -> None:
  """Writes PATH.png and PATH.svg: a coloured matrix with its numbers.

  form: of a number. limits: of the colours; None: the matrix's own. NaN is left
  blank.
  """
  matrix = np.asarray(matrix, float)
  low, high = limits or (np.nanmin(matrix), np.nanmax(matrix))
  figure = canvas(3 + 0.38 * len(columns), 2 + 0.38 * len(rows))
  axes = figure.subplots()
  image = axes.imshow(matrix, vmin=low, vmax=high, cmap=colours)
  for axis, names in ((axes.xaxis, columns), (axes.yaxis, rows)):
    axis.set_ticks(range(len(names)), [drawable(name, 40) for name in names],
                   fontsize='small')
  axes.xaxis.set_tick_params(rotation=90)
  axes.set_title(drawable(title, 60), fontsize='small', color=INK)
  axes.tick_params(colors=INK)
  for (i, j), value in np.ndenumerate(matrix):
    if np.isfinite(value):
      red, green, blue, _ = image.to_rgba(value)
      is_dark = 0.3 * red + 0.6 * green + 0.1 * blue < 0.5
      axes.text(j, i, f'{value:{form}}', ha='center', va='center', fontsize=5,
                color='white' if is_dark else 'black')
  figure.colorbar(image, shrink=0.8).ax.tick_params(colors=INK)
  save(figure, path)


@dataclasses.dataclass(frozen=True)
class Interval:
  """One line of a panel of `draw_intervals`.

  value: (mean, low, high). points: what it is the mean of. bold: it stands out.
  """
  label: str
  value: tuple[float, float, float]
  points: Sequence[float]
  bold: bool


def draw_intervals(panels: Mapping[str, Sequence[Interval]], title: str,
                   note: str, path: pathlib.Path) -> list[pathlib.Path]:
  """Writes PATH.png and PATH.svg: a panel of intervals beside 0 for each title.

  Every panel has its own scale; a label has the same row in all of them.
  """
  labels = list(dict.fromkeys(
      line.label for lines in panels.values() for line in lines))
  columns = min(3, len(panels))
  rows = -(-len(panels) // columns)
  figure = canvas(2.6 * columns + 2, (0.9 + 0.2 * len(labels)) * rows + 0.6)
  grid = figure.subplots(rows, columns, sharey=True, squeeze=False)
  for axes in grid.flat[len(panels):]:
    axes.set_visible(False)
  for axes, (heading, lines) in zip(grid.flat, panels.items()):
    axes.axvline(0, color=INK, linewidth=0.8)
    for line in lines:
      row, (mean, low, high) = labels.index(line.label), line.value
      colour = HIGHLIGHT if line.bold else OTHERS
      axes.plot(line.points, [row] * len(line.points), '|', color=colour,
                alpha=0.5, markersize=5)
      axes.plot([low, high], [row, row], color=colour, linewidth=1.5)
      axes.plot(mean, row, 'o', color=colour, markersize=4)
    axes.set_title(drawable(heading, 40), fontsize='small')
    axes.locator_params(axis='x', nbins=5)
    axes.tick_params(labelsize='small')
    plain(axes)
  grid[0, 0].set_yticks(range(len(labels)), [drawable(x, 40) for x in labels])
  grid[0, 0].set_ylim(len(labels) - 0.5, -0.5)
  figure.suptitle(drawable(title, 80), fontsize='medium', color=INK)
  figure.supxlabel(drawable(note, 100), fontsize='small', color=INK)
  return save(figure, path)
