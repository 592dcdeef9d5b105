"""Times of functions run in turn, so that they can be compared."""

from collections.abc import Callable, Mapping
import dataclasses
import resource
import time
from typing import Any

import jax
import numpy as np


@dataclasses.dataclass(frozen=True)
class Measurement:
  """One line of a benchmark.

  name: 'what/of which/quantity', such as 'update/packed/seconds'.
  value: the median where there were several runs.
  unit: 's', 'token/s', 'FLOP/s', 'byte', '1' for a ratio or a share.
  low, high: the extremes of several runs, else None.
  """
  name: str
  value: float
  unit: str
  low: float | None = None
  high: float | None = None


def interleaved(functions: Mapping[str, Callable[[], Any]], rounds: int
                ) -> dict[str, list[float]]:
  """Seconds of each function, called in turn `rounds` times after a warm-up.

  What a function returns is waited for where it is of jax. In turn, so that
  whatever else the machine does falls on all of them alike.
  """
  seconds = {name: [] for name in functions}
  for index in range(rounds + 1):
    for name, function in functions.items():
      start = time.perf_counter()
      jax.block_until_ready(function())
      if index:
        seconds[name].append(time.perf_counter() - start)
  return seconds


def summary(name: str, values: list[float], unit: str) -> Measurement:
  """The median of several runs, with the extremes."""
  return Measurement(name, float(np.median(values)), unit,
                     float(min(values)), float(max(values)))


def peak_resident_bytes() -> int:
  """The most memory that this process has held, its peers' share included."""
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
