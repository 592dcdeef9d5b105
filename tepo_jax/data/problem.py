"""A problem of a data set."""

import dataclasses
from typing import Any

from tepo_jax import grading


@dataclasses.dataclass(frozen=True)
class Problem:
  """One problem; a correct answer is equivalent to any of `answers`.

  OlympiadBench adds `unit` and `abs_error` (an absolute tolerance). With
  `numbers`, a correct answer is an expression of them (`countdown`). `turns`
  are the (role, text) of a conversation before the problem, its last turn.
  `number` is the row's, from 1; `row` has all columns as they were read, for a
  reward function. Both are None for embedded tasks and count neither in
  comparisons nor in hashes.
  """
  id: str
  problem: str
  answers: tuple[str, ...]
  source: str
  level: str | None = None
  subject: str | None = None
  unit: str | None = None
  abs_error: float | None = None
  numbers: tuple[int, ...] | None = None
  turns: tuple[tuple[str, str], ...] = ()
  number: int | None = dataclasses.field(
      default=None, compare=False, repr=False)
  row: dict[str, Any] | None = dataclasses.field(
      default=None, compare=False, repr=False)

  @property
  def text(self) -> str:
    """All turns, by which problems are compared."""
    return '\n\n'.join((*(text for _, text in self.turns), self.problem))

  @property
  def columns(self) -> dict[str, Any]:
    """The whole row, or what there is of one, for a reward function."""
    if self.row is not None:
      return self.row
    columns = {'problem': self.problem, 'answers': list(self.answers)}
    if self.numbers is not None:
      columns['numbers'] = list(self.numbers)
    return columns

  @property
  def references(self) -> tuple[grading.Reference, ...]:
    """The reference answers as `grading.Grader` takes them."""
    return tuple(grading.Reference(
        answer, self.unit, self.abs_error, self.numbers, self.problem)
                 for answer in self.answers)
