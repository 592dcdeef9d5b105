"""Do two models or methods differ? By problems of one evaluation, or by seeds.

Problems are resampled or paired as in `statistics`; seeds are few, and have
Student's t.
"""

from collections.abc import Sequence
import math

import numpy as np
from scipy import optimize
from scipy import stats

from tepo_jax.job import statistics

POWER = 0.8


def difference(first: Sequence[np.ndarray], second: Sequence[np.ndarray]
               ) -> dict[str, float]:
  """Compares two models on the same problems by the paired bootstrap.

  Returns:
    difference: second − first (`micro`); low, high: its interval; p: twice the
    share of resamples on the other side of 0, at least 1 / RESAMPLES.
  """
  means = [b_Nk.mean(1) - a_Nk.mean(1) for a_Nk, b_Nk in zip(first, second)]
  drawn = statistics.resampled(
      means, [b_Nk.size for b_Nk in second], statistics.micro)
  low, high = statistics.percentile_interval(drawn)
  tail = min((drawn <= 0).mean(), (drawn >= 0).mean())
  return {'difference': statistics.micro(second) - statistics.micro(first),
          'low': low, 'high': high,
          'p': float(min(1, max(2 * tail, 1 / statistics.RESAMPLES)))}


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
  half = float(stats.t.ppf(0.5 + statistics.LEVEL / 2, len(x) - 1)
               * x.std(ddof=1) / math.sqrt(len(x)))
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


def equivalence_p(differences: Sequence[float], bound: float) -> float:
  """Returns p of two one-sided t-tests (Schuirmann, 1987) that the mean of
  paired differences is not within ±bound; small: it is."""
  x = np.asarray(differences, float)
  if np.all(x == x[0]):
    return float(abs(x[0]) >= bound)
  return float(max(stats.ttest_1samp(x, -bound, alternative='greater').pvalue,
                   stats.ttest_1samp(x, bound, alternative='less').pvalue))


def detectable(deviation: float, pairs: int) -> float:
  """Returns the mean difference that a two-sided t-test at LEVEL finds with
  probability POWER in that many pairs, at least 3; deviation: as in
  `seeds_needed`."""
  most = 10 / math.sqrt(pairs)  # with 3 pairs 5.8; 3.3 are found
  return deviation * float(optimize.brentq(
      lambda effect: _power(pairs, effect) - POWER, 0, most))


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
  """Of a two-sided t-test that finds the effect's sign, by the noncentral t
  distribution."""
  critical = stats.t.ppf(0.5 + statistics.LEVEL / 2, pairs - 1)
  return float(stats.nct.sf(critical, pairs - 1, effect * math.sqrt(pairs)))
