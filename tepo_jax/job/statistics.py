"""Accuracies, their uncertainty, and the comparison of two models.

A set has N problems with k graded samples each. Every interval resamples
problems; the samples of a problem stay together, as they are not independent.
"""

import collections
from collections.abc import Mapping, Sequence
import math

import numpy as np
from scipy import stats

RESAMPLES = 2000
LEVEL = 0.95
POWER = 0.8


def pass_at_k(samples: int, correct: int, k: int) -> float:
  """1 − C(n − c, k) / C(n, k), unbiased (Chen et al. 2021, 2107.03374)."""
  return 1 - math.comb(samples - correct, k) / math.comb(samples, k)


def maj_at_k(votes: Mapping[str, tuple[int, float]], blanks: int, k: int
             ) -> float:
  """Returns the expected accuracy of a majority vote among k of n samples.

  The k samples are drawn without replacement. The most frequent answer wins;
  ties split; blanks do not vote, and a draw of blanks alone is wrong. The
  result is exact: for each answer and each number w of its votes, it counts
  the subsets in which no other answer has more than w votes, by the number of
  answers that tie with w.

  Args:
    votes: {answer: (number of samples, share of them that is correct)}.
    blanks: samples without an answer; n is blanks plus all answers' samples.
    k: 1 to n.
  """
  total = math.comb(blanks + sum(count for count, _ in votes.values()), k)
  expected = 0.0
  for answer, (count, accuracy) in votes.items():
    if not accuracy:
      continue
    others = [other for name, (other, _) in votes.items() if name != answer]
    for wins in range(1, min(count, k) + 1):
      ways = _ways(others, blanks, k - wins, wins)
      expected += accuracy * math.comb(count, wins) * sum(
          number / (ties + 1) for ties, number in ways.items())
  return expected / total


def _ways(others, blanks, seats, most):
  """Returns {ties: subsets of size `seats`}, no answer above `most` votes."""
  ways = collections.Counter({(0, 0): 1})  # (seats filled, ties): subsets
  for count in others:
    step = collections.Counter()
    for (filled, ties), number in ways.items():
      for taken in range(min(count, most, seats - filled) + 1):
        step[filled + taken, ties + (taken == most)] += (
            number * math.comb(count, taken))
    ways = step
  by_ties = collections.Counter()
  for (filled, ties), number in ways.items():
    by_ties[ties] += number * math.comb(blanks, seats - filled)
  return by_ties


def micro(sets: Sequence[np.ndarray]) -> float:
  """Returns the mean over all samples of all sets, each [N, k] of 0/1."""
  return (sum(float(verdict_Nk.sum()) for verdict_Nk in sets)
          / sum(verdict_Nk.size for verdict_Nk in sets))


def macro(sets: Sequence[np.ndarray]) -> float:
  """Returns the mean of the sets' means."""
  return float(np.mean([verdict_Nk.mean() for verdict_Nk in sets]))


def interval(sets: Sequence[np.ndarray], average=micro
             ) -> tuple[float, float]:
  """Returns the 95 % percentile bootstrap interval, resampling within sets."""
  return percentile_interval(_resampled(
      [verdict_Nk.mean(1) for verdict_Nk in sets],
      [verdict_Nk.size for verdict_Nk in sets], average))


def difference(first: Sequence[np.ndarray], second: Sequence[np.ndarray]
               ) -> dict[str, float]:
  """Compares two models on the same problems by the paired bootstrap.

  Returns:
    difference: second − first (`micro`); low, high: its interval; p: twice the
    share of resamples on the other side of 0, at least 1 / RESAMPLES.
  """
  means = [b_Nk.mean(1) - a_Nk.mean(1) for a_Nk, b_Nk in zip(first, second)]
  drawn = _resampled(means, [b_Nk.size for b_Nk in second], micro)
  low, high = percentile_interval(drawn)
  tail = min((drawn <= 0).mean(), (drawn >= 0).mean())
  return {'difference': micro(second) - micro(first), 'low': low, 'high': high,
          'p': float(min(1, max(2 * tail, 1 / RESAMPLES)))}


def _resampled(means, sizes, average):
  """Returns the averages [RESAMPLES] of bootstrap draws of problem means."""
  generator = np.random.default_rng(0)
  drawn = []
  for mean_N in means:
    index = generator.integers(len(mean_N), size=(RESAMPLES, len(mean_N)))
    drawn.append(mean_N[index].mean(1))
  weights = sizes if average is micro else np.ones(len(sizes))
  return np.average(drawn, axis=0, weights=weights)


def percentile_interval(drawn: np.ndarray) -> tuple[float, float]:
  """Returns the interval that holds LEVEL of the bootstrap's results."""
  low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
  return float(low), float(high)


def mcnemar(first: np.ndarray, second: np.ndarray) -> dict[str, float]:
  """Returns McNemar's exact test (1947) on verdicts [N] of the same problems.

  Returns:
    only_first, only_second: problems that only one model solves; p: of a
    two-sided binomial test against 1/2.
  """
  only_first = int((first > second).sum())
  only_second = int((second > first).sum())
  total = only_first + only_second
  p = float(stats.binomtest(only_first, total).pvalue) if total else 1.0
  return {'only_first': only_first, 'only_second': only_second, 'p': p}


def binomial_error(share: float, samples: int) -> float:
  """Returns the standard error of a share of independent samples."""
  return math.sqrt(share * (1 - share) / samples)


def over_seeds(values: Sequence[float]) -> tuple[float, float, float]:
  """Returns (mean, low, high) over the seeds of one method.

  Three or more values have Student's t interval at LEVEL, two their range, one
  itself.
  """
  x = np.asarray(values, float)
  mean = float(x.mean())
  if len(x) < 3:
    return mean, float(x.min()), float(x.max())
  half = float(stats.t.ppf(0.5 + LEVEL / 2, len(x) - 1) * x.std(ddof=1)
               / math.sqrt(len(x)))
  return mean, mean - half, mean + half


def paired_p(differences: Sequence[float]) -> float:
  """Returns p of Student's t-test that paired differences have mean 0.

  Equal differences: 1 if they are 0, else 0.
  """
  x = np.asarray(differences, float)
  if np.all(x == x[0]):
    return float(x[0] == 0)
  return float(stats.ttest_1samp(x, 0).pvalue)


def holm(p: Sequence[float]) -> list[float]:
  """Returns Holm's adjusted p-values (1979): of the i-th smallest of n, the
  largest (n − j + 1) p_j of j ≤ i, at most 1."""
  order, adjusted, largest = np.argsort(p), [0.0] * len(p), 0.0
  for rank, index in enumerate(order):
    largest = max(largest, min(1.0, (len(p) - rank) * p[index]))
    adjusted[index] = largest
  return adjusted


def seeds_needed(deviation: float, effect: float) -> int:
  """Returns the fewest pairs with which a two-sided t-test at LEVEL finds a
  mean difference of `effect` with probability POWER.

  deviation: standard deviation of the paired differences, known.
  """
  if deviation == 0:
    return 3
  pairs = 3
  while _power(pairs, effect / deviation) < POWER:
    pairs += 1
  return pairs


def _power(pairs, effect):
  """Of a two-sided t-test, by the noncentral t distribution."""
  critical = stats.t.ppf(0.5 + LEVEL / 2, pairs - 1)
  shifted = stats.nct(pairs - 1, effect * math.sqrt(pairs))
  return float(shifted.sf(critical) + shifted.cdf(-critical))
