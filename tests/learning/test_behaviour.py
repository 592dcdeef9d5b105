"""Behaviour weights by hand; their torch reference is with the objective's."""

import math

import jax
import numpy as np
import pytest

from configs import methods
from tepo_jax.learning import behaviour
from tepo_jax.learning import objective

OPEN = dict(cap=math.inf, reject_below=0.0, reject_above=math.inf)
MASK = np.array([[1, 1, 0], [1, 1, 1], [0, 0, 0]], np.float32)
# r of the valid tokens: 3, 1/2; 1, 2/5, 2; none. Garbage under the mask.
OLD = np.log(np.array(
    [[3, 0.5, 1], [1, 0.4, 2], [1, 1, 1]])) - 1
SAMPLER = np.array(
    [[-1, -1, np.nan], [-1, -1, -1], [np.inf, -np.inf, -1e30]])


def weights(**settings):
  return behaviour.weights(OLD, SAMPLER, MASK, **(OPEN | settings))


def metrics(weight, **settings):
  settings = OPEN | settings
  weight_BT = weights(weight=weight, **settings)
  return behaviour.metrics(
      weight_BT, OLD, SAMPLER, MASK, weight=weight, cap=settings['cap'])


def test_token_weights():
  np.testing.assert_allclose(
      weights(weight='token', cap=2.0), [[2, 0.5, 1], [1, 0.4, 2], [1, 1, 1]])
  np.testing.assert_allclose(
      weights(weight='token', cap=2.5, reject_below=0.45, reject_above=2.9),
      [[0, 0.5, 1], [1, 0, 2], [1, 1, 1]])


def test_sequence_weights_are_products():
  got = weights(weight='sequence', cap=1.2)
  np.testing.assert_allclose(got, [[1.2] * 3, [0.8] * 3, [1] * 3])
  got = weights(weight='sequence', reject_above=1.4)
  np.testing.assert_allclose(got, [[0] * 3, [0.8] * 3, [1] * 3])


def test_metrics_by_hand():
  got = metrics('token', cap=2.0, reject_below=0.45)
  r = np.array([3, 0.5, 1, 0.4, 2])  # weights 2, .5, 1, 0, 2
  expected = dict(
      behaviour_mean=5.5 / 5, behaviour_capped_share=2 / 5,
      behaviour_rejected_share=1 / 5, behaviour_ess=5.5**2 / (5 * 9.25),
      behaviour_kl=np.mean(r - 1 - np.log(r)))
  assert got.keys() == expected.keys()
  for name, value in expected.items():
    assert got[name] == pytest.approx(value, rel=1e-12), name
  assert metrics('off', cap=2.0, reject_below=0.45) == got


def test_metrics_of_completions():
  """Weights 1.2 of r = 1.5, and 0.8; the empty completion does not count."""
  got = metrics('sequence', cap=1.2)
  assert got['behaviour_mean'] == pytest.approx(1)
  assert got['behaviour_capped_share'] == 0.5
  assert got['behaviour_ess'] == pytest.approx(4 / (2 * (1.44 + 0.64)))
  assert got['behaviour_kl'] == metrics('token')['behaviour_kl']


def test_all_rejected():
  got = metrics('token', reject_below=1.0, reject_above=0.9)
  assert got['behaviour_rejected_share'] == 1
  assert got['behaviour_mean'] == got['behaviour_ess'] == 0


def test_the_kl_is_unbiased():
  """From samples of μ, against the sum over the vocabulary."""
  rng = np.random.default_rng(0)
  mu, pi = (rng.dirichlet(np.ones(5)) for _ in range(2))
  token_BT = rng.choice(5, (400, 500), p=mu)
  arrays = np.log(pi)[token_BT], np.log(mu)[token_BT], np.ones(token_BT.shape)
  got = behaviour.metrics(arrays[0], *arrays, weight='token', cap=2.0)
  assert got['behaviour_kl'] == pytest.approx(
      np.sum(mu * np.log(mu / pi)), rel=0.01)


@pytest.mark.parametrize('weight', behaviour.WEIGHTS)
def test_equal_log_probabilities_have_weight_one_to_the_bit(weight):
  rng = np.random.default_rng(1)
  logp = -rng.exponential(size=(4, 300)).astype(np.float32)
  mask = np.arange(300) < np.array([[300], [7], [1], [0]])
  sampler = np.where(mask, logp, np.nan).astype(np.float32)
  got = behaviour.weights(
      logp, sampler, mask, weight=weight, cap=1.0, reject_below=1.0,
      reject_above=1.0)
  assert got.dtype == np.float32
  np.testing.assert_array_equal(got, np.ones_like(logp))


@pytest.mark.parametrize('gap', [1e4, -1e4])
@pytest.mark.parametrize('weight', behaviour.WEIGHTS)
def test_violent_gaps_stay_finite(weight, gap):
  logp = np.full((2, 3), -1.0, np.float32)
  arrays = logp + np.float32(gap), logp, np.ones_like(logp)
  weight_BT = behaviour.weights(*arrays, weight=weight, **OPEN)
  found = behaviour.metrics(weight_BT, *arrays, weight=weight, cap=math.inf)
  assert np.isfinite(weight_BT).all()
  assert all(map(math.isfinite, found.values()))


@pytest.mark.parametrize('name', ['tepo', 'cispo', 'gspo'])
def test_a_weight_of_one_changes_no_bit(minibatch, name):
  loss = objective.make_policy_loss(methods.methods(0.7)[name])
  batch = {k: v.astype(np.float32)
           for k, v in minibatch('mild', 'empty_row').items()}

  @jax.jit
  def run(batch):
    def value(logp):
      tokens = objective.Tokens(**dict(batch, logp_BT=logp))
      return loss.partial(tokens, loss.statistics(tokens))
    return jax.value_and_grad(value)(batch['logp_BT'])

  ones = np.where(batch['mask_BT'], 1, np.nan).astype(np.float32)
  jax.tree.map(np.testing.assert_array_equal, run(batch),
               run(dict(batch, behaviour_BT=ones)))
