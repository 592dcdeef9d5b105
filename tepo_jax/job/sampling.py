"""The jitted programs of sampling: `engine`, and the cast for decoding."""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any

import jax
from jax.experimental import layout

from tepo_jax import errors
from tepo_jax.policy import cache as cache_lib
from tepo_jax.policy import padding
from tepo_jax.policy import pages
from tepo_jax.policy import transformer
from tepo_jax.rollout import draw
from tepo_jax.rollout import engine
from tepo_jax.rollout import shapes
from tepo_jax.runtime import mesh as mesh_lib

_LANES = 128  # of a TPU's vector register
# A TPU's compiler takes minutes for the unrolled layers of a prefill. With the
# least effort, that of Qwen2.5-7B on v6e:4x4 compiles in 10 s of one core
# instead of 147, and a run takes 50 ms instead of 45, by its schedule; prefills
# are 3 % of a step.
_QUICK_COMPILE = {'exec_time_optimization_effort': -1.0}


def for_decoding(model: transformer.ModelConfig, mesh: jax.sharding.Mesh,
                 tensor: int | None
                 ) -> tuple[transformer.ModelConfig, jax.sharding.Mesh]:
  """The model and the mesh of decoding with `config.rollout.tensor` shards of
  the weights, on the devices that train `model` on `mesh`.

  Raises:
    errors.InputError: `tensor` does not divide the devices, the heads or
      another dimension of the weights.
  """
  if tensor in (None, mesh.shape['tensor']):
    return model, mesh
  mesh = mesh_lib.with_tensor(mesh, tensor)
  with errors.naming(f'config.rollout.tensor={tensor}'):
    model = padding.sharded_over(model, tensor)
    mesh_lib.check(mesh, transformer.logical_axes(model),
                   transformer.abstract_params(model), mesh_lib.DECODE_RULES)
  return model, mesh


@functools.cache  # rollouts and evaluations mostly share it
def make_decode_cast(model: transformer.ModelConfig, mesh: jax.sharding.Mesh,
                     weights: str = 'compute') -> Any:
  """Jitted: weights of any mesh of these devices -> weights for decoding, in
  compute dtype and layout; with `weights` 'int8', the layers' kernels as int8.
  `model` and `mesh` are those of `for_decoding`."""
  def to_decode(params):
    return cache_lib.convert(
        model, cast(model.dtype, padding.padded_as(model, params)),
        weights == 'int8')

  return jax.jit(
      to_decode, out_shardings=decode_shardings(model, mesh, weights))


def decode_shardings(model: transformer.ModelConfig, mesh: jax.sharding.Mesh,
                     weights: str = 'compute'):
  """The shardings of what `make_decode_cast` returns."""
  return mesh_lib.shardings(
      mesh, cache_lib.logical_axes(model, weights == 'int8'),
      mesh_lib.DECODE_RULES)


def maker(cache: str) -> Callable[..., Any]:
  """`make` or `make_paged`, for config.rollout.cache."""
  return make_paged if cache == 'pages' else make


def make(model: transformer.ModelConfig, mesh: jax.sharding.Mesh, *,
         decoding: draw.Decoding, eos_ids: tuple[int, ...], chunk: int
         ) -> shapes.SamplingPrograms:
  """Jits the functions of `engine` for a cache that is a rectangle; slots are
  sharded over data and fsdp."""
  cache, jit = cache_shardings(model, mesh), _jit(model, mesh)

  def empty(slots, columns, index):
    return cache_lib.init_cache(
        model, slots, columns, model.dtype).replace(
            index=jax.numpy.int32(index))

  rows = ('batch',)
  return shapes.SamplingPrograms(
      empty=jit(empty, static_argnums=(0, 1), out_shardings=cache),
      prefill=_prefill(model, mesh, jit),
      insert=jit(engine.insert, donate_argnums=0, out_shardings=cache),
      move=_Compact(mesh, jit, cache),
      decode=_decode(
          model, mesh, jit, cache, transformer.KVCache(rows, rows, rows, ()),
          chunk=chunk, decoding=decoding, eos_ids=eos_ids))


def make_paged(model: transformer.ModelConfig, mesh: jax.sharding.Mesh, *,
               decoding: draw.Decoding, eos_ids: tuple[int, ...], chunk: int
               ) -> shapes.SamplingPrograms:
  """The same for a cache of pages, of which each shard has its own."""
  cache, jit = paged_shardings(model, mesh), _jit(model, mesh)
  rows, shards = ('batch',), mesh_lib.batch_shards(mesh)

  def by_shard(function, *in_axes):
    if shards > 1:
      function = mesh_lib.by_batch_shard(mesh, function, (rows, *in_axes), rows)
    return jit(function, donate_argnums=0, out_shardings=cache.kv)

  def empty(count, size):
    return pages.init_pages(model, shards * count, size)

  def store(kv, prompts, target_1QW):
    return pages.store(kv, prompts.k, prompts.v, target_1QW[0])

  def copy(kv, source_1M, target_1M):
    return pages.copy(kv, source_1M[0], target_1M[0])

  return shapes.SamplingPrograms(
      empty=jit(empty, static_argnums=(0, 1), out_shardings=cache.kv),
      prefill=_prefill(model, mesh, jit),
      insert=by_shard(store, (), rows), move=by_shard(copy, rows, rows),
      decode=_decode(
          model, mesh, jit, cache, pages.PagedCache(rows, rows, ()),
          chunk=chunk, decoding=decoding, eos_ids=eos_ids))


