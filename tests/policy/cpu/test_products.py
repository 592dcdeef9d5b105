"""Products against float64 in numpy."""

import jax.numpy as jnp
import numpy as np
import pytest

from tepo_jax.policy.cpu import products


@pytest.mark.parametrize('inputs, outputs', [(3, 5), (5, 3), (4, 4)])
def test_a_transposed_kernel(inputs, outputs):
  generator = np.random.default_rng(0)
  x_MI, kernel_OI = (
      jnp.asarray(generator.normal(size=shape), jnp.float32)
      for shape in ((6, inputs), (outputs, inputs)))
  np.testing.assert_allclose(
      products.transposed_linear(x_MI, kernel_OI),
      np.float64(x_MI) @ np.float64(kernel_OI).T, rtol=1e-5, atol=1e-6)
