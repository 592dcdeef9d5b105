"""A rollout step on a slice: does it fit, what does it take, what bounds it.

The roofline of a program is the larger of two times: of its instructions one
after another, each bound by arithmetic or by memory, and of its communication.
No program reaches it: seconds are predicted as the roofline over EFFICIENCY.
"""

from concurrent import futures
import dataclasses
import os
import re
import sys
import time

import jax
import ml_collections

from tepo_jax.job import memory as memory_lib
from tepo_jax.job import programs as programs_lib
from tepo_jax.runtime import mesh as mesh_lib
from tepo_jax.tools.benchmark import workload as workload_lib
from tepo_jax.tools.plan import chips
from tepo_jax.tools.plan import cost as cost_lib
from tepo_jax.tools.plan import programs as plan_programs_lib

# Well-kept programs elsewhere reach 45 to 65 % of a TPU's FLOP/s in training
# (MaxText), 37 to 52 % of its bandwidth in decoding (vLLM, SGLang), counted
# from what must be computed and read; the roofline here counts what is.
EFFICIENCY = 0.6

_COMPILERS = 4  # at a time, at most: each takes gigabytes
_TRIES = 6  # to find the slots that fit
_SHRINK = 0.8


@dataclasses.dataclass(frozen=True)
class Estimate:
  """A compiled program on one chip. Bytes, FLOPs and seconds of one run.

  resident: what else the run holds. hbm: all of that, outputs and code.
  failure: what the compiler says where it does not fit, else None.
  """
  name: str
  phase: str
  runs: float
  equivalent: float
  arguments: int = 0
  temporaries: int = 0
  resident: int = 0
  hbm: int = 0
  flops: float = 0.0
  hbm_bytes: float = 0.0
  wire_bytes: dict[str, float] = dataclasses.field(default_factory=dict)
  collectives: dict[str, float] = dataclasses.field(default_factory=dict)
  roofline: float = 0.0
  bound: str = ''
  compile_seconds: float = 0.0
  failure: str | None = None


@dataclasses.dataclass(frozen=True)
class Plan:
  """A step on a slice under one mesh.

  slots: completions decoded at one time. tokens: sampled in a step.
  seconds: predicted, by phase. fits: every program's hbm is within the chip's.
  """
  slice: chips.Slice
  mesh: dict[str, int]
  slots: int
  tokens: int
  estimates: list[Estimate]

  @property
  def worst(self) -> Estimate:
    return max(self.estimates, key=lambda e: (e.failure is not None, e.hbm))

  @property
  def fits(self) -> bool:
    worst = self.worst
    return worst.failure is None and worst.hbm <= self.slice.chip.hbm_bytes

  @property
  def seconds(self) -> dict[str, float]:
    return {phase: sum(e.runs * e.roofline for e in self.estimates
                       if e.phase == phase) / EFFICIENCY
            for phase in plan_programs_lib.PHASES}

  @property
  def brief_seconds(self) -> float:
    """The step from the largest programs alone, so that meshes compare."""
    return sum(e.equivalent * e.roofline for e in self.estimates) / EFFICIENCY

  @property
  def tokens_per_second_a_chip(self) -> float:
    return self.tokens / sum(self.seconds.values()) / len(self.slice.devices)


def make(config: ml_collections.ConfigDict, workload: workload_lib.Workload,
         slice_: chips.Slice, shape: dict[str, int], brief: bool = False
         ) -> Plan:
  """The plan of a mesh, with the slots of the config or as many as fit.

  Raises:
    errors.InputError: a mesh that the slice or the model does not allow.
  """
  mesh = mesh_lib.make(shape, slice_.devices)
  wanted = config.rollout.slots
  slots = wanted or min(config.rollout.prompts * config.rollout.samples,
                        _guess(config, workload, mesh, slice_.chip))
  for _ in range(_TRIES):
    programs = plan_programs_lib.of_step(config, workload, mesh, slots, brief)
    plan = _empty(workload, slice_, mesh, slots)
    _estimate(plan, [p for p in programs if p.name.startswith('decode')
                     and p.largest])
    if plan.fits or wanted:
      break
    _say(f'{slots} slots do not fit')
    slots = max(1, int(slots * _SHRINK))
    slots += -slots % mesh_lib.batch_shards(mesh)
  # Where the largest do not fit, nothing else is compiled.
  for largest in (True, False):
    if plan.fits:
      done = {estimate.name for estimate in plan.estimates}
      _estimate(plan, [p for p in programs
                       if p.largest == largest and p.name not in done])
  return plan


