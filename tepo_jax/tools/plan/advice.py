"""Which mesh of a slice a config should run on."""

from collections.abc import Iterator
import dataclasses

import ml_collections

from tepo_jax import errors
from tepo_jax.tools.benchmark import workload as workload_lib
from tepo_jax.tools.plan import step

_TENSOR = (1, 2, 4, 8)


@dataclasses.dataclass(frozen=True)
class Choice:
  """A mesh, whether it fits, and its predicted step.

  seconds: from the largest programs alone, so that meshes compare.
  """
  mesh: dict[str, int]
  slots: int
  fits: bool
  seconds: float


def choices(config: ml_collections.ConfigDict,
            workload: workload_lib.Workload, planned: step.Plan
            ) -> list[Choice]:
  """The planned mesh and the other sensible ones, the quickest first.

  Sensible: parameters sharded over all chips (no copies: `data` 1), and
  `tensor` what divides the heads.
  """
  found = [_choice(planned)]
  for mesh in _meshes(workload, planned):
    try:
      found.append(_choice(step.make(
          config, workload, planned.slice, mesh, brief=True)))
    except errors.InputError:  # the model's sizes do not divide
      continue
  return sorted(found, key=lambda choice: (not choice.fits, choice.seconds))


def _meshes(workload, planned) -> Iterator[dict[str, int]]:
  count = len(planned.slice.devices)
  for tensor in _TENSOR:
    mesh = {'data': 1, 'fsdp': count // tensor, 'tensor': tensor}
    if (count % tensor == 0 and workload.model.num_heads % tensor == 0
        and mesh != planned.mesh):
      yield mesh


def _choice(plan):
  return Choice(plan.mesh, plan.slots, plan.fits, plan.brief_seconds)
