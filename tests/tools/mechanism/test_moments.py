"""Moments from inner products: unbiased, and with intervals that cover."""

import collections
import itertools

import jax
from jax import numpy as jnp
import numpy as np
import pytest

from tepo_jax.learning import objective
from tepo_jax.tools.mechanism import measure
from tepo_jax.tools.mechanism import moments

OLD = np.log([[0.5, 0.3, 0.2], [0.2, 0.7, 0.1]])  # π_old by step and token
NEW = np.log([[0.35, 0.5, 0.15], [0.4, 0.4, 0.2]])
COMPLETIONS = np.array(list(itertools.product(range(3), repeat=2)))
REWARD = np.array([1.0, 0.2, -0.5, 0.1, 2.0, -1.0, 0.0, 0.4, -0.3])


@pytest.fixture(autouse=True)
def x64():
  with jax.enable_x64(True):
    yield


def bandit(weight, clip='none'):
  """The gradient, [9, 6], of each completion of two independent draws.

  By the code: ∂L/∂ℓ of the loss, then ∂ℓ/∂logits.
  """
  loss = objective.make_policy_loss(measure._SEQUENCE | dict(
      weight=weight, clip=clip, aggregate='seq_mean_token_sum'))

  def logp(logits, completion):
    return jnp.take_along_axis(
        jax.nn.log_softmax(logits), completion[:, None], 1)[:, 0]

  def gradient(completion, reward):
    tokens = objective.Tokens(
        logp_BT=logp(NEW, completion)[None],
        old_logp_BT=logp(OLD, completion)[None], entropy_BT=np.zeros((1, 2)),
        old_entropy_BT=np.zeros((1, 2)), advantage_BT=np.full((1, 2), reward),
        mask_BT=np.ones((1, 2)))
    _, pull_back = jax.vjp(lambda logits: logp(logits, completion), NEW)
    return np.ravel(pull_back(measure.slope(loss, tokens)[0])[0])

  return np.stack(list(map(gradient, COMPLETIONS, REWARD)))


def closed_form(weights):
  """−Σ_t w_t A (1[v = y_t] − p_tv), with the weights w [9, 2]."""
  p = np.exp(NEW)
  indicator = np.eye(3)[COMPLETIONS]  # [9, 2, 3]
  return -((weights * REWARD[:, None])[..., None] * (indicator - p)).reshape(
      9, 6)


def probabilities(logits):
  return np.exp(sum(logits[t, COMPLETIONS[:, t]] for t in range(2)))


RATIO = np.exp((NEW - OLD)[[0, 1], COMPLETIONS])  # [9, 2]
CLOSED = {
    'token': RATIO, 'none': np.ones((9, 2)),
    'sequence': np.sqrt(RATIO.prod(1, keepdims=True)) * np.ones((1, 2)),
    'sequence_token': np.sqrt(RATIO.prod(1, keepdims=True)) * np.ones((1, 2))}


@pytest.mark.parametrize('weight', CLOSED)
def test_gradients_are_the_closed_form(weight):
  np.testing.assert_allclose(
      bandit(weight), closed_form(CLOSED[weight]), atol=1e-12)


def test_a_prefix_weight_is_differentiated_through_its_tokens():
  """L = −A (ρ_1 + √(ρ_1 ρ_2)): token 1 has ρ_1 + ½√, token 2 ½√."""
  root = np.sqrt(RATIO.prod(1))
  np.testing.assert_allclose(bandit('prefix'), closed_form(
      np.stack([RATIO[:, 0] + root / 2, root / 2], 1)), atol=1e-12)


def test_clipped_tokens_have_no_gradient():
  clip = dict(name='ppo', low=0.2, high=0.28)
  clipped = np.where(REWARD[:, None] > 0, RATIO > 1.28, RATIO < 0.8)
  assert 0 < clipped.mean() < 1
  np.testing.assert_allclose(
      bandit('token', clip), closed_form(np.where(clipped, 0, RATIO)),
      atol=1e-12)


@pytest.mark.parametrize('weight', ['token', 'sequence'])
def test_the_moments_are_unbiased(weight):
  """Averaged over every possible data set of three prompts, they are those that
  enumeration gives."""
  x, y = bandit(weight), closed_form(np.ones((9, 2)))
  p, q = probabilities(OLD), probabilities(NEW)
  mean, on = p @ x, q @ y
  expected = dict(square=mean @ mean, variance=p @ (x**2).sum(1) - mean @ mean)
  weight_RP = np.ones((1, 3))
  found = dict.fromkeys(expected, 0.0)
  for i in itertools.product(range(9), repeat=3):
    off = x[list(i)] @ x[list(i)].T
    value = moments.of_gradients(weight_RP, off, off, off)
    for name in found:
      found[name] += p[list(i)].prod() * value[name][0]
  assert found == pytest.approx(expected, rel=1e-10)
  cross = sum(
      p[list(i)].prod() * q[list(j)].prod()
      * moments.pairs(np.ones((1, 2)), x[list(i)] @ y[list(j)].T)[0]
      for i in itertools.product(range(9), repeat=2)
      for j in itertools.product(range(9), repeat=2))
  assert cross == pytest.approx(mean @ on, rel=1e-10)


