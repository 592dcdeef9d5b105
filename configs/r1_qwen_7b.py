"""DeepSeek-R1-Distill-Qwen-7B, Table 2.

  python -m tepo_jax.train --config=configs/r1_qwen_7b.py:tepo --workdir=DIR

For a v6e:4x4 slice (TYPE=v6e-16, 16 chips). Its plan, with numbers in
launch/PLANS.md:

  python -m tepo_jax.plan --config=configs/r1_qwen_7b.py:tepo --topology=v6e:4x4

The paper states no KL coefficient for Table 2; this uses 1e-3. The model's
authors advise against a system prompt.
"""

from configs import base


def get_config(method: str = 'tepo'):
  """The paper's sizes; `method` is a row of methods.py."""
  c = base.get_config(method, beta=1e-3)
  c.model = 'deepseek-ai/DeepSeek-R1-Distill-Qwen-7B'
  c.data.template = 'dapo_boxed'

  # Updates shard the weights over all chips, and a microbatch has a row per
  # chip; sampling cuts heads and feed-forward columns by 4.
  c.rollout.tensor = 4
  return c
