"""The sketch against its definition in Python, and its error."""

import jax
from jax import numpy as jnp
import numpy as np
import pytest

from tepo_jax.tools.mechanism import sketch


def sign(i):
  """Murmur3's finaliser, in whole numbers."""
  x = i
  x = (x ^ x >> 16) * 0x85EBCA6B % 2**32
  x = (x ^ x >> 13) * 0xC2B2AE35 % 2**32
  return -1 if (x ^ x >> 16) >> 31 else 1


@pytest.mark.parametrize('sizes', [
    (3,), (5, 2 * sketch.SIZE + 7), (sketch.SIZE, sketch.SIZE - 1, 4),
    (70, 50_001)])
def test_a_sketch_adds_signed_coordinates(sizes):
  parts = [np.random.default_rng(n).normal(size=n) for n in sizes]
  want_C = np.zeros(sketch.SIZE)
  for i, value in enumerate(np.concatenate(parts)):
    want_C[i % sketch.SIZE] += sign(i) * value
  tree = [jnp.asarray(part, jnp.float32).reshape(-1, 1) for part in parts]
  np.testing.assert_allclose(jax.jit(sketch.sketch)(tree), want_C, atol=1e-5)


@pytest.mark.parametrize('first', [
    2**31 - 9, 2**32 - sketch.SIZE - 5, 2**32 + 3, 5 * 2**32 + 11])
def test_coordinates_beyond_32_bits(first):
  part = np.random.default_rng(0).normal(size=2 * sketch.SIZE + 9)
  want_C = np.zeros(sketch.SIZE)
  for i, value in enumerate(part, first):
    want_C[i % sketch.SIZE] += sign(i % 2**32) * value
  np.testing.assert_allclose(sketch._add(
      jnp.zeros(sketch.SIZE), jnp.asarray(part, jnp.float32), first),
                             want_C, atol=1e-5)


def test_a_long_array_is_added_in_parts(monkeypatch):
  tree = [jnp.ones(7), jnp.arange(50_001.0).reshape(3, -1)]
  want_C = sketch.sketch(tree)
  monkeypatch.setattr(sketch, '_LONGEST', 20_000)
  np.testing.assert_allclose(sketch.sketch(tree), want_C, rtol=1e-6)
  monkeypatch.undo()
  jax.eval_shape(sketch.sketch, jax.ShapeDtypeStruct((2**33 + 5,), 'float32'))


@pytest.mark.long
def test_the_error_is_the_stated_one():
  """Of |x|² and x · y over 60 pairs of a matrix with a few large columns."""
  rng = np.random.default_rng(0)
  scale = np.where(rng.random(576) < 0.05, 20, 1)
  x, y = rng.normal(size=(2, 60, 400, 576)).astype(np.float32) * scale
  y += x
  function = jax.jit(sketch.sketch)
  a, b = (np.stack([function(tree) for tree in z]) for z in (x, y))
  xx, yy, xy = (np.sum(p * q, (1, 2), dtype=float) for p, q in (
      (x, x), (y, y), (x, y)))
  for have, exact, spread in (
      (np.sum(a * a, 1), xx, np.sqrt(2) * xx),
      (np.sum(a * b, 1), xy, np.sqrt(xx * yy + xy**2))):
    error = (have - exact) / (spread / np.sqrt(sketch.SIZE))
    assert 0.7 < np.sqrt(np.mean(error**2)) < 1.3
    assert abs(error.mean()) < 4 / np.sqrt(len(error))


def test_the_error_of_pairs_is_scatter_around_the_expected_gradient_s():
  """Noise dominates: pairs of sketches of 8 minibatches, in 150 samples."""
  rng, size = np.random.default_rng(1), 3 * sketch.SIZE
  signal = rng.normal(size=size).astype(np.float32)
  signal /= np.linalg.norm(signal)
  function = jax.jit(jax.vmap(sketch.sketch))
  own = np.sum(np.square(function(signal[None])))
  noise, found = 7.0, []  # its length, for a signal of 1
  for _ in range(150):
    x = signal + noise * rng.normal(size=(8, size)).astype(
        np.float32) / size**0.5
    found.append([(np.sum(z.sum(0, dtype=float)**2)
                   - np.sum(z**2, dtype=float)) / 56
                  for z in (x, np.asarray(function(x)))])
  exact, have = np.transpose(found)
  # Of e_i . e_j, and of g . e_i.
  spread = np.sqrt((2 * noise**4 / 56 + 4 * noise**2 / 8) / sketch.SIZE)
  assert np.std(have - exact) == pytest.approx(spread, rel=0.2)
  assert abs(have.mean() - own) < 3 * np.std(have) / np.sqrt(len(have))
