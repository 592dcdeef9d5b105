"""Compares a plan's memory with programs compiled on the devices themselves."""

from collections.abc import Sequence

import jax
import ml_collections

from tepo_jax import errors
from tepo_jax.runtime import mesh as mesh_lib
from tepo_jax.tools import workload as workload_lib
from tepo_jax.tools.plan import chips
from tepo_jax.tools.plan import compiling
from tepo_jax.tools.plan import gpus
from tepo_jax.tools.plan import step


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
            ) -> list[tuple[step.Estimate, step.Estimate]]:
  """Compiles the plan's largest programs for `devices`, as runs do; returns
  what was planned of each, and what was found."""
  mesh = mesh_lib.make(plan.mesh, devices)
  here = chips.Slice(
      plan.slice.name, plan.slice.chip, list(devices),
      gpus.RUN_OPTIONS if devices[0].platform == 'gpu' else {},
      is_here=True).ordered(mesh)
  planned = {e.name: e for e in plan.estimates}
  programs = compiling.make_programs(
      config, workload, mesh, int(plan.slice.chip.hbm_bytes),
      next((e.remat for e in plan.estimates if e.remat), None))
  return [
      (planned[program.name], step.estimate(program, here))
      for program in compiling.step_programs(
          config, workload, programs, plan.slots, brief=True,
          free=plan.free)
      if program.name in planned]


def text(programs: Sequence[tuple[step.Estimate, step.Estimate]]) -> str:
  """Formats what `compare` returns, in GiB a chip."""
  return '\n'.join([
      'GiB, predicted and on the device:', *(
          f'{planned.name:<28}' + ', '.join(
              f'{part} {getattr(planned, part) / chips.GIB:.3f} and '
              f'{getattr(found, part) / chips.GIB:.3f}'
              for part in ('arguments', 'temporaries'))
          for planned, found in programs)])
