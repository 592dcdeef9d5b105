"""attention.attend against the definition, written with loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tepo_jax.policy import attention

_attend = jax.jit(attention.attend, static_argnames='window')


def _arrays(heads=6, kv_heads=2, size=5):
  rng = np.random.RandomState(0)
  q = rng.randn(2, 4, heads, size).astype(np.float32)
  k, v = rng.randn(2, 2, 7, kv_heads, size).astype(np.float32)
  query_position = np.array([[2, 3, 4, 5], [-1, 0, 1, 2]], np.int32)
  # Row 0: an empty slot at the end. Row 1: padding on the left.
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
  packed = _attend(q, k, v, position, position, window,
                   query_segment_BS=segment, key_segment_BT=segment)
  for part in slice(0, 3), slice(3, 7):
    q_, k_, v_, position_ = (x[:, part] for x in (q, k, v, position))
    np.testing.assert_allclose(
        packed[:, part], _by_loops(q_, k_, v_, position_, position_, window),
        atol=1e-6)


def test_window_may_be_an_array():
  arrays = _arrays()
  np.testing.assert_array_equal(
      _attend(*arrays, window=2),
      jax.jit(attention.attend)(*arrays, window=jnp.int32(2)))


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
