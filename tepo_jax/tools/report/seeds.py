"""Means over seeds, with intervals, and smoothing."""

from collections.abc import Sequence
import math

import numpy as np
from scipy import stats

LEVEL = 0.95


def interval(values: Sequence[float]) -> tuple[float, float, float]:
  """Returns (mean, low, high) over seeds.

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


def smooth(values: Sequence[float], width: int) -> list[float]:
  """Returns the centred mean of `width` (odd) values, fewer at both ends."""
  half = width // 2
  return [float(np.mean(values[max(0, i - half):i + half + 1]))
          for i in range(len(values))]
