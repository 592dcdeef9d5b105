r"""A laptop: the embedded task Countdown, no download, two CPU cores.

  python -m tepo_jax.train --config=configs/countdown.py:tepo \
      --workdir=runs/countdown

Like tiny.py, with another task: its answers are expressions, which a checker
grades. In three runs of about five minutes on two cores, each with its own base
model, avg@8 rose from 11, 10 and 14 % to 27, 20 and 27 %.
"""

from configs import tiny


def get_config(method: str = 'tepo'):
  """The tiny config on Countdown."""
  c = tiny.get_config(method)
  c.steps = 60
  c.data.name = 'countdown'
  c.data.limit = 2048
  c.rollout.max_tokens = 56  # the longest of the demonstrations have 58
  c.train.microbatch_tokens = 1280
  c.optimizer.learning_rate = 1e-4
  c.eval.sets = ('countdown',)
  c.eval.limit = 256
  c.eval.greedy = False
  c.eval.max_tokens = 56
  c.pretrain.demonstrations = 3000
  return c
