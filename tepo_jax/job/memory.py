"""Does a run fit on its devices? Decoding slots, arrays that stay, and what an
update keeps for its backward pass."""

from collections.abc import Callable, Iterator, Mapping
import contextlib
import dataclasses
import functools

import jax
from jax import numpy as jnp
import ml_collections

from tepo_jax import errors
from tepo_jax.job import programs as programs_lib
from tepo_jax.policy import remat as remat_lib
from tepo_jax.policy import transformer
from tepo_jax.rollout import schedule
from tepo_jax.runtime import host
from tepo_jax.runtime import mesh as mesh_lib
from tepo_jax.runtime import processes

# The cache's share of the free memory. The rest is for logits, activations,
# and one cache array while it is copied.
_CACHE_SHARE = 0.8
# The cache's share together with prefills: each has its prompts' keys and values,
# on every device all of them, and others wait for slots; the half is activations.
_SAMPLING_SHARE = 0.95
_PREFILLS = 2.5
# The share, of what the arrays leave free, for hidden states of π_old beyond
# those of one minibatch. An update needs the rest.
_STATES_SHARE = 0.2
# What remat='auto' adds to its estimate of an update's other temporaries.
_RESERVE = 1.25
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
  if free is None:
    return shapes_with(slots=most)
  shapes = shapes_with(slots=most if wanted is not None else fitting_slots(
      model, mesh, shapes_with, most, free))
  size = _cache_bytes(model, mesh, shapes)
  if size > _CACHE_SHARE * free:
    raise errors.InputError(
        f'the cache of {shapes.slots[-1]} completions of up to '
        f'{shapes.columns[-1]} tokens takes {size / 2**30:.3g} GiB on each '
        f'device, but only {_CACHE_SHARE:.0%} of the free '
        f'{free / 2**30:.3g} GiB may be used: lower config.rollout.slots or '
        'the lengths, or use more devices')
  return shapes


def fitting_slots(model: transformer.ModelConfig, mesh: jax.sharding.Mesh,
                  shapes_with: Callable[..., schedule.Shapes], most: int,
                  free: float) -> int:
  """The slots, up to `most`, whose cache and prefills fit into `free` bytes of a
  device; at least one a shard, whether it fits or not.

  shapes_with: slots=N -> the shapes.
  """
  shards = mesh_lib.batch_shards(mesh)
  for slots in range(most + -most % shards, shards, -shards):
    shapes = shapes_with(slots=slots)
    cache, width = _cache_bytes(model, mesh, shapes), shapes.prompts[-1]
    prompts = slot_bytes(model, mesh, width) * schedule.Schedule(
        None, shapes).prefill_rows(width)
    if (cache <= _CACHE_SHARE * free
        and cache + _PREFILLS * prompts <= _SAMPLING_SHARE * free):
      return slots
  return shards


