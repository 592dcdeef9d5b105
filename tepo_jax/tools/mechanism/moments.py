"""Moments of a gradient estimator from inner products; bootstrap intervals.

Each prompt (in `contrasts` each minibatch) gives one vector x_i, an independent
draw whose mean is the gradient g. The inner products G_ij = x_i . x_j are all
that is needed:

    |g|^2       mean of G_ij over pairs i != j             (unbiased)
    g . h       mean of x_i . y_j over pairs i != j        (unbiased)
    tr Cov(x)   mean of G_ii, minus |g|^2                  (unbiased)

Pairs of one prompt are left out of g . h too: both samples share the problem. A
bootstrap draws prompts with replacement, as multiplicities w; a prompt drawn
twice is no pair of distinct prompts.

Axes: P prompts · R resamples after the sample itself, which is row 0.
"""

import numpy as np

from tepo_jax.job import statistics

Interval = list[float] | None  # [value, low, high]; None: see `interval`


def resample(prompts: int, resamples: int = statistics.RESAMPLES
             ) -> np.ndarray:
  """Multiplicities [1 + R, P]: all ones, then bootstrap draws."""
  drawn_RP = np.random.default_rng(0).multinomial(
      prompts, np.full(prompts, 1 / prompts), size=resamples)
  return np.concatenate([np.ones((1, prompts)), drawn_RP])


def pairs(weight_RP: np.ndarray, gram_PP: np.ndarray) -> np.ndarray:
  """The mean of x_i . y_j over pairs of distinct prompts: [1 + R]; NaN where a
  resample has one prompt alone."""
  twice_RP = weight_RP**2
  total_R = np.sum(weight_RP @ gram_PP * weight_RP, 1)
  with np.errstate(invalid='ignore', divide='ignore'):
    return (total_R - twice_RP @ np.diag(gram_PP)) / (
        weight_RP.sum(1)**2 - twice_RP.sum(1))


def mean(weight_RP: np.ndarray, total_P: np.ndarray, count_P: np.ndarray
         ) -> np.ndarray:
  """sum w total / sum w count, as of tokens by prompt: [1 + R]; NaN of none."""
  with np.errstate(invalid='ignore', divide='ignore'):
    return (weight_RP @ total_P) / (weight_RP @ count_P)


def of_gradients(weight_RP: np.ndarray, off_PP: np.ndarray,
                 cross_PP: np.ndarray, on_PP: np.ndarray
                 ) -> dict[str, np.ndarray]:
  """An estimator's moments, each [1 + R], against the on-policy gradient h.

  off, cross, on: x_i . x_j, x_i . y_j and y_i . y_j of the estimator's vectors
  x and the on-policy vectors y. Where |g|^2 is estimated below 0, the vectors
  are too few to see g: NaN.

  Returns:
    square: |g|^2. variance: tr Cov of one prompt's vector. noise: their ratio,
    the number of prompts whose mean is half noise. cosine: of g and h. length:
    |g| / |h|.
  """
  square_R, target_R = pairs(weight_RP, off_PP), pairs(weight_RP, on_PP)
  variance_R = mean(weight_RP, np.diag(off_PP), np.ones(len(off_PP))) - square_R
  seen_R, known_R = (np.where(x > 0, x, np.nan) for x in (square_R, target_R))
  return dict(
      square=square_R, variance=variance_R, noise=variance_R / seen_R,
      cosine=pairs(weight_RP, cross_PP) / np.sqrt(seen_R * known_R),
      length=np.sqrt(seen_R / known_R))


def correlation(weight_RP: np.ndarray, x_PN: np.ndarray, y_PN: np.ndarray,
                mask_PN: np.ndarray) -> np.ndarray:
  """Pearson's correlation over the N tokens of each prompt: [1 + R]."""
  def average(value_PN):
    return mean(weight_RP, np.sum(value_PN * mask_PN, 1), mask_PN.sum(1))

  # Centred by the sample's own means, so that nothing cancels.
  with np.errstate(invalid='ignore', divide='ignore'):
    x_PN, y_PN = (z - np.sum(z * mask_PN) / mask_PN.sum() for z in (x_PN, y_PN))
    x_R, y_R = average(x_PN), average(y_PN)
    spread_R = (average(x_PN**2) - x_R**2) * (average(y_PN**2) - y_R**2)
    return (average(x_PN * y_PN) - x_R * y_R) / np.sqrt(spread_R)


def interval(value_R: np.ndarray) -> Interval:
  """[value, low, high], a percentile interval at `statistics.LEVEL`; None if
  some resample has no value."""
  if not np.isfinite(value_R).all():
    return None
  return [float(value_R[0]), *statistics.percentile_interval(value_R[1:])]
