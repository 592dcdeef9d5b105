"""Trained weights, read from the checkpoints of a finished or running run."""

import contextlib
import dataclasses
import functools
import os
from typing import Any

import jax
import ml_collections

from tepo_jax.job import configuration
from tepo_jax.job import programs as programs_lib
from tepo_jax.job import provenance
from tepo_jax.job import run_folder
from tepo_jax.job import session as session_lib
from tepo_jax.policy import lora
from tepo_jax.policy import transformer
from tepo_jax.policy.huggingface import weights
from tepo_jax.runtime import checkpoint
from tepo_jax.runtime import files
from tepo_jax.runtime import processes


@dataclasses.dataclass(frozen=True)
class Trained:
  """What a run has trained, on a mesh.

  folder: the model folder that the run started from. model: with its execution
  fields. params: all fp32 weights, or the LoRA adapters. base: with LoRA, the
  folder's fp32 weights, else None. step: of the checkpoint.
  """
  folder: str
  model: transformer.ModelConfig
  params: Any
  base: Any
  step: int

  def complete(self) -> Any:
    """All fp32 weights; adapters are merged into the base, which is used up."""
    if self.base is None:
      return self.params
    merge = functools.partial(lora.merge, self.model.lora)
    return jax.jit(merge, donate_argnums=0)(self.base, self.params)


def latest_step(workdir: str | os.PathLike) -> int | None:
  """The latest step as the first process of a job sees it: of a run in
  progress, processes may see different ones. All of them must call it."""
  with _checkpoints(workdir) as saved:
    return processes.of_first(saved.latest() or 0) or None


def _checkpoints(workdir):
  return contextlib.closing(checkpoint.Checkpointer(
      files.path(workdir) / session_lib.CHECKPOINTS, read_only=True))


def restore_trained(workdir: str | os.PathLike, mesh: jax.sharding.Mesh,
                    step: int | None) -> Trained:
  """Reads the trained parameters from a checkpoint.

  Args:
    workdir: of a training run. step: of the checkpoint; None: the latest.

  Raises:
    errors.InputError: not a run's workdir, no such checkpoint, or the model
      folder has changed since.
  """
  config = run_folder.read_config(workdir)
  configuration.check_saved(config, f'{workdir}/config.json')
  # Its checkpoint is read on these devices, whichever trained the model.
  config = ml_collections.ConfigDict(config.to_dict())
  config.rollout.tensor, config.compute.attention = None, 'auto'
  folder = session_lib.model_folder(config, workdir)
  model = programs_lib.prepare_model(weights.model_config(folder), config, mesh)
  base, digests = None, {}
  if model.lora:
    base = provenance.load(folder, mesh)[1]
    digests = provenance.weight_digests(model, base)

  def check(where, extra):
    provenance.check(where, extra['stands_on'], folder, digests)

  if step is None:
    step = latest_step(workdir)
  with _checkpoints(workdir) as saved:
    params, _ = saved.restore(
        step, *programs_lib.restorable(programs_lib.make(config, model, mesh)),
        check, part='params')
  return Trained(folder, model, params, base, step)


def restore_params(workdir: str | os.PathLike, mesh: jax.sharding.Mesh,
                   step: int | None = None) -> tuple[str, Any]:
  """Reads the complete fp32 weights; LoRA adapters are merged.

  Returns the model folder that the run started from, and the weights, in the
  layout of `weights.load`; arguments and errors are as in `restore_trained`.
  """
  trained = restore_trained(workdir, mesh, step)
  return trained.folder, trained.complete()
