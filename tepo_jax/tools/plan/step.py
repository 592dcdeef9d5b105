"""Plans a rollout step on a slice: memory, time, and what bounds each program.

The roofline of a program is the time of the compiler's schedule: the sum over
its instructions, each bound by arithmetic or by memory, and the waits for
communication that they do not hide. No program reaches it: predicted seconds
are the roofline divided by the efficiencies of `published`.
"""

from collections.abc import Sequence
from concurrent import futures
import contextlib
import dataclasses
import functools
import math
import os

import jax
import ml_collections

from tepo_jax import errors
from tepo_jax.job import memory as memory_lib
from tepo_jax.job import programs as programs_lib
from tepo_jax.job import slots as slots_lib
from tepo_jax.runtime import mesh as mesh_lib
from tepo_jax.tools import workload as workload_lib
from tepo_jax.tools.plan import chips
from tepo_jax.tools.plan import compilation
from tepo_jax.tools.plan import compiling
from tepo_jax.tools.plan import cost as cost_lib
from tepo_jax.tools.plan import kernels
from tepo_jax.tools.plan import phases
from tepo_jax.tools.plan import published
from tepo_jax.tools.plan import timeline
from tepo_jax.tools.plan import training

BOUNDS = ('low', 'mid', 'high')  # of predicted seconds
# The time from the end of a chunk of decode steps to the start of the next, in
# which the host reads tokens and refills slots: an assumption.
HOST_SYNC = dict(zip(BOUNDS, (0.5e-3, 1e-3, 5e-3)))
# The phase of `published` whose efficiency a kind of program has; the others
# read and write memory, as decoding does.
_EFFICIENCY_OF = {'update': 'update', 'score': 'score', 'old states': 'score',
                  'prefill': 'prefill'}

_COMPILERS = 4  # at a time: each needs gigabytes
_TRIES = 6  # to find a number of slots that fits
_SHRINK = 0.8
_TENSOR = (1, 2, 4, 8)  # sizes of the mesh axis to compare


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate(phases.Part):
  """Memory and cost of one run of a compiled program, per chip.

  efficiency: of programs like it.
  arguments, temporaries: bytes. hbm: these, `resident`, outputs and code.
  roofline, compile_seconds: seconds. waits: of the roofline, for communication.
  bound: 'compute', 'memory' or 'network'.
  failure: the compiler's message if the program does not fit, else None.
  uncounted: bytes of custom calls of unknown work, by name; of all their runs.
  """
  efficiency: published.Efficiency
  arguments: int = 0
  temporaries: int = 0
  hbm: int = 0
  flops: float = 0.0
  hbm_bytes: float = 0.0
  wire_bytes: dict[str, float] = dataclasses.field(default_factory=dict)
  collectives: dict[str, float] = dataclasses.field(default_factory=dict)
  roofline: float = 0.0
  waits: float = 0.0
  bound: str = ''
  compile_seconds: float = 0.0
  failure: str | None = None
  uncounted: dict[str, float] = dataclasses.field(default_factory=dict)

  def seconds(self, runs: float, bound: str) -> float:
    """Predicted seconds of runs; `bound` is of BOUNDS, 'low' the fastest."""
    efficiency = getattr(
        self.efficiency, {'low': 'high', 'high': 'low'}.get(bound, bound))
    return (runs * self.roofline / efficiency
            + self.syncs * HOST_SYNC[bound])


