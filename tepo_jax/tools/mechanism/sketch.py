"""Short vectors in the place of gradients: a count sketch of fixed signs.

Coordinate i of a gradient, counted over all its arrays, has a sign s_i, a bit
of a hash of i mod 2^32, and is added to entry i mod SIZE. The sketch is linear,
so that of a mean is the mean of sketches, and over the signs' randomness

    E S(x) . S(y) = x . y,    Var <= (|x|^2 |y|^2 + (x . y)^2) / SIZE

where the coordinates spread evenly over the entries. Thus |S(x)| is off by
0.55 % (one standard deviation), and a cosine c by (1 - c^2) / sqrt(SIZE), 0.008
at most. SIZE is a prime, so the columns of a matrix spread over all entries.

This holds for plain vectors: sums over the data, and expected gradients g. A
mean of x_i . x_j over pairs of J minibatches differs by more from that of whole
gradients where noise dominates: by sqrt(2 / SIZE) / (J s) of |g|^2, s being a
minibatch's signal to noise. S is one linear map, so over minibatches that mean
is unbiased for |S(g)|^2, and the larger difference is scatter, which intervals
over minibatches have. That of |S(g)|^2 to |g|^2 is in no interval.
"""

from typing import Any

import jax
from jax import numpy as jnp

SIZE = 16_381  # a sketch has 64 KB
_LONGEST = 2**30  # coordinates at a time: jax's loops count in int32


def sketch(tree: Any) -> jax.Array:
  """The sketch of a tree of float32 arrays, [SIZE]."""
  sums_C, first = jnp.zeros(SIZE, jnp.float32), 0
  for leaf in jax.tree.leaves(tree):
    flat = leaf.reshape(-1)
    for begin in range(0, leaf.size, _LONGEST):
      part = jax.lax.slice_in_dim(
          flat, begin, min(begin + _LONGEST, leaf.size))
      sums_C = _add(sums_C, part, first + begin)
    first += leaf.size
  return sums_C


def _add(sums_C, flat, first):
  """Adds coordinates `first` and following, [n], without a padded copy."""
  shift = -first % SIZE  # before coordinates whose entry is 0
  head, whole = flat[:shift], (len(flat) - shift) // SIZE
  sums_C = _put(sums_C, head, first)

  def add_row(row, sums_C):
    at = shift + row * SIZE
    part_C = jax.lax.dynamic_slice_in_dim(flat, at, SIZE)
    return sums_C + part_C * _signs(first, SIZE, at)

  if whole > 0:
    sums_C = jax.lax.fori_loop(0, whole, add_row, sums_C)
  rest = shift + max(whole, 0) * SIZE
  return _put(sums_C, flat[rest:], first + rest)


def _put(sums_C, part, first):
  """Adds less than SIZE coordinates that do not pass the last entry."""
  entry = first % SIZE
  return sums_C.at[entry:entry + len(part)].add(
      part * _signs(first, len(part)))


def _signs(first, count, at=0):
  """s_i of coordinates `first` + `at` and following: murmur3's finaliser of i.

  first: any whole number. at: below 2^31; it may be traced."""
  x = (jnp.uint32(first % 2**32) + jnp.asarray(at).astype(jnp.uint32)
       + jnp.arange(count, dtype=jnp.uint32))
  x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
  x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
  x = x ^ (x >> 16)
  return jnp.where(x >> 31, -1.0, 1.0)
