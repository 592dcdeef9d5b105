"""Tables in Markdown, LaTeX and CSV: the paper's with our results, and those of
any comparison of runs or evaluations."""

from collections.abc import Mapping, Sequence
import csv
import dataclasses
import io
import json
import os
from typing import Any

import numpy as np

from tepo_jax import errors
from tepo_jax.job import results as results_lib
from tepo_jax.runtime import files
from tepo_jax.tools.report import significance

NOT_RUN = 'not run'
EVALUATION = 'evaluation'  # subfolder of a run's folder
AVERAGE = 'Avg.'

Z = 1.96  # for a 95 % interval


@dataclasses.dataclass(frozen=True)
class Cell:
  """A percentage with its 95 % interval; `text` replaces a value of None."""
  value: float | None
  low: float = 0.0
  high: float = 0.0
  text: str = NOT_RUN
  mark: str = ''


@dataclasses.dataclass(frozen=True)
class Line:
  """A line of a table: a cell for each column, and the average."""
  label: str
  cells: tuple[Cell, ...]
  is_ours: bool = False
  panel: str = ''


def run_name(row: Any, seed: int) -> str:
  """Returns the folder of a row's run; rows with the same run share it."""
  if row.method is None:
    return f'{row.model}_base'
  changes = ''.join(f'_{name}={value}' for name, value in row.overrides)
  return f'{row.model}_{row.method}{changes}_steps{row.steps}_seed{seed}'


def compared(rows: Sequence[Any], columns: Mapping[str, tuple[str, int]],
             graded: int, runs: str | os.PathLike | None,
             marks: Mapping[tuple[str, str | None], str]) -> list[Line]:
  """Returns the paper's line of each row, followed by ours unless `runs` is
  None; a cell of ours that is over another number of samples has the mark
  (n=NUMBER).

  Args:
    rows, columns, graded: as in configs/paper.py.
    runs: the folder that contains the runs.
    marks: {(row, column or None): footnote mark}.
  """
  lines, graded_columns = [], [*columns.values(), (None, graded)]
  for row in rows:
    lines.append(Line(row.label, tuple(
        _papers(value, samples * len(row.seeds), row.is_change,
                marks.get((row.name, column), ''))
        for (column, samples), value in zip(
            graded_columns, (*row.cells, row.average))), panel=row.panel))
    if runs is not None and not row.is_change:
      lines.append(Line('ours', _ours(row, columns, graded, files.path(runs)),
                        True, row.panel))
  return lines


def _papers(value, samples, is_change, mark):
  if value is None:
    return Cell(None, text='-', mark=mark)
  half = 0.0 if is_change else (
      100 * Z * significance.binomial_error(value / 100, samples))
  return Cell(value, value - half, value + half, mark=mark)


def _ours(row, columns, graded, runs):
  """Returns cells over the row's seeds, empty until all are evaluated."""
  paths = [runs / run_name(row, seed) / EVALUATION / results_lib.RESULTS
           for seed in (row.seeds if row.method else row.seeds[:1])]
  if not all(path.exists() for path in paths):
    return (Cell(None),) * (len(columns) + 1)
  found = []
  for path in paths:
    try:
      found.append(json.loads(path.read_text()))
    except (OSError, ValueError) as error:
      raise errors.InputError(f'{path}: {error}') from error
  return (*(_mean([_set_cell(one, name, samples) for one in found])
            for name, (_, samples) in columns.items()),
          _mean([_average_cell(one, columns, graded) for one in found]))


def _set_cell(results, column, samples):
  for name in results['first_decodings']:
    if name.partition(':')[0].partition('/')[0] == column:
      value, count = _accuracy(results['sets'][name])
      return _cell(value, results['sets'][name], _number(count, (samples,)))
  return Cell(None)


def _average_cell(results, columns, graded):
  if any(_set_cell(results, column, 0).value is None for column in columns):
    return Cell(None)
  low, high = results['avg_micro_interval']
  count = sum(_accuracy(results['sets'][name])[1]
              for name in results['first_decodings'])
  # The paper counts twice what stands twice in a set; an evaluation does not.
  return _cell(results['avg_micro'], {'low': low, 'high': high}, _number(
      count, (graded, sum(samples for _, samples in columns.values()))))


def _accuracy(summary):
  """avg@k of a set, and the number of its samples."""
  name = next(key for key in summary if key.startswith('avg@'))
  return summary[name], int(name.removeprefix('avg@')) * summary['problems']


def _number(count, papers):
  return '' if count in papers else f' (n={count})'


def _cell(value, ends, mark):
  return Cell(100 * value, 100 * ends['low'], 100 * ends['high'], mark=mark)


def _mean(cells):
  """Averages runs. So are their half widths: they come from the sample of
  problems, which is the same for all of them."""
  if any(cell.value is None for cell in cells):
    return Cell(None)
  return Cell(*np.mean([(c.value, c.low, c.high) for c in cells], 0).tolist(),
              mark=''.join(dict.fromkeys(cell.mark for cell in cells)))


def _shown(cell):
  if cell.value is None:
    return cell.text + cell.mark
  half = (cell.high - cell.low) / 2
  return f'{cell.value:.2f}{f"±{half:.2f}" if half else ""}{cell.mark}'


def _texts(lines, columns):
  """Returns the header, and the texts of each line."""
  return ['', *columns, AVERAGE], [
      [f'{line.panel}: {line.label}' if line.panel and not line.is_ours
       else line.label, *map(_shown, line.cells)] for line in lines]


