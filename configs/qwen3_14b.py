r"""Qwen3-14B, Table 1.

  python -m tepo_jax.train --config=configs/qwen3_14b.py:tepo --workdir=DIR

For a v5p:2x4x4 slice (TYPE=v5p-64, 32 chips). Its plan, with numbers in
launch/PLANS.md:

  python -m tepo_jax.plan --config=configs/qwen3_14b.py:tepo \
      --topology=v5p:2x4x4

TEPO's KL coefficient is 1 (§4.1).
"""

from configs import base


def get_config(method: str = 'tepo'):
  """The paper's sizes; `method` is a row of methods.py."""
  c = base.get_config(method, beta=1.0)
  c.model = 'Qwen/Qwen3-14B'

  # Updates shard the weights over all chips, and a microbatch has a row per
  # chip; sampling cuts heads and feed-forward columns by 8.
  c.rollout.tensor = 8
  return c
