"""Inputs of the objective's tests."""

import jax
import numpy as np
import pytest

_STEP = {'on_policy': 0.0, 'mild': 0.2, 'violent': 3.0, 'extreme': 3.0}
_GARBAGE = np.array([np.nan, np.inf, -np.inf, 1e30, -1e30, 0.0])


@pytest.fixture
def x64():
  """float64 inside this test alone."""
  with jax.enable_x64(True):
    yield


def _mask(kind, rng, rows, length):
  if kind == 'ragged':  # one completion has one token, one is full
    lengths = rng.integers(2, length + 1, rows)
    lengths[:2] = 1, length
    return np.arange(length) < lengths[:, None]
  mask = rng.random((rows, length)) < 0.7
  mask[:, length // 2] = True
  if kind == 'empty_row':
    mask[rows // 2] = False
  return mask


@pytest.fixture(scope='session')
def minibatch():
  """Makes float64 arrays: regime on_policy, mild, violent, or extreme (some
  log-ratios beyond 20); mask ragged, holes or empty_row; whatever the mask
  hides is garbage."""

  def make(regime='mild', mask='ragged', seed=0, rows=6, length=8,
           garbage=True):
    rng = np.random.default_rng([seed, len(regime), len(mask)])
    normal = lambda: rng.normal(size=(rows, length))
    step = _STEP[regime]
    old_logp = -np.abs(normal()) - 0.05
    old_entropy = np.abs(normal()) + 0.2
    logp = -np.abs(old_logp + step * normal())
    entropy = np.abs(old_entropy + step * normal())
    kl = step * np.abs(normal())
    if regime == 'extreme':
      logp[0, 0], old_logp[1, 1] = -47.0, -52.0
    advantage = np.repeat(rng.normal(size=(rows, 1)), length, axis=1)
    mask = _mask(mask, rng, rows, length)
    reference_logp = -np.abs(logp + np.random.default_rng(seed).normal(
        size=logp.shape))
    out = dict(
        reference_logp_BT=reference_logp,
        logp_BT=logp, entropy_BT=entropy, old_logp_BT=old_logp,
        old_entropy_BT=old_entropy, advantage_BT=advantage, kl_BT=kl)
    if garbage:
      for value in out.values():
        value[~mask] = rng.choice(_GARBAGE, (~mask).sum())
    return dict(out, mask_BT=mask)

  return make
