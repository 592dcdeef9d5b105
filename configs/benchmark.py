"""Workloads for measurements: random weights, no training.

  python -m tepo_jax.benchmark --config=configs/benchmark.py:tiny

tiny: 8.0M parameters, 4 prompts x 8 samples, 64 + 128 tokens. small: 64M, 4 x
8, 128 + 256 tokens. Neither downloads anything. smollm2 downloads 93 MB for
its tokenizer: the shape of SmolLM2-135M-Instruct, the sizes of
configs/smollm2.py:sums, 16 x 8, 92 + 10 tokens; in training, completions have a
mean of 6 tokens (--mean_tokens=6).
"""

from configs import base
from configs import fields
from configs import smollm2
from configs import tiny

_SHAPES = {
    'tiny': dict(vocabulary=8192, d_model=256, num_layers=4, num_heads=8,
                 num_kv_heads=2, head_dim=32, d_ff=1024, prompt_tokens=64,
                 max_tokens=128),
    'small': dict(vocabulary=32768, d_model=512, num_layers=8, num_heads=8,
                  num_kv_heads=2, head_dim=64, d_ff=2048, prompt_tokens=128,
                  max_tokens=256),
}


def get_config(shape: str = 'tiny'):
  """The base config with a model and sizes that a laptop can run.

  `shape` is a size, or 'SIZE,METHOD' with a row of methods.py.
  """
  size, _, method = shape.partition(',')
  if size == 'smollm2':
    return smollm2.get_config(f'sums,{method or "grpo"}')
  if size not in _SHAPES:
    raise ValueError(f'unknown size {size!r}; one of: '
                     f'{", ".join(sorted([*_SHAPES, "smollm2"]))}')
  shape = dict(_SHAPES[size])
  c = base.get_config(method or 'grpo')  # as the libraries compared with
  c.data.max_prompt_tokens = shape.pop('prompt_tokens')
  c.rollout.max_tokens = shape.pop('max_tokens')
  c.rollout.prompts = 4
  c.rollout.samples = 8
  c.train.minibatch_prompts = 4
  # One group, its prompt once, in 8 attention rows. On a CPU a larger
  # microbatch is slower: each call allocates fresh memory, which causes page
  # faults.
  c.train.packing = 'shared'
  c.train.microbatch_tokens = c.data.max_prompt_tokens - 1 + (
      c.rollout.samples * (c.rollout.max_tokens + 1))
  c.pretrain = fields.config(tiny.PRETRAIN)
  c.pretrain.update(shape)
  c.compute.dtype = 'float32'
  c.compute.remat = 'none'
  return c
