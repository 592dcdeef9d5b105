"""The weights of a finished or running run, from its checkpoints."""

import functools
import os
import pathlib
from typing import Any

import jax

from configs import base
from tepo_jax import errors
from tepo_jax.job import programs as programs_lib
from tepo_jax.job import run_folder
from tepo_jax.job import session as session_lib
from tepo_jax.policy.huggingface import weights
from tepo_jax.policy import lora
from tepo_jax.policy import transformer
from tepo_jax.runtime import checkpoint


def restore_trained(workdir: str | os.PathLike, mesh: jax.sharding.Mesh,
                    step: int | None = None
                    ) -> tuple[str, transformer.ModelConfig, Any]:
  """What a checkpoint holds: all the fp32 weights, or LoRA's adapters.

  Returns:
    The folder the run started from, the model with its execution fields, and
    the parameters on the mesh.

  Raises:
    errors.InputError: not a run's workdir, or no such checkpoint.
  """
  config = run_folder.read_config(workdir)
  there = run_folder.field_names(config)
  lacking = sorted(
      name for name in run_folder.field_names(base.get_config())
      if name not in there and not name.startswith('method.'))
  if lacking:
    raise errors.InputError(
        f'{workdir}/config.json is not the config of a run of this version: '
        f'{lacking[0]} is missing')
  folder = session_lib.model_folder(config, workdir)
  checkpointer = checkpoint.Checkpointer(
      pathlib.Path(workdir) / session_lib.CHECKPOINTS, read_only=True)
  programs = programs_lib.make(config, weights.read_config(folder), mesh)
  state, _ = checkpointer.restore(step, *programs_lib.restorable(programs))
  checkpointer.close()
  return folder, programs.model, state.params


def restore_params(workdir: str | os.PathLike, mesh: jax.sharding.Mesh,
                   step: int | None = None) -> tuple[str, Any]:
  """The folder a run started from, and the fp32 weights of a checkpoint.

  They are laid out as `weights.load` would; adapters are merged.

  Raises:
    errors.InputError: as `restore_trained`.
  """
  folder, model, params = restore_trained(workdir, mesh, step)
  if model.lora:
    _, base = weights.load(folder, 'float32', mesh)
    merge = functools.partial(lora.merge, model.lora)
    return folder, jax.jit(merge, donate_argnums=0)(base, params)
  return folder, params
