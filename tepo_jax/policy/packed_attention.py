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

from tepo_jax.policy import plain_attention
from tepo_jax.policy import reductions
from tepo_jax.policy import visibility

_BLOCK = 64  # slots


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(window, q_BSKGH, k_BSKH, v_BSKH, position_BS, segment_BS):
  """softmax(q k^T / sqrt(H)) v over the visible keys, [B, S, K, G, H].

  Keys and queries are the same slots, and inside a sequence positions rise by
  one a slot. In the dtype of q; scores and softmax are float32.
  """
  return _forward(window, q_BSKGH, k_BSKH, v_BSKH, position_BS, segment_BS)[0]


def _forward(window, q_BSKGH, *others):
  rows = _cut(window, q_BSKGH, *others)
  out_BnKmH, lse_BnKm1 = jax.lax.map(
      functools.partial(_forward_row, window), rows)
  out_BSKGH = _joined(out_BnKmH, q_BSKGH)
  return out_BSKGH, (q_BSKGH, *others, out_BSKGH, lse_BnKm1)


def _backward(window, kept, of_out_BSKGH):
  """∂s = p (∂p − Σ ∂p p), where Σ ∂p p = Σ ∂out out."""
  *arrays, out_BSKGH, lse_BnKm1 = kept
  q_BSKGH, k_BSKH, v_BSKH = arrays[:3]
  mean_BSKG1 = plain_attention.gradient_mean(out_BSKGH, of_out_BSKGH)
  of_q_BnKmH, of_k_BnKtH, of_v_BnKtH = jax.lax.map(
      lambda row: _backward_row(window, *row),
      (_cut(window, *arrays), lse_BnKm1, _blocks(mean_BSKG1),
       _blocks(of_out_BSKGH)))
  return (_joined(of_q_BnKmH, q_BSKGH), _joined(of_k_BnKtH, k_BSKH),
          _joined(of_v_BnKtH, v_BSKH), None, None)


attend.defvjp(_forward, _backward)

_product = plain_attention.product


@flax.struct.dataclass
class _Row:
  """A row in blocks; of all the rows with B in front.

  first_n: the first block of keys that a block of queries sees.
  """
  q_nKmH: jax.Array
  k_nKtH: jax.Array
  v_nKtH: jax.Array
  position_ns: jax.Array
  segment_ns: jax.Array
  first_n: jax.Array

  def scores(self, window, i, j):
    """Of queries i and keys j, float32 [K, m, t]."""
    visible_1st = visibility.visible(
        self.position_ns[i, None], self.position_ns[j, None], window,
        self.segment_ns[i, None], self.segment_ns[j, None])
    score_Kmt = _product('KmH,KtH->Kmt', self.q_nKmH[i], self.k_nKtH[j])
    group = score_Kmt.shape[1] // _BLOCK
    return jnp.where(jnp.repeat(visible_1st, group, axis=1),
                     score_Kmt * self.q_nKmH.shape[-1] ** -0.5,
                     visibility.HIDDEN)


def _cut(window, q_BSKGH, k_BSKH, v_BSKH, position_BS, segment_BS):
  """_Row of all the rows."""
  slot_S = jnp.arange(position_BS.shape[1])
  back_BS = jnp.maximum(position_BS, 0)
  if window is not None:
    back_BS = jnp.minimum(back_BS, window - 1)
  return _Row(
      *map(_blocks, (q_BSKGH, k_BSKH, v_BSKH)), _blocks(position_BS, -1),
      _blocks(segment_BS, -1),
      jnp.min(_blocks(jnp.maximum(slot_S - back_BS, 0), len(slot_S)), axis=-1)
      // _BLOCK)


def _blocks(x_BS, padding=0):
  """[B, S] -> [B, n, s]; [B, S, K, (G,) H] -> [B, n, K, s or m, H]."""
  widths = [(0, 0)] * x_BS.ndim
  widths[1] = 0, -x_BS.shape[1] % _BLOCK
  x_BS = jnp.pad(x_BS, widths, constant_values=padding)
  x_Bns = x_BS.reshape(len(x_BS), -1, _BLOCK, *x_BS.shape[2:])
  if x_Bns.ndim == 3:
    return x_Bns
  x_BnKs = jnp.swapaxes(x_Bns, 2, 3)
  return x_BnKs.reshape(*x_BnKs.shape[:3], -1, x_BnKs.shape[-1])


def _joined(x_BnKm, like_BSK):
  """`_blocks` undone."""
  batch, slots, *heads = like_BSK.shape
  x_BnKs = x_BnKm.reshape(*x_BnKm.shape[:3], _BLOCK, *heads[1:])
  x_BSK = jnp.swapaxes(x_BnKs, 2, 3).reshape(batch, -1, *heads)
  return x_BSK[:, :slots].astype(like_BSK.dtype)


def _forward_row(window, row):
  """Outputs, float32 [n, K, m, H], and log Σ exp of their scores.

  The latter is 0 where no key is visible: then no score has a gradient.
  """
  count, *shape = row.q_nKmH.shape

  def of_block(i):
    def step(j, carry):
      most_Km1, sum_Km1, total_KmH = carry
      score_Kmt = row.scores(window, i, j)
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
        row.first_n[i], i + 1, step,
        (zeros_Km1 + visibility.HIDDEN, zeros_Km1, jnp.zeros(shape)))
    return total_KmH / sum_Km1, jnp.where(
        most_Km1 == visibility.HIDDEN, 0, most_Km1 + jnp.log(sum_Km1))

  return jax.lax.map(of_block, jnp.arange(count))


def _backward_row(window, row, lse_nKm1, mean_nKm1, of_out_nKmH):
  """Gradients of the queries, keys and values, float32.

  Those of keys and values with t last, as the scores have it: a CPU copies what
  it has to transpose.
  """
  dtype, scale = row.q_nKmH.dtype, row.q_nKmH.shape[-1] ** -0.5

  def of_block(of_keys, i):
    def step(j, carry):
      of_q_KmH, of_k_nKHt, of_v_nKHt = carry
      p_Kmt = jnp.exp(row.scores(window, i, j) - lse_nKm1[i])
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
        row.first_n[i], i + 1, step,
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
