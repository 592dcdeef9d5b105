"""Checks whether the printed cells of a table are consistent.

A cell is a share k/N of N samples, as a percentage rounded or truncated to two
digits. A printed average is over all graded samples. These include a few that
no cell counts (duplicate problems of Omni-Math), which may be correct or not.

Rows are those of configs/paper.py; read are their name, label, model, method,
cells, average, seeds and is_change.
"""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import math
from typing import Any

DIGIT = 0.01  # the last printed digit


@dataclasses.dataclass(frozen=True)
class Finding:
  """An inconsistency of a cell, or of the average (column None) of a row."""
  row: str
  column: str | None
  text: str


def audit(rows: Sequence[Any], columns: Mapping[str, int], graded: int
          ) -> list[Finding]:
  """Returns all findings in the order of the rows.

  Args:
    rows: of one table or several. columns: {name: samples N of its cells}.
    graded: samples of the average, including those that no cell counts.
  """
  findings = []
  for row in rows:
    if row.is_change:
      findings += _wrong_changes(row, rows, list(columns))
      continue
    findings += _impossible(row, columns)
    if len(row.seeds) == 1:
      findings += _wrong_average(row, columns, graded)
    findings += _repeated(row, rows, list(columns))
  return findings


def counts(percent: float, samples: int) -> list[int]:
  """Returns every k for which k/N prints as `percent`."""
  near = math.floor(percent * samples / 100)
  return [k for k in range(max(0, near - 1), near + 3)
          if _prints_as(100 * k / samples, percent)]


def _prints_as(value, printed):
  rounded = abs(value - printed) <= DIGIT / 2 + 1e-9
  return rounded or -1e-9 <= value - printed < DIGIT - 1e-9


def reproduces(row: Any, columns: Mapping[str, int], graded: int) -> bool:
  """Returns whether the cells' samples give the printed average.

  A missing cell counts as 0 correct samples. If a cell is no k/N, the average
  cannot be reproduced.
  """
  correct = [counts(cell or 0, samples)
             for cell, samples in zip(row.cells, columns.values())]
  if not all(correct):
    return False
  most = sum(map(max, correct)) + graded - sum(columns.values())
  return any(_prints_as(100 * k / graded, row.average)
             for k in range(sum(map(min, correct)), most + 1))


def _impossible(row, columns):
  for (column, samples), cell in zip(columns.items(), row.cells):
    total = samples * len(row.seeds)
    if cell is not None and not (
        counts(cell, samples) if total == samples else any(
            abs(100 * k / total - cell) < 1.5 * DIGIT
            for k in range(total + 1))):
      k = cell * samples / 100
      around = ' or '.join(f'{100 * n / samples:.2f}'
                           for n in (math.floor(k), math.ceil(k)))
      yield Finding(row.name, column,
                    f'{cell} is not a multiple of 1/{samples}; {around} is')


def _wrong_average(row, columns, graded):
  total = sum((cell or 0) * samples / 100
              for cell, samples in zip(row.cells, columns.values()))
  left_out = graded - sum(columns.values())
  low, high = (100 * (total + x) / graded for x in (0, left_out))
  slack = len(columns) * DIGIT  # for the rounding of the cells
  if not reproduces(row, columns, graded) and not (
      low - slack <= row.average <= high + slack):
    yield Finding(row.name, None, f'the cells give {low:.2f} to {high:.2f}, '
                                  f'the paper prints {row.average}')


def _repeated(row, rows, columns) -> Iterator[Finding]:
  """Yields pairs of neighbouring cells that equal those of another method."""
  others = [other for other in rows
            if not other.is_change and len(other.seeds) == 1
            and other.model == row.model and other.method != row.method]
  for i in range(len(columns) - 1):
    pair = row.cells[i:i + 2]
    same = [other.label for other in others
            if other.cells[i:i + 2] == pair and any(pair)]
    if same and len(row.seeds) == 1:
      yield Finding(row.name, columns[i], f'{columns[i]} and '
                    f'{columns[i + 1]} equal those of {same[0]}')


def _wrong_changes(row, rows, columns):
  """Yields printed differences that are not those of the printed rows."""
  ours, grpo, base = (
      next(r for r in rows if r.model == row.model and r.method == method
           and not r.is_change) for method in (row.method, 'grpo', None))
  for column, printed, new, old, untrained in zip(
      [*columns, None], *((*r.cells, r.average) for r in (
          row, ours, grpo, base))):
    if abs(new - old - printed) > 1.5 * DIGIT:
      against = ('; the difference to the untrained model matches'
                 if abs(new - untrained - printed) <= 1.5 * DIGIT else '')
      yield Finding(row.name, column, f'the paper prints {printed}, the rows '
                                      f'differ by {new - old:.2f}{against}')
