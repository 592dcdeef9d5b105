"""The phases of a rollout step, and its programs, as they are planned."""

from collections.abc import Callable
import dataclasses

import jax

PHASES = ('reshard', 'rollout', 'score', 'update')


@dataclasses.dataclass(frozen=True)
class PlannedProgram:
  """A program and its part in a rollout step.

  name: its kind and array sizes. phase: one of PHASES. lower: traces it.
  runs: how often it runs in a step.
  resident: bytes per chip of arrays that are allocated while it runs and are
    not passed to it. given: bytes passed to it; XLA drops unused ones.
  largest: whether it needs the most memory of its kind.
  equivalent: how many runs of it take about as long as all programs of its
    kind; 0 if it is not the largest of its kind, None if it is the only one.
  open_trips: trip counts of its loops of unknown length, in program order,
    inner loops first.
  columns: of a decode step with pages, those that a chip reads, of all its
    slots.
  by_share: for the largest decode program under dynamic sampling, {share of
    mixed groups: (equivalent, decode steps of a rollout)}.
  syncs: for the largest decode program, how often a rollout returns to the
    host.
  age: for the largest decode program, the mean age of the tokens trained on, in
    rollout steps; 0 unless completions are carried.
  uncarried: for the largest decode program where completions are carried,
    `equivalent` of a rollout that carries none, as evaluations do.
  devices: of the mesh, in its order.
  useful: FLOPs per chip that a run must make: 2 per weight and real token,
    forward, and 4 backward, and attention; 0 if it only moves data.
  remat: of an update, what it recomputes.
  """
  name: str
  phase: str
  lower: Callable[[], jax.stages.Lowered]
  runs: float
  resident: int
  largest: bool = True
  equivalent: float | None = None
  given: int = 0
  open_trips: tuple[float, ...] = (1.0,)
  columns: float | None = None
  by_share: dict[float, tuple[float, int]] = dataclasses.field(
      default_factory=dict)
  syncs: int = 0
  age: float = 0.0
  uncarried: float | None = None
  useful: float = 0.0
  remat: str = ''
  devices: list[jax.Device] = dataclasses.field(default_factory=list)
