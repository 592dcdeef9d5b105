"""The jitted programs in bfloat16: casts must not change the policy."""

import dataclasses

import jax
import numpy as np
import pytest

from configs import tiny
from tepo_jax import errors
from tepo_jax.job import memory as memory_lib
from tepo_jax.job import programs as programs_lib
from tepo_jax.learning import packing
from tepo_jax.policy import padding as padding_lib
from tepo_jax.policy import transformer
from tepo_jax.runtime import mesh as mesh_lib

MODEL = transformer.ModelConfig(
    vocab_size=32, d_model=16, num_layers=2, num_heads=2, num_kv_heads=1,
    head_dim=8, d_ff=16, max_position=32, tie_embeddings=True, qk_norm=True)


def _random_params(generator):
  return jax.tree.map(
      lambda x: x + generator.normal(0, 0.1, x.shape).astype(np.float32),
      transformer.init(MODEL, jax.random.key(0)))


def _batch(generator):
  zeros_BT = np.zeros((8, 6), np.float32)
  return packing.Batch(
      token_BS=generator.integers(0, 32, (8, 10), np.int32),
      position_BS=np.tile(np.arange(10, dtype=np.int32), (8, 1)),
      mask_BT=np.ones((8, 6), np.float32),
      advantage_B=generator.normal(size=8).astype(np.float32),
      old_logp_BT=zeros_BT, old_entropy_BT=zeros_BT, sampler_logp_BT=zeros_BT)


def _update(programs, state, generator, *frozen):
  """(state, metrics) of an update from freshly scored completions."""
  minibatch = jax.device_put(programs.pack(_batch(generator)),
                             programs.minibatch_sharding)
  old = programs.old_policy(state.params, minibatch, *frozen)
  old_logp_BT, old_entropy_BT = programs.score(
      state.params, minibatch, *frozen)
  minibatch = minibatch.replace(
      old_logp_BT=old_logp_BT, old_entropy_BT=old_entropy_BT)
  return programs.train_step(
      state, minibatch, jax.random.key(0), old, *frozen)


def _programs(rank, devices=1):
  config = tiny.get_config('tepo')
  config.compute.dtype = 'bfloat16'
  config.lora.rank = rank
  mesh = mesh_lib.make({'data': 1, 'fsdp': -1, 'tensor': 1},
                       jax.devices()[:devices])
  return programs_lib.make(
      config, programs_lib.prepare_model(MODEL, config, mesh), mesh)


@pytest.mark.long
def test_in_bfloat16_the_old_policy_is_the_policy_exactly():
  """Norm scales that bfloat16 cannot represent keep their values."""
  programs, generator = _programs(0), np.random.default_rng(0)
  state = programs.init_state(_random_params(generator))
  _, metrics = _update(programs, state, generator)
  assert metrics['entropy_unchanged_share'] == 1
  assert metrics['kl_full'] == 0 and metrics['region_share'] == 0
  assert metrics['weight_min'] == metrics['weight_max'] == 1
  assert metrics['grad_norm'] > 0


def _weights(config, model, tensor):
  """Weights for decoding of the same parameters, trained on 4 / tensor x tensor
  devices; and what `memory.held` says of their size."""
  mesh = mesh_lib.make({'data': 1, 'fsdp': -1, 'tensor': tensor},
                       jax.devices()[:4])
  programs = programs_lib.make(
      config, programs_lib.prepare_model(model, config, mesh), mesh)
  params = padding_lib.padded_as(
      programs.model, transformer.init(model, jax.random.key(0)))
  return programs.to_decode(jax.device_put(
      params, programs.state_sharding.params)), memory_lib.held(
          programs)['weights for decoding']


