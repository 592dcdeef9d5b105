"""Reductions against numpy, in steps of vector registers and at once."""

import jax
import numpy as np
import pytest

from tepo_jax.policy import reductions


@pytest.mark.parametrize('shape', [(30, 2, 48), (5, 16), (4, 37), (2, 1)])
def test_row_max(shape):
  """Of whole registers and of other lengths; all negative, and −inf."""
  x = np.random.default_rng(0).normal(size=shape).astype(np.float32) - 9
  x[0] = -np.inf
  got = jax.jit(reductions.row_max)(x)
  np.testing.assert_array_equal(got, x.max(-1, keepdims=True))
