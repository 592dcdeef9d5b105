"""The jitted programs of training, made from a config and a mesh.

Replays, plans and benchmarks compile the same functions.
"""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import ml_collections
import numpy as np
import optax

from tepo_jax import errors
from tepo_jax.job import sampling as sampling_lib
from tepo_jax.learning import advantage
from tepo_jax.learning import objective
from tepo_jax.learning import optimizer as optimizer_lib
from tepo_jax.learning import packing
from tepo_jax.learning import update
from tepo_jax.policy import attention
from tepo_jax.policy import lora
from tepo_jax.policy import ops
from tepo_jax.policy import padding as padding_lib
from tepo_jax.policy import transformer
from tepo_jax.policy.cpu import ops as cpu_ops
from tepo_jax.runtime import checkpoint
from tepo_jax.runtime import mesh as mesh_lib

# `score` and `train_step` must round identically, so that the ratios at
# π_θ = π_old are exactly 1: no fusion may keep bfloat16 values in float32, and
# on a CPU matrix products are isolated from the fusion context.
_COMPILER_OPTIONS = {'xla_allow_excess_precision': False}
_COMPILER_OPTIONS_CPU = {'xla_cpu_experimental_ynn_fusion_type':
                         'LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT'}
# Compiler options that let a TPU compute during collectives, as MaxText sets
# them; without them it waits, as the schedules for v5e, v5p and v6e show. The
# SparseCores of v5p and v6e run the collectives; a v5e fuses them with the
# instructions around them, which helps gathers only.
_BY_SPARSECORES = dict.fromkeys((
    'xla_tpu_enable_sparse_core_collective_offload_all_gather',
    'xla_tpu_enable_sparse_core_collective_offload_2d_all_gather',
    'xla_tpu_enable_sparse_core_collective_offload_3d_all_gather',
    'xla_tpu_enable_sparse_core_collective_offload_all_reduce',
    'xla_tpu_enable_sparse_core_collective_offload_reduce_scatter',
    'xla_tpu_enable_sparse_core_collective_offload_nd_reduce_scatter',
    'xla_tpu_enable_2d_cross_module_reduce_scatter',
    'xla_tpu_enable_all_gather_offload_tracing',
    'xla_tpu_enable_all_reduce_offload_tracing',
    'xla_tpu_enable_reduce_scatter_offload_tracing',
    'xla_tpu_use_tc_device_shape_on_sc',
    'xla_sc_disable_megacore_partitioning'), True) | dict.fromkeys((
        'xla_tpu_enable_async_collective_fusion_fuse_all_gather',
        'xla_sc_enable_instruction_fusion'), False)
_FUSED = dict.fromkeys((
    'xla_enable_async_all_gather', 'xla_tpu_overlap_compute_collective_tc',
    'xla_tpu_enable_async_collective_fusion',
    'xla_tpu_enable_async_collective_fusion_fuse_all_gather',
    'xla_tpu_enable_async_collective_fusion_multiple_steps'), True)
_V6E = ('TPU v6 lite', 'TPU v6e')
_WITH_SPARSECORES = ('TPU v5', 'TPU v5p', *_V6E)
# What an instruction may use of a v6e's 128 MiB of VMEM, as MaxText sets it. By
# the schedule of Qwen2.5-7B on v6e:4x4, scoring and updates then wait less for
# communication: 1.55 s an update instead of 1.63. One chip gains nothing:
# scoring Qwen2.5-0.5B takes 0.13 s instead of 0.11.
_VMEM = {'xla_tpu_scoped_vmem_limit_kib': 96 * 1024}


