"""attention.attend against the definition, written with loops."""

import functools

import jax
from jax._src.cudnn import fused_attention_stablehlo
import jax.numpy as jnp
import numpy as np
import pytest

from tepo_jax import errors
from tepo_jax.policy import attention
from tepo_jax.runtime import mesh as mesh_lib

_attend = jax.jit(attention.attend, static_argnames=('window', 'backend'))


def _arrays(heads=6, kv_heads=2, size=5):
  rng = np.random.RandomState(0)
  q = rng.randn(2, 4, heads, size).astype(np.float32)
  k, v = rng.randn(2, 2, 7, kv_heads, size).astype(np.float32)
  query_position = np.array([[2, 3, 4, 5], [-1, 0, 1, 2]], np.int32)
  # Row 0: an empty column at the end. Row 1: padding on the left.
  key_position = np.array(
      [[0, 1, 2, 3, 4, 5, -1], [-1, -1, -1, 0, 1, 2, 3]], np.int32)
  return q, k, v, query_position, key_position


def _by_loops(q, k, v, query_position, key_position, window):
  out = np.zeros_like(q)
  group = q.shape[2] // k.shape[2]
  for b, s, n in np.ndindex(q.shape[:3]):
    at = query_position[b, s]
    seen = [t for t, p in enumerate(key_position[b])
            if 0 <= p <= at and (window is None or p > at - window)]
    if seen:
      score = np.array([q[b, s, n] @ k[b, t, n // group] for t in seen])
      weight = np.exp(score / np.sqrt(q.shape[3]))
      weight /= weight.sum()
      out[b, s, n] = sum(
          w * v[b, t, n // group] for w, t in zip(weight, seen))
  return out


@pytest.mark.parametrize(
    'kv_heads,window', [(1, None), (2, None), (2, 1), (6, 3)])
def test_equals_the_definition(kv_heads, window):
  q, k, v, query_position, key_position = _arrays(kv_heads=kv_heads)
  want = _by_loops(q, k, v, query_position, key_position, window)
  got = np.asarray(_attend(q, k, v, query_position, key_position, window))
  real = query_position >= 0
  np.testing.assert_allclose(got[real], want[real], atol=1e-6)


@pytest.mark.parametrize('window', [None, 2])
def test_segments_of_a_packed_row_do_not_see_each_other(window):
  """A row of two sequences and padding, against each sequence alone."""
  rng = np.random.RandomState(1)
  q, k, v = rng.randn(3, 1, 8, 2, 5).astype(np.float32)
  position = np.array([[0, 1, 2, 0, 1, 2, 3, -1]], np.int32)
  segment = np.array([[4, 4, 4, 7, 7, 7, 7, -1]], np.int32)
  packed = _attend(q, k, v, position, position, window, segment_BS=segment)
  for part in slice(0, 3), slice(3, 7):
    q_, k_, v_, position_ = (x[:, part] for x in (q, k, v, position))
    np.testing.assert_allclose(
        packed[:, part], _by_loops(q_, k_, v_, position_, position_, window),
        atol=1e-6)


def test_rows_without_a_visible_key_are_finite_and_leave_no_gradient():
  q, k, v, query_position, key_position = _arrays()
  padding = query_position < 0

  def loss(q, k, v):
    out = attention.attend(q, k, v, query_position, key_position)
    return jnp.sum(jnp.where(padding[..., None, None], 0, out) ** 2), out

  gradients, out = jax.jit(
      jax.grad(loss, argnums=(0, 1, 2), has_aux=True))(q, k, v)
  assert np.isfinite(out).all()
  for gradient in gradients:
    assert np.isfinite(gradient).all()
  assert np.all(gradients[0][padding] == 0)
  assert np.all(gradients[1][key_position < 0] == 0)
  assert np.all(gradients[2][key_position < 0] == 0)


def test_scores_are_float32_in_bfloat16():
  """1000 and 1001 are one number in bfloat16, and one apart in the softmax."""
  q = jnp.array([8.0, 1.0], jnp.bfloat16).reshape(1, 1, 1, 2)
  k = jnp.array([[125.0, 0.0], [125.0, 1.0]], jnp.bfloat16).reshape(1, 2, 1, 2)
  v = jnp.array([0.0, 1.0], jnp.bfloat16).reshape(1, 2, 1, 1)
  v = jnp.broadcast_to(v, k.shape)
  position = jnp.array([[0, 1]])
  out = _attend(q, k, v, position[:, 1:], position)
  assert out.dtype == jnp.bfloat16
  np.testing.assert_allclose(
      out[0, 0, 0].astype(np.float32), 1 / (1 + np.exp(-2 ** -0.5)), atol=3e-3)


# ---- the other backends, on sequences that attend to themselves

def _cudnn_on_cpu(*arrays):
  """cuDNN's mask and padding, computed by XLA."""
  return attention._attend_cudnn(*arrays, implementation='xla')


KERNELS = {
    'cudnn': _cudnn_on_cpu,
    'splash': attention.KERNELS['splash_interpreted']}


def _sequences(heads, kv_heads, size, packed):
  """Row 0: padding on both sides; row 1, packed: 3 sequences and gaps."""
  rng = np.random.RandomState(2)
  q = rng.randn(2, 21, heads, size).astype(np.float32)
  k, v = rng.randn(2, 2, 21, kv_heads, size).astype(np.float32)
  position = np.full((2, 21), -1, np.int32)
  segment = np.zeros((2, 21), np.int32)
  position[0, 3:19] = np.arange(16)
  if packed:
    for index, (start, stop) in enumerate([(0, 9), (9, 13), (15, 21)]):
      position[1, start:stop] = np.arange(stop - start)
      segment[1, start:stop] = index
  else:
    position[1] = np.arange(21)
  return (q, k, v), position, segment if packed else None


@pytest.mark.long_after_first
@pytest.mark.parametrize('kernel', KERNELS)
@pytest.mark.parametrize('heads,kv_heads,size,window,packed', [
    (4, 2, 8, None, False), (7, 1, 16, 5, False), (3, 3, 8, None, True),
    (4, 2, 16, 3, True)])
def test_backends_agree(kernel, heads, kv_heads, size, window, packed):
  """Values and gradients equal those of xla."""
  arrays, position, segment = _sequences(heads, kv_heads, size, packed)
  real = position[..., None, None] >= 0
  weight = np.random.RandomState(3).randn(*arrays[0].shape)

  def total(attend, *arrays):
    out = jnp.where(real, attend(
        *arrays, position, position, window, segment), 0)
    return jnp.sum(out * weight), out

  def evaluate(attend):
    (_, out), gradients = jax.jit(jax.value_and_grad(
        functools.partial(total, attend), argnums=(0, 1, 2), has_aux=True))(
            *arrays)
    return out, gradients

  want = evaluate(attention.attend_xla)
  got = evaluate(KERNELS[kernel])
  jax.tree.map(functools.partial(
      np.testing.assert_allclose, rtol=0, atol=2e-5), got, want)
  assert float(jnp.abs(want[0]).mean()) > 0.1


def _long_sequences():
  """One row of three blocks: two sequences that share a block, and padding."""
  rng = np.random.RandomState(4)
  q = rng.randn(1, 300, 2, 8).astype(np.float32)
  k, v = rng.randn(2, 1, 300, 1, 8).astype(np.float32)
  position = np.concatenate(
      [np.full(5, -1), np.arange(95), np.arange(180), np.full(20, -1)])
  return (q, k, v), position[None].astype(np.int32), np.repeat(
      [0, 3, 9, 0], [5, 95, 180, 20])[None].astype(np.int32)


@pytest.mark.parametrize('window', [None, 100])
def test_splash_skips_only_hidden_blocks(window, monkeypatch):
  """Values and gradients; the window reaches over a block's edge."""
  monkeypatch.setattr(attention, '_SPLASH_BLOCK', 128)
  arrays, position, segment = _long_sequences()
  real = position[..., None, None] >= 0
  weight = np.random.RandomState(3).randn(*arrays[0].shape)

  def evaluate(backend):
    def total(*arrays):
      out = jnp.where(real, attention.attend(
          *arrays, position, None, window, backend, segment), 0)
      return jnp.sum(out * weight), out
    (_, out), gradients = jax.jit(jax.value_and_grad(
        total, argnums=(0, 1, 2), has_aux=True))(*arrays)
    return out, gradients

  jax.tree.map(functools.partial(
      np.testing.assert_allclose, rtol=0, atol=2e-5),
               evaluate('splash_interpreted'), evaluate('xla'))


def test_splash_leaves_out_blocks_of_other_sequences(monkeypatch):
  """NaN in their values would spread, with a weight of 0 too. Rows have other
  blocks to skip than each other."""
  monkeypatch.setattr(attention, '_SPLASH_BLOCK', 128)
  rng = np.random.RandomState(7)
  q, k, v = rng.randn(3, 2, 384, 1, 8).astype(np.float32)
  start = np.array([128, 256])  # of the second sequence
  at = np.arange(384)
  second = at >= start[:, None]
  position = np.where(second, at - start[:, None], at).astype(np.int32)
  segment = np.where(second, 2, 5).astype(np.int32)

  def evaluate(backend, v):
    def total(*arrays):
      out = jnp.where(second[..., None, None], attention.attend(
          *arrays, position, None, None, backend, segment), 0)
      return jnp.sum(out ** 2), out
    (_, out), gradients = jax.jit(jax.value_and_grad(
        total, argnums=(0, 1, 2), has_aux=True))(q, k, v)
    return [x[second] for x in (out, *gradients)]

  jax.tree.map(functools.partial(
      np.testing.assert_allclose, rtol=0, atol=2e-5),
               evaluate('splash_interpreted',
                        np.where(second[..., None, None], v, np.nan)),
               evaluate('xla', v))


def test_blocks_that_share_a_segment():
  """Of four columns each: padding has no segment; the block of padding alone
  has itself only."""
  segment = jnp.array([-1, 5, 5, 5, 5, 5, 7, 7, 7, 7, 9, -1, -1, -1, -1, -1])
  np.testing.assert_array_equal(attention.blocks_share(segment, 4), [
      [1, 1, 0, 0], [1, 1, 1, 0], [0, 1, 1, 0], [0, 0, 0, 1]])


def test_splash_on_a_mesh_computes_each_device_s_own_part():
  arrays, position, segment = _sequences(4, 2, 8, True)
  mesh = mesh_lib.make(dict(data=1, fsdp=2, tensor=2))
  attend = functools.partial(
      attention.attend, window=4, backend='splash_interpreted')
  *placed, position_BS, segment_BS = mesh_lib.put(
      (*arrays, position, segment), mesh_lib.batch_sharding(mesh))
  got = jax.jit(mesh_lib.on_mesh(mesh, attend))(
      *placed, position_BS, position_BS, segment_BS=segment_BS)
  assert got.sharding.shard_shape(got.shape) == (1, 21, 2, 8)
  want = attend(*arrays, position, position, segment_BS=segment)
  np.testing.assert_allclose(
      np.asarray(got)[position >= 0], want[position >= 0], atol=1e-6)


def _by_definition(q, k, v, position, segment, window):
  """Softmax over all the columns at once."""
  k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], axis=2) for x in (k, v))
  score = jnp.einsum('bsnh,btnh->bnst', q, k) / np.sqrt(q.shape[3])
  visible = attention.visible(position, position, window, (segment, segment))
  score = jnp.where(visible[:, None], score, -1e30)
  return jnp.einsum('bnst,btnh->bsnh', jax.nn.softmax(score), v)


@pytest.mark.long_after_first
@pytest.mark.parametrize('window', [None, 30])
def test_blocks_of_queries(window):
  """Three blocks with sequences across their edges, against all keys at once.
  """
  rng = np.random.RandomState(6)
  q = rng.randn(2, 150, 4, 8).astype(np.float32)
  k, v = rng.randn(2, 2, 150, 2, 8).astype(np.float32)
  position = np.stack([
      np.concatenate([np.arange(90), 4 + np.arange(55), np.full(5, -1)]),
      np.concatenate([np.full(3, -1), 7 + np.arange(147)])])
  segment = np.stack([np.repeat([1, 2, 3], [90, 55, 5]), np.ones(150, int)])
  real = position[..., None, None] >= 0
  weight = rng.randn(*q.shape)

  def total(attend, q, k, v):
    out = jnp.where(real, attend(q, k, v), 0)
    return jnp.sum(out * weight), out

  def evaluate(attend):
    (_, out), gradients = jax.jit(jax.value_and_grad(
        functools.partial(total, attend), argnums=(0, 1, 2), has_aux=True))(
            q, k, v)
    return out, gradients

  got = evaluate(lambda *x: attention.attend(
      *x, position, None, window, segment_BS=segment))
  want = evaluate(
      lambda *x: _by_definition(*x, position, segment, window))
  jax.tree.map(functools.partial(
      np.testing.assert_allclose, rtol=0, atol=2e-5), got, want)


def test_forward_and_reverse_derivatives_agree():
  """<∂out, J ∂x> = <Jᵀ ∂out, ∂x>, over two blocks."""
  rng = np.random.RandomState(9)
  shapes = (1, 70, 4, 8), (1, 70, 2, 8), (1, 70, 2, 8)
  arrays, tangents = ([jnp.asarray(rng.randn(*shape), jnp.float32)
                       for shape in shapes] for _ in range(2))
  position = np.arange(70)[None] - 3

  def attend(*arrays):
    out = attention.attend(*arrays, position, segment_BS=position * 0)
    return jnp.where(position[..., None, None] >= 0, out, 0)

  out, d_out = jax.jit(lambda *x: jax.jvp(attend, *x))(arrays, tangents)
  pulled = jax.jit(lambda out, *x: jax.vjp(attend, *x)[1](out))(out, *arrays)
  want = sum(float(jnp.vdot(a, b)) for a, b in zip(pulled, tangents))
  assert abs(want) > 1
  np.testing.assert_allclose(jnp.vdot(out, d_out), want, rtol=1e-5)


@pytest.mark.parametrize('length,window,pairs', [
    (64, None, 64 * 64), (128, None, 64 * 64 + 64 * 128),
    (1024, None, 128 * 128 * 36), (128, 3, 64 * 64 + 64 * 66)])
def test_what_blocks_compute(length, window, pairs):
  sizes = [(mine.stop - mine.start) * (keys.stop - keys.start)
           for mine, keys in attention._blocks(length, window)]
  assert sum(sizes) == pairs


@pytest.mark.long
def test_gradients_in_bfloat16_round_once():
  """Relative errors of the gradients of queries and keys, for large scores."""
  def attend(*arrays):
    return attention.attend_block(*arrays, jnp.ones((2, 32, 32), bool))

  generator = np.random.default_rng(0)
  of_out, q, k, v = (
      jnp.asarray(generator.normal(size=(2, 32, 2, *shape)), jnp.bfloat16)
      for shape in ((4, 16), (4, 16), (16,), (16,)))

  def gradients(dtype):
    arrays = (x.astype(dtype) for x in (3 * q, k, v))
    return jax.vjp(attend, *arrays)[1](of_out.astype(dtype))[:2]

  for got, want in zip(gradients(jnp.bfloat16), gradients(jnp.float32)):
    assert got.dtype == jnp.bfloat16
    error = np.linalg.norm(np.float32(got) - want) / np.linalg.norm(want)
    assert 0 < error < 0.0045


def test_one_query_is_always_xla():
  arrays = _arrays()
  query = arrays[0][:, -1:], arrays[3][:, -1:]
  want = _attend(query[0], *arrays[1:3], query[1], arrays[4])
  for backend in ('splash', 'cudnn'):
    np.testing.assert_array_equal(want, _attend(
        query[0], *arrays[1:3], query[1], arrays[4], backend=backend))


@pytest.mark.parametrize('choice,platform,dtype,size,backend', [
    ('auto', 'cpu', 'float32', 64, 'xla'),
    ('auto', 'gpu', 'bfloat16', 128, 'cudnn'),
    ('auto', 'gpu', 'float32', 128, 'xla'),
    ('auto', 'gpu', 'bfloat16', 100, 'xla'),
    ('auto', 'tpu', 'float32', 64, 'splash'),
    ('xla', 'tpu', 'bfloat16', 64, 'xla'),
    ('cudnn', 'gpu', 'bfloat16', 64, 'cudnn'),
    ('cudnn', 'gpu', 'float32', 64, 'bfloat16'),
    ('cudnn', 'gpu', 'bfloat16', 12, 'head size'),
    ('cudnn', 'cpu', 'bfloat16', 64, 'needs a gpu, and the devices are cpu'),
    ('splash', 'gpu', 'bfloat16', 64, 'needs a tpu')])
def test_choose(choice, platform, dtype, size, backend):
  if backend in ('xla', *attention.KERNELS):
    assert attention.choose(choice, platform, dtype, size) == backend
  else:
    with pytest.raises(errors.InputError, match=backend):
      attention.choose(choice, platform, dtype, size)


def test_cudnn_is_given_the_mask_and_causality(monkeypatch):
  """Lowered for a GPU without one: the call has a mask operand."""
  lowering = fused_attention_stablehlo
  monkeypatch.setattr(lowering, 'check_cudnn_version', lambda: 91200)
  monkeypatch.setattr(lowering, 'check_compute_capability', lambda _: True)
  monkeypatch.setattr(
      lowering, 'is_cuda_compute_capability_equal', lambda _: False)

  def loss(q, k, v, position, segment):
    return jnp.sum(attention.attend(
        q, k, v, position, position, 5, 'cudnn', segment
    ).astype(jnp.float32))

  def shape(heads):
    return jax.ShapeDtypeStruct((4, 21, heads, 64), jnp.bfloat16)

  ints = jax.ShapeDtypeStruct((4, 21), jnp.int32)
  text = jax.jit(jax.grad(loss, (0, 1, 2))).trace(
      shape(8), shape(4), shape(4), ints, ints).lower(
          lowering_platforms=('cuda',)).as_text()
  calls = [line for line in text.splitlines() if 'fmhaScaleBias' in line]
  assert len(calls) == 2 and 'fmhaScaleBiasSoftmaxBackward' in calls[1]
  for call in calls:
    assert 'CAUSAL' in call and 'tensor<4x1x22x22xbf16>' in call
