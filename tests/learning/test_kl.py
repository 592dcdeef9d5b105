"""Estimators of the KL to a reference policy, and rewards less this KL."""

import jax
from jax import numpy as jnp
import numpy as np
import pytest
import torch

from tepo_jax.learning import advantage
from tepo_jax.learning import kl


@pytest.fixture
def arrays():
  """logp and the reference's logp, |d| up to 2, so that verl's clamp of k3 to
  10 does not act."""
  rng = np.random.default_rng(0)
  logp_BT = -rng.random((5, 7)) * 3
  return logp_BT, logp_BT + rng.uniform(-2, 2, (5, 7))


def _verl(logp, reference_logp, name):
  """kl_penalty of verl/trainer/ppo/core_algos.py (b178a3c), by torch.

  Of a name that ends with '+', as verl documents it: at that commit kl_penalty
  passes the whole name on to a function that does not know it.
  """
  value = {
      'k1': lambda: logp - reference_logp,
      'k2': lambda: 0.5 * (logp - reference_logp).square(),
      'k3': lambda: torch.clamp(
          torch.exp(torch.clamp(reference_logp - logp, -20, 20))
          - (reference_logp - logp) - 1, -10, 10)}[name.strip('+')]()
  if not name.endswith('+'):
    return value
  backward = 0.5 * (logp - reference_logp).square()
  return backward - backward.detach() + value.detach()


@pytest.mark.parametrize('name', kl.ESTIMATORS)
def test_value_and_gradient_are_verls(x64, arrays, name):
  logp = torch.tensor(arrays[0], requires_grad=True)
  want = _verl(logp, torch.tensor(arrays[1]), name)
  want.sum().backward()
  value, gradient = jax.vmap(jax.value_and_grad(kl.ESTIMATORS[name]))(
      (arrays[0] - arrays[1]).ravel())
  np.testing.assert_allclose(
      value, want.detach().numpy().ravel(), rtol=0, atol=1e-12)
  np.testing.assert_allclose(
      gradient, logp.grad.numpy().ravel(), rtol=0, atol=1e-12)


def test_k3_is_trls(x64, arrays):
  """per_token_kl of trl/trainer/grpo_trainer.py (f2cd577)."""
  logp, reference_logp = map(torch.tensor, arrays)
  want = (torch.exp(reference_logp - logp) - (reference_logp - logp) - 1)
  np.testing.assert_allclose(
      kl.k3(arrays[0] - arrays[1]), want.numpy(), rtol=0, atol=1e-12)


def test_expectations_are_those_that_the_docstring_states(x64):
  """Exactly, over a vocabulary of 9: Σ_y π(y) k(y), and Σ_y π(y) ∇k(y)."""
  rng = np.random.default_rng(1)
  logits, reference = rng.normal(size=(2, 9)) * 0.3
  reference = jax.nn.log_softmax(reference)

  def divergence(logits):
    logp = jax.nn.log_softmax(logits)
    return jnp.sum(jnp.exp(logp) * (logp - reference))

  def reverse(logits):
    return jnp.sum(jnp.exp(reference) * (
        reference - jax.nn.log_softmax(logits)))

  def expected(name):
    policy = jax.nn.softmax(logits)
    return jax.value_and_grad(lambda x: jnp.sum(policy * kl.ESTIMATORS[name](
        jax.nn.log_softmax(x) - reference)))(logits)

  ours = jax.grad(divergence)(logits)
  assert np.abs(ours).max() > 0.01
  for name, value, gradient in [
      ('k1', divergence, 0 * ours),
      ('k3', divergence, jax.grad(reverse)(logits)),
      ('k2', None, ours), ('k1+', divergence, ours),
      ('k3+', divergence, ours)]:
    got = expected(name)
    np.testing.assert_allclose(got[1], gradient, rtol=0, atol=1e-14)
    if value:
      np.testing.assert_allclose(got[0], value(logits), rtol=0, atol=1e-14)
    else:  # to the third order of d
      assert float(got[0]) == pytest.approx(float(divergence(logits)), rel=0.1)


def _reinforce_plus_plus(reward, mask):
  """compute_reinforce_plus_plus_outcome_advantage of verl (b178a3c): its loop,
  discount 1, and masked_whiten of verl/utils/torch_functional.py."""
  returns, running = torch.zeros_like(reward), torch.zeros(len(reward))
  for t in reversed(range(reward.shape[1])):
    running = reward[:, t] + running
    returns[:, t] = running
    running = running * mask[:, t]
  count = mask.sum()
  mean = (returns * mask).sum() / (count + 1e-8)
  variance = ((returns - mean)**2 * mask).sum() / (count + 1e-8)
  variance = variance * count / (count - 1)
  return (returns - mean) * torch.rsqrt(variance + 1e-8) * mask


def test_reinforce_pp_is_verls(x64, arrays):
  """With apply_kl_penalty of verl's ray_trainer.py: each token's KL is taken
  from its reward, the score is that of the last token. A row is filler."""
  rng = np.random.default_rng(2)
  reward_B, length_B = rng.normal(size=5), np.array([7, 1, 4, 0, 6])
  mask = torch.tensor(np.arange(7) < length_B[:, None], dtype=torch.float64)
  token_reward = torch.zeros(5, 7, dtype=torch.float64)
  for i, n in enumerate(length_B):
    if n:
      token_reward[i, n - 1] = reward_B[i]
  d_BT = arrays[0] - arrays[1]
  want = _reinforce_plus_plus(
      token_reward - 0.3 * torch.tensor(d_BT) * mask, mask)
  got = advantage.of_tokens(reward_B, 0.3 * d_BT, mask.numpy() > 0)
  assert np.ptp(np.asarray(got)[0]) > 0.1
  np.testing.assert_allclose(got, want.numpy(), rtol=0, atol=1e-7)
