"""Moments of a gradient estimator from inner products; bootstrap intervals.

Each minibatch gives one vector x_i, an independent draw whose mean is the
gradient g. The inner products G_ij = x_i . x_j are all that is needed:

    |g|^2       mean of G_ij over pairs i != j             (unbiased)
    g . h       mean of x_i . y_j over pairs i != j        (unbiased)
    tr Cov(x)   mean of G_ii, minus |g|^2                  (unbiased)

A bootstrap draws minibatches with replacement, as multiplicities w; a minibatch
drawn twice is no pair of distinct ones.

Axes: J minibatches · R resamples after the sample itself, which is row 0.
"""

import numpy as np

from tepo_jax.job import statistics

Interval = list[float] | None  # [value, low, high]; None: see `interval`


def resample(minibatches: int, resamples: int = statistics.RESAMPLES
             ) -> np.ndarray:
  """Multiplicities [1 + R, J]: all ones, then bootstrap draws."""
  drawn_RJ = np.random.default_rng(0).multinomial(
      minibatches, np.full(minibatches, 1 / minibatches), size=resamples)
  return np.concatenate([np.ones((1, minibatches)), drawn_RJ])


def pairs(weight_RJ: np.ndarray, gram_JJ: np.ndarray) -> np.ndarray:
  """The mean of x_i . y_j over pairs of distinct minibatches: [1 + R]; NaN
  where a resample has one minibatch alone."""
  twice_RJ = weight_RJ**2
  total_R = np.sum(weight_RJ @ gram_JJ * weight_RJ, 1)
  with np.errstate(invalid='ignore', divide='ignore'):
    return (total_R - twice_RJ @ np.diag(gram_JJ)) / (
        weight_RJ.sum(1)**2 - twice_RJ.sum(1))


def mean(weight_RJ: np.ndarray, total_J: np.ndarray, count_J: np.ndarray
         ) -> np.ndarray:
  """sum w total / sum w count, [1 + R]; NaN of none."""
  with np.errstate(invalid='ignore', divide='ignore'):
    return (weight_RJ @ total_J) / (weight_RJ @ count_J)


def signal_to_noise(weight_RJ: np.ndarray, gram_JJ: np.ndarray
                    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """|g|^2, tr Cov of one minibatch's vector, and their ratio, each [1 + R].

  Where the minibatches are too few to see g, |g|^2 and the ratio may be below
  0.
  """
  square_R = pairs(weight_RJ, gram_JJ)
  variance_R = mean(
      weight_RJ, np.diag(gram_JJ), np.ones(len(gram_JJ))) - square_R
  with np.errstate(invalid='ignore', divide='ignore'):
    return square_R, variance_R, square_R / variance_R


def of_gradients(weight_RJ: np.ndarray, off_JJ: np.ndarray,
                 cross_JJ: np.ndarray, on_JJ: np.ndarray
                 ) -> dict[str, np.ndarray]:
  """An estimator's moments, each [1 + R], against the on-policy gradient h.

  off, cross, on: x_i . x_j, x_i . y_j and y_i . y_j of the estimator's vectors
  x and the on-policy vectors y.

  Returns:
    square, variance, signal_to_noise: as `signal_to_noise`. cosine: of g and h.
    length: |g| / |h|. These two are NaN where |g|^2 or |h|^2 is estimated below
    0.
  """
  square_R, variance_R, ratio_R = signal_to_noise(weight_RJ, off_JJ)
  seen_R, known_R = (np.where(x > 0, x, np.nan)
                     for x in (square_R, pairs(weight_RJ, on_JJ)))
  return dict(
      square=square_R, variance=variance_R, signal_to_noise=ratio_R,
      cosine=pairs(weight_RJ, cross_JJ) / np.sqrt(seen_R * known_R),
      length=np.sqrt(seen_R / known_R))


def interval(value_R: np.ndarray) -> Interval:
  """[value, low, high], a percentile interval at `statistics.LEVEL`; None if
  some resample has no value."""
  if not np.isfinite(value_R).all():
    return None
  return [float(value_R[0]), *statistics.percentile_interval(value_R[1:])]