def test_token_weights_are_unbiased_for_one_step_only():
  """A weight per token corrects a step's own draw, not the state's past; with
  one step it is exact, and the variance is the textbook's."""
  p, q = np.exp(OLD[0]), np.exp(NEW[0])
  reward, score = np.array([1.0, -0.4, 0.3]), np.eye(3) - q
  x = (q / p * reward)[:, None] * score
  np.testing.assert_allclose(p @ x, (q * reward) @ score, atol=1e-12)
  generator = np.random.default_rng(0)
  drawn, fresh = (z[generator.choice(3, 3000, p=w)] for z, w in (
      (x, p), (reward[:, None] * score, q)))
  found = moments.of_gradients(
      moments.resample(3000, resamples=200), drawn @ drawn.T, drawn @ fresh.T,
      fresh @ fresh.T)
  mean = p @ x
  assert found['cosine'][0] == pytest.approx(1, abs=1e-3)
  for name, exact in dict(
      square=mean @ mean, variance=p @ (x**2).sum(1) - mean @ mean,
      length=1).items():
    _, low, high = moments.interval(found[name])
    assert low <= exact <= high, name


def test_gram_matrices_are_enough():
  """Against numpy on the vectors themselves, weights as repeated rows."""
  generator = np.random.default_rng(1)
  x, y = generator.normal(0.5, 1, (2, 5, 7))
  weight_P = np.array([2, 0, 1, 1, 1])
  found = moments.of_gradients(
      weight_P[None].astype(float), x @ x.T, x @ y.T, y @ y.T)
  index = np.repeat(np.arange(5), weight_P)

  def direct(a, b):
    pairs = [a[i] @ b[j] for i in index for j in index if i != j]
    return np.mean(pairs)

  square, target = direct(x, x), direct(y, y)
  assert {name: value[0] for name, value in found.items()} == pytest.approx(
      dict(square=square,
           variance=np.mean((x[index]**2).sum(1)) - square,
           noise=np.mean((x[index]**2).sum(1)) / square - 1,
           cosine=direct(x, y) / np.sqrt(square * target),
           length=np.sqrt(square / target)))


def test_halves_add_up():
  generator = np.random.default_rng(2)
  x, y = generator.normal(size=(2, 8, 5))
  x[3] = 0
  found = measure.inner_products(x, y)
  whole_x, whole_y = (z[::2] + z[1::2] for z in (x, y))
  np.testing.assert_allclose(found['all'], whole_x @ whole_y.T, atol=1e-12)
  np.testing.assert_allclose(found['short'], x[::2] @ y[::2].T, atol=1e-12)
  np.testing.assert_allclose(found['long'], x[1::2] @ y[1::2].T, atol=1e-12)


def test_intervals_cover():
  """In about 95 of 100 data sets, the exact value is inside."""
  generator, hits = np.random.default_rng(3), collections.Counter()
  mean, scale, dims, prompts = 0.5, 1.5, 20, 100
  exact = dict(square=dims * mean**2, variance=dims * scale**2, cosine=1,
               noise=scale**2 / mean**2, length=1)
  weight_RP = moments.resample(prompts, resamples=400)
  for _ in range(200):
    x, y = generator.normal(mean, scale, (2, prompts, dims))
    found = moments.of_gradients(weight_RP, x @ x.T, x @ y.T, y @ y.T)
    for name, value in exact.items():
      _, low, high = moments.interval(found[name])
      hits[name] += low <= value <= high
  assert all(178 <= hits[name] <= 200 for name in exact), hits


def test_correlation_is_numpy_s():
  generator = np.random.default_rng(4)
  x = generator.normal(size=(6, 4))
  y, mask = x + generator.normal(size=(6, 4)), generator.random((6, 4)) < 0.7
  weight = np.array([[1.0] * 6, [2, 0, 1, 3, 0, 0]])
  found = moments.correlation(weight, x + 1e3, y, mask)
  for value, weight_P in zip(found, weight):
    repeated = np.repeat(weight_P.astype(int)[:, None], 4, 1)[mask]
    assert value == pytest.approx(np.corrcoef(
        np.repeat(x[mask], repeated), np.repeat(y[mask], repeated))[0, 1])


def test_no_value_is_no_interval():
  assert moments.interval(np.array([1.0, np.nan, 2.0])) is None
  assert moments.interval(np.arange(101.0)) == pytest.approx(
      [0, 3.475, 97.525])