def _jit(model, mesh):
  def jit(function, **options):
    # Without `programs.compiled`'s options: they halve the speed on a CPU.
    return jax.jit(
        mesh_lib.on_mesh(mesh, function, model.dtype), **options)

  return jit


def _prefill(model, mesh, jit):
  is_tpu = mesh_lib.platform(mesh) == 'tpu'
  return jit(functools.partial(engine.prefill, model),
             out_shardings=cache_shardings(model, mesh, None),
             compiler_options=_QUICK_COMPILE if is_tpu else None)


def _decode(model, mesh, jit, cache, cache_axes, **options):
  """Jits `engine.decode`: each shard decodes its slots; shards synchronise
  active-slot counts. cache, cache_axes: of the cache, for jit and by shard."""
  drawn = replicated = mesh_lib.replicated(mesh)
  decode = functools.partial(engine.decode, model, **options)
  if mesh_lib.batch_shards(mesh) > 1:
    rows, whole = ('batch',), ()
    decode = mesh_lib.by_batch_shard(
        mesh, functools.partial(
            decode, total=mesh_lib.total_over_batch,
            count_every=engine.count_every(mesh_lib.batch_shards(mesh))),
        in_axes=(whole, cache_axes, rows, whole, whole, whole),
        out_axes=(cache_axes, engine.Chunk(*5 * [rows], whole)))
    if not mesh.is_multi_process:
      # The host can read every device, so that tokens need not be gathered.
      rows = mesh_lib.batch_sharding(mesh)
      drawn = engine.Chunk(*5 * [rows], replicated)
  return jit(decode, donate_argnums=1, out_shardings=(cache, drawn))


def paged_shardings(model: transformer.ModelConfig, mesh: jax.sharding.Mesh
                    ) -> pages.PagedCache:
  """The shardings of a cache of pages: pages over data and fsdp, heads over
  tensor."""
  return pages.PagedCache(
      (mesh_lib.shardings(mesh, ('batch', None, 'kv_heads', None)),)
      * model.num_layers, mesh_lib.batch_sharding(mesh),
      mesh_lib.replicated(mesh))


def cache_shardings(model: transformer.ModelConfig, mesh: jax.sharding.Mesh,
                    rows: str | None = 'batch') -> transformer.KVCache:
  """The shardings of a decoding cache: slots over `rows`, heads over tensor.

  We fix the layout that the decode loop uses. Left alone, XLA gives the
  arguments another one, and copies all keys or values before and after each
  chunk (seen in the compiled programs). On a TPU the keys' head size is
  innermost, unless that pads it to a vector register; on a GPU with one head on
  each device the values' columns are innermost.
  """
  store = mesh_lib.shardings(mesh, (rows, 'kv_heads', None, None))
  swapped = layout.Format(layout.Layout((0, 1, 3, 2)), store)
  keys = values = store
  platform = mesh_lib.platform(mesh)
  if platform == 'tpu' and model.head_dim % _LANES == 0:
    keys = swapped
  if platform == 'gpu' and model.cache_heads == mesh.shape['tensor']:
    values = swapped
  return transformer.KVCache(
      (keys,) * model.num_layers, (values,) * model.num_layers,
      mesh_lib.shardings(mesh, (rows, None)), mesh_lib.replicated(mesh))


@dataclasses.dataclass(frozen=True, eq=False)
class _Compact:
  """`engine.compact` of a complete cache, one array at a time.

  This never needs memory for two caches, and all layers share one program.
  """
  mesh: jax.sharding.Mesh
  jit: Callable[..., Any]
  sharding: transformer.KVCache

  @functools.cache
  def of_array(self, part: str, columns: int) -> Any:
    """Jitted: (array, row_M, shift) -> array, for 'k', 'v' or 'position'."""
    axis, empty = {'k': (3, 0), 'v': (2, 0), 'position': (1, -1)}[part]
    compact = functools.partial(
        engine.compact, axis=axis, columns=columns, empty=empty)
    if mesh_lib.batch_shards(self.mesh) > 1:
      compact = mesh_lib.by_batch_shard(
          self.mesh, compact, (('batch',), ('batch',), ()), ('batch',))
    return self.jit(
        compact, out_shardings=jax.tree.leaves(getattr(self.sharding, part))[0])

  def __call__(self, cache: transformer.KVCache, row_M: jax.Array,
               shift: jax.Array, columns: int) -> transformer.KVCache:
    def move(part, array):
      moved = self.of_array(part, columns)(array, row_M, shift)
      array.delete()
      return moved

    return transformer.KVCache(
        tuple(move('k', k) for k in cache.k),
        tuple(move('v', v) for v in cache.v),
        move('position', cache.position), cache.index - shift)


def cast(dtype, params):
  """Casts weights, except norm scales, to the compute dtype; as the model does
  the same, the policy of the cast weights is exactly that of the masters."""
  return jax.tree_util.tree_map_with_path(
      lambda path, x: x if path[-1].key == 'scale' else x.astype(dtype),
      params)
