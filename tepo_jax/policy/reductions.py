"""Reductions that XLA's CPU backend needs told how to vectorise."""

import jax
import jax.numpy as jnp

_LANES = 16  # float32 numbers in a vector register


def row_max(x: jax.Array) -> jax.Array:
  """max over the last axis, which is kept with size 1.

  A CPU takes element after element along the last axis, but vectors along any
  other; the barrier keeps the two steps from being merged into one. Where a
  CPU mesh cuts that axis, its pieces should be multiples of 16 too.
  """
  if x.shape[-1] % _LANES:
    return _row_max(x)
  return jax.lax.platform_dependent(x, cpu=_by_lanes, default=_row_max)


def _row_max(x):
  return jnp.max(x, axis=-1, keepdims=True)


def _by_lanes(x):
  most = jnp.max(x.reshape(*x.shape[:-1], -1, _LANES), axis=-2)
  return _row_max(jax.lax.optimization_barrier(most))
