"""Digests of arrays, which show that what is read is what was saved."""

from collections.abc import Mapping
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def named(tree: Any) -> dict[str, Any]:
  """The leaves by their path: 'params/w'."""
  return {
      jax.tree_util.keystr(path, simple=True, separator='/'): leaf
      for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


def compute(tree: Any, shapes: Mapping[str, tuple[int, ...]] | None = None
            ) -> dict[str, int]:
  """A digest of each array's bits, by the array's path ('params/w').

  It does not depend on the sharding. A single changed element always changes
  it; any other change does with a probability of 1 − 2^-32. One program
  computes them all: on a CPU, many small programs with collectives can
  deadlock.

  Args:
    shapes: of the arrays that are padded with zeros or cut, by path: their
      shapes otherwise.
  """
  arrays = named(tree)
  sizes = tuple(tuple((shapes or {}).get(name, np.shape(x)))
                for name, x in arrays.items())
  return dict(zip(arrays, map(int, jax.device_get(
      _digest_all(list(arrays.values()), sizes)))))


@functools.partial(jax.jit, static_argnums=1)
def _digest_all(arrays, shapes) -> list[jax.Array]:
  return list(map(_digest, arrays, shapes))


def _digest(x, shape) -> jax.Array:
  """Σ_i m_i · bits(x_i) mod 2^32 with odd m_i: uint32.

  Independent of the sharding, as the order of a sum mod 2^32 is irrelevant; a
  single changed element always changes it. i numbers the elements of an array
  of `shape`; x may be padded or cut at its ends relative to it, as zeros add
  nothing.
  """
  x = jnp.atleast_1d(jnp.asarray(x))
  bits = jax.lax.bitcast_convert_type(x, f'uint{8 * x.dtype.itemsize}')
  index = jnp.zeros(x.shape, jnp.uint32)
  for axis, size in enumerate(shape or (1,)):
    index = index * jnp.uint32(size) + jax.lax.broadcasted_iota(
        jnp.uint32, x.shape, axis)
  # Knuth's multiplier: 2^32 / golden ratio.
  scrambled = (index + 1) * jnp.uint32(2654435761)
  odd = scrambled ^ (scrambled >> 15) | 1
  return jnp.sum(bits.astype(jnp.uint32) * odd, dtype=jnp.uint32)
