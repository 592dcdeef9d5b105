"""Attention in plain XLA, without holding the scores for the backward pass.

Queries are taken a block of slots at a time. A block computes on no key that
stands behind it, and what is kept of it is its output, maximum and sum: the
backward pass makes its scores once more (FlashAttention, arXiv 2205.14135).

Axes: B completions, S query slots of a block, T key slots, K key/value heads,
G query heads a key/value head, H head size.
"""

import functools

import jax
import jax.numpy as jnp

from tepo_jax.policy import reductions
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
  score_BKSGT = _scores(q_BSKGH, k_BTKH, visible_BST)
  most_BKSG1 = reductions.row_max(score_BKSGT)
  weight_BKSGT = jnp.exp(score_BKSGT - most_BKSG1)
  sum_BKSG1 = reductions.row_sum(weight_BKSGT)
  total_BKSGH = product('BKSGT,BTKH->BKSGH', weight_BKSGT.astype(
      q_BSKGH.dtype), v_BTKH)
  out_BSKGH = jnp.moveaxis(
      (total_BKSGH / sum_BKSG1).astype(q_BSKGH.dtype), 1, 2)
  return out_BSKGH, (q_BSKGH, k_BTKH, v_BTKH, visible_BST, out_BSKGH,
                     most_BKSG1, sum_BKSG1)


def _backward(kept, of_out_BSKGH):
  """∂s = p (∂p − Σ ∂p p), where Σ ∂p p = Σ ∂out out.

  Products have T, as the larger axis, where the scores have it: last.
  """
  q_BSKGH, k_BTKH, v_BTKH, visible_BST, out_BSKGH, most_BKSG1, sum_BKSG1 = kept
  dtype, scale = q_BSKGH.dtype, q_BSKGH.shape[-1] ** -0.5
  p_BKSGT = jnp.exp(
      _scores(q_BSKGH, k_BTKH, visible_BST) - most_BKSG1) / sum_BKSG1
  of_v_BKHT = product('BSKGH,BKSGT->BKHT', of_out_BSKGH, p_BKSGT.astype(dtype))
  of_p_BKSGT = product('BSKGH,BTKH->BKSGT', of_out_BSKGH, v_BTKH)
  mean_BSKG1 = gradient_mean(out_BSKGH, of_out_BSKGH)
  of_score_BKSGT = (
      p_BKSGT * (of_p_BKSGT - jnp.moveaxis(mean_BSKG1, 1, 2)) * scale
  ).astype(dtype)
  # Without the barrier XLA takes the product's transpose, and a CPU copies
  # the scores for it.
  of_q_BKSGH = jax.lax.optimization_barrier(
      product('BKSGT,BTKH->BKSGH', of_score_BKSGT, k_BTKH))
  of_k_BKHT = product('BSKGH,BKSGT->BKHT', q_BSKGH, of_score_BKSGT)
  return (jnp.moveaxis(of_q_BKSGH, 2, 1).astype(dtype),
          jnp.moveaxis(of_k_BKHT, -1, 1).astype(k_BTKH.dtype),
          jnp.moveaxis(of_v_BKHT, -1, 1).astype(v_BTKH.dtype), None)


attend.defvjp(_forward, _backward)

# Sums in float32, whatever is multiplied.
product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


def gradient_mean(out_BSKGH, of_out_BSKGH):
  """Σ ∂out out = Σ ∂p p, the mean of ∂p under p: float32 [B, S, K, G, 1]."""
  return jnp.sum(
      of_out_BSKGH.astype(jnp.float32) * out_BSKGH.astype(jnp.float32),
      axis=-1, keepdims=True)


def _scores(q_BSKGH, k_BTKH, visible_BST):
  score_BKSGT = product('BSKGH,BTKH->BKSGT', q_BSKGH, k_BTKH)
  # XLA makes a logarithm once, and not again for every head and use, as it
  # does with what visibility is made of. Hidden scores must be finite.
  bias_BST = jnp.maximum(
      jnp.log(visible_BST.astype(jnp.float32)), visibility.HIDDEN)
  return (score_BKSGT * q_BSKGH.shape[-1] ** -0.5
          + bias_BST[:, None, :, None, :])
