"""Attention on a CPU: packed rows at the cost of the sequences in them.

In a long packed row, a block of queries iterates over the blocks of keys from
the first that one of its queries sees up to its own, and no scores are kept
(FlashAttention, arXiv 2205.14135). The number of those blocks is known on the
device only: it depends on how the sequences lie in the row.

Axes: B rows, S columns, n blocks, s columns of a block of queries, t of a block
of keys, N query heads, K key/value heads, G query heads per key/value head,
m = s G queries per key/value head, H head size.
"""

import functools

import flax.struct
import jax
import jax.numpy as jnp

from tepo_jax.policy import attention
from tepo_jax.policy.cpu import block_attention
from tepo_jax.policy.cpu import reductions
from tepo_jax.runtime import mesh as mesh_lib

_BLOCK = 64  # columns
_SHORT = 256  # columns of a packed row in which skipping blocks gains nothing


def attend(q_BSNH, k_BTKH, v_BTKH, query_position_BS, key_position_BT,
           window, segment_BS):
  """As `attention.attend_xla`; long packed rows by `attend_packed`."""
  if (key_position_BT is not None or segment_BS is None
      or q_BSNH.shape[1] <= _SHORT):
    return attention.attend_xla(
        q_BSNH, k_BTKH, v_BTKH, query_position_BS, key_position_BT, window,
        segment_BS, attend_block=block_attention.attend)

  def of_piece(q_BSNH, k_BSKH, v_BSKH, *layout):
    return attend_packed(
        window, attention.by_key_head(q_BSNH, k_BSKH), k_BSKH, v_BSKH, *layout
    ).reshape(q_BSNH.shape)

  # Each device computes its own rows and heads.
  return mesh_lib.per_device(
      of_piece, attention.AXES + (('batch', None),), q_BSNH, k_BTKH, v_BTKH,
      query_position_BS, segment_BS)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend_packed(window, q_BSKGH, k_BSKH, v_BSKH, position_BS, segment_BS):
  """softmax(q kᵀ / √H) v over the visible keys, [B, S, K, G, H].

  Requires keys and queries to be the same columns, and each sequence to lie
  contiguously in its row, its positions rising by one per column. In the dtype
  of q; scores and softmax are float32.
  """
  return _forward(window, q_BSKGH, k_BSKH, v_BSKH, position_BS, segment_BS)[0]


def _forward(window, q_BSKGH, *others):
  out_BnKmH, lse_BnKm1 = jax.lax.map(
      _forward_row, _blocked_rows(window, q_BSKGH, *others))
  out_BSKGH = _joined(out_BnKmH, q_BSKGH)
  return out_BSKGH, (q_BSKGH, *others, out_BSKGH, lse_BnKm1)


def _backward(window, kept, d_out_BSKGH):
  """∂s = p (∂p − Σ ∂p p), where Σ ∂p p = Σ ∂out out."""
  *arrays, out_BSKGH, lse_BnKm1 = kept
  mean_BSKG1 = block_attention.gradient_mean(out_BSKGH, d_out_BSKGH)
  gradients = jax.lax.map(
      lambda row: _backward_row(*row),
      (_blocked_rows(window, *arrays), lse_BnKm1, _blocks(mean_BSKG1),
       _blocks(d_out_BSKGH)))
  return *map(_joined, gradients, arrays[:3]), None, None


attend_packed.defvjp(_forward, _backward)

_product = block_attention.product


@flax.struct.dataclass
class _BlockedRow:
  """One row cut into blocks; `_blocked_rows` stacks B of them on axis 0.

  first_ns: the first column that each column sees; padding sees none: the
    column after its own.
  """
  q_nKmH: jax.Array
  k_nKtH: jax.Array
  v_nKtH: jax.Array
  first_ns: jax.Array

  def first_block(self, i):
    """The first block of keys that block i of queries sees."""
    return jnp.min(self.first_ns[i]) // _BLOCK

  def scores(self, i, j):
    """Scores of queries i and keys j, float32 [K, m, t]."""
    score_Kmt = _product('KmH,KtH->Kmt', self.q_nKmH[i], self.k_nKtH[j])
    column = jnp.arange(_BLOCK)
    query_s1, key_1t = i * _BLOCK + column[:, None], j * _BLOCK + column
    visible_st = (self.first_ns[i][:, None] <= key_1t) & (key_1t <= query_s1)
    group = score_Kmt.shape[1] // _BLOCK
    return jnp.where(jnp.repeat(visible_st, group, axis=0),
                     score_Kmt * self.q_nKmH.shape[-1] ** -0.5,
                     attention.HIDDEN)


def _blocked_rows(window, q_BSKGH, k_BSKH, v_BSKH, position_BS, segment_BS):
  """The rows as _BlockedRow; columns that fill the last block see no key."""
  first_BS = _first_visible(window, position_BS, segment_BS)
  return _BlockedRow(
      _blocks(q_BSKGH), _blocks(k_BSKH[:, :, :, None]),
      _blocks(v_BSKH[:, :, :, None]),
      _cut(first_BS, padding=first_BS.shape[1]))


