"""A laptop: the embedded arithmetic task, no download, two CPU cores.

  python -m tepo_jax.train --config=configs/tiny.py:tepo --workdir=runs/tiny

Makes a 0.2M-parameter Qwen3-shaped model, trains it on demonstrations, saves it
as a Hugging Face folder in the workdir, and continues with reinforcement
learning from there.
"""

from configs import base


def get_config(method: str = 'tepo'):
  """The base config at laptop scale."""
  c = base.get_config(method)
  c.steps = 40
  c.data.name = 'arithmetic'
  c.data.template = 'plain'
  c.data.max_prompt_tokens = 24
  c.data.limit = 4096

  c.rollout.prompts = 32
  c.rollout.samples = 8
  c.rollout.max_tokens = 48

  c.grading.workers = 1

  c.train.minibatch_prompts = 8
  c.train.microbatch_tokens = 1152

  c.optimizer.learning_rate = 3e-5

  c.compute.dtype = 'float32'
  c.compute.remat = 'none'
  c.compute.unroll = 3

  c.eval.sets = ('arithmetic',)
  c.eval.period = 10
  c.eval.limit = 512
  c.eval.samples = 8
  c.eval.temperature = 1.0
  c.eval.greedy = True
  c.eval.max_tokens = 48

  c.checkpoint.period = 5

  c.pretrain.worked_steps = 900
  c.pretrain.mixed_steps = 150
  return c
