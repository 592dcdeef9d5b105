"""Ranges of a method's numbers: annotations of the functions' parameters.

    def my_clip(weight_BT, advantage_BT, x, *, bound: ranges.POSITIVE):

`method.read` checks a row's numbers against them.
"""

import dataclasses
import math
import numbers
from typing import Any, Callable

from tepo_jax import errors


@dataclasses.dataclass(frozen=True)
class Range:
  """What a number must be: in words, and as a test that NaN fails.

  count: how many numbers the field has; the test takes them all.
  """
  meaning: str
  test: Callable[..., bool]
  count: int = 1

  def check(self, field: str, value: Any) -> float | tuple[float, ...]:
    """The value as a float, or `count` of them; else errors.InputError."""
    is_list = self.count > 1 and isinstance(value, (tuple, list))
    values = tuple(value) if is_list else (value,)
    if (len(values) != self.count
        or not all(isinstance(x, numbers.Real) and not isinstance(x, bool)
                   for x in values) or not self.test(*values)):
      raise errors.InputError(f'{field}: {value!r} is not {self.meaning}')
    return tuple(map(float, values)) if is_list else float(value)


FINITE = Range('a finite number', math.isfinite)
AMOUNT = Range('a finite number >= 0', lambda x: 0 <= x < math.inf)
POSITIVE = Range('a number > 0', lambda x: x > 0)
ABOVE_ONE = Range('a number > 1', lambda x: x > 1)
SHARE = Range('a number in (0, 1]', lambda x: 0 < x <= 1)
BELOW = Range('a number in [0, 1] (or inf: no bound)',
              lambda x: 0 <= x <= 1 or x == math.inf)
ABOVE = Range('a number >= 0 (inf: no bound)', lambda x: x >= 0)
BAND = Range('a pair (lower, upper) of numbers, lower < upper',
             lambda lower, upper: lower < upper, count=2)
