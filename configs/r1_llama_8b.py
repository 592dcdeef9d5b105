r"""DeepSeek-R1-Distill-Llama-8B, Table 2.

  python -m tepo_jax.train --config=configs/r1_llama_8b.py:tepo --workdir=DIR

For a v5p:2x2x4 slice (TYPE=v5p-32, 16 chips). Its plan, with numbers in
launch/PLANS.md:

  python -m tepo_jax.plan --config=configs/r1_llama_8b.py:tepo \
      --topology=v5p:2x2x4

The paper states no KL coefficient for Table 2; this uses 1e-3. The model's
authors advise against a system prompt.
"""

from configs import base


def get_config(method: str = 'tepo'):
  """The paper's sizes; `method` is a row of methods.py."""
  c = base.get_config(method, beta=1e-3)
  c.model = 'deepseek-ai/DeepSeek-R1-Distill-Llama-8B'
  c.data.template = 'dapo_boxed'

  # Updates shard the weights over all chips, and a microbatch has a row per
  # chip; sampling cuts heads and feed-forward columns by 8.
  c.rollout.tensor = 8
  return c
