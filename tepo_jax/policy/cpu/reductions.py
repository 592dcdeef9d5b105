"""Reductions of rows in the form that XLA's CPU backend vectorises.

XLA reduces the last axis element by element and any other axis in vectors, and
it materialises the operand of a long reduction. So each row is cut into pieces
that are combined elementwise: in vectors, and fused with the operand's
computation. Barriers stop XLA from merging the steps into one reduction again.
For the logits the gain is memory, not time: the gradient of `scoring` holds one
[M, V] per policy, and two with the plain form of either function.
If a CPU mesh shards the axis, each shard should be a multiple of 128, else
pieces span two shards.
"""

from collections.abc import Callable
import functools
import math
import operator

import jax
import jax.numpy as jnp

_LANES = 16  # float32 numbers in a vector register
_PIECES = 8  # at most, combined before the first result is materialised


def log_sum_exp_and_entropy(z: jax.Array) -> tuple[jax.Array, jax.Array]:
  """As `policy.ops.log_sum_exp_and_entropy`, in three passes: XLA would store
  exponentials that two sums share."""
  most = row_max(z)
  lse = most + jnp.log(row_sum(
      z, most, term=lambda z, most: jnp.exp(z - most)))
  return lse, row_sum(
      z, lse, term=lambda z, lse: jnp.exp(z - lse) * (lse - z))


def row_max(x: jax.Array) -> jax.Array:
  """max over the last axis, which is kept with size 1."""
  return _row(jnp.maximum, jnp.max, lambda x: x, x)


def row_sum(*x: jax.Array, term: Callable[..., jax.Array] = lambda x: x
            ) -> jax.Array:
  """As `policy.ops.row_sum`."""
  return _row(operator.add, jnp.sum, term, *x)


def _row(combine, reduce, term, *x):
  """`reduce` of term(*x); `combine` is the same reduction of two arrays."""
  vectors, rest = divmod(max(array.shape[-1] for array in x), _LANES)
  if rest:
    return reduce(term(*x), axis=-1, keepdims=True)
  count = math.gcd(vectors, _PIECES)

  def pieces(x):
    if x.shape[-1] == 1:
      return [x[..., None]] * count
    x = x.reshape(*x.shape[:-1], -1, count, _LANES)
    return [x[..., i, :] for i in range(count)]

  partial = functools.reduce(combine, map(term, *map(pieces, x)))
  partial = reduce(jax.lax.optimization_barrier(partial), axis=-2)
  return reduce(jax.lax.optimization_barrier(partial), axis=-1, keepdims=True)
