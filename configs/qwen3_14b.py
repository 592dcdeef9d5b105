r"""Qwen3-14B, Table 1.

  python -m tepo_jax.train --config=configs/qwen3_14b.py:tepo --workdir=DIR

For a slice v5p:2x4x4 (TYPE=v5p-64, 32 chips): all 512 completions are decoded
at one time, a chip holds at most 36.5 of its 95.7 GiB, and a step takes 101 s,
by

  python -m tepo_jax.plan --config=configs/qwen3_14b.py:tepo \
      --topology=v5p:2x4x4

TEPO's KL coefficient is 1 (§4.1).
"""

from configs import base


def get_config(method: str = 'tepo'):
  """The paper's geometry; `method` is a row of methods.py."""
  c = base.get_config(method, beta=1.0)
  c.model = 'Qwen/Qwen3-14B'

  # Of training and of decoding: the rest of the chips is fsdp.
  c.mesh.tensor = 8
  c.train.microbatch_tokens = 4 * 10_240  # a row for each of 4 fsdp shards
  return c
