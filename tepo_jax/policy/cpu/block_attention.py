"""One block of attention's queries, with a backward pass for CPUs.

The forward pass keeps the output, maximum and sum of each query; the backward
pass computes the scores again (FlashAttention, arXiv 2205.14135).

Axes: B rows, S query columns of a block, T key columns, K key/value heads,
G query heads per key/value head, M = S G queries per key/value head, H head
size.
"""

import functools

import jax
import jax.numpy as jnp

from tepo_jax.policy import attention
from tepo_jax.policy.cpu import reductions


@jax.custom_vjp
def attend(q_BSKGH, k_BTKH, v_BTKH, visible_BST):
  """As `attention._attend_block`: [B, S, K, G, H] in the dtype of q."""
  return _forward(q_BSKGH, k_BTKH, v_BTKH, visible_BST)[0]


def _forward(q_BSKGH, k_BTKH, v_BTKH, visible_BST):
  dtype, group = q_BSKGH.dtype, q_BSKGH.shape[3]
  score_BKMT = _scores(by_head(q_BSKGH), k_BTKH, visible_BST)
  most_BKM1 = reductions.row_max(score_BKMT)
  weight_BKMT = jnp.exp(score_BKMT - most_BKM1)
  sum_BKM1 = reductions.row_sum(weight_BKMT)
  total_BKMH = product('BKMT,BTKH->BKMH', weight_BKMT.astype(dtype), v_BTKH)
  out_BSKGH = by_column((total_BKMH / sum_BKM1).astype(dtype), group)
  return out_BSKGH, (q_BSKGH, k_BTKH, v_BTKH, visible_BST, out_BSKGH,
                     most_BKM1, sum_BKM1)


def _backward(kept, d_out_BSKGH):
  """∂s = p (∂p − Σ ∂p p), where Σ ∂p p = Σ ∂out out.

  ∂out is divided by Σ e, so that p = e / Σ e is never computed. In the products
  T, the larger axis, is last, as in the scores.
  """
  q_BSKGH, k_BTKH, v_BTKH, visible_BST, out_BSKGH, most_BKM1, sum_BKM1 = kept
  group, size = q_BSKGH.shape[3:]
  dtype, q_BKMH = q_BSKGH.dtype, by_head(q_BSKGH)
  weight_BKMT = jnp.exp(_scores(q_BKMH, k_BTKH, visible_BST) - most_BKM1)
  d_out_BKMH = (by_head(d_out_BSKGH) / sum_BKM1).astype(dtype)
  mean_BKM1 = gradient_mean(by_head(out_BSKGH), d_out_BKMH)
  d_v_BKHT = product(
      'BKMH,BKMT->BKHT', d_out_BKMH, weight_BKMT.astype(dtype))
  d_p_BKMT = product('BKMH,BTKH->BKMT', d_out_BKMH, v_BTKH)
  d_score_BKMT = (
      weight_BKMT * (d_p_BKMT - mean_BKM1) * size ** -0.5).astype(dtype)
  # The barrier stops XLA from computing the product's transpose, for which a
  # CPU would copy the scores.
  d_q_BKMH = jax.lax.optimization_barrier(
      product('BKMT,BTKH->BKMH', d_score_BKMT, k_BTKH))
  d_k_BKHT = product('BKMH,BKMT->BKHT', q_BKMH, d_score_BKMT)
  return (by_column(d_q_BKMH, group).astype(dtype),
          jnp.moveaxis(d_k_BKHT, -1, 1).astype(k_BTKH.dtype),
          jnp.moveaxis(d_v_BKHT, -1, 1).astype(v_BTKH.dtype), None)


attend.defvjp(_forward, _backward)

# Sums in float32, whatever the operands' dtype.
product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)


def gradient_mean(out, d_out):
  """Σ ∂out out = Σ ∂p p, the mean of ∂p under p: [..., H] -> float32 [..., 1].
  """
  return jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32),
                 axis=-1, keepdims=True)


def _scores(q_BKMH, k_BTKH, visible_BST):
  """Float32 [B, K, M, T]; the scores of hidden keys are about HIDDEN."""
  score_BKMT = product('BKMH,BTKH->BKMT', q_BKMH, k_BTKH)
  # The logarithm materialises the mask once; XLA would fuse `where`, and with
  # it the visibility rule, into every use and head.
  bias_BST = jnp.maximum(
      jnp.log(visible_BST.astype(jnp.float32)), attention.HIDDEN)
  bias_BMT = jnp.repeat(
      bias_BST, q_BKMH.shape[2] // bias_BST.shape[1], axis=1)
  return score_BKMT * q_BKMH.shape[-1] ** -0.5 + bias_BMT[:, None]


def by_head(x_SKGH):
  """[..., S, K, G, H] -> [..., K, M, H]: S and G merged, so that no product
  transposes the scores."""
  *leading, columns, heads, group, size = x_SKGH.shape
  return jnp.swapaxes(x_SKGH, -4, -3).reshape(
      *leading, heads, columns * group, size)


def by_column(x_KMH, group):
  """The inverse of `by_head`; `group` is G."""
  *leading, heads, queries, size = x_KMH.shape
  return jnp.swapaxes(
      x_KMH.reshape(*leading, heads, queries // group, group, size), -4, -3)
