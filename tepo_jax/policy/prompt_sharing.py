"""Computes a prompt once for several completions; attention sees copies.

A token's hidden states depend on earlier tokens only, so a prompt has the same
ones before each of its completions. Rows of the layers hold the prompt once.
For attention, queries, keys and values are copied into rows of full sequences,
and the outputs are copied back: this works with every backend, and the
gradients of a prompt's copies are summed.

Axes: N rows of the layers, of S columns · R rows of attention, R / N for each
row of the layers, of A columns · K heads · H head size.
"""

import flax.struct
import jax
from jax import numpy as jnp
import numpy as np


@flax.struct.dataclass
class Sequences:
  """Rows of full sequences, copied from the rows of the layers.

  source_RA: int32, the column in its row of the layers that each column is
    copied from; arbitrary in padding.
  position_RA, segment_RA: int32, as in `attention.attend`; −1 is padding.
  home_NS: int32, the index, among the (R / N) · A columns made from a row of
    the layers, that a column's output is copied from; arbitrary in padding.
  """
  source_RA: jax.Array | np.ndarray
  position_RA: jax.Array | np.ndarray
  segment_RA: jax.Array | np.ndarray
  home_NS: jax.Array | np.ndarray

  def spread(self, x_NSKH: jax.Array) -> jax.Array:
    """Copies to the rows of attention, [R, A, K, H].

    The gradient sums over the copies in float32.
    """
    index_NM = self.source_RA.reshape(len(x_NSKH), -1)
    x_NMKH = _take(x_NSKH.astype(jnp.float32), index_NM).astype(x_NSKH.dtype)
    return x_NMKH.reshape(*self.source_RA.shape, *x_NSKH.shape[2:])

  def collect(self, x_RAKH: jax.Array) -> jax.Array:
    """Copies from the rows of attention to those of the layers, [N, S, K, H].
    """
    x_NMKH = x_RAKH.reshape(len(self.home_NS), -1, *x_RAKH.shape[2:])
    return _take(x_NMKH, self.home_NS)


def _take(x_NMKH: jax.Array, index_NS: jax.Array) -> jax.Array:
  """Gathers row by row, so that each row stays on its device."""
  return jax.vmap(lambda x, index: x.at[index].get(
      mode='promise_in_bounds'))(x_NMKH, index_NS)
