"""Metrics against enumeration; intervals against closed forms."""

import collections
import fractions
import itertools
import math

import numpy as np
import pytest
import scipy.stats

from tepo_jax.job import statistics


@pytest.mark.parametrize('samples', [1, 5, 7])
def test_pass_at_k_is_the_share_of_subsets_with_a_correct_sample(samples):
  for correct in range(samples + 1):
    verdicts = [1] * correct + [0] * (samples - correct)
    for k in range(1, samples + 1):
      subsets = list(itertools.combinations(verdicts, k))
      want = sum(map(any, subsets)) / len(subsets)
      assert statistics.pass_at_k(samples, correct, k) == pytest.approx(want)


def test_pass_at_k_does_not_resample():
  """verl's best@k draws with replacement and gives .638 here."""
  assert statistics.pass_at_k(32, 1, 32) == 1


def _majority(subset, correct):
  """The rule itself: most votes win, ties split, None does not vote."""
  votes = collections.Counter(answer for answer in subset if answer)
  if not votes:
    return fractions.Fraction(0)
  winners = [a for a in votes if votes[a] == max(votes.values())]
  return fractions.Fraction(sum(a in correct for a in winners), len(winners))


@pytest.mark.parametrize('samples', [
    'aabbc', 'aaab', 'abcdef', 'a', '....', 'aa..bb.', 'aabbccd.', 'ab......'])
@pytest.mark.parametrize('correct', ['a', 'bd', ''])
def test_maj_at_k_is_the_mean_over_all_subsets(samples, correct):
  answers = [None if answer == '.' else answer for answer in samples]
  votes = {answer: (count, float(answer in correct))
           for answer, count in collections.Counter(answers).items() if answer}
  for k in range(1, len(answers) + 1):
    subsets = list(itertools.combinations(answers, k))
    want = sum(_majority(s, correct) for s in subsets) / len(subsets)
    assert statistics.maj_at_k(votes, answers.count(None), k) == (
        pytest.approx(float(want)))


def test_maj_at_32_of_32_is_quick_and_exact():
  votes = {str(i): (2, 0.0) for i in range(8)} | {'right': (3, 1.0)}
  assert statistics.maj_at_k(votes, 13, 32) == 1
  assert statistics.maj_at_k({'right': (16, 1.0), 'b': (16, 0.0)}, 0, 32) == .5


SETS = [np.array([[1, 0], [1, 1], [0, 0]]), np.array([[1], [0], [0], [0]])]


def test_averages():
  assert statistics.micro(SETS) == pytest.approx(4 / 10)
  assert statistics.macro(SETS) == pytest.approx((1 / 2 + 1 / 4) / 2)


def test_the_interval_of_a_share_is_the_binomials():
  """2,000 problems, one sample each: ± 1.96 √(p(1 − p)/N)."""
  verdicts = (np.arange(2000) % 10 < 3).astype(float)[:, None]
  low, high = statistics.interval([verdicts])
  half = 1.96 * math.sqrt(.3 * .7 / 2000)
  assert (low, high) == pytest.approx((.3 - half, .3 + half), abs=0.1 * half)
  assert half == pytest.approx(1.96 * statistics.binomial_error(.3, 2000))


def test_samples_of_a_problem_are_not_independent():
  """32 equal samples of a problem give the interval of one."""
  once = (np.arange(100) % 2).astype(float)[:, None]
  assert statistics.interval([np.repeat(once, 32, 1)]) == pytest.approx(
      statistics.interval([once]))


def test_macro_weighs_sets_equally():
  sure, unsure = np.ones((900, 1)), (np.arange(50) % 2).astype(float)[:, None]
  low, high = statistics.interval([sure, unsure], statistics.macro)
  half = 1.96 * math.sqrt(.25 / 50) / 2
  assert (high - low) / 2 == pytest.approx(half, rel=0.15)
  narrow = statistics.interval([sure, unsure], statistics.micro)
  assert narrow[1] - narrow[0] < (high - low) / 3


def test_a_paired_difference_is_narrower_than_two_intervals():
  first = (np.arange(400) % 2).astype(float)[:, None]
  second = first.copy()
  second[:40] = 1  # 20 problems won, none lost
  found = statistics.difference([first], [second])
  assert found['difference'] == pytest.approx(.05)
  half = 1.96 * math.sqrt(.05 * .95 / 400)
  assert found['high'] - found['low'] == pytest.approx(2 * half, rel=0.1)
  assert 0 < found['low'] and found['p'] < 0.01
  same = statistics.difference([first], [first])
  assert (same['difference'], same['p']) == (0, 1)


@pytest.mark.parametrize('lost, won, p', [
    (0, 0, 1), (1, 1, 1), (0, 5, 2 / 32), (1, 9, 2 * (1 + 10) / 1024),
    (9, 1, 2 * (1 + 10) / 1024)])
def test_mcnemar_is_the_exact_binomial_test(lost, won, p):
  first = np.array([1] * lost + [0] * won + [1, 0, 1])
  second = np.array([0] * lost + [1] * won + [1, 0, 1])
  assert statistics.mcnemar(first, second) == {
      'only_first': lost, 'only_second': won, 'p': pytest.approx(p)}


def test_holm_by_hand():
  """p sorted times 4, 3, 2, 1, made monotonic."""
  assert statistics.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx(
      [0.03, 0.06, 0.06, 0.02])
  assert statistics.holm([0.9, 0.6]) == [1.0, 1.0]
  assert statistics.holm([]) == []


def test_paired_p_is_that_of_the_interval():
  values = [0.4, 1.1, 0.2, 0.9, 1.7]
  t = np.mean(values) / (np.std(values, ddof=1) / 5 ** 0.5)
  assert statistics.paired_p(values) == pytest.approx(
      2 * scipy.stats.t.sf(t, 4))
  assert statistics.paired_p([0.0, 0.0, 0.0]) == 1
  assert statistics.paired_p([2.0, 2.0, 2.0]) == 0


@pytest.mark.parametrize('effect', [0.6, 1.0, 2.0])
def test_seeds_needed_by_simulation(effect):
  """80 % of 20,000 studies of that size see the effect; a pair less: fewer."""
  def seen(pairs):
    x = np.random.default_rng(0).normal(effect, 1, (20_000, pairs))
    return (scipy.stats.ttest_1samp(x, 0, axis=1).pvalue < 0.05).mean()
  pairs = statistics.seeds_needed(1.0, effect)
  assert seen(pairs) >= 0.79
  assert pairs == 3 or seen(pairs - 1) < 0.81
