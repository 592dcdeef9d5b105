"""The jitted programs of a run, made from its config and mesh.

One place, so that training, evaluation and measurement compile the very same
functions: cast and reshard for decoding, generate, score, update.
"""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any

import jax
from jax.experimental import layout
import ml_collections
import optax

from tepo_jax.learning import objective
from tepo_jax.learning import optimizer as optimizer_lib
from tepo_jax.learning import update
from tepo_jax.policy import attention
from tepo_jax.policy import decoding as decoding_lib
from tepo_jax.policy import lora
from tepo_jax.policy import on_mesh
from tepo_jax.policy import transformer
from tepo_jax.rollout import draw
from tepo_jax.rollout import engine
from tepo_jax.rollout import packing
from tepo_jax.rollout import schedule
from tepo_jax.runtime import checkpoint
from tepo_jax.runtime import mesh as mesh_lib


# `score` and `train_step` must round alike, else the ratios at π_θ = π_old are
# not exactly 1. A fusion may keep bfloat16 values in float32; and on the CPU
# what a library call is fused with decides how it rounds: products go there by
# themselves.
_COMPILER_OPTIONS = {'xla_allow_excess_precision': False}
_COMPILER_OPTIONS_CPU = {'xla_cpu_experimental_ynn_fusion_type':
                         'LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT'}


@dataclasses.dataclass(frozen=True)
class Programs:
  """Everything that runs on the devices, bound to one mesh.

  Attributes:
    mesh, model: where and what; `model` carries the execution fields.
    policy_loss: the objective of `config.method`.
    scorer, optimizer: what `train_step` is made of.
    state_sharding: of `update.TrainState`.
    init_state: params -> TrainState; takes the params over.
    freeze: with LoRA: the model's weights -> the base in the compute dtype.
      init_adapters: key -> the first params.
    to_decode: as of `make_decode_cast`.
    to_old_policy: the same dtype in the training layout, for the exact KL.
    pack: update.Batch on the host -> update.Minibatch there.
    minibatch_sharding: of `update.Minibatch`.
    score: (params, Minibatch) -> ℓ° and H°.
    train_step: (state, Minibatch, rng, noise_floor, old_params) -> state,
      metrics; donates the state.

  With LoRA the params of the state and of π_old are adapters; `score` and
  `train_step` take the frozen base as one more argument, and `to_decode` takes
  `lora.combine` of both.
  """
  mesh: jax.sharding.Mesh
  model: transformer.ModelConfig
  policy_loss: objective.PolicyLoss
  scorer: update.Scorer
  optimizer: optax.GradientTransformation
  state_sharding: update.TrainState
  init_state: Any
  freeze: Any
  init_adapters: Any
  to_decode: Any
  to_old_policy: Any
  pack: Callable[[update.Batch], update.Minibatch]
  minibatch_sharding: update.Minibatch
  score: Any
  train_step: Any


def adapted(model: transformer.ModelConfig, settings: ml_collections.ConfigDict
            ) -> transformer.ModelConfig:
  """The model with the adapters of `config.lora`."""
  adapters = lora.Lora(settings.rank, settings.alpha, tuple(settings.targets))
  return dataclasses.replace(model, lora=adapters if settings.rank else None)


def execution(model: transformer.ModelConfig,
              compute: ml_collections.ConfigDict,
              mesh: jax.sharding.Mesh | None = None) -> transformer.ModelConfig:
  """The model with the execution fields of `config.compute`, for a mesh.

  Raises:
    errors.InputError: the mesh cannot cut the model, or its devices do not
      have that attention.
  """
  device = jax.devices()[0] if mesh is None else mesh.devices.flat[0]
  if mesh is not None:
    model = on_mesh.sharded_over(model, mesh.shape['tensor'])
  return dataclasses.replace(
      model, dtype=compute.dtype, remat=compute.remat, unroll=compute.unroll,
      attention=attention.choose(
          compute.attention, device.platform, compute.dtype, model.head_dim))