def test_sampling_may_have_a_mesh_of_its_own():
  """With 31 tokens, which one shard does not pad and two do."""
  config = tiny.get_config('tepo')
  model = dataclasses.replace(MODEL, vocab_size=31)
  expected, size = _weights(config, model, 2)
  config.rollout.tensor = 2
  weights, own_size = _weights(config, model, 1)
  assert size == own_size == mesh_lib.device_bytes(weights)
  assert weights['embed']['embedding'].shape[0] == 32
  assert not np.asarray(weights['embed']['embedding'])[31].any()
  jax.tree.map(np.testing.assert_array_equal, weights, expected)
  jax.tree.map(lambda a, b: a.sharding.is_equivalent_to(b.sharding, a.ndim)
               or pytest.fail(f'{a.sharding} {b.sharding}'), weights, expected)
  config.rollout.tensor = 3
  with pytest.raises(errors.InputError, match='tensor=3 does not divide'):
    _weights(config, model, 1)


def test_int8_weights_are_for_rollouts():
  """Evaluations sample from the policy itself."""
  config = tiny.get_config('tepo')
  config.rollout.weights = 'int8'
  mesh = mesh_lib.make(config.mesh, jax.devices()[:1])
  programs = programs_lib.make(
      config, programs_lib.prepare_model(MODEL, config, mesh), mesh)
  rollouts, evaluations = (
      {leaf.dtype.name for leaf in jax.tree.leaves(cast.eval_shape(
          transformer.abstract_params(programs.model)))}
      for cast in (programs.to_decode, programs.to_evaluate))
  assert rollouts == {'float32', 'int8'} and evaluations == {'float32'}


@pytest.mark.long
def test_lora_trains_adapters_alone():
  """The base in bfloat16 is an argument of an update, not part of the state."""
  programs, generator = _programs(3, devices=4), np.random.default_rng(0)
  frozen = programs.freeze(_random_params(generator))
  assert frozen['layers']['q']['kernel'].dtype == 'bfloat16'
  assert frozen['final_norm']['scale'].dtype == 'float32'
  adapters = programs.init_adapters(jax.random.key(1))
  names = {path[-1].key for path, _ in
           jax.tree_util.tree_flatten_with_path(adapters)[0]}
  assert names == {'lora_a', 'lora_b'} and len(adapters['layers']) == 7
  state = programs.init_state(adapters)
  # Parameters, two moments, their count and the number of updates.
  assert len(jax.tree.leaves(state)) == 3 * 14 + 2
  assert jax.tree.structure(state) == jax.tree.structure(
      programs_lib.abstract_state(programs))
  state, metrics = _update(programs, state, generator, frozen)
  assert metrics['kl_full'] == 0 and metrics['grad_norm'] > 0
  assert metrics['weight_min'] == metrics['weight_max'] == 1
  before = programs.init_adapters(jax.random.key(1))
  for name, node in state.params['layers'].items():
    # B starts at 0, so that A has no gradient at first.
    np.testing.assert_array_equal(
        node['lora_a'], before['layers'][name]['lora_a'])
    assert np.abs(node['lora_b']).max() > 0, name
  state, metrics = _update(programs, state, generator, frozen)
  assert all(np.abs(node['lora_a'] - before['layers'][name]['lora_a']).max() > 0
             for name, node in state.params['layers'].items())


def test_a_model_that_does_not_fit_is_refused_before_loading(monkeypatch):
  programs = _programs(0)
  count = 3_696  # parameters: 16 bytes of state and gradient each, 2 to decode
  shapes = transformer.abstract_params(MODEL)
  assert sum(np.prod(leaf.shape) for leaf in jax.tree.leaves(shapes)) == count
  # The hidden states of a minibatch of up to 8 full microbatches.
  states = 2 * 8 * 1152 * MODEL.d_model
  size = 18 * count + 8 + states
  assert sum(memory_lib.held(programs).values()) == size
  memory_lib.check(programs)  # CPUs do not report their memory
  monkeypatch.setattr(mesh_lib, 'memory_limit', lambda mesh: size)
  memory_lib.check(programs)
  monkeypatch.setattr(mesh_lib, 'memory_limit', lambda mesh: size - 1)
  with pytest.raises(errors.InputError) as error:
    memory_lib.check(programs)
  for part in ("'fsdp': 1", f'has {(size - 1) / 1e9:.4g} GB',
               f'weights and moments {(12 * count + 8) / 1e9:.4g} GB',
               f'gradient {4 * count / 1e9:.4g} GB',
               f'weights for decoding {2 * count / 1e9:.4g} GB'):
    assert part in str(error.value)
