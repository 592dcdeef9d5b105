"""Compares a plan's memory with programs compiled on the devices themselves."""

from collections.abc import Sequence
import dataclasses

import jax
import ml_collections

from tepo_jax import errors
from tepo_jax.runtime import mesh as mesh_lib
from tepo_jax.tools import workload as workload_lib
from tepo_jax.tools.plan import chips
from tepo_jax.tools.plan import compiling
from tepo_jax.tools.plan import gpus
from tepo_jax.tools.plan import step


@dataclasses.dataclass(frozen=True)
class ProgramMemory:
  """Bytes of a program's arguments and temporaries, predicted and found."""
  name: str
  predicted: tuple[int, int]
  found: tuple[int, int]


def require(slice_: chips.Slice, devices: Sequence[jax.Device]) -> None:
  """Raises errors.InputError unless the devices are of the slice's kind, and as
  many."""
  planned = slice_.devices
  if len(devices) != len(planned) or {d.device_kind for d in devices} != {
      d.device_kind for d in planned}:
    raise errors.InputError(
        f'--check: the plan is for {len(planned)} x {planned[0].device_kind}, '
        f'and there are {len(devices)} x {devices[0].device_kind}')


def compare(config: ml_collections.ConfigDict, workload: workload_lib.Workload,
            plan: step.StepPlan, devices: Sequence[jax.Device]
            ) -> list[ProgramMemory]:
  """Compiles the plan's largest programs for `devices`, as runs do."""
  here = chips.Slice(
      plan.slice.name, plan.slice.chip, list(devices),
      gpus.RUN_OPTIONS if devices[0].platform == 'gpu' else {}, is_here=True)
  estimates = {e.name: e for e in plan.estimates}
  programs = compiling.make_programs(
      config, workload, mesh_lib.make(plan.mesh, devices),
      int(plan.slice.chip.hbm_bytes),
      next((e.remat for e in plan.estimates if e.remat), None))
  return [
      ProgramMemory(program.name, *(
          (e.arguments, e.temporaries)
          for e in (estimates[program.name], step.estimate(program, here))))
      for program in compiling.step_programs(
          config, workload, programs, plan.slots, brief=True,
          free=plan.free)
      if program.name in estimates]


def text(programs: Sequence[ProgramMemory]) -> str:
  """Formats the programs, in GiB a chip."""
  return '\n'.join([
      'GiB, predicted and on the device:', *(
          f'{c.name:<28}' + ', '.join(
              f'{part} {predicted / chips.GIB:.3f} and {found / chips.GIB:.3f}'
              for part, predicted, found in zip(
                  ('arguments', 'temporaries'), c.predicted, c.found))
          for c in programs)])
