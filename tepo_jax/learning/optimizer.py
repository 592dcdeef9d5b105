"""The optimiser: global-norm clipping, then AdamW, on fp32 masters; and the
schedule of its learning rate over rollout steps."""

from collections.abc import Callable, Mapping
from typing import Any

import optax

SCHEDULES = 'constant', 'linear', 'cosine'
_OF_SCHEDULE = 'schedule', 'warmup_steps', 'schedule_steps', 'floor'

# Rollout steps done -> the share of the learning rate in the next one.
Share = Callable[[int], Any]


def of(settings: Mapping[str, Any]
       ) -> tuple[optax.GradientTransformation, Share | None]:
  """`make` and `share` of all fields of `config.optimizer`."""
  rest = dict(settings)
  schedule = {name: rest.pop(name) for name in _OF_SCHEDULE}
  return make(**rest), share(**schedule)


def make(learning_rate: float | optax.Schedule, *, beta1: float, beta2: float,
         epsilon: float, weight_decay: float, max_grad_norm: float,
         momentum_dtype: str = 'float32') -> optax.GradientTransformation:
  """AdamW after clipping the gradient's global norm (paper §4.1).

  The paper: learning rate 5e-7, constant; its other settings are unstated,
  and the defaults of configs/base.py are those of its code's base (verl).
  The parameters must be fp32: in bf16 an update of 5e-7 on a weight of 0.02
  rounds to nothing. `momentum_dtype` is that of the first moment; the second is
  kept in fp32, as its decay of 0.001 a step would round to nothing too.
  """
  return optax.chain(
      optax.clip_by_global_norm(max_grad_norm),
      optax.adamw(learning_rate, b1=beta1, b2=beta2, eps=epsilon,
                  weight_decay=weight_decay, mu_dtype=momentum_dtype))


def share(schedule: str, *, warmup_steps: int, schedule_steps: int | None,
          floor: float) -> Share | None:
  """The share of the learning rate by rollout step; None: always 1.

  With t steps done, W = warmup_steps and S = schedule_steps:

    t < W:      (t + 1) / (W + 1), so that no step has the rate 0
    'constant': 1
    'linear':   1 − (1 − floor) x,       x = min(1, (t − W) / (S − W))
    'cosine':   floor + (1 − floor) (1 + cos πx) / 2

  It is a function of the rollout step, not of the optimiser's own count: that
  leaves out updates that were skipped, and minibatches without a group.
  """
  if schedule == 'constant' and not warmup_steps:
    return None
  if schedule == 'constant':
    after = optax.constant_schedule(1.0)
  else:
    assert schedule_steps is not None  # job.configuration checks it
    falls = schedule_steps - warmup_steps
    after = (optax.linear_schedule(1.0, floor, falls) if schedule == 'linear'
             else optax.cosine_decay_schedule(1.0, falls, floor))
  if not warmup_steps:
    return after
  return optax.join_schedules(
      [optax.linear_schedule(1 / (warmup_steps + 1), 1.0, warmup_steps), after],
      [warmup_steps])