def _empty(workload, slice_, mesh, slots):
  length_B = workload.lengths(workload.prompts * workload.samples)
  return Plan(slice_, dict(mesh.shape), slots, int(length_B.sum()), [])


def _estimate(plan, programs):
  """Adds the programs' estimates, of several at a time."""
  with futures.ThreadPoolExecutor(min(_COMPILERS, os.cpu_count())) as threads:
    plan.estimates.extend(threads.map(
        lambda program: _compile(program, plan.slice.chip), programs))


def _guess(config, workload, mesh, chip):
  """Slots that leave room for what decoding needs beside the cache."""
  shards = mesh_lib.batch_shards(mesh)
  reference = plan_programs_lib.of_step(config, workload, mesh, shards)
  held = max(p.resident for p in reference if p.name.startswith('insert'))
  model = programs_lib.execution(workload.model, config.compute, mesh)
  shapes = plan_programs_lib.sampling_shapes(config, model, mesh, shards)
  slot = memory_lib.slot_bytes(model, mesh, shapes.columns[-1])
  return max(1, int(_SHRINK * (chip.hbm_bytes - held) / slot)) * shards


def _compile(program: plan_programs_lib.Program, chip: chips.Chip) -> Estimate:
  """Compiles a program and reads its costs off."""
  known = dict(name=program.name, phase=program.phase, runs=program.runs,
               resident=program.resident, equivalent=(
                   program.runs if program.equivalent is None
                   else program.equivalent))
  start = time.perf_counter()
  try:
    compiled = program.lower().compile()
  except jax.errors.JaxRuntimeError as error:
    if 'RESOURCE_EXHAUSTED' not in str(error):
      raise
    return Estimate(**known, failure=_reason(error),
                    compile_seconds=time.perf_counter() - start)
  seconds = time.perf_counter() - start
  _say(f'{program.name}: compiled in {seconds:.0f} s')
  memory = compiled.memory_analysis()
  unused = max(0, program.given - memory.argument_size_in_bytes)
  known['resident'] += unused
  used = (memory.argument_size_in_bytes + memory.output_size_in_bytes
          - memory.alias_size_in_bytes + memory.temp_size_in_bytes
          + memory.generated_code_size_in_bytes)
  cost = cost_lib.of(compiled.as_text(), program.open_trips)
  roofline, bound = _roofline(cost, chip)
  return Estimate(
      **known, arguments=memory.argument_size_in_bytes,
      temporaries=memory.temp_size_in_bytes, hbm=used + known['resident'],
      flops=cost.flops, hbm_bytes=cost.hbm_bytes,
      wire_bytes=dict(cost.wire_bytes), collectives=dict(
          cost.collective_counts), roofline=roofline, bound=bound,
      compile_seconds=seconds)


def _roofline(cost, chip):
  """Seconds, and what takes the largest part of them."""
  sent = sum(cost.wire_bytes.values()) / chip.ici_bandwidth
  busy = cost.seconds(chip.flops, chip.hbm_bandwidth)
  parts = {'compute': cost.flops / chip.flops,
           'memory': cost.hbm_bytes / chip.hbm_bandwidth, 'network': sent}
  return max(busy, sent), max(parts, key=parts.get)


def _reason(error):
  """The compiler's own numbers: '… 20.1G … exceeds … (15.75G)'."""
  text = ' '.join(str(error).split())
  found = re.search(r'(Ran out of memory|Used \S+ of|total memory required).*?'
                    r'(hbm|HBM)[^.]*(\.\d+\w+[^.]*)*\.', text)
  return found[0] if found else text[:300]


def _say(text):
  print(text, file=sys.stderr, flush=True)
