"""A prompt computed once for several completions; attention sees them whole.

What a token is in the layers depends on the tokens before it only, so a prompt
is the same in front of every completion. The layers work on slots that hold it
once. For attention, queries, keys and values are copied into rows of whole
sequences, and what comes out is taken back: every backend serves, and the
gradients of a prompt's copies are summed.

Axes: N rows of the layers, of S slots · R rows of attention, R / N of each, of
A slots · K heads · H head size.
"""

import flax.struct
import jax
from jax import numpy as jnp


@flax.struct.dataclass
class Sequences:
  """Rows of whole sequences, copied from the rows of the layers.

  source_RA: int32, the slot in its row of the layers that a slot is copied
    from; anything in padding.
  position_RA, segment_RA: int32, as attention takes them; −1 is padding.
  home_NS: int32, which of the (R / N) · A slots made of a row of the layers
    a slot's output is taken from; anything in padding.
  """
  source_RA: jax.Array
  position_RA: jax.Array
  segment_RA: jax.Array
  home_NS: jax.Array

  def spread(self, x_NSKH: jax.Array) -> jax.Array:
    """Copies into the rows of attention, [R, A, K, H].

    In the gradient the copies are summed in float32.
    """
    index_NM = self.source_RA.reshape(len(x_NSKH), -1)
    x_NMKH = _take(x_NSKH.astype(jnp.float32), index_NM).astype(x_NSKH.dtype)
    return x_NMKH.reshape(*self.source_RA.shape, *x_NSKH.shape[2:])

  def collect(self, x_RAKH: jax.Array) -> jax.Array:
    """The slots of the layers out of the rows of attention, [N, S, K, H]."""
    x_NMKH = x_RAKH.reshape(len(self.home_NS), -1, *x_RAKH.shape[2:])
    return _take(x_NMKH, self.home_NS)


def _take(x_NMKH: jax.Array, index_NS: jax.Array) -> jax.Array:
  """Row by row, each on its own device."""
  return jax.vmap(lambda x, index: x.at[index].get(
      mode='promise_in_bounds'))(x_NMKH, index_NS)
