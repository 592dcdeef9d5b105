"""The schedule of the learning rate, against torch's schedulers."""

import jax
from jax import numpy as jnp
import numpy as np
import optax
import pytest
import torch

from tepo_jax.learning import optimizer as optimizer_lib
from tepo_jax.learning import update

RATE, W, S, FLOOR = 0.03, 3, 11, 0.2
SETTINGS = dict(learning_rate=RATE, beta1=0.9, beta2=0.95, epsilon=1e-6,
                weight_decay=0.1, max_grad_norm=100.0, momentum_dtype='float32')


def _torchs(optimizer, schedule):
  schedulers = torch.optim.lr_scheduler
  after = {
      'constant': lambda: schedulers.ConstantLR(optimizer, 1.0, 0),
      'linear': lambda: schedulers.LinearLR(optimizer, 1.0, FLOOR, S - W),
      'cosine': lambda: schedulers.CosineAnnealingLR(
          optimizer, S - W, FLOOR * RATE)}[schedule]
  return schedulers.SequentialLR(optimizer, [
      schedulers.LinearLR(optimizer, 1 / (W + 1), 1.0, W), after()], [W])


@pytest.mark.parametrize('schedule', optimizer_lib.SCHEDULES)
def test_rates_and_weights_are_torchs(schedule):
  """Two updates in each rollout step, over the whole schedule."""
  rng = np.random.default_rng(0)
  optimizer, share = optimizer_lib.of(SETTINGS | dict(
      schedule=schedule, warmup_steps=W, schedule_steps=S, floor=FLOOR))
  params = {'a': jnp.asarray(rng.normal(size=(4, 3)), jnp.float32)}
  theirs = torch.tensor(np.float64(params['a']), requires_grad=True)
  adamw = torch.optim.AdamW([theirs], lr=RATE, betas=(0.9, 0.95), eps=1e-6,
                            weight_decay=0.1)
  scheduler, state = _torchs(adamw, schedule), optimizer.init(params)
  step = jax.jit(lambda *arguments: update.change(optimizer, *arguments))
  for done in range(S + 1):
    np.testing.assert_allclose(
        share(done) * RATE, scheduler.get_last_lr(), rtol=1e-6)
    for _ in range(2):
      gradient = rng.normal(size=(4, 3))
      theirs.grad = torch.tensor(gradient)
      adamw.step()
      updates, state = step({'a': jnp.asarray(gradient, jnp.float32)}, state,
                            params, np.float32(share(done)))
      params = optax.apply_updates(params, updates)
      np.testing.assert_allclose(
          params['a'], theirs.detach(), rtol=0, atol=2e-6)
    scheduler.step()
  last = {'constant': 1}.get(schedule, FLOOR)
  assert share(S) == share(10 * S) == pytest.approx(last)


def test_a_constant_rate_has_no_schedule():
  """Its programs stay what they were."""
  no_warmup = dict(warmup_steps=0, schedule_steps=None, floor=0.0)
  assert optimizer_lib.share('constant', **no_warmup) is None
  falling = optimizer_lib.share(
      'cosine', **no_warmup | dict(schedule_steps=4))
  assert falling(0) == 1 and falling(4) == pytest.approx(0)
