"""Qwen2.5-7B, Tables 1, 3 and 4.

  python -m tepo_jax.train --config=configs/qwen2_5_7b.py:tepo --workdir=DIR

For a v6e:4x4 slice (TYPE=v6e-16, 16 chips). Its plan, with numbers in
launch/PLANS.md:

  python -m tepo_jax.plan --config=configs/qwen2_5_7b.py:tepo --topology=v6e:4x4

TEPO's KL coefficient is 1e-3 (§4.1).
"""

from configs import base


def get_config(method: str = 'tepo'):
  """The paper's sizes; `method` is a row of methods.py."""
  c = base.get_config(method, beta=1e-3)
  c.model = 'Qwen/Qwen2.5-7B'

  # Updates shard the weights over all chips, and a microbatch has a row per
  # chip; sampling cuts heads and feed-forward columns by 4.
  c.rollout.tensor = 4
  return c
