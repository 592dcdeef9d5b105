"""Columns and rows of the paper's tables, and the config of a row."""

import dataclasses

import ml_collections

from configs import mistral_7b
from configs import qwen2_5_7b
from configs import qwen3_14b
from configs import r1_llama_8b
from configs import r1_qwen_7b

MODELS = {'qwen2_5_7b': qwen2_5_7b, 'qwen3_14b': qwen3_14b,
          'r1_llama_8b': r1_llama_8b, 'mistral_7b': mistral_7b,
          'r1_qwen_7b': r1_qwen_7b}

# Evaluation set: (column, samples graded for a cell). Of Omni-Math's 2,821 rows
# 2,811 are different problems; the average counts all rows.
COLUMNS = {
    'aime24': ('AIME24', 960), 'aime25': ('AIME25', 960),
    'amc': ('AMC', 2656), 'math500': ('MATH-500', 500),
    'omni_math': ('OMNI-MATH', 2811), 'olympiadbench': ('OlympiadBench', 675),
    'minerva': ('Minerva', 272)}
GRADED = 8844  # samples graded for an average


@dataclasses.dataclass(frozen=True)
class Row:
  """A row of a table.

  Attributes:
    name: after the colon of --config.
    label: as printed.
    model: of MODELS.
    method: of methods.py; None: the untrained model.
    cells: printed percentages, in the order of COLUMNS; None: no number.
    average: as printed.
    steps, seeds: of the runs that the row averages. If a table states neither,
      they are 72 and 2, whose row in Table 4 has the same digits.
    panel: of Table 3.
    is_change: a row of differences.
    overrides: further config fields.
  """
  name: str
  label: str
  model: str
  method: str | None
  cells: tuple[float | None, ...]
  average: float
  steps: int = 72
  seeds: tuple[int, ...] = (2,)
  panel: str = ''
  is_change: bool = False
  overrides: tuple[tuple[str, object], ...] = ()


def config(rows: tuple[Row, ...], name: str | None
           ) -> ml_collections.ConfigDict:
  """The config of a row: its first seed, evaluated on all columns."""
  named = {row.name: row for row in rows if not row.is_change}
  if name not in named:
    raise ValueError(f'no row {name!r}; one of: {", ".join(named)}')
  row = named[name]
  c = MODELS[row.model].get_config(row.method or 'tepo')
  c.steps, c.seed = row.steps, row.seeds[0]
  # Evaluated once, after training (launch/sweep.sh). For the paper's Omni-Math
  # give a file: --config.eval.sets="(..., 'omni_math:FILE', ...)".
  c.eval.sets = tuple(COLUMNS)
  c.eval.period = 0
  c.update_from_flattened_dict(dict(row.overrides))
  return c
