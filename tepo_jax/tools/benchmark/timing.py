"""Interleaved timing of functions that are to be compared."""

from collections.abc import Callable, Mapping
import dataclasses
import time
from typing import Any

import jax
import numpy as np


@dataclasses.dataclass(frozen=True)
class Measurement:
  """One line of a benchmark.

  name: 'part/variant/quantity', such as 'update/packed/seconds'.
  value: the median of several runs. low, high: their extremes, else None.
  unit: 's', 'token/s', 'FLOP/s', 'byte', '1' for a ratio or a share.
  """
  name: str
  value: float
  unit: str
  low: float | None = None
  high: float | None = None


def interleaved(functions: Mapping[str, Callable[[], Any]], rounds: int
                ) -> dict[str, list[float]]:
  """Returns the seconds of each call, `rounds` per function.

  A warm-up round comes first. Rounds interleave the functions, so that a noisy
  machine slows all of them alike; each call waits for its jax results.
  """
  seconds = {name: [] for name in functions}
  for index in range(rounds + 1):
    for name, function in functions.items():
      start = time.perf_counter()
      jax.block_until_ready(function())
      if index:
        seconds[name].append(time.perf_counter() - start)
  return seconds


def ratio(name: str, times: list[float], base: list[float]) -> Measurement:
  """Returns how many times longer than `base` took, by round."""
  return summary(name, [a / b for a, b in zip(times, base)], '1')


def summary(name: str, values: list[float], unit: str) -> Measurement:
  """Returns the median of several runs with their extremes."""
  return Measurement(name, float(np.median(values)), unit,
                     float(min(values)), float(max(values)))
