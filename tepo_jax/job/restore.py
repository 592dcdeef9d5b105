"""Trained weights, read from the checkpoints of a finished or running run."""

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
  """Reads the trained parameters: all fp32 weights, or the LoRA adapters.

  Args:
    workdir: of a training run. step: of the checkpoint; None: the latest.

  Returns:
    The model folder that the run started from, the model with its execution
    fields, and the parameters on the mesh.

  Raises:
    errors.InputError: not a run's workdir, or no such checkpoint.
  """
  config = run_folder.read_config(workdir)
  found = run_folder.field_names(config)
  missing = sorted(
      name for name in run_folder.field_names(base.get_config())
      if name not in found and not name.startswith('method.'))
  if missing:
    raise errors.InputError(
        f'{workdir}/config.json was not written by this version: '
        f'{missing[0]} is missing')
  folder = session_lib.model_folder(config, workdir)
  model = programs_lib.prepare_model(weights.read_config(folder), config, mesh)
  checkpointer = checkpoint.Checkpointer(
      pathlib.Path(workdir) / session_lib.CHECKPOINTS, read_only=True)
  state, _ = checkpointer.restore(
      step, *programs_lib.restorable(programs_lib.make(config, model, mesh)))
  checkpointer.close()
  return folder, model, state.params


def restore_params(workdir: str | os.PathLike, mesh: jax.sharding.Mesh,
                   step: int | None = None) -> tuple[str, Any]:
  """Reads the complete fp32 weights; LoRA adapters are merged.

  Returns the model folder that the run started from, and the weights, in the
  layout of `weights.load`; arguments and errors are as in `restore_trained`.
  """
  folder, model, params = restore_trained(workdir, mesh, step)
  if model.lora:
    _, base_params = weights.load(folder, 'float32', mesh)
    merge = functools.partial(lora.merge, model.lora)
    return folder, jax.jit(merge, donate_argnums=0)(base_params, params)
  return folder, params
