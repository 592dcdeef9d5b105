r"""Table 1: Qwen2.5-7B and Qwen3-14B against every baseline.

  python -m tepo_jax.train --config=configs/table1.py:qwen2_5_7b.tepo \
      --workdir=DIR
  python -m tepo_jax.report --table=1 --runs=runs
"""

from configs import paper

ROWS = (
    paper.Row('qwen2_5_7b.base', 'Qwen2.5-7B',
              'qwen2_5_7b', None,
              (0.94, 0.94, 14.34, 43.2, 13.73, 16.74, 21.69), 13.3),
    paper.Row('qwen2_5_7b.grpo', 'w. GRPO/DAPO',
              'qwen2_5_7b', 'grpo',
              (11.25, 5.0, 42.8, 76.6, 25.0, 37.92, 33.08), 30.85),
    paper.Row('qwen2_5_7b.clip_cov', 'w. CLIP-Cov',
              'qwen2_5_7b', 'clip_cov',
              (10.83, 7.4, 42.84, 75.6, 26.11, 39.4, 37.86), 31.64),
    paper.Row('qwen2_5_7b.kl_cov', 'w. KL-Cov',
              'qwen2_5_7b', 'kl_cov',
              (12.29, 8.23, 42.77, 75.6, 25.64, 39.11, 34.92), 31.6),
    paper.Row('qwen2_5_7b.entropy_advantage', 'w. Entropy-based Term',
              'qwen2_5_7b', 'entropy_advantage',
              (11.35, 6.15, 43.18, 74.8, 26.14, 40.14, 36.02), 31.62),
    paper.Row('qwen2_5_7b.gpg', 'w. GPG',
              'qwen2_5_7b', 'gpg',
              (13.54, 6.04, 43.29, 75.0, 26.28, 40.44, 34.55), 31.91),
    paper.Row('qwen2_5_7b.gspo', 'w. GSPO',
              'qwen2_5_7b', 'gspo',
              (11.77, 6.04, 42.77, 75.8, 25.72, 38.37, 35.66), 31.33),
    paper.Row('qwen2_5_7b.tepo', 'TEPO',
              'qwen2_5_7b', 'tepo',
              (12.6, 8.75, 43.48, 77.4, 27.17, 40.44, 34.92), 32.59),
    paper.Row('qwen2_5_7b.change', 'TEPO (Δ vs GRPO/DAPO)',
              'qwen2_5_7b', 'tepo',
              (1.35, 3.75, 5.68, 0.8, 2.17, 2.52, 1.84), 1.74,
              is_change=True),
    paper.Row('qwen3_14b.base', 'Qwen3-14B',
              'qwen3_14b', None,
              (19.16, 16.77, 51.01, 82.8, 30.27, 43.4, 45.95), 38.34),
    paper.Row('qwen3_14b.grpo', 'w. GRPO/DAPO',
              'qwen3_14b', 'grpo',
              (22.08, 19.06, 55.94, 85.6, 33.01, 44.0, 47.79), 41.51),
    paper.Row('qwen3_14b.clip_cov', 'w. CLIP-Cov',
              'qwen3_14b', 'clip_cov',
              (22.7, 20.1, 54.96, 86.0, 32.94, 43.55, 45.58), 41.29),
    paper.Row('qwen3_14b.kl_cov', 'w. KL-Cov',
              'qwen3_14b', 'kl_cov',
              (23.85, 19.06, 56.47, 86.4, 32.87, 43.85, 47.79), 41.85),
    paper.Row('qwen3_14b.entropy_advantage', 'w. Entropy-based Term',
              'qwen3_14b', 'entropy_advantage',
              (24.27, 18.54, 55.87, 85.2, 33.04, 42.37, 48.52), 41.56),
    paper.Row('qwen3_14b.gpg', 'w. GPG',
              'qwen3_14b', 'gpg',
              (23.85, 19.89, 57.34, 84.4, 32.22, 43.55, 47.05), 42.16),
    paper.Row('qwen3_14b.gspo', 'w. GSPO',
              'qwen3_14b', 'gspo',
              (23.85, 20.41, 56.58, 86.0, 33.54, 44.44, 48.52), 42.28),
    paper.Row('qwen3_14b.tepo', 'TEPO',
              'qwen3_14b', 'tepo',
              (24.37, 23.75, 58.96, 86.4, 35.11, 46.37, 49.26), 44.02),
    paper.Row('qwen3_14b.change', 'TEPO (Δ vs GRPO/DAPO)',
              'qwen3_14b', 'tepo',
              (5.21, 4.69, 3.02, 0.8, 2.1, 2.37, 1.47), 2.51,
              is_change=True),
)


def get_config(row: str | None = None):
  """The config of a row, by name."""
  return paper.config(ROWS, row)
