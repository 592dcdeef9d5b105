"""The transformer against transformers' own models, and against itself."""

import dataclasses
import functools

from flax import linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from tepo_jax.policy import cache as cache_lib
from tepo_jax.policy import layers
from tepo_jax.policy import ops
from tepo_jax.policy import rope
from tepo_jax.policy import transformer
from tepo_jax.policy.cpu import ops as cpu_ops
from tepo_jax.policy.huggingface import weights
from tepo_jax.runtime import mesh as mesh_lib


@functools.partial(jax.jit, static_argnums=0)
def _logits(config, params, token_BS, position_BS, cache=None):
  hidden_BSD, cache = transformer.forward(
      config, params, token_BS, position_BS, cache)
  return transformer.logits(config, params, hidden_BSD), cache


@pytest.fixture(scope='module')
def small():
  """A ModelConfig with every feature, and parameters without a zero."""
  config = transformer.ModelConfig(
      vocab_size=61, d_model=24, num_layers=3, num_heads=4, num_kv_heads=2,
      head_dim=10, d_ff=40, max_position=64, qkv_bias=True, qk_norm=True,
      sliding_window=6, num_full_layers=1)
  rng = np.random.RandomState(0)
  return config, jax.tree.map(
      lambda leaf: rng.normal(0.1, 0.3, leaf.shape).astype(np.float32),
      transformer.abstract_params(config))


@pytest.mark.long_after_first
def test_logits_are_those_of_transformers(case, hf_model, torch_logits, batch):
  folder, model = hf_model(case)
  config, params = weights.load(folder, 'float32')
  want = torch_logits(model, *batch)
  got, _ = _logits(config, params, *batch)
  real = batch[1] >= 0
  print(f'{case}: {np.abs(got - want)[real].max():.1e}')
  np.testing.assert_allclose(got[real], want[real], rtol=0, atol=1e-4)


def test_by_default_a_window_holds_for_the_first_layer_too():
  """A token that sees itself alone does not depend on those before it."""
  config = transformer.ModelConfig(
      vocab_size=9, d_model=8, num_layers=1, num_heads=2, num_kv_heads=1,
      head_dim=4, d_ff=8, max_position=8, sliding_window=1)
  rng = np.random.RandomState(0)
  params = jax.tree.map(
      lambda leaf: rng.normal(0.1, 0.3, leaf.shape).astype(np.float32),
      transformer.abstract_params(config))
  token_BS = np.int32([[1, 2, 3], [4, 5, 3]])
  logits_BSV, _ = _logits(
      config, params, token_BS, 0 * token_BS + np.arange(3, dtype=np.int32))
  np.testing.assert_array_equal(logits_BSV[0, 2], logits_BSV[1, 2])
  assert np.ptp(logits_BSV[:, 1], axis=0).max() > 0


def test_packed_sequences_are_scored_as_if_alone(small):
  """One row of three sequences gives the hidden states of each alone."""
  config, params = small
  rng = np.random.default_rng(0)
  lengths = (9, 4, 8)
  token_S = rng.integers(0, 61, sum(lengths) + 2).astype(np.int32)
  position_S = np.concatenate([*map(np.arange, lengths), [-1, -1]])
  segment_S = np.repeat([0, 1, 2, -1], [*lengths, 2])
  packed, _ = transformer.forward(
      config, params, token_S[None], position_S[None],
      segment_BS=segment_S[None])
  alone_BS = segment_S == np.arange(3)[:, None]
  alone, _ = transformer.forward(
      config, params, np.tile(token_S, (3, 1)),
      np.where(alone_BS, position_S, -1))
  for index in range(3):
    mine = segment_S == index
    np.testing.assert_allclose(
        packed[0, mine], alone[index, mine], rtol=0, atol=1e-5)


@pytest.mark.long_after_first
def test_greedy_tokens_are_those_of_transformers(case, hf_model, batch):
  """64 tokens, past the window and the rope scaling's original context.

  With the operations of a CPU, and in three cases the plain ones.
  """
  plain = case in ('qwen3_yarn', 'llama', 'mistral_window')
  folder, model = hf_model(case)
  token_BS, position_BS = (x[:, -9:] for x in batch)
  position_BS = np.where(position_BS < 0, -1, position_BS - np.maximum(
      position_BS[:, :1], 0))
  with torch.no_grad():
    want = model.generate(
        torch.tensor(token_BS), attention_mask=torch.tensor(position_BS >= 0),
        max_new_tokens=64, do_sample=False).numpy()[:, 9:]
  config, params = weights.load(folder, 'float32')
  config = dataclasses.replace(config, ops=ops.PLAIN if plain else cpu_ops.OPS)
  np.testing.assert_array_equal(
      _greedy(config, params, token_BS, position_BS), want)


