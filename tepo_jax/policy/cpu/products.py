"""Matrix products in the form that XLA's CPU backend computes fastest.

The backend is slow, or copies first, where the contracted axis is not the last
of the first operand. Barriers stop XLA from undoing the transposes.

Axes: M tokens, I inputs, O outputs, D model, V vocabulary.
"""

import jax

from tepo_jax.policy import ops


@jax.custom_vjp
def linear(x_MI, kernel_IO):
  """x @ kernel, [M, O]; the kernel's gradient is `weight_gradient`."""
  return x_MI @ kernel_IO


def _linear_forward(x_MI, kernel_IO):
  # Not linear(x, kernel): a remat policy must see the product.
  return x_MI @ kernel_IO, (x_MI, kernel_IO)


def _linear_backward(kept, d_y_MO):
  x_MI, kernel_IO = kept
  return d_y_MO @ kernel_IO.T, weight_gradient(x_MI, d_y_MO)


linear.defvjp(_linear_forward, _linear_backward)


def transposed_linear(x_MI, kernel_OI):
  """x @ kernel.T, [M, O], for few tokens: the kernel is the first operand, as
  a CPU copies the second one."""
  return jax.lax.optimization_barrier(kernel_OI @ _transposed(x_MI)).T


def weight_gradient(x_MI, d_y_MO, dtype=None):
  """As `policy.ops.weight_gradient`, transposing the smaller operand.

  If that is ∂y, computes the transpose of the result.
  """
  if x_MI.shape[1] > d_y_MO.shape[1]:
    return jax.lax.optimization_barrier(
        weight_gradient(d_y_MO, x_MI, dtype)).T
  return jax.lax.dot_general(
      _transposed(x_MI), d_y_MO, (((1,), (0,)), ((), ())),
      preferred_element_type=dtype)


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
