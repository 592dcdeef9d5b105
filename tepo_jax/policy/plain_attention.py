"""Attention in plain XLA, without holding the scores for the backward pass.

Queries are taken a block of slots at a time. A block computes on no key that
stands behind it, and what is kept of it is its output, maximum and sum: the
backward pass makes its scores once more (FlashAttention, arXiv 2205.14135).

Axes: B completions, S query slots of a block, T key slots, K key/value heads,
G query heads a key/value head, M = S G queries a key/value head, H head size.
"""

import functools

import jax
import jax.numpy as jnp

from tepo_jax.policy.cpu import reductions
from tepo_jax.policy import visibility

_SMALLEST = 64  # slots of a block
_MOST = 8  # blocks: they are unrolled


def blocks(length: int, window: int | None):
  """(queries, keys) of each block, as slices, of slots that see each other.

  With b blocks, (b + 1) / 2 b of the square; less with a window.
  """
  size = max(_SMALLEST, -(-length // _MOST))
  for start in range(0, length, size):
    stop = min(start + size, length)
    first = 0 if window is None else max(0, start - window + 1)
    yield slice(start, stop), slice(first, stop)


@jax.custom_vjp
def attend(q_BSKGH, k_BTKH, v_BTKH, visible_BST):
  """softmax(q k^T / sqrt(H)) v over the visible keys, [B, S, K, G, H].

  In the dtype of q; scores and softmax are float32.
  """
  return _forward(q_BSKGH, k_BTKH, v_BTKH, visible_BST)[0]


def _forward(q_BSKGH, k_BTKH, v_BTKH, visible_BST):
  dtype, group = q_BSKGH.dtype, q_BSKGH.shape[3]
  score_BKMT = _scores(by_head(q_BSKGH), k_BTKH, visible_BST)
  most_BKM1 = reductions.row_max(score_BKMT)
  weight_BKMT = jnp.exp(score_BKMT - most_BKM1)
  sum_BKM1 = reductions.row_sum(weight_BKMT)
  total_BKMH = product('BKMT,BTKH->BKMH', weight_BKMT.astype(dtype), v_BTKH)
  out_BSKGH = by_slot((total_BKMH / sum_BKM1).astype(dtype), group)
  return out_BSKGH, (q_BSKGH, k_BTKH, v_BTKH, visible_BST, out_BSKGH,
                     most_BKM1, sum_BKM1)


def _backward(kept, of_out_BSKGH):
  """∂s = p (∂p − Σ ∂p p), where Σ ∂p p = Σ ∂out out.

  p = e / Σ e is not written: ∂out is divided instead. Products have T, as the
  larger axis, where the scores have it: last.
  """
  q_BSKGH, k_BTKH, v_BTKH, visible_BST, out_BSKGH, most_BKM1, sum_BKM1 = kept
  group, size = q_BSKGH.shape[3:]
  dtype, q_BKMH = q_BSKGH.dtype, by_head(q_BSKGH)
  weight_BKMT = jnp.exp(_scores(q_BKMH, k_BTKH, visible_BST) - most_BKM1)
  of_out_BKMH = (by_head(of_out_BSKGH) / sum_BKM1).astype(dtype)
  mean_BKM1 = gradient_mean(by_head(out_BSKGH), of_out_BKMH)
  of_v_BKHT = product(
      'BKMH,BKMT->BKHT', of_out_BKMH, weight_BKMT.astype(dtype))
  of_p_BKMT = product('BKMH,BTKH->BKMT', of_out_BKMH, v_BTKH)
  of_score_BKMT = (
      weight_BKMT * (of_p_BKMT - mean_BKM1) * size ** -0.5).astype(dtype)
  # Without the barrier XLA takes the product's transpose, and a CPU copies
  # the scores for it.
  of_q_BKMH = jax.lax.optimization_barrier(
      product('BKMT,BTKH->BKMH', of_score_BKMT, k_BTKH))
  of_k_BKHT = product('BKMH,BKMT->BKHT', q_BKMH, of_score_BKMT)
  return (by_slot(of_q_BKMH, group).astype(dtype),
          jnp.moveaxis(of_k_BKHT, -1, 1).astype(k_BTKH.dtype),
          jnp.moveaxis(of_v_BKHT, -1, 1).astype(v_BTKH.dtype), None)


attend.defvjp(_forward, _backward)

# Sums in float32, whatever is multiplied.
product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


def gradient_mean(out, of_out):
  """Σ ∂out out = Σ ∂p p, the mean of ∂p under p: float32 [..., 1] of [..., H].
  """
  return jnp.sum(of_out.astype(jnp.float32) * out.astype(jnp.float32),
                 axis=-1, keepdims=True)


def _scores(q_BKMH, k_BTKH, visible_BST):
  """Float32 [B, K, M, T]; hidden ones are finite and far below."""
  score_BKMT = product('BKMH,BTKH->BKMT', q_BKMH, k_BTKH)
  # XLA makes a logarithm once, and not again for every head and use, as it
  # does with what visibility is made of.
  bias_BST = jnp.maximum(
      jnp.log(visible_BST.astype(jnp.float32)), visibility.HIDDEN)
  bias_BMT = jnp.repeat(
      bias_BST, q_BKMH.shape[2] // bias_BST.shape[1], axis=1)
  return score_BKMT * q_BKMH.shape[-1] ** -0.5 + bias_BMT[:, None]


def by_head(x_SKGH):
  """[..., S, K, G, H] -> [..., K, M, H].

  With M in one piece no product transposes the scores.
  """
  *leading, slots, heads, group, size = x_SKGH.shape
  return jnp.swapaxes(x_SKGH, -4, -3).reshape(
      *leading, heads, slots * group, size)


def by_slot(x_KMH, group):
  """`by_head` undone, G being `group`."""
  *leading, heads, queries, size = x_KMH.shape
  return jnp.swapaxes(
      x_KMH.reshape(*leading, heads, queries // group, group, size), -4, -3)