@functools.partial(jax.jit, static_argnums=0)
def _greedy(config, params, token_BS, position_BS):
  rows, width = token_BS.shape
  params = cache_lib.convert(config, params)
  cache = cache_lib.init_cache(config, rows, width + 63, 'float32')
  hidden_BSD, cache = transformer.forward(
      config, params, token_BS, position_BS, cache)

  def choose(hidden_BSD):
    return jnp.argmax(
        transformer.logits(config, params, hidden_BSD[:, -1]), -1)

  def step(state, i):
    token_B, cache = state
    hidden_B1D, cache = transformer.forward(
        config, params, token_B[:, None], position_BS[:, -1:] + i, cache)
    token_B = choose(hidden_B1D)
    return (token_B, cache), token_B

  first_B = choose(hidden_BSD)
  _, token_TB = jax.lax.scan(step, (first_B, cache), jnp.arange(1, 64))
  return jnp.concatenate([first_B[:, None], token_TB.T], 1)


@pytest.mark.parametrize('table', [cpu_ops.OPS, ops.PLAIN])
def test_the_cache_changes_nothing(small, batch, table):
  """20, 12 and 1 columns are written; 4 stay empty."""
  config, params = small
  config = dataclasses.replace(config, ops=table)
  token_BS, position_BS = batch
  want, _ = _logits(config, params, token_BS, position_BS)
  params = cache_lib.convert(config, params)
  cache = cache_lib.init_cache(config, 3, 37, 'float32')
  got = []
  for columns in (slice(0, 20), slice(20, 32), slice(32, 33)):
    part, cache = _logits(
        config, params, token_BS[:, columns], position_BS[:, columns], cache)
    got.append(part)
  real = position_BS >= 0
  np.testing.assert_allclose(
      np.concatenate(got, 1)[real], want[real], atol=2e-5)
  assert cache.index == 33
  np.testing.assert_array_equal(cache.position[:, :33], position_BS)
  assert np.all(np.asarray(cache.position)[:, 33:] == -1)


@pytest.mark.long
def test_kernels_serve_prefill_and_scoring(small, batch):
  """With window and full layers; then decoding after the prefill."""
  config, params = small
  kernel = dataclasses.replace(config, attention='splash_interpreted')
  token_BS, position_BS = batch
  want, _ = _logits(config, params, token_BS, position_BS)
  scored, _ = _logits(kernel, params, token_BS, position_BS)
  params = cache_lib.convert(config, params)
  cache = cache_lib.init_cache(config, 3, 37, 'float32')
  first, cache = _logits(
      kernel, params, token_BS[:, :32], position_BS[:, :32], cache)
  last, _ = _logits(
      kernel, params, token_BS[:, 32:], position_BS[:, 32:], cache)
  real = position_BS >= 0
  for got in (scored, np.concatenate([first, last], 1)):
    np.testing.assert_allclose(got[real], want[real], atol=2e-5)
  # A second block of several tokens would have to see the cache.
  wrong, _ = _logits(
      kernel, params, token_BS[:, 30:], position_BS[:, 30:], cache)
  assert np.isnan(wrong).all()


def test_padding_and_row_order_are_invisible(small, batch):
  config, params = small
  token_BS, position_BS = batch
  want, _ = _logits(config, params, token_BS, position_BS)
  # Padding in the middle and at the end instead, with other ids; rows reversed.
  order = np.random.RandomState(1).permutation(33)
  order = np.sort(order[:20]).tolist() + np.sort(order[20:]).tolist()
  moved_token, moved_position = (
      np.asarray(x)[::-1][:, order] for x in batch)
  moved_token = np.where(
      moved_position < 0, (moved_token + 5) % 61, moved_token)
  got, _ = _logits(config, params, moved_token, moved_position)
  real = moved_position >= 0
  np.testing.assert_allclose(
      got[real], np.asarray(want)[::-1][:, order][real], atol=2e-5)


@pytest.mark.long
def test_gradients_with_padding_and_execution_fields(small, batch):
  """Finite; independent of the padding's ids and of execution fields."""
  config, params = small
  token_BS, position_BS = (np.array(x) for x in batch)
  position_BS[1] = -1
  real_BS1 = position_BS[..., None] >= 0

  @functools.partial(jax.jit, static_argnums=0)
  @functools.partial(jax.value_and_grad, argnums=1)
  def loss(config, params, token_BS):
    logits_BSV, _ = _logits(config, params, token_BS, position_BS)
    return jnp.mean(jnp.where(real_BS1, jax.nn.log_softmax(logits_BSV), 0))

  want = loss(config, params, token_BS)
  assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(want))
  other_BS = np.where(position_BS < 0, (token_BS + 7) % 61, token_BS)
  executed = dataclasses.replace(config, remat='dots')
  for got in (loss(config, params, other_BS),
              loss(executed, params, token_BS)):
    jax.tree.map(functools.partial(
        np.testing.assert_allclose, rtol=1e-4, atol=1e-6), got, want)


