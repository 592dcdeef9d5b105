"""Does a run fit on its devices? Decoding slots, and the arrays that stay."""

from collections.abc import Iterator, Mapping
import contextlib
import dataclasses
import functools

import jax
from jax import numpy as jnp
import ml_collections

from tepo_jax import errors
from tepo_jax.job import programs as programs_lib
from tepo_jax.policy import transformer
from tepo_jax.rollout import schedule
from tepo_jax.runtime import host
from tepo_jax.runtime import mesh as mesh_lib

# The cache's share of the free memory. The rest is for logits, activations,
# and one cache array while it is copied.
_CACHE_SHARE = 0.8
# The share, of what the arrays leave free, for hidden states of π_old beyond
# those of one minibatch. An update needs the rest.
_STATES_SHARE = 0.2
_MAX_MESSAGE = 200  # characters of XLA's message, which may list every buffer


def sampling_shapes(
    model: transformer.ModelConfig, mesh: jax.sharding.Mesh, *,
    wanted: int | None, work: int, prompt_tokens: int, max_tokens: int,
    chunk: int) -> schedule.Shapes:
  """The shapes of sampling with `wanted` slots, or with as many as fit.

  Call it once the weights are on the devices: it reads the free memory.

  Args:
    wanted: slots; None: one per completion, or as many as fit.
    work: completions to sample.
    prompt_tokens, max_tokens, chunk: P, T and C.

  Raises:
    errors.InputError: not one slot, or not `wanted` slots, fit; with the sizes.
  """
  shards = mesh_lib.batch_shards(mesh)

  shapes_with = functools.partial(
      schedule.make_shapes, work=work, prompt_tokens=prompt_tokens,
      max_tokens=max_tokens, chunk=chunk, shards=shards)
  most = work if wanted is None else min(wanted, work)
  free = mesh_lib.free_bytes()
  fitting = most if free is None else shards * int(
      _CACHE_SHARE * free
      // slot_bytes(model, mesh, shapes_with(slots=1).columns[-1]))
  least = 1 if wanted is None else most
  if fitting < least:
    shapes = shapes_with(slots=least)
    slots, columns = shapes.slots[-1], shapes.columns[-1]
    size = slot_bytes(model, mesh, columns) * slots / shards
    raise errors.InputError(
        f'the cache of {slots} completions of up to {columns} tokens takes '
        f'{size / 2**30:.3g} GiB on each device, but only {_CACHE_SHARE:.0%} '
        f'of the free {free / 2**30:.3g} GiB may be used: lower '
        'config.rollout.slots or the lengths, or use more devices')
  return shapes_with(slots=min(most, fitting))


def slot_bytes(model: transformer.ModelConfig, mesh: jax.sharding.Mesh,
               columns: int) -> int:
  """Bytes of one slot's keys and values on each device that holds them."""
  heads = model.cache_heads // mesh.shape['tensor']
  return (2 * model.num_layers * columns * heads * model.head_dim
          * jnp.dtype(model.dtype).itemsize)


def check(programs: programs_lib.TrainingPrograms, limit: int | None = None
          ) -> None:
  """Refuses a mesh whose devices cannot hold the arrays of `held`.

  `limit` is in bytes of a device; None: what the device reports, or for a CPU,
  which reports nothing, its part of the machine's memory.

  Raises:
    errors.InputError: with the bytes of each part on a device.
  """
  limit = limit or _limit(programs)
  sizes = held(programs)
  if sum(sizes.values()) > limit:
    raise errors.InputError(
        f'mesh {dict(programs.mesh.shape)}: a device has {limit / 1e9:.4g} GB '
        f'of memory and would have to hold {sum(sizes.values()) / 1e9:.4g} '
        f'GB: {_in_gigabytes(sizes)}')


def keeping(programs: programs_lib.TrainingPrograms, minibatches: int,
            limit: int | None = None) -> programs_lib.TrainingPrograms:
  """The programs with `kept` enlarged from one minibatch to all of an epoch, or
  to as many of their microbatches as fit; `limit` as in `check`."""
  kept = programs.kept
  if kept is None:
    return programs
  rows, least, *rest = kept.shape
  free = (limit or _limit(programs)) - sum(held(programs).values())
  more = int(_STATES_SHARE * free * least // mesh_lib.device_bytes(kept))
  count = min(least * minibatches, least + max(0, more))
  return dataclasses.replace(
      programs, kept=kept.update(shape=(rows, count, *rest)))


def describe_kept(states: jax.ShapeDtypeStruct) -> str:
  """What becomes of π_old's hidden states; `states` is `programs.kept`."""
  rows, count, columns, _ = states.shape
  return (f'exact KL: π_old\'s hidden states of up to {count} microbatches of '
          f'{rows} × {columns:,} tokens are kept after scoring, '
          f'{mesh_lib.device_bytes(states) / 1e9:.3g} GB on each device; in a '
          'step with more, they are computed again before each update')


def held(programs: programs_lib.TrainingPrograms) -> dict[str, int]:
  """Bytes on one device of the arrays that outlive a jitted call."""
  model, mesh = programs.model, programs.mesh

  def placed(rules, dtype):
    return jax.tree.map(
        lambda x, s: x.update(sharding=s),
        transformer.abstract_params(model, dtype), mesh_lib.shardings(
            mesh, transformer.logical_axes(model), rules))

  state = programs_lib.abstract_state(programs)
  frozen, _ = programs_lib.split_trained(
      model, placed(mesh_lib.RULES, model.dtype))
  return {name: mesh_lib.device_bytes(tree) for name, tree in {
      'weights and moments': state, 'gradient': state.params,
      'frozen weights': frozen,
      'weights for decoding': placed(mesh_lib.DECODE_RULES, model.dtype),
      'hidden states of π_old': programs.kept,
  }.items()}


def check_cache(model: transformer.ModelConfig, mesh: jax.sharding.Mesh,
                shapes: schedule.Shapes) -> None:
  """On CPUs, whose free memory `sampling_shapes` cannot see, refuses a cache
  that is larger than the machine's memory.

  Raises:
    errors.InputError: with the sizes.
  """
  slots, columns = shapes.slots[-1], shapes.columns[-1]
  size = slot_bytes(model, mesh, columns) * slots / mesh_lib.batch_shards(mesh)
  if mesh_lib.memory_limit(mesh) is None and size > _cpu_bytes():
    raise errors.InputError(
        f'the cache of {slots} completions of up to {columns} tokens takes '
        f'{size / 2**30:,.3g} GiB on each device, of which each has '
        f'{_cpu_bytes() / 2**30:.3g} GiB: lower config.rollout.slots, '
        'config.rollout.chunk or the lengths')


def _limit(programs):
  """Bytes of a device, as in `check`."""
  return mesh_lib.memory_limit(programs.mesh) or _cpu_bytes()


def _cpu_bytes():
  """A CPU device's part of the machine's memory."""
  return host.memory_bytes() / len(jax.local_devices())


@contextlib.contextmanager
def explaining_exhaustion(
    config: ml_collections.ConfigDict,
    programs: programs_lib.TrainingPrograms) -> Iterator[None]:
  """Adds what a device holds to XLA's out-of-memory errors."""
  try:
    yield
  except jax.errors.JaxRuntimeError as error:
    if 'RESOURCE_EXHAUSTED' not in str(error):
      raise
    raise jax.errors.JaxRuntimeError(
        f'{errors.one_line(error)[:_MAX_MESSAGE]}; '
        f'{_describe_held(config, programs)}') from error


def _describe_held(config, programs):
  slot = slot_bytes(programs.model, programs.mesh,
                    config.data.max_prompt_tokens + config.rollout.max_tokens)
  completions = config.rollout.prompts * config.rollout.samples
  most = min(config.rollout.slots or completions, completions)
  shards = mesh_lib.batch_shards(programs.mesh)
  limit = mesh_lib.memory_limit(programs.mesh)
  size = f' of {limit / 1e9:.4g} GB' if limit else ''
  return (f'a device{size} holds {_in_gigabytes(held(programs))}, '
          f'{slot / 1e9:.4g} GB for each of up to {-(-most // shards)} slots '
          'of the cache, and the temporaries of a program')


def _in_gigabytes(sizes: Mapping[str, int]) -> str:
  """'weights 1.5 GB, gradient 0.5 GB', without the parts of size 0."""
  return ', '.join(f'{name} {size / 1e9:.4g} GB'
                   for name, size in sizes.items() if size)