@dataclasses.dataclass(frozen=True)
class TrainingPrograms:
  """The functions that training runs on the devices of one mesh.

  Attributes:
    jit: `compiled` on the mesh, as for the functions below.
    model: with adapters and execution fields, see `prepare_model`.
    policy_loss, scorer, optimizer: the parts of `train_step`.
    share: of the learning rate by rollout step, see `optimizer.share`.
    init_state: params -> TrainState; donates the params.
    freeze: only with LoRA: weights -> frozen base in the compute dtype.
    init_adapters: only with LoRA: key -> params.
    decoding: model and mesh of sampling, see `sampling.for_decoding`.
    to_decode, to_evaluate: see `sampling.make_decode_cast`.
    to_old_policy: params -> compute dtype, training layout, for `old_policy`
      and the reference policy.
    pack: Batch -> Minibatch, both on the host.
    minibatch: shapes, dtypes and shardings of every minibatch of the run.
    old_states: with an exact KL, the shape [R, K, S, D] and sharding of the
      hidden states of π_old that a run keeps; else None. See `memory.keeping`.
    score: (params, Minibatch) -> ℓ° and H°.
    score_and_keep: (params, Minibatch, states, first) -> ℓ°, H°, OldPolicy; see
      `update.score_minibatch`; donates the states.
    old_policy: (params, Minibatch) -> OldPolicy.
    train_step: (state, Minibatch, rng, OldPolicy) -> state, metrics; donates
      the state.

  With LoRA the params of the state and of π_old are adapters; the functions
  from `score` to `train_step` take the frozen base as one more argument, and
  `to_decode` takes `lora.combine` of both.
  """
  mesh: jax.sharding.Mesh
  jit: Callable[..., Any]
  model: transformer.ModelConfig
  policy_loss: objective.PolicyLoss
  scorer: update.Scorer
  optimizer: optax.GradientTransformation
  share: optimizer_lib.Share | None
  state_sharding: update.TrainState
  init_state: Any
  freeze: Any
  init_adapters: Any
  decoding: tuple[transformer.ModelConfig, jax.sharding.Mesh]
  to_decode: Any
  to_evaluate: Any
  to_old_policy: Any
  pack: Callable[[packing.Batch], packing.Minibatch]
  minibatch_sharding: packing.Minibatch
  minibatch: packing.Minibatch
  old_states: jax.ShapeDtypeStruct | None
  score: Any
  score_and_keep: Any
  old_policy: Any
  train_step: Any

  def rate_share(self, step: int) -> np.float32 | None:
    """`Minibatch.rate_share` in rollout step `step`, counted from 1."""
    return None if self.share is None else np.float32(self.share(step - 1))


class UpdateArguments(NamedTuple):
  """Of `TrainingPrograms.train_step`; base: LoRA's frozen weights, or ()."""
  state: update.TrainState
  minibatch: packing.Minibatch
  key: jax.Array
  old: update.OldPolicy | None
  base: tuple[Any, ...]

  def in_order(self) -> tuple[Any, ...]:
    """The arguments, as `train_step` takes them."""
    return *self[:-1], *self.base


def prepare_model(model: transformer.ModelConfig,
                  config: ml_collections.ConfigDict, mesh: jax.sharding.Mesh
                  ) -> transformer.ModelConfig:
  """`execution` of the model with the adapters of `config.lora`."""
  settings = config.lora
  adapters = lora.Lora(settings.rank, settings.alpha, tuple(settings.targets))
  return execution(
      dataclasses.replace(model, lora=adapters if settings.rank else None),
      config.compute, mesh)


def execution(model: transformer.ModelConfig,
              compute: ml_collections.ConfigDict,
              mesh: jax.sharding.Mesh | None = None) -> transformer.ModelConfig:
  """The model with the execution fields of `config.compute`, for a mesh.

  Its `remat` for 'auto' is 'full' until `memory.fitted` chooses it.

  Raises:
    errors.InputError: the mesh cannot cut the model, or its devices lack that
      attention.
  """
  device = jax.devices()[0] if mesh is None else mesh.devices.flat[0]
  is_cpu = device.platform == 'cpu'
  if mesh is not None:
    model = padding_lib.sharded_over(model, mesh.shape['tensor'])
  with errors.naming('config.compute.attention'):
    backend = attention.choose(
        compute.attention, device.platform, compute.dtype, model.head_dim)
  return dataclasses.replace(
      model, dtype=compute.dtype,
      remat='full' if compute.remat == 'auto' else compute.remat,
      ops=cpu_ops.OPS if is_cpu else ops.PLAIN, attention=backend)


def make_packer(config: ml_collections.ConfigDict, mesh: jax.sharding.Mesh
                ) -> Callable[[packing.Batch], packing.Minibatch]:
  """The packing of `config.train`."""
  train = config.train
  return packing.make(
      train.packing, prompt_tokens=config.data.max_prompt_tokens,
      max_tokens=config.rollout.max_tokens, samples=config.rollout.samples,
      microbatch_tokens=train.microbatch_tokens,
      shards=mesh_lib.batch_shards(mesh), shared_prefix=train.shared_prefix)


