r"""Table 4: seeds and steps, Qwen2.5-7B.

  python -m tepo_jax.train --config=configs/table4.py:tepo_72_seed1 \
      --workdir=DIR
  python -m tepo_jax.report --table=4 --runs=runs
"""

from configs import paper

ROWS = (
    paper.Row('grpo_72_seed1', 'GRPO/DAPO (72 steps, seed1)',
              'qwen2_5_7b', 'grpo',
              (11.56, 6.25, 40.47, 72.4, 26.0, 37.77, 36.76), 30.3,
              seeds=(1,)),
    paper.Row('grpo_72_seed2', 'GRPO/DAPO (72 steps, seed2)',
              'qwen2_5_7b', 'grpo',
              (11.25, 5.0, 42.8, 76.6, 25.0, 37.92, 33.08), 30.85,
              seeds=(2,)),
    paper.Row('grpo_132_seed1', 'GRPO/DAPO (132 steps, seed1)',
              'qwen2_5_7b', 'grpo',
              (12.08, 7.08, 42.65, 76.2, 26.07, 39.85, 37.86), 31.73,
              steps=132, seeds=(1,)),
    paper.Row('grpo_132_seed2', 'GRPO/DAPO (132 steps, seed2)',
              'qwen2_5_7b', 'grpo',
              (12.08, 6.98, 41.67, 74.2, 27.42, 39.85, 36.76), 31.69,
              steps=132, seeds=(2,)),
    paper.Row('tepo_72_seed1', 'TEPO (72 steps, seed1)',
              'qwen2_5_7b', 'tepo',
              (12.5, 7.6, 45.18, 77.8, 26.78, 41.03, 38.97), 32.62,
              seeds=(1,)),
    paper.Row('tepo_72_seed2', 'TEPO (72 steps, seed2)',
              'qwen2_5_7b', 'tepo',
              (12.6, 8.75, 43.48, 77.4, 27.17, 40.44, 34.92), 32.59,
              seeds=(2,)),
    paper.Row('grpo_72_mean', 'GRPO/DAPO (72 steps, mean)',
              'qwen2_5_7b', 'grpo',
              (11.41, 5.63, 41.64, 74.5, 25.5, 37.85, 34.92), 30.58,
              seeds=(1, 2)),
    paper.Row('grpo_132_mean', 'GRPO/DAPO (132 steps, mean)',
              'qwen2_5_7b', 'grpo',
              (12.08, 7.03, 42.16, 75.2, 26.75, 39.85, 37.31), 31.71,
              steps=132, seeds=(1, 2)),
    paper.Row('tepo_72_mean', 'TEPO (72 steps, mean)',
              'qwen2_5_7b', 'tepo',
              (12.55, 8.18, 44.33, 77.6, 26.98, 40.74, 36.95), 32.61,
              seeds=(1, 2)),
)


def get_config(row: str | None = None):
  """The config of a row, by name."""
  return paper.config(ROWS, row)
