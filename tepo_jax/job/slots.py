"""How many completions are decoded at one time: what the memory allows."""

import jax
import numpy as np

from tepo_jax import errors
from tepo_jax.policy import transformer
from tepo_jax.rollout import schedule
from tepo_jax.runtime import mesh as mesh_lib

# Of the free memory, for the cache; the rest is for logits, activations, and
# an array of the cache that is moved.
_SHARE = 0.8


def shapes(model: transformer.ModelConfig, mesh: jax.sharding.Mesh, *,
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
    return schedule.shapes(
        slots=slots, work=work, prompt_tokens=prompt_tokens,
        max_tokens=max_tokens, chunk=chunk, shards=shards)

  most = work if wanted is None else min(wanted, work)
  free = mesh_lib.free_bytes()
  fits = most if free is None else shards * int(
      _SHARE * free // slot_bytes(model, mesh, of(1).columns[-1]))
  if fits < (1 if wanted is None else most):
    result = of(1 if wanted is None else most)
    columns, needed = result.columns[-1], result.slots[-1]
    size = slot_bytes(model, mesh, columns) * needed / shards
    raise errors.InputError(
        f'the cache of {needed} completions of up to {columns} tokens takes '
        f'{size / 2**30:.3g} GiB on each device, and {_SHARE:.0%} of the free '
        f'{free / 2**30:.3g} GiB may be used: lower config.rollout.slots or '
        'the lengths, or use more devices')
  return of(min(most, fits))


def slot_bytes(model: transformer.ModelConfig, mesh: jax.sharding.Mesh,
               columns: int) -> int:
  """Bytes that one row of the cache takes on each device it is on."""
  heads = model.cache_heads // mesh.shape['tensor']
  return (2 * model.num_layers * columns * heads * model.head_dim
          * np.dtype(jax.numpy.dtype(model.dtype)).itemsize)
