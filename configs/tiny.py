"""A laptop: the embedded arithmetic task, no download, two CPU cores.

  python -m tepo_jax.train --config=configs/tiny.py:tepo --workdir=runs/tiny

Makes a 0.2M-parameter Qwen3-shaped model, trains it on demonstrations, saves it
as a Hugging Face folder in the workdir, and continues with reinforcement
learning from there.
"""

from configs import base
from configs import fields

F = fields.Field
POSITIVE = fields.POSITIVE

# Section `pretrain` of configs that make their model if `c.model` is None: a
# Qwen3-shaped network, trained on worked solutions of `c.data.name`, then on a
# mixture with direct answers.
PRETRAIN = dict(
  worked_steps=F(900, 'updates on worked solutions', POSITIVE),
  mixed_steps=F(150, 'updates on the mixture', fields.NOT_NEGATIVE),
  direct_share=F(0.6, 'of direct answers in the mixture', fields.SHARE),
  batch=F(32, 'demonstrations per update', POSITIVE),
  demonstrations=F(8000, 'different problems', POSITIVE),
  learning_rate=F(6e-3, 'peak, after a tenth of the steps', POSITIVE),
  d_model=F(64, 'D', POSITIVE),
  num_layers=F(3, 'L', POSITIVE),
  num_heads=F(2, 'query heads, a multiple of num_kv_heads', POSITIVE),
  num_kv_heads=F(2, 'key/value heads', POSITIVE),
  head_dim=F(32, 'H', POSITIVE),
  d_ff=F(192, 'F, the feed-forward width', POSITIVE),
  vocabulary=F(8192, 'tokens of the model that tepo_jax.benchmark and '
               'tepo_jax.plan assume; a made model has those of its task',
               POSITIVE),
)


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

  c.eval.sets = ('arithmetic',)
  c.eval.period = 10
  c.eval.limit = 512
  c.eval.samples = 8
  c.eval.temperature = 1.0
  c.eval.greedy = True
  c.eval.max_tokens = 48

  c.checkpoint.period = 5

  c.pretrain = fields.config(PRETRAIN)
  return c
