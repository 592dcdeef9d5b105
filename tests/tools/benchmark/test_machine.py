"""The machine's peak rates."""

import numpy as np

from tepo_jax.tools.benchmark import machine


def test_the_flops_are_those_of_the_products():
  products, flops = machine.product_of('float32')
  a, = map(np.asarray, products.args)
  size = len(a)
  assert flops == 8 * 2 * size ** 3
  np.testing.assert_allclose(
      products(), np.linalg.matrix_power(a.astype(np.float64), 9), atol=1e-5)