def make_packer(config: ml_collections.ConfigDict,
                mesh: jax.sharding.Mesh
                ) -> Callable[[update.Batch], update.Minibatch]:
  """How `config.train` lays the rows of an update out."""
  train = config.train
  longest = config.data.max_prompt_tokens + config.rollout.max_tokens
  return packing.make(
      train.packing, row_tokens=train.row_tokens or longest,
      microbatch_tokens=train.microbatch_tokens, room=train.attention_room,
      shards=mesh_lib.batch_shards(mesh))


def make_optimizer(config: ml_collections.ConfigDict
                   ) -> optax.GradientTransformation:
  """The optimiser of `config.optimizer`."""
  return optimizer_lib.make(**config.optimizer)


def make(config: ml_collections.ConfigDict, model: transformer.ModelConfig,
         mesh: jax.sharding.Mesh) -> Programs:
  """Builds (does not compile yet) the programs of a training run."""
  model = execution(adapted(model, config.lora), config.compute, mesh)
  optimizer = make_optimizer(config)
  policy_loss = objective.make_policy_loss(config.method)
  frozen_sharding, param_sharding = _split(
      model, mesh_lib.shardings(mesh, transformer.logical_axes(model)))
  state_sharding = _state_sharding(model, mesh, optimizer)
  minibatch_sharding = _minibatch_sharding(mesh)
  replicated = mesh_lib.replicated(mesh)
  shards = mesh_lib.batch_shards(mesh)
  scorer = update.Scorer(
      model=model, temperature=config.rollout.temperature,
      chunk_size=config.train.chunk_size * shards, shards=shards,
      gradient_dtype=config.compute.gradient_dtype)

  def score(params, minibatch, frozen=None):
    return update.old_policy_statistics(
        dataclasses.replace(scorer, frozen=frozen), params, minibatch)

  def train_step(state, minibatch, rng, noise_floor, old_params, frozen=None):
    return update.train_step(
        dataclasses.replace(scorer, frozen=frozen), policy_loss, optimizer,
        state, minibatch, rng, noise_floor, old_params)

  frozen = () if frozen_sharding is None else (frozen_sharding,)
  jit = functools.partial(compiled, mesh)
  return Programs(
      mesh=mesh, model=model, policy_loss=policy_loss, scorer=scorer,
      optimizer=optimizer, state_sharding=state_sharding,
      init_state=jit(functools.partial(_init_state, optimizer),
                     out_shardings=state_sharding, donate_argnums=0),
      freeze=jit(functools.partial(_cast, model.dtype),
                 out_shardings=frozen_sharding),
      init_adapters=jit(lambda key: _split(
          model, transformer.init(model, key))[1],
                        out_shardings=param_sharding),
      to_decode=make_decode_cast(model, mesh),
      to_old_policy=jit(functools.partial(_cast, model.dtype),
                        out_shardings=param_sharding),
      pack=make_packer(config, mesh), minibatch_sharding=minibatch_sharding,
      score=jit(score,
                in_shardings=(param_sharding, minibatch_sharding, *frozen),
                out_shardings=replicated),
      train_step=jit(
          train_step,
          in_shardings=(state_sharding, minibatch_sharding, replicated,
                        replicated,
                        param_sharding if policy_loss.needs_kl else None,
                        *frozen),
          out_shardings=(state_sharding, replicated), donate_argnums=0))


def compiled(mesh: jax.sharding.Mesh, function: Callable, **options: Any):
  """jax.jit under the rules of the mesh, rounding alike in every program."""
  compiler_options = _COMPILER_OPTIONS
  if _platform(mesh) == 'cpu':
    compiler_options = compiler_options | _COMPILER_OPTIONS_CPU
  return jax.jit(mesh_lib.under_rules(mesh, function),
                 compiler_options=compiler_options, **options)


def make_decode_cast(model: transformer.ModelConfig, mesh: jax.sharding.Mesh):
  """Jitted: weights to the compute dtype in the layout and form of decoding."""
  def cast(params):
    return decoding_lib.convert(_cast(model.dtype, params), _platform(mesh))

  return jax.jit(cast, out_shardings=decode_shardings(model, mesh))


