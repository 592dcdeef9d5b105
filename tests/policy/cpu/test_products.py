"""Products and their gradients: against float64 in numpy, and as compiled."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tepo_jax.policy.cpu import ops as cpu_ops
from tepo_jax.policy.cpu import products
from tepo_jax.policy import ops

TOKENS, SHAPES = 6, [(3, 5), (5, 3), (4, 4)]  # inputs, outputs


def _arrays(inputs, outputs, dtype=jnp.float32):
  """x_MI, kernel_IO and a gradient d_y_MO."""
  generator = np.random.default_rng(0)
  return [jnp.asarray(generator.normal(size=shape), dtype)
          for shape in ((TOKENS, inputs), (inputs, outputs), (TOKENS, outputs))]


@pytest.mark.parametrize('inputs, outputs', SHAPES)
def test_linear_and_its_gradients(inputs, outputs):
  x_MI, kernel_IO, d_y_MO = _arrays(inputs, outputs)
  y_MO, backward = jax.vjp(products.linear, x_MI, kernel_IO)
  d_x_MI, d_kernel_IO = backward(d_y_MO)
  x, kernel, d_y = (np.float64(a) for a in (x_MI, kernel_IO, d_y_MO))
  np.testing.assert_allclose(y_MO, x @ kernel, rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(d_x_MI, d_y @ kernel.T, rtol=1e-5, atol=1e-6)
  np.testing.assert_allclose(d_kernel_IO, x.T @ d_y, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('table', [cpu_ops.OPS, ops.PLAIN])
@pytest.mark.parametrize('dtype', [None, jnp.float32])
@pytest.mark.parametrize('inputs, outputs', SHAPES)
def test_the_dtype_of_a_weight_gradient(dtype, inputs, outputs, table):
  x_MI, _, d_y_MO = _arrays(inputs, outputs, jnp.bfloat16)
  d_kernel_IO = table.weight_gradient(x_MI, d_y_MO, dtype)
  assert d_kernel_IO.dtype == (dtype or jnp.bfloat16)
  np.testing.assert_allclose(
      np.float64(d_kernel_IO), np.float64(x_MI).T @ np.float64(d_y_MO),
      rtol=1e-6 if dtype else 2 ** -7, atol=1e-6 if dtype else 2 ** -7)


def test_a_remat_policy_sees_the_product():
  """Saved, the first of two products is not recomputed; the second never is."""
  def count(policy):
    @functools.partial(jax.checkpoint, policy=policy)
    def layers(x_MI, kernel_II):
      return products.linear(
          jnp.sin(products.linear(x_MI, kernel_II)), kernel_II)

    x_MI, kernel_II, _ = _arrays(4, 4)
    program = jax.make_jaxpr(jax.grad(
        lambda *x: jnp.sum(layers(*x)), (0, 1)))(x_MI, kernel_II)
    return str(program).count('dot_general[')

  policies = jax.checkpoint_policies
  assert count(policies.dots_with_no_batch_dims_saveable) == (
      count(policies.nothing_saveable) - 1)


@pytest.mark.parametrize('inputs, outputs', SHAPES)
def test_a_transposed_kernel(inputs, outputs):
  x_MI, kernel_IO, _ = _arrays(inputs, outputs)
  np.testing.assert_allclose(
      products.transposed_linear(x_MI, kernel_IO.T),
      np.float64(x_MI) @ np.float64(kernel_IO), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('inputs, outputs', [(256, 1024), (1024, 256)])
def test_a_weight_gradient_transposes_the_smaller_operand(inputs, outputs):
  """Compiled to [256, M] @ [M, 1024], whichever of the two x is."""
  def struct(width):
    return jax.ShapeDtypeStruct((320, width), jnp.float32)

  compiled = jax.jit(products.weight_gradient).lower(
      struct(inputs), struct(outputs)).compile().as_text()
  left, right = re.search(r' dot\(%(\S+), %(\S+)\),', compiled).groups()
  shape_of = functools.partial(re.search, string=compiled)
  assert shape_of(rf'%{re.escape(left)} = f32\[256,320\]\{{1,0\}}')
  assert shape_of(rf'%{re.escape(right)} = f32\[320,1024\]\{{1,0\}}')
  assert 'lhs_contracting_dims={1}, rhs_contracting_dims={0}' in compiled
