"""One problem of a data set, as every other part of the project sees it."""

import dataclasses

from tepo_jax.tasks import grading


@dataclasses.dataclass(frozen=True)
class Problem:
  """One problem. Any of `answers` counts as right.

  `unit` and `abs_error` (absolute tolerance) come with OlympiadBench golds.
  """
  id: str
  problem: str
  answers: tuple[str, ...]
  source: str
  level: str | None = None
  subject: str | None = None
  unit: str | None = None
  abs_error: float | None = None

  @property
  def golds(self) -> tuple[str | grading.Gold, ...]:
    """What `grading.Grader` takes for answers."""
    if self.unit is None and self.abs_error is None:
      return self.answers
    return tuple(grading.Gold(answer, self.unit, self.abs_error)
                 for answer in self.answers)
