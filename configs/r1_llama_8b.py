r"""DeepSeek-R1-Distill-Llama-8B, Table 2.

  python -m tepo_jax.train --config=configs/r1_llama_8b.py:tepo --workdir=DIR

For a slice v5p:2x2x4 (TYPE=v5p-32, 16 chips): all 512 completions are decoded
at one time, a chip holds at most 55.2 of its 95.7 GiB, and a step takes 111 s,
by

  python -m tepo_jax.plan --config=configs/r1_llama_8b.py:tepo \
      --topology=v5p:2x2x4

The paper states no KL coefficient for Table 2: 1e-3. Its authors advise
against a system prompt.
"""

from configs import base


def get_config(method: str = 'tepo'):
  """The paper's geometry; `method` is a row of methods.py."""
  c = base.get_config(method, beta=1e-3)
  c.model = 'deepseek-ai/DeepSeek-R1-Distill-Llama-8B'
  c.data.template = 'dapo_boxed'

  # Of training and of decoding: the rest of the chips is fsdp.
  c.mesh.tensor = 4
  c.train.microbatch_tokens = 4 * 10_240  # a row for each of 4 fsdp shards
  return c
