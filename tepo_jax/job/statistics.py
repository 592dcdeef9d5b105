"""Accuracies of graded samples, and their uncertainty.

A set has N problems with k graded samples each. Every interval resamples
problems; the samples of a problem stay together, as they are not independent.
"""

import collections
from collections.abc import Mapping, Sequence
import fractions
import math

import numpy as np

RESAMPLES = 2000
LEVEL = 0.95


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
  expected = fractions.Fraction(0)  # counts may be above the largest float
  for answer, (count, accuracy) in votes.items():
    if not accuracy:
      continue
    others = [other for name, (other, _) in votes.items() if name != answer]
    for wins in range(1, min(count, k) + 1):
      ways = _ways(others, blanks, k - wins, wins)
      expected += fractions.Fraction(accuracy) * math.comb(count, wins) * sum(
          fractions.Fraction(number, ties + 1) for ties, number in ways.items())
  return float(expected / total)


def _ways(others, blanks, seats, most):
  """Returns {ties: subsets of size `seats`}, no answer above `most` votes."""
  # Answers below `most` can neither win nor tie: like blanks, they fill seats.
  blanks += sum(count for count in others if count < most)
  ways = collections.Counter({(0, 0): 1})  # (seats filled, ties): subsets
  for count in filter(most.__le__, others):
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
  return percentile_interval(resampled(
      [verdict_Nk.mean(1) for verdict_Nk in sets],
      [verdict_Nk.size for verdict_Nk in sets], average))


def resampled(means: Sequence[np.ndarray], sizes: Sequence[int], average
              ) -> np.ndarray:
  """Returns the averages [RESAMPLES] of bootstrap draws of problem means.

  means, sizes: of each set, [N] and its samples. average: `micro` or `macro`.
  """
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
