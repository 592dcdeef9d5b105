"""How many completions are decoded at once: the slots that fit on the devices.
"""

from collections.abc import Callable
import dataclasses
import functools
import math
from typing import Any

import jax
from jax import numpy as jnp

from tepo_jax import errors
from tepo_jax.policy import pages as pages_lib
from tepo_jax.policy import transformer
from tepo_jax.rollout import shapes as shapes_lib
from tepo_jax.runtime import mesh as mesh_lib

# The cache's share of the free memory. The rest is for logits, activations,
# and one cache array while it is copied.
_CACHE_SHARE = 0.8
# The cache's share together with prefills: each has its prompts' keys and
# values, on every device all of them, and others wait for slots; the half is
# activations.
_SAMPLING_SHARE = 0.95
_PREFILLS = 2.5
# Columns of a page of the cache. Larger pages are read faster and need smaller
# tables, but of each completion half a page more is computed and held.
_PAGE = 64
# The mean length of the sequences that are decoded at a time, as a share of the
# longest, for which pages are kept. Where they are longer, samples lack pages
# and are drawn twice.
_MEAN_SHARE = 1 / 4


def sampling_shapes(
    model: transformer.ModelConfig, mesh: jax.sharding.Mesh, *, cache: str,
    wanted: int | None, work: int, prompt_tokens: int, max_tokens: int,
    chunk: int, samples: int = 1, carries: bool = False,
    prefix: tuple[int, ...] = (), pages: int | None = None
    ) -> shapes_lib.Shapes:
  """The shapes of sampling with `wanted` slots, or with as many as fit.

  Call it once the weights are on the devices: it reads the free memory.

  Args:
    cache: config.rollout.cache.
    wanted: slots; None: one per completion, or as many as fit.
    work: completions to sample.
    prompt_tokens, max_tokens, chunk, samples, carries, prefix: of
      `shapes.make`.
    pages: those of a run that had `wanted` slots before, which need not be
      found to fit again.

  Raises:
    errors.InputError: not one slot, or not `wanted` slots, fit; with the sizes.
  """
  free = None if pages is not None else mesh_lib.free_bytes()
  sizes = dict(work=work, prompt_tokens=prompt_tokens, max_tokens=max_tokens,
               chunk=chunk, samples=samples, carries=carries, prefix=prefix)
  if cache == 'pages':
    shapes = paged_shapes(model, mesh, wanted=wanted, free=free, **sizes)
    if pages is not None and pages >= shapes.least_pages:
      return dataclasses.replace(shapes, pages=pages)
    _warn_of_few(shapes)
    return shapes
  shapes_with = functools.partial(
      shapes_lib.make, shards=mesh_lib.batch_shards(mesh), **sizes)
  most = work if wanted is None else min(wanted, work)
  if free is None:
    return shapes_with(slots=most)
  shapes = shapes_with(slots=most if wanted is not None else fitting_slots(
      model, mesh, shapes_with, most, free))
  size = cache_bytes(model, mesh, shapes)
  if size > _CACHE_SHARE * free:
    raise errors.InputError(
        f'the cache of {shapes.slots[-1]} completions of up to '
        f'{shapes.columns[-1]} tokens takes {size / 2**30:.3g} GiB on each '
        f'device, but only {_CACHE_SHARE:.0%} of the free '
        f'{free / 2**30:.3g} GiB may be used: lower config.rollout.slots or '
        'the lengths, or use more devices')
  return shapes


