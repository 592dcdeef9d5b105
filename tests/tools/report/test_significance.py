"""Tests of significance against closed forms, scipy and simulation."""

import math

import numpy as np
import pytest
import scipy.stats

from tepo_jax.tools.report import significance


def test_the_error_of_a_share():
  assert significance.binomial_error(.3, 2000) == pytest.approx(
      math.sqrt(.3 * .7 / 2000))


def test_a_paired_difference_is_narrower_than_two_intervals():
  first = (np.arange(400) % 2).astype(float)[:, None]
  second = first.copy()
  second[:40] = 1  # 20 problems won, none lost
  found = significance.difference([first], [second])
  assert found['difference'] == pytest.approx(.05)
  half = 1.96 * math.sqrt(.05 * .95 / 400)
  assert found['high'] - found['low'] == pytest.approx(2 * half, rel=0.1)
  assert 0 < found['low'] and found['p'] < 0.01
  same = significance.difference([first], [first])
  assert (same['difference'], same['p']) == (0, 1)


@pytest.mark.parametrize('lost, won, p', [
    (0, 0, 1), (1, 1, 1), (0, 5, 2 / 32), (1, 9, 2 * (1 + 10) / 1024),
    (9, 1, 2 * (1 + 10) / 1024)])
def test_mcnemar_is_the_exact_binomial_test(lost, won, p):
  first = np.array([1] * lost + [0] * won + [1, 0, 1])
  second = np.array([0] * lost + [1] * won + [1, 0, 1])
  assert significance.mcnemar(first, second) == {
      'only_first': lost, 'only_second': won, 'p': pytest.approx(p)}


def test_holm_by_hand():
  """p sorted times 4, 3, 2, 1, made monotonic."""
  assert significance.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx(
      [0.03, 0.06, 0.06, 0.02])
  assert significance.holm([0.9, 0.6]) == [1.0, 1.0]
  assert significance.holm([]) == []


def test_paired_p_is_that_of_the_interval():
  values = [0.4, 1.1, 0.2, 0.9, 1.7]
  t = np.mean(values) / (np.std(values, ddof=1) / 5 ** 0.5)
  assert significance.paired_p(values) == pytest.approx(
      2 * scipy.stats.t.sf(t, 4))
  assert significance.paired_p([0.0, 0.0, 0.0]) == 1
  assert significance.paired_p([2.0, 2.0, 2.0]) == 0


@pytest.mark.parametrize('effect', [0.6, 1.0, 2.0])
def test_seeds_needed_by_simulation(effect):
  """80 % of 20,000 studies of that size see the effect; a pair less: fewer."""
  def seen(pairs):
    x = np.random.default_rng(0).normal(effect, 1, (20_000, pairs))
    return (scipy.stats.ttest_1samp(x, 0, axis=1).pvalue < 0.05).mean()
  pairs = significance.seeds_needed(1.0, effect)
  assert seen(pairs) >= 0.79
  assert pairs == 3 or seen(pairs - 1) < 0.81


@pytest.mark.parametrize('mean', [0.1, 1.2, -0.9])
def test_equivalence_is_the_one_sided_test_of_the_nearer_bound(mean, bound=1):
  x = mean + np.array([-0.3, 0.1, 0.4, -0.2, 0.0])
  error = np.std(x, ddof=1) / len(x) ** 0.5
  expected = scipy.stats.t.sf((bound - abs(mean)) / error, len(x) - 1)
  assert significance.equivalence_p(x, bound) == pytest.approx(expected)


def test_equal_differences_are_equivalent_within_the_bound_only():
  assert significance.equivalence_p([0.5] * 3, 1) == 0
  assert significance.equivalence_p([1.0] * 3, 1) == 1


@pytest.mark.parametrize('pairs', [4, 8])
def test_a_detectable_difference_by_simulation(pairs):
  effect = significance.detectable(2.0, pairs)
  x = np.random.default_rng(0).normal(effect, 2, (40_000, pairs))
  seen = (scipy.stats.ttest_1samp(x, 0, axis=1).pvalue < 0.05).mean()
  assert seen == pytest.approx(0.8, abs=0.01)
