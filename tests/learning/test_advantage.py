"""Group advantages against numbers computed by hand, and against numpy."""

import math

import jax
import numpy as np
import pytest
import torch

from tepo_jax import errors
from tepo_jax.learning import advantage


def test_grpo_by_hand(x64):
  """One of four correct: mean 1/4, deviations 3/4 and -1/4, so the variance
  over three is 1/4, the std 1/2. Then a group of twos and zeros: std
  sqrt(4/3)."""
  got = advantage.group_advantage(
      np.array([1., 0, 0, 0, 2, 2, 0, 0]), 4, 'grpo')
  second = 1 / (math.sqrt(4 / 3) + 1e-6)
  np.testing.assert_allclose(got, [
      0.75 / 0.500001, *[-0.25 / 0.500001] * 3,
      second, second, -second, -second], rtol=1e-12)


@pytest.mark.parametrize('group_size', [2, 8])
def test_grpo_is_numpys_with_ddof_one(x64, group_size):
  reward = np.random.default_rng(0).normal(size=(5, group_size)) + 3
  want = (reward - reward.mean(1, keepdims=True)) / (
      reward.std(1, ddof=1, keepdims=True) + 1e-6)
  got = advantage.group_advantage(reward.ravel(), group_size, 'grpo')
  np.testing.assert_allclose(got, want.ravel(), rtol=1e-10)


def test_gpg_by_hand():
  """Two of three groups have equal rewards: alpha = 3."""
  got = advantage.group_advantage([1, 1, 0, 1, 0, 0], 2, 'gpg')
  np.testing.assert_allclose(got, [0, 0, -1.5, 1.5, 0, 0])


def test_gpg_without_a_mixed_group_is_zero():
  assert not advantage.group_advantage([1, 1, 0, 0], 2, 'gpg').any()


def test_drgrpo_by_hand():
  got = advantage.group_advantage([1, 0, 0, 1, 1, 1], 3, 'drgrpo')
  np.testing.assert_allclose(got, [2 / 3, -1 / 3, -1 / 3, 0, 0, 0], rtol=1e-6)


def _torch(reward, estimator):
  """float64 [N, G] by torch, each completion by itself."""
  reward = torch.tensor(reward, dtype=torch.float64)
  size = reward.shape[1]
  if estimator == 'rloo':
    return torch.stack([torch.stack([
        row[i] - torch.cat([row[:i], row[i + 1:]]).mean() for i in range(size)])
                        for row in reward])
  centred = reward - reward.mean(1, keepdim=True)
  if estimator == 'reinforce_pp_baseline':
    return (centred - centred.mean()) / (centred.std() + 1e-6)
  return centred


@pytest.mark.parametrize('group_size', [2, 5, 8])
@pytest.mark.parametrize(
    'estimator', ['rloo', 'drgrpo', 'reinforce_pp_baseline'])
def test_estimators_are_torchs(x64, estimator, group_size):
  rng = np.random.default_rng(2)
  for reward in (rng.normal(size=(6, group_size)) * 3 + 1,
                 (rng.random((6, group_size)) < 0.3).astype(float)):
    got = advantage.group_advantage(reward.ravel(), group_size, estimator)
    np.testing.assert_allclose(
        got, _torch(reward, estimator).numpy().ravel(), rtol=0, atol=1e-7)


@pytest.mark.parametrize(
    'estimator', ['grpo', 'gpg', 'rloo', 'drgrpo', 'reinforce_pp_baseline'])
def test_the_excluded_are_in_no_baseline(x64, estimator):
  """Against torch on lists of the rewards that are left; one that is left
  alone has nothing to be compared with."""
  rng = np.random.default_rng(4)
  reward = rng.normal(size=(7, 6))
  reward[4] = 2.5
  counted = rng.random((7, 6)) < 0.7
  counted[0], counted[1] = False, np.arange(6) == 2
  left = [torch.tensor(r[c]) for r, c in zip(reward, counted)]
  centred = [r - r.mean() for r in left]
  alike = sum(len(r) > 0 and bool((r == r[0]).all()) for r in left)
  std = torch.cat(centred).std() + 1e-6
  want = [{
      'grpo': lambda: c / (r.std() + 1e-6 if len(r) > 1 else 1),
      'gpg': lambda: c * 6 / (6 - alike), 'drgrpo': lambda: c,
      'rloo': lambda: torch.stack([x - torch.cat([r[:i], r[i + 1:]]).mean()
                                   for i, x in enumerate(r)])
                      if len(r) > 1 else c,
      'reinforce_pp_baseline': lambda: c / std}[estimator]()
          for r, c in zip(left, centred)]
  got = np.asarray(advantage.group_advantage(
      reward.ravel(), 6, estimator, counted.ravel())).reshape(7, 6)
  assert alike == 2 and not got[~counted].any() and not got[1].any()
  np.testing.assert_allclose(
      got[counted], torch.cat(want).numpy(), rtol=0, atol=1e-12)


def test_rloo_by_hand():
  got = advantage.group_advantage([1, 0, 0, 1, 1, 1], 3, 'rloo')
  np.testing.assert_allclose(got, [1, -0.5, -0.5, 0, 0, 0], rtol=1e-6)


def test_reinforce_pp_baseline_by_hand():
  """Centred: 1/2, -1/2, 2, -2, 0, 0, so the variance over five is 17/10."""
  got = advantage.group_advantage([1, 0, 4, 0, 1, 1], 2,
                                  'reinforce_pp_baseline')
  np.testing.assert_allclose(
      got, np.array([0.5, -0.5, 2, -2, 0, 0]) / math.sqrt(1.7), rtol=1e-5)


def test_a_group_of_one():
  np.testing.assert_allclose(
      advantage.group_advantage([3.0, -1.0], 1, 'grpo'),
      np.float32([3, -1]) / np.float32(1 + 1e-6))
  for estimator in 'gpg', 'drgrpo', 'rloo':
    assert not advantage.group_advantage([3.0, -1.0], 1, estimator).any()


@pytest.mark.parametrize(  # the other has no baseline of the group
    'estimator', sorted(advantage.ESTIMATORS.keys() - {'reinforce_pp'}))
def test_equal_rewards_give_exactly_zero(estimator):
  """The float32 mean of seven 0.1s is not 0.1, and 1e-8 / 1e-6 is not 0."""
  reward = np.float32([0.1] * 7 + [1, 0, 0, 0, 0, 0, 0])
  got = jax.jit(advantage.group_advantage, static_argnums=(1, 2))(
      reward, 7, estimator)
  assert not got[:7].any() and got[7:].all()


@pytest.mark.parametrize('dtype', [np.int32, np.bool_, np.float32])
def test_dtypes(dtype):
  got = advantage.group_advantage(np.array([1, 0], dtype), 2, 'grpo')
  assert got.dtype == np.float32


def test_bad_arguments():
  with pytest.raises(errors.InputError, match='estimator.*grpo, gpg, drgrpo'):
    advantage.group_advantage([1, 0], 2, 'ppo')
  with pytest.raises(ValueError, match='reinforce_pp is by token'):
    advantage.group_advantage([1, 0], 2, 'reinforce_pp')
  for size in 0, 3:
    with pytest.raises(ValueError, match='groups'):
      advantage.group_advantage([1, 0], size, 'grpo')