@dataclasses.dataclass(frozen=True)
class StepPlan:
  """A rollout step on a slice under one mesh.

  mesh, decoding: of training, and of sampling on the same chips.
  slots: completions decoded at a time. tokens: sampled in a step.
  state_bytes: per chip, of what a checkpoint holds. free: bytes of a chip from
    which pages are taken.
  fits: whether every program fits a chip's HBM.
  brief: whether it has the largest program of each kind only, which then stands
    for all of its kind.
  """
  slice: chips.Slice
  mesh: dict[str, int]
  decoding: dict[str, int]
  slots: int
  tokens: int
  estimates: list[Estimate]
  brief: bool = False
  state_bytes: int = 0
  free: float = 0.0

  @property
  def worst(self) -> Estimate:
    return max(self.estimates, key=lambda e: (e.failure is not None, e.hbm))

  @property
  def fits(self) -> bool:
    worst = self.worst
    return worst.failure is None and worst.hbm <= self.slice.chip.hbm_bytes

  def seconds(self, bound: str = 'mid', brief: bool | None = None
              ) -> dict[str, float]:
    """Predicted seconds by phase.

    brief: from the largest programs only, to compare meshes; None: if the plan
    has no others.
    """
    brief = self.brief if brief is None else brief
    return {phase: sum(
        e.seconds(e.equivalent if brief else e.runs, bound)
        for e in self.estimates if e.phase == phase)
            for phase in phases.PHASES}

  def total(self, bound: str = 'mid', brief: bool | None = None) -> float:
    """Predicted seconds of a step."""
    return sum(self.seconds(bound, brief).values())

  @property
  def roofline(self) -> float:
    """Seconds of a step at the data sheet's rates."""
    return sum(e.roofline * (e.equivalent if self.brief else e.runs)
               for e in self.estimates)

  @property
  def rollout_by_share(self) -> dict[float, tuple[dict[str, float], int]]:
    """{share of mixed groups: ({bound: seconds}, decode steps) of a rollout}.

    The seconds of the planned rollout, scaled by the bytes that decode steps
    read; empty without dynamic sampling.
    """
    return {
        share: ({bound: self.seconds(bound)['rollout'] * equivalent
                 / estimate.equivalent for bound in BOUNDS}, steps)
        for estimate in self.estimates
        for share, (equivalent, steps) in estimate.by_share.items()}

  def uncarried_rollout(self, bound: str) -> float:
    """Predicted seconds of a rollout that carries no completions: those of the
    planned rollout, if it carries some scaled as in `rollout_by_share`."""
    return self.seconds(bound)['rollout'] * math.prod(
        e.uncarried / e.equivalent for e in self.estimates if e.uncarried)

  @property
  def age(self) -> float:
    """Of the tokens trained on, see `phases.Part`."""
    return max(e.age for e in self.estimates)

  @property
  def tokens_per_second_a_chip(self) -> float:
    return self.tokens / self.total() / len(self.slice.devices)


def make(config: ml_collections.ConfigDict, workload: workload_lib.Workload,
         slice_: chips.Slice, shape: dict[str, int], brief: bool = False
         ) -> StepPlan:
  """Plans a step on a mesh, with the config's slots or as many as fit.

  brief: compile only the largest program of each kind.

  Raises:
    errors.InputError: the mesh does not suit the slice or the model.
  """
  fitting, updates = fitted(
      config, workload, slice_, mesh_lib.make(shape, slice_.devices))
  mesh, decoding = fitting.mesh, fitting.decoding[1]
  wanted = config.rollout.slots
  free = slice_.chip.hbm_bytes - compiling.held_bytes(fitting)
  slots = wanted or _guess(config, fitting, free)
  for _ in range(_TRIES):
    programs = compiling.step_programs(
        config, workload, fitting, slots, brief, free)
    tokens = int(workload.lengths(workload.prompts * workload.samples).sum())
    plan = StepPlan(slice_, dict(mesh.shape), dict(decoding.shape), slots,
                    tokens, list(updates), brief, mesh_lib.device_bytes(
                        programs_lib.abstract_state(fitting)), free)
    _estimate(plan, mesh, [p for p in programs if p.largest
                           and p.name.startswith('decode')])
    if plan.fits or wanted or plan.worst in updates:
      break
    errors.note(f'{slots} slots do not fit')
    slots, free = max(1, int(slots * _SHRINK)), free * _SHRINK
    slots += -slots % mesh_lib.batch_shards(decoding)
  # If the largest programs do not fit, no others are compiled.
  for largest in (True, False):
    if plan.fits:
      done = {estimate.name for estimate in plan.estimates}
      _estimate(plan, mesh, [p for p in programs if p.largest == largest
                             and p.name not in done])
  names = [program.name for program in programs]
  plan.estimates.sort(key=lambda e: names.index(e.name))
  return plan


def fitted(config: ml_collections.ConfigDict, workload: workload_lib.Workload,
           slice_: chips.Slice, mesh: jax.sharding.Mesh
           ) -> tuple[programs_lib.TrainingPrograms, list[Estimate]]:
  """The programs of a run, and for compute.remat='auto', which is chosen as a
  run does (`memory.fitted`), the estimate of the update."""
  estimates = {}

  def size_of(programs):
    update, = (p for p in training.planned(
        config, workload, programs, programs_lib.update_arguments(programs))
               if p.name == 'update')
    found = estimates[programs.model.remat] = estimate(
        update, slice_.ordered(mesh))
    return math.inf if found.failure else found.hbm

  limit = slice_.chip.hbm_bytes
  programs, _ = memory_lib.fitted(config, compiling.make_programs(
      config, workload, mesh, limit), size_of, limit=limit)
  return programs, [estimates[name] for name in estimates
                    if name == programs.model.remat]


