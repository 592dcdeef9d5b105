"""The machine's peak rates."""

import types

import jax
import numpy as np
import pytest

from tepo_jax.tools.benchmark import machine


@pytest.mark.long
def test_the_flops_are_those_of_the_products():
  products, flops = machine.product_of('float32')
  a, = map(np.asarray, products.args)
  size = len(a)
  assert flops == 8 * 2 * size ** 3
  np.testing.assert_allclose(
      products(), np.linalg.matrix_power(a.astype(np.float64), 9), atol=1e-5)


def test_peak_rates_are_those_of_the_data_sheets():
  v6e = 2 * [types.SimpleNamespace(device_kind='TPU v6 lite')]
  h100 = [types.SimpleNamespace(device_kind='NVIDIA H100 80GB HBM3')]
  assert machine.peak(v6e, 'bfloat16') == 2 * 918e12
  assert machine.peak(h100, 'bfloat16') == 989e12
  assert machine.peak(h100, 'float32') is None
  assert machine.peak(jax.devices(), 'bfloat16') is None  # a CPU
