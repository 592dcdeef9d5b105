"""Reductions against numpy, of lengths that fill vector registers or do not."""

import jax
import numpy as np
import pytest

from tepo_jax.policy.cpu import reductions

# Whole registers, combined 8, 4 or 1 at a time; other lengths.
SHAPES = [(3, 768), (30, 2, 192), (5, 16), (4, 37), (2, 1)]


@pytest.mark.parametrize('shape', SHAPES)
def test_row_max(shape):
  """Of negative numbers, and of −inf."""
  x = np.random.default_rng(0).normal(size=shape).astype(np.float32) - 9
  x[0] = -np.inf
  got = jax.jit(reductions.row_max)(x)
  np.testing.assert_array_equal(got, x.max(-1, keepdims=True))


@pytest.mark.parametrize('shape', SHAPES)
def test_row_sum(shape):
  """Of a term of two arrays and a number per row."""
  rng = np.random.default_rng(0)
  x, y = rng.normal(size=(2, *shape)).astype(np.float32)
  of_row = rng.normal(size=(*shape[:-1], 1)).astype(np.float32)

  def term(x, y, of_row):
    return x * (y - of_row)

  got = jax.jit(lambda *arrays: reductions.row_sum(*arrays, term=term))(
      x, y, of_row)
  want = term(*(a.astype(np.float64) for a in (x, y, of_row)))
  np.testing.assert_allclose(
      got, want.sum(-1, keepdims=True), rtol=0,
      atol=1e-6 * np.abs(want).sum(-1).max())