def _first_visible(window, position_BS, segment_BS):
  """As `_BlockedRow.first_ns`, [B, S]."""
  column_S = jnp.arange(position_BS.shape[1])
  back_BS = position_BS
  if window is not None:
    back_BS = jnp.minimum(back_BS, window - 1)
  # Padding before a sequence may carry the segment of that sequence.
  segment_BS = jnp.where(position_BS >= 0, segment_BS, -1)
  is_next_BS = jnp.diff(segment_BS, axis=1, prepend=segment_BS[:, :1]) != 0
  start_BS = jax.lax.cummax(jnp.where(is_next_BS, column_S, 0), axis=1)
  return jnp.maximum(column_S - back_BS, start_BS)


def _cut(x_BS, padding=0):
  """[B, S, ...] -> [B, n, s, ...]."""
  widths = [(0, 0)] * x_BS.ndim
  widths[1] = 0, -x_BS.shape[1] % _BLOCK
  x_BS = jnp.pad(x_BS, widths, constant_values=padding)
  return x_BS.reshape(len(x_BS), -1, _BLOCK, *x_BS.shape[2:])


def _blocks(x_BSKGH):
  """[B, S, K, G, H] -> [B, n, K, m, H]."""
  return block_attention.by_head(_cut(x_BSKGH))


def _joined(x_BnKmH, like_BS):
  """The inverse of `_blocks`, with the shape and dtype of `like_BS`."""
  x_BnsKGH = block_attention.by_column(x_BnKmH, x_BnKmH.shape[3] // _BLOCK)
  batch, columns, *heads = like_BS.shape
  x_BS = x_BnsKGH.reshape(batch, -1, *heads)
  return x_BS[:, :columns].astype(like_BS.dtype)


def _forward_row(row):
  """Returns outputs, float32 [n, K, m, H], and log Σ exp of their scores.

  The latter is 0 where no key is visible: then no score has a gradient.
  """
  count, *shape = row.q_nKmH.shape

  def one_block(i):
    def step(j, carry):
      most_Km1, sum_Km1, total_KmH = carry
      score_Kmt = row.scores(i, j)
      new_Km1 = jnp.maximum(most_Km1, reductions.row_max(score_Kmt))
      weight_Kmt = jnp.exp(score_Kmt - new_Km1)
      kept_Km1 = jnp.exp(most_Km1 - new_Km1)
      new_KmH = _product(
          'Kmt,KtH->KmH', weight_Kmt.astype(row.v_nKtH.dtype), row.v_nKtH[j])
      return (
          new_Km1,
          sum_Km1 * kept_Km1 + reductions.row_sum(weight_Kmt),
          total_KmH * kept_Km1 + new_KmH)

    zeros_Km1 = jnp.zeros((*shape[:-1], 1))
    most_Km1, sum_Km1, total_KmH = jax.lax.fori_loop(
        row.first_block(i), i + 1, step,
        (zeros_Km1 + attention.HIDDEN, zeros_Km1, jnp.zeros(shape)))
    return total_KmH / sum_Km1, jnp.where(
        most_Km1 == attention.HIDDEN, 0, most_Km1 + jnp.log(sum_Km1))

  return jax.lax.map(one_block, jnp.arange(count))


def _backward_row(row, lse_nKm1, mean_nKm1, d_out_nKmH):
  """Returns the gradients of queries, keys and values, float32.

  Those of keys and values are summed with t last, as in the scores, because a
  CPU would copy the scores to transpose them.
  """
  dtype, scale = row.q_nKmH.dtype, row.q_nKmH.shape[-1] ** -0.5

  def one_block(d_keys, i):
    def step(j, carry):
      d_q_KmH, d_k_nKHt, d_v_nKHt = carry
      p_Kmt = jnp.exp(row.scores(i, j) - lse_nKm1[i])
      d_p_Kmt = _product('KmH,KtH->Kmt', d_out_nKmH[i], row.v_nKtH[j])
      d_score_Kmt = (
          p_Kmt * (d_p_Kmt - mean_nKm1[i]) * scale).astype(dtype)
      return (
          d_q_KmH + _product('Kmt,KtH->KmH', d_score_Kmt, row.k_nKtH[j]),
          _add(d_k_nKHt, j, _product(
              'KmH,Kmt->KHt', row.q_nKmH[i], d_score_Kmt)),
          _add(d_v_nKHt, j, _product(
              'KmH,Kmt->KHt', d_out_nKmH[i], p_Kmt.astype(dtype))))

    d_q_KmH, *d_keys = jax.lax.fori_loop(
        row.first_block(i), i + 1, step,
        (jnp.zeros(row.q_nKmH.shape[1:]), *d_keys))
    return d_keys, d_q_KmH

  count, heads, columns, size = row.k_nKtH.shape
  zeros_nKHt = jnp.zeros((count, heads, size, columns))
  (d_k_nKHt, d_v_nKHt), d_q_nKmH = jax.lax.scan(
      one_block, [zeros_nKHt, zeros_nKHt], jnp.arange(len(row.q_nKmH)))
  return d_q_nKmH, *(
      jnp.swapaxes(x, -1, -2) for x in (d_k_nKHt, d_v_nKHt))


def _add(x_nKHt, j, new_KHt):
  """Adds to block j; in place inside a loop."""
  return jax.lax.dynamic_update_index_in_dim(x_nKHt, x_nKHt[j] + new_KHt, j, 0)