def decode_shardings(model: transformer.ModelConfig, mesh: jax.sharding.Mesh):
  """Of the weights that decoding takes."""
  return mesh_lib.shardings(
      mesh, decoding_lib.logical_axes(model, _platform(mesh)),
      mesh_lib.DECODE_RULES)


def make_sampling(model: transformer.ModelConfig, mesh: jax.sharding.Mesh, *,
                  decoding: draw.Decoding, eos_ids: tuple[int, ...],
                  chunk: int) -> schedule.Programs:
  """The functions of `engine`, jitted: slots over data and fsdp."""
  cache, prompts = (cache_shardings(model, mesh, rows)
                    for rows in ('batch', None))
  whole = drawn = mesh_lib.replicated(mesh)
  decode = functools.partial(
      engine.decode, model, chunk=chunk, decoding=decoding, eos_ids=eos_ids)
  if mesh_lib.batch_shards(mesh) > 1:
    decode = _decode_by_shard(mesh, decode)
    if not mesh.is_multi_process:
      # The host sees every device: they need not gather what they drew.
      rows = mesh_lib.batch_sharding(mesh)
      drawn = engine.Chunk(rows, rows, rows, rows, rows, whole)

  def jit(function, **options):
    # Without the options that the updates need: they halve the rate on a CPU.
    return jax.jit(mesh_lib.under_rules(mesh, function, mesh_lib.DECODE_RULES),
                   **options)

  def empty(slots, columns, index):
    return decoding_lib.init_cache(
        model, slots, columns, model.dtype).replace(
            index=jax.numpy.int32(index))

  return schedule.Programs(
      empty=jit(empty, static_argnums=(0, 1), out_shardings=cache),
      prefill=jit(functools.partial(engine.prefill, model),
                  out_shardings=prompts),
      insert=jit(engine.insert, donate_argnums=0, out_shardings=cache),
      relay=_Relay(jit, cache),
      decode=jit(decode, donate_argnums=1, out_shardings=(cache, drawn)))


def _decode_by_shard(mesh, decode):
  """Shards with slots of their own, which count the live rows together."""
  rows, whole = ('batch',), ()
  cache = transformer.KVCache(rows, rows, rows, whole)
  return mesh_lib.by_batch_shard(
      mesh, functools.partial(
          decode, total=mesh_lib.total_over_batch,
          count_every=engine.count_every(mesh_lib.batch_shards(mesh))),
      in_axes=(whole, cache, rows, whole, whole, whole),
      out_axes=(cache, engine.Chunk(rows, rows, rows, rows, rows, whole)))


def cache_shardings(model: transformer.ModelConfig, mesh: jax.sharding.Mesh,
                    rows: str | None = 'batch') -> transformer.KVCache:
  """Of a decoding cache: its rows over `rows`, its heads over tensor.

  A TPU keeps the keys' head size innermost whatever the order of their axes;
  unless told, it would copy all of them at the start and end of every chunk.
  """
  store = mesh_lib.shardings(mesh, (rows, 'kv_heads', None, None))
  keys = store
  if _platform(mesh) == 'tpu':
    keys = layout.Format(layout.Layout((0, 1, 3, 2)), store)
  return transformer.KVCache(
      (keys,) * model.num_layers, (store,) * model.num_layers,
      mesh_lib.shardings(mesh, (rows, None)), mesh_lib.replicated(mesh))


@dataclasses.dataclass(frozen=True, eq=False)
class _Relay:
  """`engine.relay` of a whole cache, one array at a time.

  So the memory of two caches is never needed at once; all the layers share
  one program.

  jit: as for the sampler's other functions. sharding: of the cache.
  """
  jit: Callable[..., Any]
  sharding: transformer.KVCache

  @functools.cache
  def of_array(self, part: str, columns: int) -> Any:
    """Jitted: (array, row_M, shift) -> array; of 'k', 'v' or 'position'."""
    axis, empty = {'k': (3, 0), 'v': (2, 0), 'position': (1, -1)}[part]
    return self.jit(
        functools.partial(
            engine.relay, axis=axis, columns=columns, empty=empty),
        out_shardings=jax.tree.leaves(getattr(self.sharding, part))[0])

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


