"""Attention of packed rows on a CPU, at the cost of the sequences in them.

A block of queries goes through the blocks of keys from the first that one of
them sees up to its own, and no scores are kept (FlashAttention, arXiv
2205.14135). How many blocks that is, is known on the device only: it depends on
how sequences lie in a row.

Axes: B rows, S slots, n blocks, s slots of a block of queries, t of a block of
keys, K key/value heads, G query heads a key/value head, m = s G queries a
key/value head, H head size.
"""

import functools

import flax.struct
import jax
import jax.numpy as jnp

from tepo_jax.policy.cpu import reductions
from tepo_jax.policy import plain_attention
from tepo_jax.policy import visibility

_BLOCK = 64  # slots


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(window, q_BSKGH, k_BSKH, v_BSKH, position_BS, segment_BS):
  """softmax(q k^T / sqrt(H)) v over the visible keys, [B, S, K, G, H].

  Keys and queries are the same slots, and those of a sequence lie side by side,
  where positions rise by one a slot. In the dtype of q; scores and softmax are
  float32.
  """
  return _forward(window, q_BSKGH, k_BSKH, v_BSKH, position_BS, segment_BS)[0]


def _forward(window, q_BSKGH, *others):
  out_BnKmH, lse_BnKm1 = jax.lax.map(
      _forward_row, _rows(window, q_BSKGH, *others))
  out_BSKGH = _joined(out_BnKmH, q_BSKGH)
  return out_BSKGH, (q_BSKGH, *others, out_BSKGH, lse_BnKm1)


def _backward(window, kept, of_out_BSKGH):
  """∂s = p (∂p − Σ ∂p p), where Σ ∂p p = Σ ∂out out."""
  *arrays, out_BSKGH, lse_BnKm1 = kept
  mean_BSKG1 = plain_attention.gradient_mean(out_BSKGH, of_out_BSKGH)
  gradients = jax.lax.map(
      lambda row: _backward_row(*row),
      (_rows(window, *arrays), lse_BnKm1, _blocks(mean_BSKG1),
       _blocks(of_out_BSKGH)))
  return *map(_joined, gradients, arrays[:3]), None, None


attend.defvjp(_forward, _backward)

_product = plain_attention.product


@flax.struct.dataclass
class _Row:
  """A row in blocks; of all the rows with B in front.

  first_ns: the first slot that each slot sees; the one behind it for padding.
  """
  q_nKmH: jax.Array
  k_nKtH: jax.Array
  v_nKtH: jax.Array
  first_ns: jax.Array

  def first_block(self, i):
    """Of the keys that block i of queries sees."""
    return jnp.min(self.first_ns[i]) // _BLOCK

  def scores(self, i, j):
    """Of queries i and keys j, float32 [K, m, t]."""
    score_Kmt = _product('KmH,KtH->Kmt', self.q_nKmH[i], self.k_nKtH[j])
    slot = jnp.arange(_BLOCK)
    query_s1, key_1t = i * _BLOCK + slot[:, None], j * _BLOCK + slot
    visible_st = (self.first_ns[i][:, None] <= key_1t) & (key_1t <= query_s1)
    group = score_Kmt.shape[1] // _BLOCK
    return jnp.where(jnp.repeat(visible_st, group, axis=0),
                     score_Kmt * self.q_nKmH.shape[-1] ** -0.5,
                     visibility.HIDDEN)


def _rows(window, q_BSKGH, k_BSKH, v_BSKH, position_BS, segment_BS):
  """_Row of all the rows; what fills the last block sees none of the row."""
  first_BS = _first_visible(window, position_BS, segment_BS)
  return _Row(_blocks(q_BSKGH), _blocks(k_BSKH[:, :, :, None]),
              _blocks(v_BSKH[:, :, :, None]),
              _cut(first_BS, padding=first_BS.shape[1]))


def _first_visible(window, position_BS, segment_BS):
  """The first slot that each slot sees; the one behind it for padding."""
  slot_S = jnp.arange(position_BS.shape[1])
  back_BS = position_BS
  if window is not None:
    back_BS = jnp.minimum(back_BS, window - 1)
  # Padding in front may have the segment of what it pads.
  segment_BS = jnp.where(position_BS >= 0, segment_BS, -1)
  is_next_BS = jnp.diff(segment_BS, axis=1, prepend=segment_BS[:, :1]) != 0
  start_BS = jax.lax.cummax(jnp.where(is_next_BS, slot_S, 0), axis=1)
  return jnp.maximum(slot_S - back_BS, start_BS)


