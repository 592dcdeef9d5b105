"""The programs of sampling, with the cache layouts of other devices."""

import dataclasses

import jax
from jax.experimental import layout
import numpy as np
import pytest

from tepo_jax import errors
from tepo_jax.job import sampling as sampling_lib
from tepo_jax.policy import transformer
from tepo_jax.rollout import draw
from tepo_jax.rollout import engine
from tepo_jax.runtime import mesh as mesh_lib

MODEL = transformer.ModelConfig(
    vocab_size=64, d_model=32, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=8, d_ff=64, max_position=128)


def _sample(mesh, weights=None):
  """Prefill, insert, decode and compact: the tokens, and the cache."""
  programs = sampling_lib.make(
      MODEL, mesh, decoding=draw.Decoding(), eos_ids=(-1,), chunk=4)
  if weights is None:
    weights = sampling_lib.make_decode_cast(MODEL, mesh)(
        transformer.init(MODEL, jax.random.key(0)))
  token_QP = np.arange(8, dtype=np.int32).reshape(2, 4)
  prompts = programs.prefill(
      weights, token_QP, np.tile(np.arange(4, dtype=np.int32), (2, 1)))
  row_N = np.arange(4, dtype=np.int32)
  cache = programs.insert(
      programs.empty(4, 32, np.int32(8)), prompts, row_N % 2, row_N)
  slots = engine.Slots(
      *(np.full(4, x, np.int32) for x in (3, 5, 0, 9, 0)), sample=row_N,
      live=np.ones(4, bool))
  cache, drawn = programs.decode(
      weights, cache, slots, jax.random.key(1), np.int32(4), np.int32(0))
  cache = programs.move(cache, row_N[::-1] % 2, np.int32(2), 32)
  return np.asarray(drawn.token_NC), cache


@pytest.fixture(scope='module')
def mesh():
  return mesh_lib.make({'data': 1, 'fsdp': 2, 'tensor': 2}, jax.devices())


@pytest.mark.parametrize('part, axis', [('k', 3), ('v', 2)])
def test_to_compact_a_cache_sends_nothing(part, axis, mesh):
  """Slots 2, 1 and 0 of the first shard, then 3, 0 and 1 of the other."""
  programs = sampling_lib.make(
      MODEL, mesh, decoding=draw.Decoding(), eos_ids=(-1,), chunk=4)
  cache = programs.empty(8, 32, np.int32(8))
  array = np.random.default_rng(0).random(getattr(cache, part)[0].shape)
  placed = jax.device_put(
      array.astype(np.float32), getattr(cache, part)[0].sharding)
  compact = programs.move.of_array(part, 16)
  arguments = placed, np.int32([2, 1, 0, 3, 0, 1]), np.int32(5)
  text = compact.lower(*arguments).compile().as_text()
  assert not any(name in text for name in (
      'all-gather', 'all-reduce', 'all-to-all', 'collective-permute'))
  want = np.take(array[[2, 1, 0, 7, 4, 5]], np.arange(5, 21), axis)
  np.testing.assert_array_equal(compact(*arguments), want.astype(np.float32))


@pytest.mark.long
def test_a_mesh_decodes_with_int8_weights(mesh):
  """The tokens are those of the kernels that the numbers stand for."""
  weights = sampling_lib.make_decode_cast(MODEL, mesh, 'int8')(
      transformer.init(MODEL, jax.random.key(0)))
  kernel_IO = weights['layers'][1]['down']['int8_kernel']
  assert kernel_IO.dtype == 'int8'
  assert kernel_IO.sharding.shard_shape((64, 32)) == (32, 32)
  plain = {**weights, 'layers': [
      {name: {'kernel': node['int8_kernel'] * node['kernel_scale']}
       if 'int8_kernel' in node else node for name, node in layer.items()}
      for layer in weights['layers']]}
  np.testing.assert_array_equal(
      _sample(mesh, weights)[0], _sample(mesh, plain)[0])


@pytest.fixture(scope='module')
def sampled(mesh):
  """Tokens and cache with the layout of this device."""
  return _sample(mesh)


@pytest.mark.parametrize('part', ['k', 'v'])
def test_the_layout_of_the_cache_changes_no_token(
    part, mesh, sampled, monkeypatch):
  """`cache_shardings` chooses it by device; a CPU takes any."""
  want_NC, before = sampled
  make = sampling_lib.cache_shardings

  def swapped(*arguments):
    shardings = make(*arguments)
    stores = tuple(layout.Format(layout.Layout((0, 1, 3, 2)), store)
                   for store in getattr(shardings, part))
    return shardings.replace(**{part: stores})

  monkeypatch.setattr(sampling_lib, 'cache_shardings', swapped)
  token_NC, cache = _sample(mesh)
  store = getattr(cache, part)[0]
  assert store.format.layout.major_to_minor == (0, 1, 3, 2)
  np.testing.assert_array_equal(token_NC, want_NC)
  jax.tree.map(np.testing.assert_array_equal, cache, before)


def test_a_width_that_tensor_does_not_divide_is_refused():
  model = dataclasses.replace(MODEL, d_ff=66)
  mesh = mesh_lib.make({'data': 1, 'fsdp': 4, 'tensor': 1})
  with pytest.raises(errors.InputError, match=(
      'config.rollout.tensor=4: .*tensor=4 does not divide .*66')):
    sampling_lib.for_decoding(model, mesh, 4)
  model = dataclasses.replace(MODEL, num_heads=14, num_kv_heads=2)
  with pytest.raises(errors.InputError, match=(
      'config.rollout.tensor=4: .* does not divide the 14 query heads')):
    sampling_lib.for_decoding(model, mesh, 4)
