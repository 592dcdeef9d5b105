"""Matrix products in the form that XLA's CPU backend computes fastest.

The backend is slow, or copies first, where the contracted axis is not the last
of the first operand. Barriers stop XLA from undoing the transposes.

Axes: M tokens, I inputs, O outputs, D model, V vocabulary.
"""

import jax

from tepo_jax.policy import ops


def transposed_linear(x_MI, kernel_OI):
  """x @ kernel.T, [M, O], for few tokens: the kernel is the first operand, as
  a CPU copies the second one."""
  return jax.lax.optimization_barrier(kernel_OI @ _transposed(x_MI)).T


def decoding_logits(hidden_MD, weight, tied):
  """As `policy.ops.logits`, for few tokens.

  A tied weight is the first operand, as V is its first axis. Otherwise a
  barrier stops XLA from transposing the product where `draw` transposes the
  logits.
  """
  if tied:
    return ops.logits(weight, hidden_MD, tied).T
  return jax.lax.optimization_barrier(ops.logits(hidden_MD, weight, tied))


def _transposed(x):
  return jax.lax.optimization_barrier(x.T)