def stream(seed: int, name: str) -> jax.Array:
  """The key of one use of randomness: 'rollout', 'eval', 'update', ….

  Folded with the rollout step, it is all the random state of a run.
  """
  uses = ('rollout', 'eval', 'update', 'adapters')
  return jax.random.fold_in(jax.random.key(seed), uses.index(name))


def restorable(programs: Programs
               ) -> tuple[update.TrainState, checkpoint.Unpadded]:
  """What `Checkpointer.restore` needs to know of the state."""
  state = abstract_state(programs)
  return state, on_mesh.unpadded(programs.model, state)


def abstract_state(programs: Programs) -> update.TrainState:
  """Shapes, dtypes and shardings of the state."""
  params = _trained(programs.model)
  shapes = jax.eval_shape(programs.init_state, params)
  return jax.tree.map(
      lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
      shapes, programs.state_sharding)


def _split(model, tree):
  """(what is frozen, what is trained) of a tree like the parameters'."""
  return lora.split(tree) if model.lora else (None, tree)


def _trained(model):
  """Shapes of the trained parameters."""
  return _split(model, transformer.abstract_params(model, 'float32'))[1]


def memory_parts(programs: Programs) -> dict[str, Any]:
  """What outlives a jitted call: name -> ShapeDtypeStructs with shardings."""
  model, mesh = programs.model, programs.mesh
  def placed(rules, dtype):
    return jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        transformer.abstract_params(model, dtype), mesh_lib.shardings(
            mesh, transformer.logical_axes(model), rules))

  state = abstract_state(programs)
  frozen, _ = _split(model, placed(mesh_lib.RULES, model.dtype))
  return {'weights and moments': state, 'gradient': state.params,
          'frozen weights': frozen,
          'weights for decoding': placed(mesh_lib.DECODE_RULES, model.dtype)}


def check_memory(programs: Programs) -> None:
  """Refuses a mesh whose devices cannot hold what outlives a jitted call.

  Raises:
    errors.InputError: with the bytes on a device.
  """
  mesh_lib.check_memory(programs.mesh, memory_parts(programs))


def _platform(mesh):
  return mesh.devices.flat[0].platform


def _init_state(optimizer, params):
  return update.TrainState(
      step=jax.numpy.int32(0), params=params,
      opt_state=optimizer.init(params))


def _minibatch_sharding(mesh):
  """The rows of each microbatch over data and fsdp; the rest everywhere."""
  names = (field.name for field in dataclasses.fields(update.Minibatch))
  everywhere = mesh_lib.replicated(mesh)
  return update.Minibatch(**dict.fromkeys(names, everywhere)).replace(
      blocks=mesh_lib.shardings(mesh, (None, 'batch')))


def _state_sharding(model, mesh, optimizer):
  """Moments are laid out as the parameters they belong to."""
  opt_state = jax.eval_shape(optimizer.init, _trained(model))
  _, param_sharding = _split(
      model, mesh_lib.shardings(mesh, transformer.logical_axes(model)))
  replicated = mesh_lib.replicated(mesh)
  return update.TrainState(
      step=replicated, params=param_sharding,
      opt_state=optax.tree_map_params(
          optimizer, lambda _, sharding: sharding, opt_state, param_sharding,
          transform_non_params=lambda _: replicated))


def _cast(dtype, params):
  """To the compute dtype; but norm scales are used in fp32 and stay so.

  The policy of these weights is then exactly that of the masters.
  """
  return jax.tree_util.tree_map_with_path(
      lambda path, x: x if path[-1].key == 'scale' else x.astype(dtype),
      params)
