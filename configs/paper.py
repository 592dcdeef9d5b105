"""What the paper's tables have in common: columns, rows, and a row's config."""

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

# Evaluation set: (column, samples its cells are shares of). Omni-Math's are
# the 2,811 problems that its 2,821 rows hold once; the average counts all.
COLUMNS = {
    'aime24': ('AIME24', 960), 'aime25': ('AIME25', 960),
    'amc': ('AMC', 2656), 'math500': ('MATH-500', 500),
    'omni_math': ('OMNI-MATH', 2811), 'olympiadbench': ('OlympiadBench', 675),
    'minerva': ('Minerva', 272)}
GRADED = 8844  # samples of all sets


@dataclasses.dataclass(frozen=True)
class Row:
  """A row of a table.

  name: behind the colon of --config. label: as printed. model: of MODELS.
  method: of methods.py; None is the untrained model. cells: percent, in the
  order of COLUMNS, None where none is printed; average: the printed one.
  seeds: runs whose mean the row is. panel: of Table 3. is_change: a row of
  differences. overrides: config fields besides. Where a table states neither
  steps nor seed: 72 and 2, which Table 4 has with the same digits.
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
  """The config of a row, for its first seed, evaluated on all the columns."""
  named = {row.name: row for row in rows if not row.is_change}
  if name not in named:
    raise ValueError(f'no row {name!r}; one of: {", ".join(named)}')
  row = named[name]
  c = MODELS[row.model].get_config(row.method or 'tepo')
  c.steps, c.seed = row.steps, row.seeds[0]
  # Once, after training (launch/sweep.sh). The paper's Omni-Math is a file:
  # --config.eval.sets="(..., 'omni_math:FILE', ...)".
  c.eval.sets = tuple(COLUMNS)
  c.eval.period = 0
  c.update_from_flattened_dict(dict(row.overrides))
  return c