@pytest.mark.long
def test_the_forward_derivative_is_the_reverse_one(small, batch):
  """<∂h, J ∂θ> = <Jᵀ ∂h, ∂θ>, and a finite difference agrees."""
  config, params = small
  token_BS, position_BS = batch
  real_BS1 = jnp.asarray(position_BS)[..., None] >= 0
  rng = np.random.default_rng(0)
  tangent = jax.tree.map(
      lambda x: rng.normal(size=x.shape).astype(np.float32), params)

  @jax.jit
  def hidden(params):
    hidden_BSD, _ = transformer.forward(config, params, token_BS, position_BS)
    return jnp.where(real_BS1, hidden_BSD, 0)

  _, d_hidden = jax.jvp(hidden, (params,), (tangent,))
  pulled, = jax.vjp(hidden, params)[1](d_hidden)
  want = sum(float(np.vdot(a, b)) for a, b in zip(
      jax.tree.leaves(pulled), jax.tree.leaves(tangent)))
  np.testing.assert_allclose(jnp.vdot(d_hidden, d_hidden), want, rtol=1e-4)
  step = 1e-3
  ahead, back = (hidden(jax.tree.map(
      lambda x, t: x + sign * step * t, params, tangent)) for sign in (1, -1))
  np.testing.assert_allclose(
      (ahead - back) / (2 * step), d_hidden, rtol=0,
      atol=1e-2 * float(jnp.abs(d_hidden).max()))


def test_bfloat16_computes_near_float32(small, batch):
  config, params = small
  want, _ = _logits(config, params, *batch)
  config = dataclasses.replace(config, dtype='bfloat16')
  hidden_BSD, _ = jax.eval_shape(functools.partial(
      transformer.forward, config), params, *batch)
  got, _ = _logits(config, params, *batch)
  assert hidden_BSD.dtype == jnp.bfloat16 and got.dtype == jnp.float32
  real = batch[1] >= 0
  error = np.abs(np.asarray(got) - want)[real].mean() / np.std(want[real])
  assert error < 0.05, error


def test_every_dimension_has_a_logical_name(small):
  config, params = small
  axes = transformer.logical_axes(config)
  assert jax.tree.structure(params) == jax.tree.structure(
      axes, is_leaf=lambda node: isinstance(node, tuple))
  jax.tree.map(
      lambda leaf, names: _check_names(leaf, names), params, axes)
  assert axes['layers']['q']['kernel'] == ('layers', 'embed', 'heads')
  assert axes['embed']['embedding'] == ('vocab', 'embed')
  shapes = jax.tree.map(lambda leaf: leaf.shape, params)
  assert shapes == jax.tree.map(
      lambda leaf: leaf.shape, transformer.abstract_params(config, 'bfloat16'))


def _check_names(leaf, names):
  assert len(names) == leaf.ndim
  assert all(name in mesh_lib.RULES for name in names)


def test_init_is_small_and_seeded(small):
  config, _ = small
  params = jax.jit(transformer.init, static_argnums=0)(
      config, jax.random.key(0))
  kernel = params['layers']['gate']['kernel']
  assert abs(float(jnp.std(kernel)) - 0.02) < 0.002
  assert not np.allclose(kernel[0], kernel[1])
  assert np.all(np.asarray(params['layers']['q']['bias']) == 0)
  assert np.all(np.asarray(params['final_norm']['scale']) == 1)


def test_rope_rotates_by_position():
  """Position p rotates the first pair by p radians, whatever theta is."""
  x = jnp.array([1.0, 0.0, 0.0, 0.0]).reshape(1, 1, 1, 4)
  got = rope.rotate(x, rope.rotation(jnp.array([[3]]), 4, 1e4))
  np.testing.assert_allclose(
      got.reshape(-1), [np.cos(3), 0, np.sin(3), 0], atol=1e-6)


def test_the_gradient_of_a_bias_in_bfloat16_rounds_once():
  """It is a sum over all tokens; in bfloat16 that is wrong by 1 %."""
  linear = layers.Linear(64, (None, None), use_bias=True)
  rng = np.random.default_rng(0)
  x_MI = jnp.asarray(rng.normal(size=(4096, 8)), jnp.bfloat16)
  slope_MO = jnp.asarray(rng.normal(size=(4096, 64)), jnp.bfloat16)
  params = nn.unbox(linear.init(jax.random.key(0), x_MI))

  @jax.jit
  def gradient(params, x_MI, slope_MO):
    return jax.grad(lambda p: jnp.vdot(
        linear.apply(p, x_MI), slope_MO, preferred_element_type='float32'))(
            params)['params']['bias']

  got_O = gradient(params, x_MI, slope_MO)
  want_O = np.asarray(slope_MO, np.float64).sum(0)
  error = np.linalg.norm(got_O - want_O) / np.linalg.norm(want_O)
  assert 0 < error < 0.004
