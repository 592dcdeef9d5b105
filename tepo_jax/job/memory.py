"""How many completions are decoded at one time: what the memory allows."""

from collections.abc import Iterator
import contextlib
from typing import Any

import jax
import ml_collections
import numpy as np

from tepo_jax import errors
from tepo_jax.job import programs as programs_lib
from tepo_jax.policy import transformer
from tepo_jax.rollout import schedule
from tepo_jax.runtime import mesh as mesh_lib

# Of the free memory, for the cache; the rest is for logits, activations, and
# an array of the cache that is moved.
_CACHE_SHARE = 0.8
_LONGEST = 200

def sampling_shapes(
    model: transformer.ModelConfig, mesh: jax.sharding.Mesh, *,
    wanted: int | None, work: int, prompt_tokens: int, max_tokens: int,
    chunk: int) -> schedule.Shapes:
  """The shapes of sampling with `wanted` slots, or as many as fit.

  Call it with the weights on the devices.

  Args:
    wanted: slots; None: as many as there is work for or memory allows.
    work: completions of a queue.
    prompt_tokens, max_tokens, chunk: P, T and C.

  Raises:
    errors.InputError: not a single slot, or not `wanted` slots, fit; says the
      sizes.
  """
  shards = mesh_lib.batch_shards(mesh)

  def of(slots):
    return schedule.make_shapes(
        slots=slots, work=work, prompt_tokens=prompt_tokens,
        max_tokens=max_tokens, chunk=chunk, shards=shards)

  most = work if wanted is None else min(wanted, work)
  free = mesh_lib.free_bytes()
  fits = most if free is None else shards * int(
      _CACHE_SHARE * free // slot_bytes(model, mesh, of(1).columns[-1]))
  if fits < (1 if wanted is None else most):
    result = of(1 if wanted is None else most)
    columns, needed = result.columns[-1], result.slots[-1]
    size = slot_bytes(model, mesh, columns) * needed / shards
    raise errors.InputError(
        f'the cache of {needed} completions of up to {columns} tokens takes '
        f'{size / 2**30:.3g} GiB on each device, and {_CACHE_SHARE:.0%} of the '
        f'free {free / 2**30:.3g} GiB may be used: lower config.rollout.slots or '
        'the lengths, or use more devices')
  return of(min(most, fits))


def slot_bytes(model: transformer.ModelConfig, mesh: jax.sharding.Mesh,
               columns: int) -> int:
  """Bytes that one row of the cache takes on each device it is on."""
  heads = model.cache_heads // mesh.shape['tensor']
  return (2 * model.num_layers * columns * heads * model.head_dim
          * np.dtype(jax.numpy.dtype(model.dtype)).itemsize)
  # letters of XLA's message, which may list every buffer


@contextlib.contextmanager
def explaining_exhaustion(
    config: ml_collections.ConfigDict,
    programs: programs_lib.TrainingPrograms) -> Iterator[None]:
  """Adds to an error for want of memory what a device holds."""
  try:
    yield
  except jax.errors.JaxRuntimeError as error:
    if 'RESOURCE_EXHAUSTED' not in str(error):
      raise
    reason = ' '.join(str(error).split())[:_LONGEST]
    raise jax.errors.JaxRuntimeError(
        f'{reason}; {describe_held(config, programs)}') from error


def describe_held(config: ml_collections.ConfigDict,
                  programs: programs_lib.TrainingPrograms) -> str:
  """Bytes on a device of what lasts, and of what grows with the slots."""
  longest = config.data.max_prompt_tokens + config.rollout.max_tokens
  slot = slot_bytes(programs.model, programs.mesh, longest)
  sizes = mesh_lib.bytes_on_device(parts(programs))
  completions = config.rollout.prompts * config.rollout.samples
  most = min(config.rollout.slots or completions, completions)
  shards = mesh_lib.batch_shards(programs.mesh)
  stats = programs.mesh.local_devices[0].memory_stats()
  limit = f' of {stats["bytes_limit"] / 1e9:.4g} GB' if stats else ''
  return (f'a device{limit} holds {mesh_lib.in_gigabytes(sizes)}, '
          f'{slot / 1e9:.4g} GB for each of up to {-(-most // shards)} slots '
          'of the cache, and the temporaries of a program')


def parts(programs: programs_lib.TrainingPrograms) -> dict[str, Any]:
  """What outlives a jitted call: name -> ShapeDtypeStructs with shardings."""
  model, mesh = programs.model, programs.mesh
  def placed(rules, dtype):
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        transformer.abstract_params(model, dtype), mesh_lib.shardings(
            mesh, transformer.logical_axes(model), rules))

  state = programs_lib.abstract_state(programs)
  frozen, _ = programs_lib.split_trained(
      model, placed(mesh_lib.RULES, model.dtype))
  return {'weights and moments': state, 'gradient': state.params,
          'frozen weights': frozen,
          'weights for decoding': placed(mesh_lib.DECODE_RULES, model.dtype)}


def check(programs: programs_lib.TrainingPrograms) -> None:
  """Refuses a mesh whose devices cannot hold what outlives a jitted call.

  Raises:
    errors.InputError: with the bytes on a device.
  """
  mesh_lib.check_memory(programs.mesh, parts(programs))