def _cut(x_BS, padding=0):
  """[B, n, s, ...] of [B, S, ...]."""
  widths = [(0, 0)] * x_BS.ndim
  widths[1] = 0, -x_BS.shape[1] % _BLOCK
  x_BS = jnp.pad(x_BS, widths, constant_values=padding)
  return x_BS.reshape(len(x_BS), -1, _BLOCK, *x_BS.shape[2:])


def _blocks(x_BSKGH):
  """[B, n, K, m, H]."""
  return plain_attention.by_head(_cut(x_BSKGH))


def _joined(x_BnKmH, like_BS):
  """`_blocks` undone, for queries or keys."""
  x_BnsKGH = plain_attention.by_slot(x_BnKmH, x_BnKmH.shape[3] // _BLOCK)
  batch, slots, *heads = like_BS.shape
  x_BS = x_BnsKGH.reshape(batch, -1, *heads)
  return x_BS[:, :slots].astype(like_BS.dtype)


def _forward_row(row):
  """Outputs, float32 [n, K, m, H], and log Σ exp of their scores.

  The latter is 0 where no key is visible: then no score has a gradient.
  """
  count, *shape = row.q_nKmH.shape

  def of_block(i):
    def step(j, carry):
      most_Km1, sum_Km1, total_KmH = carry
      score_Kmt = row.scores(i, j)
      new_Km1 = jnp.maximum(most_Km1, reductions.row_max(score_Kmt))
      weight_Kmt = jnp.exp(score_Kmt - new_Km1)
      kept_Km1 = jnp.exp(most_Km1 - new_Km1)
      of_block_KmH = _product(
          'Kmt,KtH->KmH', weight_Kmt.astype(row.v_nKtH.dtype), row.v_nKtH[j])
      return (
          new_Km1,
          sum_Km1 * kept_Km1 + reductions.row_sum(weight_Kmt),
          total_KmH * kept_Km1 + of_block_KmH)

    zeros_Km1 = jnp.zeros((*shape[:-1], 1))
    most_Km1, sum_Km1, total_KmH = jax.lax.fori_loop(
        row.first_block(i), i + 1, step,
        (zeros_Km1 + visibility.HIDDEN, zeros_Km1, jnp.zeros(shape)))
    return total_KmH / sum_Km1, jnp.where(
        most_Km1 == visibility.HIDDEN, 0, most_Km1 + jnp.log(sum_Km1))

  return jax.lax.map(of_block, jnp.arange(count))


def _backward_row(row, lse_nKm1, mean_nKm1, of_out_nKmH):
  """Gradients of the queries, keys and values, float32.

  Those of keys and values with t last, as the scores have it: a CPU copies what
  it has to transpose.
  """
  dtype, scale = row.q_nKmH.dtype, row.q_nKmH.shape[-1] ** -0.5

  def of_block(of_keys, i):
    def step(j, carry):
      of_q_KmH, of_k_nKHt, of_v_nKHt = carry
      p_Kmt = jnp.exp(row.scores(i, j) - lse_nKm1[i])
      of_p_Kmt = _product('KmH,KtH->Kmt', of_out_nKmH[i], row.v_nKtH[j])
      of_score_Kmt = (
          p_Kmt * (of_p_Kmt - mean_nKm1[i]) * scale).astype(dtype)
      return (
          of_q_KmH + _product('Kmt,KtH->KmH', of_score_Kmt, row.k_nKtH[j]),
          _add(of_k_nKHt, j, _product(
              'KmH,Kmt->KHt', row.q_nKmH[i], of_score_Kmt)),
          _add(of_v_nKHt, j, _product(
              'KmH,Kmt->KHt', of_out_nKmH[i], p_Kmt.astype(dtype))))

    of_q_KmH, *of_keys = jax.lax.fori_loop(
        row.first_block(i), i + 1, step,
        (jnp.zeros(row.q_nKmH.shape[1:]), *of_keys))
    return of_keys, of_q_KmH

  count, heads, slots, size = row.k_nKtH.shape
  zeros_nKHt = jnp.zeros((count, heads, size, slots))
  (of_k_nKHt, of_v_nKHt), of_q_nKmH = jax.lax.scan(
      of_block, [zeros_nKHt, zeros_nKHt], jnp.arange(len(row.q_nKmH)))
  return of_q_nKmH, *(
      jnp.swapaxes(x, -1, -2) for x in (of_k_nKHt, of_v_nKHt))


def _add(x_nKHt, j, new_KHt):
  """In place, in a loop."""
  return jax.lax.dynamic_update_index_in_dim(x_nKHt, x_nKHt[j] + new_KHt, j, 0)