def make(config: ml_collections.ConfigDict, model: transformer.ModelConfig,
         mesh: jax.sharding.Mesh) -> TrainingPrograms:
  """Builds the programs; does not compile. `model` is of `prepare_model`."""
  decoding = sampling_lib.for_decoding(model, mesh, config.rollout.tensor)
  cast_as = functools.partial(sampling_lib.make_decode_cast, *decoding)
  optimizer, share = optimizer_lib.of(config.optimizer)
  policy_loss = objective.make_policy_loss(config.method)
  whole_sharding = mesh_lib.shardings(mesh, transformer.logical_axes(model))
  frozen_sharding, param_sharding = split_trained(model, whole_sharding)
  replicated = mesh_lib.replicated(mesh)
  reference_dtype = model.dtype if policy_loss.needs_reference else None
  state_sharding = _state_sharding(model, optimizer, param_sharding, replicated)
  if reference_dtype:
    state_sharding = state_sharding.replace(reference=param_sharding)
  minibatch_sharding = _minibatch_sharding(mesh)
  width = None if model.d_model % mesh.shape['tensor'] else 'states'
  old_sharding = update.OldPolicy(
      mesh_lib.shardings(mesh, ('batch', None, None, width)),
      replicated, transformer.head_weight(model, whole_sharding))
  pack, shards = make_packer(config, mesh), mesh_lib.batch_shards(mesh)
  minibatch = _abstract_minibatch(
      config, policy_loss, pack, minibatch_sharding, share)
  microbatches, rows, columns = minibatch.rows.token_RS.shape
  scorer = update.Scorer(
      model=model, temperature=config.rollout.temperature,
      chunk_size=config.train.chunk_size * shards, shards=shards)
  jit = functools.partial(compiled, mesh, dtype=model.dtype)
  return TrainingPrograms(
      mesh=mesh, jit=jit, model=model, policy_loss=policy_loss, scorer=scorer,
      optimizer=optimizer, share=share, state_sharding=state_sharding,
      init_state=jit(
          functools.partial(_init_state, optimizer, reference_dtype),
          out_shardings=state_sharding, donate_argnums=0),
      freeze=jit(functools.partial(sampling_lib.cast, model.dtype),
                 out_shardings=frozen_sharding),
      init_adapters=jit(lambda key: split_trained(
          model, transformer.init(model, key))[1],
                        out_shardings=param_sharding),
      decoding=decoding, to_decode=cast_as(config.rollout.weights),
      to_evaluate=cast_as('compute'),
      to_old_policy=jit(functools.partial(sampling_lib.cast, model.dtype),
                        out_shardings=param_sharding),
      pack=pack, minibatch_sharding=minibatch_sharding, minibatch=minibatch,
      old_states=jax.ShapeDtypeStruct(
          (rows, microbatches, columns, model.d_model), model.dtype,
          sharding=old_sharding.states_RKSD) if policy_loss.needs_kl else None,
      **_minibatch_programs(
          jit, scorer, policy_loss, optimizer, state_sharding,
          minibatch_sharding, old_sharding, replicated,
          () if frozen_sharding is None else (frozen_sharding,)))


def _minibatch_programs(jit, scorer, policy_loss, optimizer, state_sharding,
                        minibatch_sharding, old_sharding, replicated, frozen):
  """The programs from `score` to `train_step`; `frozen`: () or (sharding,)."""
  def on(frozen):
    return dataclasses.replace(scorer, frozen=frozen)

  def score(params, minibatch, frozen=None):
    return update.score_minibatch(on(frozen), params, minibatch)[:2]

  def score_and_keep(params, minibatch, states, first, frozen=None):
    return update.score_minibatch(
        on(frozen), params, minibatch, states, first)

  def old_policy(params, minibatch, frozen=None):
    return update.score_with_states(on(frozen), params, minibatch)[2]

  def train_step(state, minibatch, rng, old, frozen=None):
    return update.train_step(
        on(frozen), policy_loss, optimizer, state, minibatch, rng, old)

  given = state_sharding.params, minibatch_sharding
  return dict(
      score=jit(score, in_shardings=(*given, *frozen),
                out_shardings=replicated),
      score_and_keep=jit(
          score_and_keep, in_shardings=(
              *given, old_sharding.states_RKSD, replicated, *frozen),
          out_shardings=(replicated, replicated, old_sharding),
          donate_argnums=2),
      old_policy=jit(old_policy, in_shardings=(*given, *frozen),
                     out_shardings=old_sharding),
      train_step=jit(
          train_step,
          in_shardings=(state_sharding, minibatch_sharding, replicated,
                        old_sharding if policy_loss.needs_kl else None,
                        *frozen),
          out_shardings=(state_sharding, replicated), donate_argnums=0))