def paged_shapes(
    model: transformer.ModelConfig, mesh: jax.sharding.Mesh, *,
    wanted: int | None, work: int, free: float | None, **sizes: Any
    ) -> shapes_lib.Shapes:
  """`sampling_shapes` of a cache of pages, which take all of their share of the
  `free` bytes of a device that they can need; None: all that they can need.

  sizes: the other arguments of `shapes.make`.

  Without the kernel a decode step gathers all columns of all slots, as many as
  a rectangle has: the slots are then those whose sequences fit at full length.

  Raises:
    errors.InputError: not one completion of the greatest length fits, or the
      kernel cannot take `wanted` slots.
  """
  shards, kernel = mesh_lib.batch_shards(mesh), has_kernel(model, mesh)
  most = -(-(work if wanted is None else min(wanted, work)) // shards)

  def shapes_of(slots, pages=0):
    """The kernel reads what is alive: it needs no narrower tables."""
    shapes = shapes_lib.make(
        slots=slots * shards, work=slots * shards, shards=shards, **sizes)
    columns = shapes.columns[-1:] if kernel else shapes.columns
    return dataclasses.replace(shapes, columns=columns, page=_PAGE, pages=pages)

  shapes = shapes_of(most)
  longest = sizes['prompt_tokens'] + sizes['max_tokens']
  limit = (pages_lib.most_slots(shapes.table_pages[-1]) if kernel
           else most)
  if wanted is not None and most > limit:
    raise errors.InputError(
        f'config.rollout.slots={wanted}: with config.rollout.cache=pages, at '
        f'most {limit * shards} completions of {longest} tokens are decoded at '
        'once')
  most, free = min(most, limit), math.inf if free is None else free
  size, tail = slot_bytes(model, mesh, _PAGE), shapes.tail
  whole, mean = (_pages(shapes, share)
                 for share in (1, _MEAN_SHARE if kernel else 1))
  prompts = _PREFILLS * _prefill_bytes(model, mesh, shapes)
  usable = min(_CACHE_SHARE * free, _SAMPLING_SHARE * free - prompts)
  pages = int(min(most * (tail + whole) + tail, usable / size))
  if wanted is None:
    most = max(1, min(most, pages // (tail + mean),
                      (pages - whole - tail) // tail))
  shapes = shapes_of(most, pages)
  if pages < shapes.least_pages:
    raise errors.InputError(
        f'the pages of {most * shards} completions, one of them of '
        f'{longest} tokens, take '
        f'{shapes.least_pages * size / 2**30:.3g} GiB on each device, but only '
        f'{usable / 2**30:.3g} of the free {free / 2**30:.3g} GiB may be used: '
        'lower config.rollout.slots or the lengths, or use more devices')
  return shapes


def _pages(shapes, share):
  """Pages of a sequence of so much of the greatest length, with the partial
  pages at the end of its prompt and at its own end; without its tail."""
  return -(-math.ceil(shapes.columns[-1] * share) // shapes.page) + 2


def _warn_of_few(shapes):
  """Warns of a pool in which many samples would lack pages."""
  own = (shapes.pages - shapes.tails) // (shapes.slots[-1] // shapes.shards)
  if own < _pages(shapes, _MEAN_SHARE):
    errors.note(
        f'warning: config.rollout.slots={shapes.slots[-1]}: there are pages '
        f'for {own * shapes.page} tokens a completion; where they are longer '
        'on average, many are drawn again (sampling/redrawn): lower '
        'config.rollout.slots')


def has_kernel(model: transformer.ModelConfig, mesh: jax.sharding.Mesh) -> bool:
  """Whether a kernel reads the pages of decoding."""
  return pages_lib.has_kernel(
      model.attention, 2 * model.cache_heads // mesh.shape['tensor'],
      model.head_dim, model.dtype)


def fitting_slots(model: transformer.ModelConfig, mesh: jax.sharding.Mesh,
                  shapes_with: Callable[..., shapes_lib.Shapes], most: int,
                  free: float) -> int:
  """The slots, up to `most`, whose cache and prefills fit into `free` bytes of
  a device; at least one a shard, whether it fits or not.

  shapes_with: slots=N -> the shapes.
  """
  shards = mesh_lib.batch_shards(mesh)
  for slots in range(most + -most % shards, shards, -shards):
    shapes = shapes_with(slots=slots)
    cache = cache_bytes(model, mesh, shapes)
    prompts = _prefill_bytes(model, mesh, shapes)
    if (cache <= _CACHE_SHARE * free
        and cache + _PREFILLS * prompts <= _SAMPLING_SHARE * free):
      return slots
  return shards


def _prefill_bytes(model, mesh, shapes):
  """Bytes of the widest prefill's keys and values."""
  width = shapes.prompts[-1]
  return slot_bytes(model, mesh, width) * shapes.prefill_rows(width)


def cache_bytes(model: transformer.ModelConfig, mesh: jax.sharding.Mesh,
                shapes: shapes_lib.Shapes) -> int:
  """Bytes of the largest cache on each device."""
  if shapes.page:
    return slot_bytes(model, mesh, shapes.page) * shapes.pages
  return (slot_bytes(model, mesh, shapes.columns[-1]) * shapes.slots[-1]
          // mesh_lib.batch_shards(mesh))


def slot_bytes(model: transformer.ModelConfig, mesh: jax.sharding.Mesh,
               columns: int) -> int:
  """Bytes of one slot's keys and values on each device that holds them."""
  heads = model.cache_heads // mesh.shape['tensor']
  return (2 * model.num_layers * columns * heads * model.head_dim
          * jnp.dtype(model.dtype).itemsize)
