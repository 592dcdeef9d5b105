"""Matrix products in the form that XLA's CPU backend is fastest at.

It is slow, or copies first, where the axis that is summed is not the last of
the first operand. Barriers keep XLA from turning the operands back.

Axes: M tokens, I inputs, O outputs.
"""

import functools

import jax


@jax.custom_vjp
def linear(x_MI, kernel_IO):
  """x @ kernel, [M, O]; the gradient of the kernel is `weight_gradient`."""
  return x_MI @ kernel_IO


def _linear_forward(x_MI, kernel_IO):
  # Not by linear(): a policy of what to keep must see the product.
  return x_MI @ kernel_IO, (x_MI, kernel_IO)


def _linear_backward(kept, of_y_MO):
  x_MI, kernel_IO = kept
  return of_y_MO @ kernel_IO.T, weight_gradient(x_MI, of_y_MO)


linear.defvjp(_linear_forward, _linear_backward)


def turned_linear(x_MI, kernel_OI):
  """x @ kernel.T, [M, O], the kernel first: for few tokens."""
  return jax.lax.optimization_barrier(kernel_OI @ _turned(x_MI)).T


def weight_gradient(x_MI, of_y_MO, dtype=None):
  """x.T @ of_y, [I, O], in `dtype` (None: that of the operands)."""
  product = functools.partial(
      jax.lax.dot_general, preferred_element_type=dtype)
  return jax.lax.platform_dependent(
      x_MI, of_y_MO, cpu=functools.partial(_by_smaller, product),
      default=functools.partial(_at_once, product))


def _by_smaller(product, x_MI, of_y_MO):
  """The smaller operand is turned, and with it the result where it is of_y."""
  if x_MI.shape[1] > of_y_MO.shape[1]:
    return jax.lax.optimization_barrier(
        _by_smaller(product, of_y_MO, x_MI)).T
  return product(_turned(x_MI), of_y_MO, (((1,), (0,)), ((), ())))


def _at_once(product, x_MI, of_y_MO):
  return product(x_MI, of_y_MO, (((0,), (0,)), ((), ())))


def _turned(x):
  return jax.lax.optimization_barrier(x.T)
