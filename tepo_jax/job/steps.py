"""The jitted programs of a run, made from its config and mesh.

One place, so that training, evaluation and measurement compile the very same
functions: cast and reshard for decoding, generate, score, update.
"""

import dataclasses
import functools
from typing import Any

import jax
import ml_collections
import optax

from tepo_jax.learning import objective
from tepo_jax.learning import optimizer as optimizer_lib
from tepo_jax.learning import update
from tepo_jax.policy import transformer
from tepo_jax.rollout import packing
from tepo_jax.rollout import sampler
from tepo_jax.runtime import mesh as mesh_lib


# `score` and `train_step` must round alike, else the ratios at π_θ = π_old are
# not exactly 1. A fusion may keep bfloat16 values in float32; and on the CPU
# what a library call is fused with decides how it rounds.
_COMPILER_OPTIONS = {'xla_allow_excess_precision': False}
_COMPILER_OPTIONS_CPU = {'xla_cpu_experimental_ynn_fusion_type': ''}


@dataclasses.dataclass(frozen=True)
class Programs:
  """Everything that runs on the devices, bound to one mesh.

  Attributes:
    mesh, model: where and what; `model` carries the execution fields.
    policy_loss: the objective of `config.method`.
    state_sharding: of `update.TrainState`.
    init_state: params -> TrainState; takes the params over.
    to_decode: fp32 masters -> weights in the compute dtype and decode layout.
    to_old_policy: the same dtype in the training layout, for the exact KL.
    pack: update.Batch on the host -> update.Minibatch there.
    minibatch_sharding: of `update.Minibatch`.
    score: (params, Minibatch) -> ℓ° and H°.
    train_step: (state, Minibatch, rng, noise_floor, old_params) -> state,
      metrics; donates the state.
  """
  mesh: jax.sharding.Mesh
  model: transformer.ModelConfig
  policy_loss: objective.PolicyLoss
  state_sharding: update.TrainState
  init_state: Any
  to_decode: Any
  to_old_policy: Any
  pack: packing.Packer
  minibatch_sharding: update.Minibatch
  score: Any
  train_step: Any


def execution(model: transformer.ModelConfig,
              compute: ml_collections.ConfigDict) -> transformer.ModelConfig:
  """The model with the execution fields of `config.compute`."""
  return dataclasses.replace(
      model, dtype=compute.dtype, remat=compute.remat, unroll=compute.unroll)


def make_packer(config: ml_collections.ConfigDict,
                mesh: jax.sharding.Mesh) -> packing.Packer:
  """How `config.train` lays the rows of an update out."""
  train = config.train
  longest = config.data.max_prompt_tokens + config.rollout.max_tokens
  return packing.make(
      train.packing, row_tokens=train.row_tokens or longest,
      microbatch_tokens=train.microbatch_tokens,
      shards=mesh_lib.batch_shards(mesh))


def make_optimizer(config: ml_collections.ConfigDict
                   ) -> optax.GradientTransformation:
  """The optimiser of `config.optimizer`."""
  return optimizer_lib.make(**config.optimizer)


def make(config: ml_collections.ConfigDict, model: transformer.ModelConfig,
         mesh: jax.sharding.Mesh) -> Programs:
  """Builds (does not compile yet) the programs of a training run."""
  model = execution(model, config.compute)
  axes = transformer.logical_axes(model)
  optimizer = make_optimizer(config)
  policy_loss = objective.make_policy_loss(config.method)
  param_sharding = mesh_lib.shardings(mesh, axes)
  state_sharding = _state_sharding(model, mesh, optimizer)
  minibatch_sharding = _minibatch_sharding(mesh)
  replicated = mesh_lib.replicated(mesh)
  shards = mesh_lib.batch_shards(mesh)
  scorer = update.Scorer(
      model=model, temperature=config.rollout.temperature,
      chunk_size=config.train.chunk_size * shards, shards=shards,
      gradient_dtype=config.compute.gradient_dtype)

  compiler_options = _COMPILER_OPTIONS
  if mesh.devices.flat[0].platform == 'cpu':
    compiler_options = compiler_options | _COMPILER_OPTIONS_CPU

  def jit(function, **options):
    return jax.jit(mesh_lib.under_rules(mesh, function),
                   compiler_options=compiler_options, **options)

  return Programs(
      mesh=mesh, model=model, policy_loss=policy_loss,
      state_sharding=state_sharding,
      init_state=jit(functools.partial(_init_state, optimizer),
                     out_shardings=state_sharding, donate_argnums=0),
      to_decode=make_decode_cast(model, mesh),
      to_old_policy=jit(functools.partial(_cast, model.dtype),
                        out_shardings=param_sharding),
      pack=make_packer(config, mesh), minibatch_sharding=minibatch_sharding,
      score=jit(functools.partial(update.old_policy_statistics, scorer),
                in_shardings=(param_sharding, minibatch_sharding),
                out_shardings=replicated),
      train_step=jit(
          functools.partial(update.train_step, scorer, policy_loss, optimizer),
          in_shardings=(state_sharding, minibatch_sharding, replicated,
                        replicated,
                        param_sharding if policy_loss.needs_kl else None),
          out_shardings=(state_sharding, replicated), donate_argnums=0))


def make_decode_cast(model: transformer.ModelConfig, mesh: jax.sharding.Mesh):
  """Jitted: weights to the compute dtype in the decode layout."""
  return jax.jit(
      functools.partial(_cast, model.dtype),
      out_shardings=mesh_lib.shardings(
          mesh, transformer.logical_axes(model), mesh_lib.DECODE_RULES))


def make_generate(model: transformer.ModelConfig, mesh: jax.sharding.Mesh, *,
                  group_size: int, max_tokens: int, temperature: float,
                  eos_ids: tuple[int, ...]):
  """Jitted `sampler.generate`: (params, prompts…, key) -> Completions."""
  batch = mesh_lib.batch_sharding(mesh)
  weights = mesh_lib.shardings(
      mesh, transformer.logical_axes(model), mesh_lib.DECODE_RULES)
  generate = functools.partial(
      sampler.generate, model, group_size=group_size, max_tokens=max_tokens,
      temperature=temperature, eos_ids=eos_ids)
  return jax.jit(
      mesh_lib.under_rules(mesh, generate, mesh_lib.DECODE_RULES),
      in_shardings=(weights, batch, batch, batch, mesh_lib.replicated(mesh)),
      out_shardings=batch)


def stream(seed: int, name: str) -> jax.Array:
  """The key of one use of randomness: 'rollout', 'eval' or 'update'.

  Folded with the rollout step, it is all the random state of a run.
  """
  uses = ('rollout', 'eval', 'update')
  return jax.random.fold_in(jax.random.key(seed), uses.index(name))


def abstract_state(programs: Programs) -> update.TrainState:
  """Shapes, dtypes and shardings of the state, to restore into."""
  params = transformer.abstract_params(programs.model, 'float32')
  shapes = jax.eval_shape(programs.init_state, params)
  return jax.tree.map(
      lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
      shapes, programs.state_sharding)


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
  params = transformer.abstract_params(model, 'float32')
  opt_state = jax.eval_shape(optimizer.init, params)
  param_sharding = mesh_lib.shardings(mesh, transformer.logical_axes(model))
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
