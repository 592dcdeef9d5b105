"""What is said of the devices' memory when it is full."""

from collections.abc import Iterator
import contextlib

import jax

from tepo_jax.job import learner as learner_lib
from tepo_jax.job import slots
from tepo_jax.job import steps
from tepo_jax.runtime import mesh as mesh_lib

_LONGEST = 200  # letters of XLA's message, which may list every buffer


@contextlib.contextmanager
def noted(learner: learner_lib.Learner) -> Iterator[None]:
  """Adds to an error for want of memory what a device holds."""
  try:
    yield
  except jax.errors.JaxRuntimeError as error:
    if 'RESOURCE_EXHAUSTED' not in str(error):
      raise
    reason = ' '.join(str(error).split())[:_LONGEST]
    raise jax.errors.JaxRuntimeError(
        f'{reason}; {held(learner)}') from error


def held(learner: learner_lib.Learner) -> str:
  """Bytes on a device of what lasts, and of what grows with the slots."""
  config, programs = learner.config, learner.programs
  longest = config.data.max_prompt_tokens + config.rollout.max_tokens
  slot = slots.slot_bytes(programs.model, programs.mesh, longest)
  sizes = mesh_lib.bytes_on_device(steps.memory_parts(programs))
  completions = config.rollout.prompts * config.rollout.samples
  most = min(config.rollout.slots or completions, completions)
  shards = mesh_lib.batch_shards(programs.mesh)
  stats = programs.mesh.local_devices[0].memory_stats()
  limit = f' of {stats["bytes_limit"] / 1e9:.4g} GB' if stats else ''
  return (f'a device{limit} holds {mesh_lib.in_gigabytes(sizes)}, '
          f'{slot / 1e9:.4g} GB for each of up to {-(-most // shards)} slots '
          'of the cache, and the temporaries of a program')
