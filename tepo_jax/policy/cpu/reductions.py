"""Reductions of rows in the form that XLA's CPU backend vectorises.

A CPU takes element after element along the last axis, but vectors along any
other, and writes out what a long reduction goes over. So a row is cut into
pieces that are combined element by element, in vectors and in one pass with
what makes them; the barriers keep XLA from merging the steps into one again.
Where a CPU mesh cuts the axis, each shard should be a multiple of 128: other
pieces lie on two shards.
"""

from collections.abc import Callable
import functools
import math
import operator

import jax
import jax.numpy as jnp

_LANES = 16  # float32 numbers in a vector register
_PIECES = 8  # at most, combined before anything is written


def row_max(x: jax.Array) -> jax.Array:
  """max over the last axis, which is kept with size 1."""
  return _row(jnp.maximum, jnp.max, _itself, x)


def row_sum(*x: jax.Array, term: Callable[..., jax.Array] | None = None
            ) -> jax.Array:
  """Σ term(*x) over the last axis, which is kept with size 1.

  `term` works element by element, and is x itself if not given; arrays with a
  last axis of 1 have one value for a row.
  """
  return _row(operator.add, jnp.sum, term or _itself, *x)


def _itself(x):
  return x


def _row(combine, reduce, term, *x):
  """`reduce` of term(*x); `combine` is the same of two arrays."""
  def at_once(*x):
    return reduce(term(*x), axis=-1, keepdims=True)

  vectors, rest = divmod(max(array.shape[-1] for array in x), _LANES)
  if rest:
    return at_once(*x)
  count = math.gcd(vectors, _PIECES)

  def pieces(x):
    if x.shape[-1] == 1:
      return [x[..., None]] * count
    x = x.reshape(*x.shape[:-1], -1, count, _LANES)
    return [x[..., i, :] for i in range(count)]

  def by_lanes(*x):
    partial = functools.reduce(combine, map(term, *map(pieces, x)))
    partial = reduce(jax.lax.optimization_barrier(partial), axis=-2)
    return reduce(
        jax.lax.optimization_barrier(partial), axis=-1, keepdims=True)

  return jax.lax.platform_dependent(*x, cpu=by_lanes, default=at_once)
