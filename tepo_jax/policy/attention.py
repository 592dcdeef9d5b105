"""Attention over positions: one function, several backends.

One visibility rule serves causality, padding, empty cache slots, packed rows
and sliding windows: a key is visible iff it is of the query's segment, 0 <= its
position <= the query's, and, with a window w, its position > the query's - w.

Axes: B completions, S query slots, T key slots, N query heads, K key/value
heads, G = N / K query heads a key/value head, H head size.
"""

import jax
import jax.numpy as jnp

# Finite, so that a row without a visible key (a padding query) is a uniform
# average and not NaN, in the gradient too.
_MASKED = -1e30


def attend(q_BSNH, k_BTKH, v_BTKH, query_position_BS, key_position_BT,
           window=None, backend='xla', query_segment_BS=None,
           key_segment_BT=None):
  """softmax(q k^T / sqrt(H)) v over the visible keys.

  Args:
    q_BSNH: queries, rotated.
    k_BTKH: keys, rotated; N is a multiple of K, heads n // G share key head.
    v_BTKH: values.
    query_position_BS: i32, -1 for padding (whose output means nothing).
    key_position_BT: i32, -1 for padding and empty cache slots.
    window: how many positions back a query sees, itself included; None: all.
      A number or a scalar array.
    backend: a name of BACKENDS.
    query_segment_BS, key_segment_BT: i32, which sequence of a packed row a
      slot belongs to; None: a row is one sequence.

  Returns:
    out_BSNH in the dtype of q; scores and softmax are float32.
  """
  return BACKENDS[backend](
      q_BSNH, k_BTKH, v_BTKH, query_position_BS, key_position_BT, window,
      query_segment_BS, key_segment_BT)


def visible(query_position_BS, key_position_BT, window=None,
            query_segment_BS=None, key_segment_BT=None):
  """The visibility rule: bool [B, S, T]."""
  query_BS1 = query_position_BS[:, :, None]
  key_B1T = key_position_BT[:, None, :]
  visible_BST = (key_B1T >= 0) & (key_B1T <= query_BS1)
  if window is not None:
    visible_BST &= key_B1T > query_BS1 - window
  if query_segment_BS is not None:
    visible_BST &= query_segment_BS[:, :, None] == key_segment_BT[:, None, :]
  return visible_BST


def _attend_xla(q_BSNH, k_BTKH, v_BTKH, query_position_BS, key_position_BT,
                window, query_segment_BS, key_segment_BT):
  """Products batched over (B, K); the repeated keys are never written out."""
  batch, length, heads, size = q_BSNH.shape
  kv_heads = k_BTKH.shape[2]
  q_BSKGH = q_BSNH.reshape(batch, length, kv_heads, heads // kv_heads, size)
  score_BKSGT = jnp.einsum(
      'BSKGH,BTKH->BKSGT', q_BSKGH, k_BTKH.astype(q_BSNH.dtype),
      preferred_element_type=jnp.float32)
  visible_BST = visible(query_position_BS, key_position_BT, window,
                        query_segment_BS, key_segment_BT)
  score_BKSGT = jnp.where(
      visible_BST[:, None, :, None, :], score_BKSGT * size ** -0.5, _MASKED)
  weight_BKSGT = jax.nn.softmax(score_BKSGT, axis=-1).astype(q_BSNH.dtype)
  out_BKSGH = jnp.einsum(
      'BKSGT,BTKH->BKSGH', weight_BKSGT, v_BTKH.astype(q_BSNH.dtype))
  return jnp.moveaxis(out_BKSGH, 1, 2).reshape(q_BSNH.shape)


BACKENDS = {'xla': _attend_xla}