def _abstract_minibatch(config, policy_loss, pack, sharding, share):
  """`TrainingPrograms.minibatch`: that of completions without a token."""
  rows = config.train.minibatch_prompts * config.rollout.samples
  length = config.rollout.max_tokens
  zeros_BT = np.zeros((rows, length), np.float32)
  nothing_BS = np.full(
      (rows, config.data.max_prompt_tokens + length), -1, np.int32)
  zeros_B = (zeros_BT if advantage.is_by_token(policy_loss.method.estimator)
             else zeros_BT[:, 0])
  packed = pack(packing.Batch(
      nothing_BS, nothing_BS, zeros_BT, zeros_B, *3 * [zeros_BT],
      None if config.train.behaviour.weight == 'off' else zeros_BT)).replace(
          reference_logp_BT=zeros_BT if policy_loss.needs_reference else None,
          rate_share=None if share is None else np.float32(1),
          scored_at=np.int32(0))
  return jax.tree.map(lambda sharding, part: jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
      part), sharding, packed)


def compiled(mesh: jax.sharding.Mesh, function: Callable, dtype: str,
             **options: Any):
  """jax.jit on the mesh, with equal rounding in all programs."""
  return jax.jit(mesh_lib.on_mesh(mesh, function, dtype=dtype),
                 compiler_options=compiler_options(mesh), **options)


def compiler_options(mesh: jax.sharding.Mesh) -> dict[str, Any]:
  """XLA's options of scoring and updates, by platform, chip and mesh."""
  if mesh_lib.platform(mesh) == 'cpu':
    return _COMPILER_OPTIONS | _COMPILER_OPTIONS_CPU
  if mesh_lib.platform(mesh) != 'tpu' or mesh.size == 1:
    return _COMPILER_OPTIONS
  kind = mesh.devices.flat[0].device_kind
  collectives = _BY_SPARSECORES if kind in _WITH_SPARSECORES else _FUSED
  return _COMPILER_OPTIONS | collectives | (_VMEM if kind in _V6E else {})


def stream(seed: int, name: str) -> jax.Array:
  """The random key of one use. Folded with the rollout step, these keys are
  a run's only random state."""
  uses = ('rollout', 'eval', 'update', 'adapters')
  return jax.random.fold_in(jax.random.key(seed), uses.index(name))


def restorable(programs: TrainingPrograms
               ) -> tuple[update.TrainState, checkpoint.Unpadded]:
  """The arguments of `Checkpointer.restore` that describe the state."""
  state = abstract_state(programs)
  return state, padding_lib.unpadded(programs.model, state)


def abstract_state(programs: TrainingPrograms) -> update.TrainState:
  """Shapes, dtypes and shardings of the state."""
  return jax.tree.map(
      lambda x, s: x.update(sharding=s),
      jax.eval_shape(programs.init_state, _trained(programs.model)),
      programs.state_sharding)


def update_arguments(programs: TrainingPrograms) -> UpdateArguments:
  """Shapes, dtypes and shardings of `train_step`'s arguments in a run that
  keeps π_old's states."""
  state, base, old = abstract_state(programs), (), None
  if programs.model.lora:
    base = programs.freeze.eval_shape(transformer.abstract_params(
        dataclasses.replace(programs.model, lora=None), 'float32')),
  if programs.old_states is not None:
    *_, old = programs.score_and_keep.eval_shape(
        state.params, programs.minibatch, programs.old_states, 0, *base)
  return UpdateArguments(
      state, programs.minibatch, jax.eval_shape(lambda: jax.random.key(0)),
      old, base)


def split_trained(model, tree):
  """Splits a tree like the parameters' into (frozen or None, trained)."""
  return lora.split(tree) if model.lora else (None, tree)


def _trained(model):
  """Shapes of the trained parameters."""
  return split_trained(model, transformer.abstract_params(model, 'float32'))[1]


def _init_state(optimizer, reference_dtype, params):
  return update.TrainState(
      jax.numpy.int32(0), params, optimizer.init(params),
      reference_dtype and sampling_lib.cast(reference_dtype, params))


def _minibatch_sharding(mesh):
  """Shards each microbatch's rows over data and fsdp; replicates the rest."""
  names = (field.name for field in dataclasses.fields(packing.Minibatch))
  everywhere = mesh_lib.replicated(mesh)
  return packing.Minibatch(**dict.fromkeys(names, everywhere)).replace(
      rows=mesh_lib.shardings(mesh, (None, 'batch')))


def _state_sharding(model, optimizer, param_sharding, replicated):
  """Moments get the sharding of their parameters."""
  opt_state = jax.eval_shape(optimizer.init, _trained(model))
  return update.TrainState(
      step=replicated, params=param_sharding,
      opt_state=optax.tree_map_params(
          optimizer, lambda _, sharding: sharding, opt_state, param_sharding,
          transform_non_params=lambda _: replicated))
