"""Estimators against enumeration on a bandit; intervals that cover."""

import collections
import itertools

import jax
from jax import numpy as jnp
import numpy as np
import pytest

from configs import methods
from tepo_jax.learning import objective
from tepo_jax.tools.mechanism import directions
from tepo_jax.tools.mechanism import moments

OLD = np.log([[0.5, 0.3, 0.2], [0.2, 0.7, 0.1]])  # π_old by step and token
NEW = np.log([[0.35, 0.5, 0.15], [0.22, 0.58, 0.2]])
COMPLETIONS = np.array(list(itertools.product(range(3), repeat=2)))
REWARD = np.array([1.0, 0.2, -0.5, 0.1, 2.0, -1.0, 0.0, 0.4, -0.3])
RATIO = np.exp((NEW - OLD)[[0, 1], COMPLETIONS])  # [9, 2]
ROOT = np.sqrt(RATIO.prod(1, keepdims=True))
CLIPPED = np.where(REWARD[:, None] > 0, RATIO > 1.28, RATIO < 0.8)
# ∂S/∂ℓ / A by hand; the prefix weights are ρ_1 and √(ρ_1 ρ_2).
SLOPES = {
    'token': RATIO, 'none': np.ones((9, 2)), 'sequence': ROOT * np.ones(2),
    'prefix': np.concatenate([RATIO[:, :1] + ROOT / 2, ROOT / 2], 1),
    'token .2/.28': np.where(CLIPPED, 0, RATIO)}


@pytest.fixture(autouse=True)
def x64():
  with jax.enable_x64(True):
    yield


def by_code(loss):
  """∂L/∂logits, [9, 6], of each completion of two independent draws."""
  def logp(logits, completion):
    return jax.nn.log_softmax(logits)[jnp.arange(2), completion]

  def gradient(completion, reward):
    new, pull_back = jax.vjp(lambda x: logp(x, completion), NEW)
    zeros = np.zeros((1, 2))
    slope = directions.of_loss(loss, objective.Tokens(
        logp_BT=new[None], old_logp_BT=logp(OLD, completion)[None],
        entropy_BT=zeros, old_entropy_BT=zeros, advantage_BT=zeros + reward,
        mask_BT=zeros + 1)).logp_BT
    return np.ravel(pull_back(slope[0])[0])

  return np.stack(list(map(gradient, COMPLETIONS, REWARD)))


def closed_form(name):
  """−A Σ_t (∂S/∂ℓ_t / A) (1[v = y_t] − p_tv)."""
  slope = SLOPES[name] * REWARD[:, None]
  return -(slope[..., None] * (
      np.eye(3)[COMPLETIONS] - np.exp(NEW))).reshape(9, 6)


def probability(logits):
  return np.exp(logits[[0, 1], COMPLETIONS].sum(1))


@pytest.mark.parametrize('name', SLOPES)
def test_gradients_are_the_closed_form(name):
  assert 0 < CLIPPED.mean() < 1
  rows = methods.methods(1e-3)
  weight, clips, _ = name.partition(' .2/.28')
  loss = objective.make_policy_loss(rows['tepo_no_kl'] | dict(
      weight=weight, clip=rows['grpo']['clip'] if clips else 'none',
      aggregate=dict(name='constant_length', length=1.0)))
  np.testing.assert_allclose(by_code(loss), closed_form(name), atol=1e-12)


@pytest.mark.parametrize('name', ['token', 'sequence'])
def test_the_moments_are_unbiased(name):
  """Averaged over every possible sample of two or three minibatches, they are
  the moments that enumerating the completions gives."""
  x, y = closed_form(name), closed_form('none')
  p, q = probability(OLD), probability(NEW)
  found = collections.Counter()
  for i in map(list, itertools.product(range(9), repeat=3)):
    gram = x[i] @ x[i].T
    value = moments.of_gradients(np.ones((1, 3)), gram, gram, gram)
    for key in ('square', 'variance'):
      found[key] += p[i].prod() * value[key][0]
  pairs = list(map(list, itertools.product(range(9), repeat=2)))
  found['cross'] = sum(
      p[i].prod() * q[j].prod() * moments.pairs(
          np.ones((1, 2)), x[i] @ y[j].T)[0] for i in pairs for j in pairs)
  mean = p @ x
  assert dict(found) == pytest.approx(dict(
      square=mean @ mean, variance=p @ (x**2).sum(1) - mean @ mean,
      cross=mean @ (q @ y)), rel=1e-10)


def test_gram_matrices_are_enough():
  """Against numpy on the vectors; multiplicities are repeated rows."""
  x, y = np.random.default_rng(1).normal(0.5, 1, (2, 5, 7))
  weight_J = np.array([2, 0, 1, 1, 1])
  found = moments.of_gradients(
      weight_J[None].astype(float), x @ x.T, x @ y.T, y @ y.T)
  index = np.repeat(np.arange(5), weight_J)

  def direct(a, b):
    return np.mean([a[i] @ b[j] for i in index for j in index if i != j])

  square, target = direct(x, x), direct(y, y)
  variance = np.mean((x[index]**2).sum(1)) - square
  assert {key: value[0] for key, value in found.items()} == pytest.approx(dict(
      square=square, variance=variance, signal_to_noise=square / variance,
      cosine=direct(x, y) / np.sqrt(square * target),
      length=np.sqrt(square / target)))


@pytest.mark.long
def test_intervals_cover():
  """In about 95 of 100 data sets, the exact value is inside."""
  generator, hits = np.random.default_rng(3), collections.Counter()
  exact = dict(
      square=5, variance=45, cosine=1, signal_to_noise=1 / 9, length=1)
  weight_RJ = moments.resample(100, resamples=400)
  for _ in range(200):
    x, y = generator.normal(0.5, 1.5, (2, 100, 20))
    found = moments.of_gradients(weight_RJ, x @ x.T, x @ y.T, y @ y.T)
    for key, value in exact.items():
      _, low, high = moments.interval(found[key])
      hits[key] += low <= value <= high
  assert all(178 <= hits[key] <= 200 for key in exact), hits
  assert moments.interval(np.array([1.0, np.nan, 2.0])) is None
