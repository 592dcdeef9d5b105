"""The table of decoding operations for CPUs: see `policy.ops`.

Axes: M tokens, I inputs, O outputs, D model, V vocabulary.
"""

import jax

from tepo_jax.policy import ops


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


OPS = ops.Ops(decoding_logits=decoding_logits,
              transposed_linear=transposed_linear)