def compare_meshes(config: ml_collections.ConfigDict,
                   workload: workload_lib.Workload, planned: StepPlan
                   ) -> list[StepPlan]:
  """Returns `planned` and brief plans of other meshes, fastest first.

  The others shard parameters over all chips (`data` is 1), with sizes of
  `tensor` that divide the heads, for sampling too.
  """
  config = config.copy_and_resolve_references()
  config.rollout.tensor = None
  plans, count = [planned], len(planned.slice.devices)
  for tensor in _TENSOR:
    mesh = {'data': 1, 'fsdp': count // tensor, 'tensor': tensor}
    if (count % tensor or workload.model.num_heads % tensor
        or mesh == planned.mesh):
      continue
    with contextlib.suppress(errors.InputError):  # not a divisor of some size
      plans.append(make(config, workload, planned.slice, mesh, brief=True))
  return sorted(plans, key=lambda plan: (
      not plan.fits, plan.total(brief=True)))


def best_of_two(plans: Sequence[StepPlan]
                ) -> tuple[StepPlan, StepPlan, float] | None:
  """The plan that samples fastest, the one that does the rest fastest, and the
  seconds of a step of both; None if a single plan is as fast.

  Whether both fit together, a plan with `mesh` of the one and `rollout.tensor`
  of the other has to show.
  """
  def rollout_of(plan):
    return plan.seconds(brief=True)['rollout']

  def rest(plan):
    return plan.total(brief=True) - rollout_of(plan)

  plans = [plan for plan in plans if plan.fits]
  if not plans:
    return None
  rollout, update = min(plans, key=rollout_of), min(plans, key=rest)
  if rollout.decoding == update.decoding:
    return None
  return rollout, update, rollout_of(rollout) + rest(update)


def _estimate(plan, mesh, programs):
  """Adds the programs' estimates; compiles several programs at a time."""
  slice_ = plan.slice.ordered(mesh)
  with futures.ThreadPoolExecutor(min(_COMPILERS, os.cpu_count())) as threads:
    plan.estimates.extend(threads.map(
        lambda program: estimate(program, slice_), programs))


def _guess(config, programs, free):
  """Estimates how many slots fit into `free` bytes of a chip."""
  if config.rollout.cache == 'pages':
    return compiling.sampling_shapes(
        config, programs.decoding, None, free).slots[-1]
  return slots_lib.fitting_slots(
      *programs.decoding,
      functools.partial(compiling.sampling_shapes, config, programs.decoding),
      config.rollout.prompts * config.rollout.samples, free)


def estimate(program: phases.PlannedProgram, slice_: chips.Slice
             ) -> Estimate:
  """Compiles a program and estimates its costs; slice_: in the order of the
  program's mesh."""
  known = {field.name: getattr(program, field.name)
           for field in dataclasses.fields(phases.Part)}
  if program.equivalent is None:
    known['equivalent'] = program.runs
  known['efficiency'] = published.efficiency(
      phase_of(program.name),
      published.name_of(slice_.chip.kind) or slice_.chip.kind)
  found = compilation.compiled(program.name, program.lower(), slice_)
  known['compile_seconds'] = found.seconds
  if found.failure:
    return Estimate(**known, failure=found.failure)
  memory = found.memory
  if not slice_.is_here:  # there XLA knows it
    memory = memory._replace(
        temporaries=memory.temporaries + kernels.cudnn_workspace(found.text))
  known['resident'] += max(0, program.given - memory.arguments)
  cost = cost_lib.of(found.text, program.open_trips, program.columns)
  work, waits = timeline.seconds(cost.events, slice_)
  return Estimate(
      **known, arguments=memory.arguments, temporaries=memory.temporaries,
      hbm=sum(memory) + known['resident'], flops=cost.flops,
      hbm_bytes=cost.hbm_bytes,
      wire_bytes=dict(cost.wire_bytes),
      collectives=dict(cost.collective_counts), roofline=work + waits,
      waits=waits, bound=_bound(cost, waits, slice_.chip),
      uncounted=dict(cost.uncounted))


def phase_of(name: str) -> str:
  """The phase of `published` whose efficiency a program of this name has."""
  return next((phase for start, phase in _EFFICIENCY_OF.items()
               if name.startswith(start)), 'decode')


def share_of_peak(flops: float, e: Estimate, chip: chips.Chip) -> float:
  """Returns the share of the chip's FLOP/s that `flops` take in the predicted
  time of a run."""
  return flops and flops / (chip.flops * e.roofline / e.efficiency.mid)


def _bound(cost, waits, chip):
  """Returns which of three resources takes the most time."""
  parts = {'compute': cost.flops / chip.flops,
           'memory': cost.hbm_bytes / chip.hbm_bandwidth, 'network': waits}
  return max(parts, key=parts.get)
