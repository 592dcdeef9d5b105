"""The jitted programs of a run, made from its config and mesh.

One place, so that training, evaluation and measurement compile the very same
functions: cast and reshard for decoding, generate, score, update.
"""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any

import jax
import ml_collections
import numpy as np
import optax

from tepo_jax.learning import objective
from tepo_jax.learning import optimizer as optimizer_lib
from tepo_jax.learning import update
from tepo_jax.policy import transformer
from tepo_jax.rollout import sampler
from tepo_jax.runtime import mesh as mesh_lib


# A fusion may keep bfloat16 values in float32; then `score` and `train_step`
# round differently and the ratios at π_θ = π_old are not exactly 1.
_COMPILER_OPTIONS = {'xla_allow_excess_precision': False}


@dataclasses.dataclass(frozen=True)
class Programs:
  """Everything that runs on the devices, bound to one mesh.

  Attributes:
    mesh, model: where and what; `model` carries the execution fields.
    policy_loss: the objective of `config.method`.
    scorer, optimizer: what `train_step` is made of.
    state_sharding: of `update.TrainState`.
    init_state: params -> TrainState; takes the params over.
    to_decode: fp32 masters -> weights in the compute dtype and decode layout.
    to_old_policy: the same dtype in the training layout, for the exact KL.
    score: (params, Batch) -> Batch with ℓ° and H°, a minibatch at a time.
    train_step: (state, Batch, rng, noise_floor, old_params) -> state,
      metrics; donates the state.
  """
  mesh: jax.sharding.Mesh
  model: transformer.ModelConfig
  policy_loss: objective.PolicyLoss
  scorer: update.Scorer
  optimizer: optax.GradientTransformation
  state_sharding: update.TrainState
  init_state: Any
  to_decode: Any
  to_old_policy: Any
  score: Any
  train_step: Any


def execution(model: transformer.ModelConfig,
              compute: ml_collections.ConfigDict) -> transformer.ModelConfig:
  """The model with the execution fields of `config.compute`."""
  return dataclasses.replace(
      model, dtype=compute.dtype, remat=compute.remat, unroll=compute.unroll)


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
  batch_sharding = mesh_lib.batch_sharding(mesh)
  replicated = mesh_lib.replicated(mesh)
  scorer = update.Scorer(
      model=model, microbatches=config.train.microbatches,
      temperature=config.rollout.temperature,
      chunk_size=config.train.chunk_size)

  return Programs(
      mesh=mesh, model=model, policy_loss=policy_loss, scorer=scorer,
      optimizer=optimizer,
      state_sharding=state_sharding,
      init_state=jit(mesh, functools.partial(_init_state, optimizer),
                     out_shardings=state_sharding, donate_argnums=0),
      to_decode=make_decode_cast(model, mesh),
      to_old_policy=jit(mesh, functools.partial(_cast, model.dtype),
                        out_shardings=param_sharding),
      score=jit(mesh, functools.partial(update.old_policy_statistics, scorer),
                in_shardings=(param_sharding, batch_sharding),
                out_shardings=batch_sharding),
      train_step=jit(
          mesh, functools.partial(
              update.train_step, scorer, policy_loss, optimizer),
          in_shardings=(state_sharding, batch_sharding, replicated, replicated,
                        param_sharding if policy_loss.needs_kl else None),
          out_shardings=(state_sharding, replicated), donate_argnums=0))


def jit(mesh: jax.sharding.Mesh, function: Callable, **options: Any):
  """jax.jit under the mesh's rules, rounding alike in every program."""
  return jax.jit(mesh_lib.under_rules(mesh, function),
                 compiler_options=_COMPILER_OPTIONS, **options)


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


def take_rows(mesh: jax.sharding.Mesh, batch: update.Batch,
              rows: np.ndarray) -> update.Batch:
  """Some rows of a host batch, on the devices."""
  return mesh_lib.put_batch(mesh, jax.tree.map(lambda x: x[rows], batch))


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
