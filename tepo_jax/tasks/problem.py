"""A problem of a data set."""

import dataclasses
from typing import Any

from tepo_jax.tasks import grading


@dataclasses.dataclass(frozen=True)
class Problem:
  """One problem; a correct answer is equivalent to any of `answers`.

  OlympiadBench adds `unit` and `abs_error` (an absolute tolerance). `row` has
  all columns as they were read, for a reward function; None for embedded
  tasks. It counts neither in comparisons nor in hashes.
  """
  id: str
  problem: str
  answers: tuple[str, ...]
  source: str
  level: str | None = None
  subject: str | None = None
  unit: str | None = None
  abs_error: float | None = None
  row: dict[str, Any] | None = dataclasses.field(
      default=None, compare=False, repr=False)

  @property
  def references(self) -> tuple[str | grading.Reference, ...]:
    """The reference answers as `grading.Grader` takes them."""
    if self.unit is None and self.abs_error is None:
      return self.answers
    return tuple(grading.Reference(answer, self.unit, self.abs_error)
                 for answer in self.answers)
