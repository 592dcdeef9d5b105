"""Draws against float64 sums, frequencies, and transformers' truncations."""

import jax
from jax import numpy as jnp
import numpy as np
import pytest
import torch
import transformers

from tepo_jax.rollout import draw


def _counts(rng, rows, vocabulary, total=2**16):
  """Probabilities that are multiples of 1 / total."""
  weights = rng.random((rows, vocabulary)) ** 8 + 1e-9
  weights[rng.random((rows, vocabulary)) < 0.3] = 0
  weights[:, rng.integers(vocabulary)] += 1e-3
  weights /= weights.sum(1, keepdims=True)
  return np.stack([rng.multinomial(total, w) for w in weights]) / total


def _log(p_BV):
  with np.errstate(divide='ignore'):
    return np.log(p_BV).astype(np.float32)


@pytest.mark.parametrize('vocabulary', [1, 40, 127, 128, 129, 1000])
def test_inverse_cdf_is_the_search_in_float64_sums(vocabulary):
  rng = np.random.default_rng(vocabulary)
  p_BV = _counts(rng, 500, vocabulary)
  # Sixteenths of a step of the CDF away from each of its steps.
  uniform_B = (rng.integers(0, 2**16, 500) + rng.choice(
      [1 / 16, 0.5, 15 / 16], 500)) / 2**16
  want = [np.searchsorted(cdf, u, side='right')
          for cdf, u in zip(np.cumsum(p_BV, 1), uniform_B)]
  # The probabilities need not add up to 1.
  for factor in (1, 3.7):
    got, total_B = jax.jit(draw.inverse_cdf)(
        _log(factor * p_BV), uniform_B.astype(np.float32))
    np.testing.assert_array_equal(got, want)
    np.testing.assert_allclose(total_B, factor, rtol=1e-6)


@pytest.mark.parametrize('vocabulary', [129, 3000])
def test_inverse_cdf_never_draws_the_impossible(vocabulary):
  """However the sums are rounded, at both ends of [0, 1) and between."""
  rng = np.random.default_rng(vocabulary)
  rows = 2000
  p_BV = rng.random((rows, vocabulary)) ** 20
  p_BV[rng.random((rows, vocabulary)) < 0.9] = 0
  p_BV[:500, :rng.integers(1, vocabulary)] = 0
  p_BV[500:1000, -rng.integers(1, vocabulary):] = 0
  p_BV[np.arange(rows), rng.integers(0, vocabulary, rows)] += 1e-4
  p_BV /= p_BV.sum(1, keepdims=True)
  p_BV = np.where(p_BV > 1e-30, p_BV, 0).astype(np.float32)  # no denormals
  cdf_BV = np.cumsum(p_BV.astype(np.float64), 1)
  ends = [0.0, 2.0**-24, 1 - 2.0**-23, 1 - 2.0**-24]
  inverse_cdf = jax.jit(draw.inverse_cdf)
  for uniform in ends + list(rng.random(4)):
    uniform_B = np.full(rows, uniform, np.float32)
    got = np.asarray(inverse_cdf(_log(p_BV), uniform_B)[0])
    row = np.arange(rows)
    assert (p_BV[row, got] > 0).all()
    target_B = uniform * cdf_BV[:, -1]
    below_B = cdf_BV[row, got] - p_BV[row, got]
    assert (below_B <= target_B + 1e-6).all()
    assert (cdf_BV[row, got] >= target_B - 1e-6).all()
  first = (p_BV > 0).argmax(1)
  np.testing.assert_array_equal(
      inverse_cdf(_log(p_BV), np.zeros(rows, np.float32))[0], first)


def _draws(logits_V, decoding, draws):
  """(token_B, logp_B) of `draws` rows of the same logits."""
  rows = jnp.arange(draws)
  return jax.jit(draw.draw, static_argnums=1)(
      jnp.broadcast_to(logits_V, (draws, len(logits_V))), decoding,
      draw.row_keys(jax.random.key(5), rows // 7, rows), rows % 3)


def test_frequencies():
  """20,000 draws: Pearson's statistic within 5 deviations of its mean."""
  rng = np.random.default_rng(0)
  draws, vocabulary, temperature = 20_000, 150, 0.7
  logits_V = rng.normal(size=vocabulary).astype(np.float32)
  token_B, logp_B = _draws(logits_V, draw.Decoding(temperature), draws)
  p_V = np.exp(logits_V.astype(np.float64) / temperature)
  p_V /= p_V.sum()
  np.testing.assert_allclose(logp_B, np.log(p_V)[token_B], atol=1e-5)
  expected_V = draws * p_V
  counts_V = np.bincount(token_B, minlength=vocabulary)
  statistic = ((counts_V - expected_V) ** 2 / expected_V).sum()
  freedom = vocabulary - 1
  assert abs(statistic - freedom) < 5 * np.sqrt(2 * freedom)


@pytest.mark.long_after_first
@pytest.mark.parametrize('top_k, top_p', [
    (1, 1.0), (7, 1.0), (0, 0.8), (0, 1e-6), (20, 0.6), (1000, 0.999)])
def test_truncation_is_that_of_transformers(top_k, top_p):
  """Which tokens are drawn, and the log-probability among them."""
  logits_V = np.random.default_rng(1).normal(0, 2, 60).astype(np.float32)
  scores_BV = torch.tensor(logits_V)[None] / 0.6
  if top_k:
    scores_BV = transformers.TopKLogitsWarper(top_k)(None, scores_BV)
  scores_BV = transformers.TopPLogitsWarper(top_p)(None, scores_BV)
  want_V = torch.log_softmax(scores_BV.double(), -1)[0].numpy()
  token_B, logp_B = _draws(logits_V, draw.Decoding(0.6, top_k, top_p), 5000)
  np.testing.assert_allclose(logp_B, want_V[token_B], atol=1e-5)
  likely = set(np.flatnonzero(want_V > np.log(0.005)))
  assert likely <= set(np.unique(token_B)) <= set(
      np.flatnonzero(np.isfinite(want_V)))


def test_ties_at_the_last_of_top_k_are_kept():
  """As in transformers: excluding some of them would be arbitrary."""
  logits_V = jnp.array([0.0, 1.0, 1.0, 1.0, -3.0])
  token_B, logp_B = _draws(logits_V, draw.Decoding(1.0, 2), 200)
  assert set(np.unique(token_B)) == {1, 2, 3}
  np.testing.assert_allclose(logp_B, -np.log(3), atol=1e-6)