def markdown(lines: Sequence[Line], columns: Sequence[str]) -> str:
  """Formats as Markdown; ± is half the width of the 95 % interval."""
  head, texts = _texts(lines, columns)
  return markdown_of(head, texts, ['---'] + ['---:'] * (len(columns) + 1))


def markdown_of(head: Sequence[str], rows: Sequence[Sequence[str]],
                rule: Sequence[str] = ()) -> str:
  """Formats a table as Markdown; rule: alignments, default left."""
  return '\n'.join(
      '| ' + ' | '.join(cell.replace('|', r'\|') for cell in row) + ' |'
      for row in (head, rule or ['---'] * len(head), *rows))


_LATEX = str.maketrans({
    '\\': r'\textbackslash{}', '^': r'\textasciicircum{}',
    '~': r'\textasciitilde{}', '|': r'\textbar{}', '−': '$-$', '±': r'$\pm$',
    'β': r'$\beta$', 'Δ': r'$\Delta$', '∧': r'$\wedge$', '∨': r'$\vee$',
    '<': '$<$', '>': '$>$'} | {x: f'\\{x}' for x in '_%&#${}'})


def latex_text(text: str) -> str:
  """A text for LaTeX: on one line, so that it can also stand in a comment, and
  without any character that LaTeX interprets."""
  return errors.printable(' '.join(text.split())).translate(_LATEX)


def latex(lines: Sequence[Line], columns: Sequence[str]) -> str:
  """Formats as a LaTeX tabular."""
  return latex_of(*_texts(lines, columns), labels=1)


def latex_of(head: Sequence[str], rows: Sequence[Sequence[str]], labels: int
             ) -> str:
  """A LaTeX tabular of texts; the first `labels` columns are left-aligned."""
  body = [' & '.join(map(latex_text, row)) + r' \\' for row in (head, *rows)]
  return '\n'.join([
      r'% Needs \usepackage{booktabs}.',
      rf'\begin{{tabular}}{{{"l" * labels}{"r" * (len(head) - labels)}}}',
      r'\toprule', body[0], r'\midrule', *body[1:], r'\bottomrule',
      r'\end{tabular}'])


def comma_separated(lines: Sequence[Line], columns: Sequence[str]) -> str:
  """Formats as CSV: panel, row, of (paper or ours), column, value, low, …"""
  rows, label = [], ''
  for line in lines:
    label = label if line.is_ours else line.label
    for column, cell in zip([*columns, AVERAGE], line.cells):
      numbers = 3 * [''] if cell.value is None else [
          f'{x:.4f}' for x in (cell.value, cell.low, cell.high)]
      note = cell.text if cell.value is None else cell.mark
      rows.append([line.panel, label, 'ours' if line.is_ours else 'paper',
                   column, *numbers, note])
  return csv_of('panel row of column value low high note'.split(), rows)


def csv_of(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
  """CSV of a head and rows."""
  out = io.StringIO()
  csv.writer(out, lineterminator='\n').writerows([head, *rows])
  return out.getvalue().rstrip('\n')


FORMATS = {'markdown': markdown, 'latex': latex, 'csv': comma_separated}


def of_comparison(rows: Sequence[Mapping[str, Any]], form: str) -> str:
  """Formats the rows of `comparison.compare`; `form`: one of FORMATS."""
  if form == 'csv':
    names = 'set problems first second difference low high p'.split()
    return csv_of(names, [[row[name] for name in names] for row in rows])
  if form == 'latex':
    return latex_of(
        ['set', 'problems', 'first, %', 'second, %', 'difference', 'p'], [
            [row['set'], str(row['problems']), f'{100 * row["first"]:.1f}',
             f'{100 * row["second"]:.1f}', '{:+.1f} [{:+.1f}, {:+.1f}]'.format(
                 *(100 * row[x] for x in ('difference', 'low', 'high'))),
             f'{row["p"]:.3g}'] for row in rows], labels=1)
  lines = []
  for row in rows:
    line = (f'{row["set"]}: {row["first"]:.2%} → {row["second"]:.2%}, '
            f'difference {row["difference"]:+.2%} '
            f'[{row["low"]:+.2%}, {row["high"]:+.2%}], p {row["p"]:.3g}')
    if test := row.get('mcnemar'):
      line += (f'; McNemar: solved by one only {test["only_first"]} / '
               f'{test["only_second"]}, p {test["p"]:.3g}')
    lines.append(line)
  return '\n'.join(lines)


def commands(rows: Sequence[Any], table: int, runs: str | os.PathLike
             ) -> list[list[str]]:
  """Returns the commands that a table still needs: train, then evaluate.

  A run is complete when its evaluation has results. The same command resumes
  an interrupted training.
  """
  done, found = set(), []
  for row in rows:
    for seed in row.seeds if row.method else row.seeds[:1]:
      folder = files.path(runs) / run_name(row, seed)
      if row.is_change or folder in done or (
          folder / EVALUATION / results_lib.RESULTS).exists():
        continue
      done.add(folder)
      config = [f'--config=configs/table{table}.py:{row.name}',
                f'--config.seed={seed}']
      if row.method is not None:
        found.append(['tepo_jax.train', *config, f'--workdir={folder}'])
      found.append([
          'tepo_jax.evaluate', *config,
          *([f'--checkpoint={folder}'] if row.method else []),
          f'--out={folder / EVALUATION}'])
  return found
