"""The table of operations for CPUs: see `policy.ops`.

Axes: M tokens, I inputs, O outputs, D model, V vocabulary; in `attend_block`
those of `policy.attention`, and M = S G queries per key/value head.
"""

import functools

import jax
import jax.numpy as jnp

from tepo_jax.policy import attention
from tepo_jax.policy import ops


@jax.checkpoint  # as the plain form
def attend_block(q_BSKGH, k_BTKH, v_BTKH, visible_BST):
  """As `attention.attend_block`, with S and G as one axis.

  With two axes of queries, XLA's CPU backend transposes the scores, and
  sampling takes 1.25 times as long. Its GPU backend would copy the keys of a
  single head for this form.
  """
  product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
  batch, columns, kv_heads, group, size = q_BSKGH.shape
  q_BKMH = jnp.swapaxes(q_BSKGH, 1, 2).reshape(
      batch, kv_heads, columns * group, size)
  score_BKMT = product('BKMH,BTKH->BKMT', q_BKMH, k_BTKH) * size ** -0.5
  visible_BMT = jnp.repeat(visible_BST, group, axis=1)
  weight_BKMT = jax.nn.softmax(
      jnp.where(visible_BMT[:, None], score_BKMT, attention.HIDDEN))
  out_BKMH = product(
      'BKMT,BTKH->BKMH', weight_BKMT.astype(q_BSKGH.dtype), v_BTKH)
  return jnp.swapaxes(
      out_BKMH.reshape(batch, kv_heads, columns, group, size), 1, 2
  ).astype(q_BSKGH.dtype)


def transposed_linear(x_MI, kernel_OI):
  """x @ kernel.T, [M, O], for few tokens.

  XLA's CPU backend copies the second operand of a product, so that is x and not
  the kernel. The barriers stop XLA from undoing the transposes.
  """
  x_IM = jax.lax.optimization_barrier(x_MI.T)
  return jax.lax.optimization_barrier(kernel_OI @ x_IM).T


def decoding_logits(hidden_MD, weight, tied):
  """As `policy.ops.logits`, for few tokens.

  For an untied head [D, V] the barrier stops XLA from merging the product with
  the transpose in `draw`. The product would then contract the first axis of its
  first operand, for which XLA's CPU backend has no fast form: sampling would
  take 1.6 times as long.
  """
  logits_MV = ops.logits(hidden_MD, weight, tied)
  return logits_MV if tied else jax.lax.optimization_barrier(logits_MV)


OPS = ops.Ops(attend_block=attend_block, decoding_logits=decoding_logits,
              transposed_linear=transposed_linear)
