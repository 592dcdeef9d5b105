r"""Table 2: models of other families.

  python -m tepo_jax.train --config=configs/table2.py:r1_llama_8b.tepo \
      --workdir=DIR
  python -m tepo_jax.report --table=2 --runs=runs
"""

from configs import paper

ROWS = (
    paper.Row('r1_llama_8b.base', 'DeepSeek-R1-Distill-Llama-8B',
              'r1_llama_8b', None,
              (12.7, 13.33, 46.49, 70.4, 25.5, 36.88, 23.52), 32.46),
    paper.Row('r1_llama_8b.grpo', 'w. GRPO/DAPO',
              'r1_llama_8b', 'grpo',
              (27.5, 18.43, 61.89, 78.4, 32.97, 41.62, 26.1), 42.23),
    paper.Row('r1_llama_8b.tepo', 'TEPO',
              'r1_llama_8b', 'tepo',
              (25.72, 18.85, 60.84, 79.6, 33.11, 43.55, 29.77), 42.76),
    paper.Row('mistral_7b.base', 'Mistral-7B-Instruct-v0.2',
              'mistral_7b', None,
              (None, None, 2.18, 9.8, 3.98, 1.19, 5.88), 2.77),
    paper.Row('mistral_7b.grpo', 'w. GRPO/DAPO',
              'mistral_7b', 'grpo',
              (None, None, 3.13, 10.8, 4.27, 2.37, 8.09), 3.37),
    paper.Row('mistral_7b.tepo', 'TEPO',
              'mistral_7b', 'tepo',
              (None, None, 3.58, 12.8, 4.59, 1.93, 8.09), 3.65),
    paper.Row('r1_qwen_7b.base', 'DeepSeek-R1-Distill-Qwen-7B',
              'r1_qwen_7b', None,
              (29.89, 20.93, 59.48, 83.4, 33.86, 42.66, 34.19), 43.23),
    paper.Row('r1_qwen_7b.grpo', 'w. GRPO/DAPO',
              'r1_qwen_7b', 'grpo',
              (32.08, 23.33, 66.1, 87.8, 38.42, 47.7, 40.44), 45.99),
    paper.Row('r1_qwen_7b.tepo', 'TEPO',
              'r1_qwen_7b', 'tepo',
              (32.7, 24.58, 66.41, 87.8, 39.55, 49.92, 40.8), 48.6),
)


def get_config(row: str | None = None):
  """The config of a row, by name."""
  return paper.config(ROWS, row)
