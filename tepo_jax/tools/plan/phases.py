"""The phases of a rollout step, and its programs, as they are planned."""

from collections.abc import Callable
import dataclasses

import jax

PHASES = ('reshard', 'rollout', 'score', 'update')


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
  """A program's part in a rollout step.

  name: its kind and array sizes. phase: one of PHASES.
  runs: how often it runs in a step.
  resident: bytes per chip of arrays that are allocated while it runs and are
    not passed to it.
  equivalent: how many runs of it take about as long as all programs of its
    kind; 0 if it is not the largest of its kind, None if it is the only one.
  useful: FLOPs per chip that a run must make: 2 per weight and real token,
    forward, and 4 backward, and attention; 0 if it only moves data.
  remat: of an update, what it recomputes.

  Of the largest decode program:

  syncs: how often a rollout returns to the host.
  by_share: under dynamic sampling, {share of mixed groups: (equivalent, decode
    steps of a rollout)}.
  age: the mean age of the tokens trained on, in rollout steps; 0 unless
    completions are carried.
  uncarried: where completions are carried, `equivalent` of a rollout that
    carries none, as evaluations do.
  """
  name: str
  phase: str
  runs: float
  resident: int = 0
  equivalent: float | None = None
  useful: float = 0.0
  remat: str = ''
  syncs: int = 0
  by_share: dict[float, tuple[float, int]] = dataclasses.field(
      default_factory=dict)
  age: float = 0.0
  uncarried: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedProgram(Part):
  """A program, ready to be compiled.

  lower: traces it. given: bytes passed to it; XLA drops unused ones.
  largest: whether it needs the most memory of its kind.
  open_trips: trip counts of its loops of unknown length, in program order,
    inner loops first.
  columns: of a decode step with pages, those that a chip reads, of all its
    slots.
  """
  lower: Callable[[], jax.stages.Lowered]
  given: int = 0
  largest: bool = True
  open_trips: tuple[float, ...] = (1.0,)
  columns: float | None = None
