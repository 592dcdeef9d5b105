"""Metrics against enumeration; intervals against closed forms."""

import collections
import fractions
import itertools
import math
import time

import numpy as np
import pytest

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


@pytest.mark.parametrize('n, k', [(1100, 512), (2048, 1024)])
def test_counts_above_the_largest_float(n, k):
  votes = {'right': (n // 2, 1.0), 'wrong': (n // 2, 0.0)}
  assert statistics.maj_at_k(votes, 0, k) == .5
  assert statistics.maj_at_k({'right': (n // 2, 0.5)}, n // 2, k) == (
      pytest.approx(.5))
  assert statistics.pass_at_k(n, n // 2, k) == pytest.approx(1)


def test_many_different_answers_are_counted_quickly():
  start = time.process_time()
  votes = {str(i): (1, 0.0) for i in range(100)} | {'right': (28, 1.0)}
  assert .9 < statistics.maj_at_k(votes, 128, 128) <= 1
  assert time.process_time() - start < 1


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