def _cache_bytes(model, mesh, shapes):
  return (slot_bytes(model, mesh, shapes.columns[-1]) * shapes.slots[-1]
          // mesh_lib.batch_shards(mesh))


def slot_bytes(model: transformer.ModelConfig, mesh: jax.sharding.Mesh,
               columns: int) -> int:
  """Bytes of one slot's keys and values on each device that holds them."""
  heads = model.cache_heads // mesh.shape['tensor']
  return (2 * model.num_layers * columns * heads * model.head_dim
          * jnp.dtype(model.dtype).itemsize)


def check(programs: programs_lib.TrainingPrograms, limit: int | None = None
          ) -> None:
  """Refuses a mesh whose devices cannot hold the arrays of `held`.

  `limit` is in bytes of a device; None: the least that a device of the job
  reports, or for a CPU, which reports nothing, its part of the machine's
  memory. With several processes, all of them must then call it.

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


def fitted(config: ml_collections.ConfigDict,
           programs: programs_lib.TrainingPrograms, limit: int | None = None
           ) -> programs_lib.TrainingPrograms:
  """The programs with `kept` and, for compute.remat='auto', the model's `remat`
  chosen by the memory of a device; `limit` as in `check`."""
  limit = limit or _limit(programs)
  fitting = keeping(
      programs, config.rollout.prompts // config.train.minibatch_prompts, limit)
  model = programs.model
  # A CPU gains nothing; attention 'xla' needs memory that is not estimated.
  if (config.compute.remat != 'auto' or model.attention == 'xla'
      or mesh_lib.platform(programs.mesh) == 'cpu'):
    return fitting
  sizes = held(fitting)
  free = limit - (sum(sizes.values()) - sizes['weights for decoding']
                  + _RESERVE * _temporaries(fitting))
  remat = next((name for name in ('dots', 'mlp')
                if activations(fitting, name) <= free), 'full')
  return dataclasses.replace(
      programs_lib.make(config, dataclasses.replace(model, remat=remat),
                        programs.mesh), kept=fitting.kept)


def activations(programs: programs_lib.TrainingPrograms,
                remat: str | None = None) -> float:
  """Bytes that the layers keep on a device for the backward pass over a
  microbatch; `remat` None: as the programs do."""
  model = programs.model
  return _tokens(programs) * remat_lib.bytes_a_token(
      model, remat or model.remat, programs.mesh.shape['tensor'])


def describe_remat(programs: programs_lib.TrainingPrograms) -> str:
  """What remat='auto' has chosen."""
  return (f'compute.remat=auto: {programs.model.remat}; the layers keep '
          f'{activations(programs) / 1e9:.3g} GB of a microbatch on each '
          'device for the backward pass')


def _tokens(programs):
  """Tokens of a microbatch on a device, those of its tensor shards included."""
  _, rows, columns = programs.rows_shape
  return rows * columns // mesh_lib.batch_shards(programs.mesh)


def _temporaries(programs):
  """Estimates the bytes of an update's other arrays on a device.

  They are the weights in the compute dtype, of which XLA makes a copy on TPUs,
  and if a mesh cuts them also the gradient of a microbatch; embedding and head,
  whole over fsdp, with their gradients; the logits of a chunk; and in the layers
  a few arrays of each width, three layers' weights among them.
  """
  model, scorer = programs.model, programs.scorer
  tensor = programs.mesh.shape['tensor']
  size = jnp.dtype(model.dtype).itemsize
  trained = mesh_lib.device_bytes(programs_lib.abstract_state(programs).params)
  vocabulary = (model.vocab_size + model.vocab_padding) / tensor
  heads = (model.num_heads + 2 * model.cache_heads) * model.head_dim / tensor
  wide = heads + 2 * model.d_ff / tensor
  if programs.mesh.shape['fsdp'] * tensor > 1:
    copies = 2
  else:
    copies = int(mesh_lib.platform(programs.mesh) == 'tpu')
  return (copies * trained / 4 * size
          + (3 * 4 + 2 * size) * vocabulary * model.d_model
          + 4 * 4 * vocabulary * scorer.chunk_size / scorer.shards
          + size * (_tokens(programs) * (12 * model.d_model + 3 * wide)
                    + 3 * model.d_model * 1.5 * wide))


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
  model = programs.model

  def placed(rules, dtype, model, mesh):
    return jax.tree.map(
        lambda x, s: x.update(sharding=s),
        transformer.abstract_params(model, dtype), mesh_lib.shardings(
            mesh, transformer.logical_axes(model), rules))

  state = programs_lib.abstract_state(programs)
  frozen, _ = programs_lib.split_trained(
      model, placed(mesh_lib.RULES, model.dtype, model, programs.mesh))
  return {name: mesh_lib.device_bytes(tree) for name, tree in {
      'weights and moments': state, 'gradient': state.params,
      'frozen weights': frozen,
      'weights for decoding': placed(
          mesh_lib.DECODE_RULES, model.dtype, *programs.decoding),
      'hidden states of π_old': programs.kept,
  }.items()}


def check_cache(model: transformer.ModelConfig, mesh: jax.sharding.Mesh,
                shapes: schedule.Shapes) -> None:
  """On CPUs, whose free memory `sampling_shapes` cannot see, refuses a cache
  that is larger than the machine's memory.

  Raises:
    errors.InputError: with the sizes.
  """
  size = _cache_bytes(model, mesh, shapes)
  if mesh_lib.memory_limit(mesh) is None and size > _cpu_bytes():
    raise errors.InputError(
        f'the cache of {shapes.slots[-1]} completions of up to '
        f'{shapes.columns[-1]} tokens takes {size / 2**30:,.3g} GiB on each '
        f'device, of which each has {_cpu_bytes() / 2**30:.3g} GiB: lower '
        'config.rollout.slots, config.rollout.chunk or the lengths')


def _limit(programs):
  """Bytes of a device, as in `check`."""
  return processes.least(
      mesh_lib.memory_limit(programs.mesh) or int(_cpu_bytes()))


def _cpu_bytes():
  """A CPU device's part of the machine's memory."""
  return host.memory_bytes() / len(jax.local_devices())


@contextlib.contextmanager
def explaining_exhaustion(
    config: ml_collections.ConfigDict,
    programs: programs_lib.TrainingPrograms) -> Iterator[None]:
  """Adds what a device holds to XLA's out-of-memory errors.

  jax passes some of them on as other exceptions than its own: any counts.
  """
  try:
    yield
  except Exception as error:  # pylint: disable=broad-exception-caught
    if 'RESOURCE_EXHAUSTED' not in str(error):
      raise
    raise jax.errors.JaxRuntimeError(
        f'{errors.one_line(error)[:_MAX_MESSAGE]}; '
        f'{_describe_held(config, programs)}') from error


def _describe_held(config, programs):
  slot = slot_bytes(*programs.decoding,
                    config.data.max_prompt_tokens + config.rollout.max_tokens)
  completions = config.rollout.prompts * config.rollout.samples
  most = min(config.rollout.slots or completions, completions)
  shards = mesh_lib.batch_shards(programs.decoding[1])
  limit = mesh_lib.memory_limit(programs.mesh)
  size = f' of {limit / 1e9:.4g} GB' if limit else ''
  return (f'a device{size} holds {_in_gigabytes(held(programs))}, '
          f'{slot / 1e9:.4g} GB for each of up to {-(-most // shards)} slots '
          'of the cache, and the temporaries of a program')


def _in_gigabytes(sizes: Mapping[str, int]) -> str:
  """'weights 1.5 GB, gradient 0.5 GB', without the parts of size 0."""
  return ', '.join(f'{name} {size / 1e9:.4g} GB'
                   for name, size in sizes.items() if size)
