"""Do a table's printed cells agree with one another? Computed, not typed in.

A cell is a share k/N of N samples, its percentage rounded or cut to two
digits. A printed average is that of all graded samples, among them those that
the cells leave out (the problems that Omni-Math holds twice), which may be
right or wrong.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

# What is read of a row: name, label, model, method, cells, average, seeds,
# is_change (configs/paper.py).
Row = object

DIGIT = 0.01  # the last one printed


@dataclasses.dataclass(frozen=True)
class Finding:
  """What is wrong with a cell, or with the average (column None) of a row."""
  row: str
  column: str | None
  text: str


def audit(rows: Sequence[Row], columns: Mapping[str, int], graded: int
          ) -> list[Finding]:
  """Every finding, in the order of the rows.

  Args:
    rows: of one table or several. columns: {name: samples N of its cells}.
    graded: samples of all columns, and of what the cells leave out.
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
  """Every k of which k/N is printed so, rounded or cut."""
  near = math.floor(percent * samples / 100)
  return [k for k in range(max(0, near - 1), near + 3)
          if _is_printed_so(100 * k / samples, percent)]


def _is_printed_so(value, printed):
  rounded = abs(value - printed) <= DIGIT / 2 + 1e-9
  return rounded or -1e-9 <= value - printed < DIGIT - 1e-9


def reproduces(row: Row, columns: Mapping[str, int], graded: int) -> bool:
  """Whether the printed average is that of the cells' samples.

  An unprinted cell counts as no sample right; with a cell that is no k/N
  nothing is reproduced.
  """
  right = [counts(cell or 0, samples)
           for cell, samples in zip(row.cells, columns.values())]
  if not all(right):
    return False
  lowest, highest = (sum(map(end, right)) for end in (min, max))
  left_out = graded - sum(columns.values())
  return any(_is_printed_so(100 * k / graded, row.average)
             for k in range(lowest, highest + left_out + 1))


def _impossible(row, columns):
  for (column, samples), cell in zip(columns.items(), row.cells):
    runs = len(row.seeds)
    if cell is not None and not (
        counts(cell, samples * runs) if runs == 1 else any(
            abs(100 * k / (samples * runs) - cell) < 1.5 * DIGIT
            for k in range(samples * runs + 1))):
      k = cell * samples / 100
      around = ' or '.join(f'{100 * n / samples:.2f}'
                           for n in (math.floor(k), math.ceil(k)))
      yield Finding(row.name, column,
                    f'{cell} is no multiple of 1/{samples}: {around} is')


def _wrong_average(row, columns, graded):
  total = sum((cell or 0) * samples / 100
              for cell, samples in zip(row.cells, columns.values()))
  left_out = graded - sum(columns.values())
  low, high = (100 * (total + x) / graded for x in (0, left_out))
  slack = len(columns) * DIGIT  # of the cells' own rounding
  if not reproduces(row, columns, graded) and not (
      low - slack <= row.average <= high + slack):
    yield Finding(row.name, None, f'the cells give {low:.2f} to {high:.2f}, '
                                  f'printed is {row.average}')


def _repeated(row, rows, columns) -> Iterator[Finding]:
  """Neighbouring cells that another method has with the same digits."""
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
  """Differences that are not those of the rows they are said to be of."""
  ours, grpo, base = (
      next(r for r in rows if r.model == row.model and r.method == method
           and not r.is_change) for method in (row.method, 'grpo', None))
  values = list(zip(
      [*columns, None], (*row.cells, row.average), (*ours.cells, ours.average),
      (*grpo.cells, grpo.average), (*base.cells, base.average)))
  for column, printed, new, old, untrained in values:
    if abs(new - old - printed) > 1.5 * DIGIT:
      against = ('; against the untrained model it is that'
                 if abs(new - untrained - printed) <= 1.5 * DIGIT else '')
      yield Finding(row.name, column, f'printed is {printed}, the rows differ '
                                      f'by {new - old:.2f}{against}')
