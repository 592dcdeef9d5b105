"""Mistral-7B-Instruct-v0.2, Table 2.

  python -m tepo_jax.train --config=configs/mistral_7b.py:tepo --workdir=DIR

For a v6e:4x8 slice (TYPE=v6e-32, 32 chips). Its plan, with numbers in
launch/PLANS.md:

  python -m tepo_jax.plan --config=configs/mistral_7b.py:tepo --topology=v6e:4x8

The paper states no KL coefficient for Table 2; this uses 1e-3. The model's chat
template has no system turn.
"""

from configs import base


def get_config(method: str = 'tepo'):
  """The paper's sizes; `method` is a row of methods.py."""
  c = base.get_config(method, beta=1e-3)
  c.model = 'mistralai/Mistral-7B-Instruct-v0.2'
  c.data.template = 'dapo_boxed'

  # Updates shard the weights over all chips, and a microbatch has a row per
  # chip; sampling cuts heads and feed-forward columns by 8. By the plan,
  # decoding on tensor 4 leaves memory for fewer slots.
  c.rollout.tensor = 8
  return c
