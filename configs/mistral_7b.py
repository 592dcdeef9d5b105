"""Mistral-7B-Instruct-v0.2, Table 2.

  python -m tepo_jax.train --config=configs/mistral_7b.py:tepo --workdir=DIR

For a slice v6e:4x8 (TYPE=v6e-32, 32 chips): 492 completions are decoded at one
time, a chip holds at most 29.1 of its 31.25 GiB, and a step takes 66 s, by

  python -m tepo_jax.plan --config=configs/mistral_7b.py:tepo --topology=v6e:4x8

The paper states no KL coefficient for Table 2: 1e-3. Its chat template has no
system turn.
"""

from configs import base


def get_config(method: str = 'tepo'):
  """The paper's geometry; `method` is a row of methods.py."""
  c = base.get_config(method, beta=1e-3)
  c.model = 'mistralai/Mistral-7B-Instruct-v0.2'
  c.data.template = 'dapo_boxed'

  # Of training and of decoding: the rest of the chips is fsdp.
  c.mesh.tensor = 8
  c.train.microbatch_tokens = 4 * 10_240  # a row for each of 4 fsdp shards
  return c
