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

# Finite, so that a row without a visible key (a padding query) is a uniform
# average and not NaN, in the gradient too.
_MASKED = -1e30

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
def attend(q_BKSGH, k_BKTH, v_BKTH, visible_BST):
  """softmax(q k^T / sqrt(H)) v over the visible keys, [B, K, S, G, H].

  In the dtype of q; scores and softmax are float32.
  """
  return _forward(q_BKSGH, k_BKTH, v_BKTH, visible_BST)[0]


def _forward(q_BKSGH, k_BKTH, v_BKTH, visible_BST):
  score_BKSGT = _scores(q_BKSGH, k_BKTH, visible_BST)
  most_BKSG1 = jnp.max(score_BKSGT, axis=-1, keepdims=True)
  weight_BKSGT = jnp.exp(score_BKSGT - most_BKSG1)
  sum_BKSG1 = jnp.sum(weight_BKSGT, axis=-1, keepdims=True)
  total_BKSGH = _product('BKSGT,BKTH->BKSGH', weight_BKSGT.astype(
      q_BKSGH.dtype), v_BKTH)
  out_BKSGH = (total_BKSGH / sum_BKSG1).astype(q_BKSGH.dtype)
  return out_BKSGH, (q_BKSGH, k_BKTH, v_BKTH, visible_BST, out_BKSGH,
                     most_BKSG1, sum_BKSG1)


def _backward(kept, of_out_BKSGH):
  """∂s = p (∂p − Σ ∂p p), where Σ ∂p p = Σ ∂out out."""
  q_BKSGH, k_BKTH, v_BKTH, visible_BST, out_BKSGH, most_BKSG1, sum_BKSG1 = kept
  dtype, scale = q_BKSGH.dtype, q_BKSGH.shape[-1] ** -0.5
  p_BKSGT = jnp.exp(
      _scores(q_BKSGH, k_BKTH, visible_BST) - most_BKSG1) / sum_BKSG1
  of_v_BKTH = _product('BKSGT,BKSGH->BKTH', p_BKSGT.astype(dtype), of_out_BKSGH)
  of_p_BKSGT = _product('BKSGH,BKTH->BKSGT', of_out_BKSGH, v_BKTH)
  mean_BKSG1 = jnp.sum(
      of_out_BKSGH.astype(jnp.float32) * out_BKSGH.astype(jnp.float32),
      axis=-1, keepdims=True)
  of_score_BKSGT = (
      p_BKSGT * (of_p_BKSGT - mean_BKSG1) * scale).astype(dtype)
  of_q_BKSGH = _product('BKSGT,BKTH->BKSGH', of_score_BKSGT, k_BKTH)
  of_k_BKTH = _product('BKSGT,BKSGH->BKTH', of_score_BKSGT, q_BKSGH)
  return (of_q_BKSGH.astype(dtype), of_k_BKTH.astype(k_BKTH.dtype),
          of_v_BKTH.astype(v_BKTH.dtype), None)


attend.defvjp(_forward, _backward)

_product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


def _scores(q_BKSGH, k_BKTH, visible_BST):
  score_BKSGT = _product('BKSGH,BKTH->BKSGT', q_BKSGH, k_BKTH)
  return jnp.where(visible_BST[:, None, :, None, :],
                   score_BKSGT * q_BKSGH.shape[-1] ** -0.5, _MASKED)
