"""Arithmetic that must be exact for the objective: clips, masks, top-k.

Axes: B completions, T tokens of a completion.
"""

import jax
import jax.numpy as jnp
import numpy as np


def clean(tokens):
  """Zeros under the mask, before any exp: NaN reaches no value or gradient."""
  mask_BT = tokens.mask_BT.astype(bool)
  return jax.tree.map(
      lambda leaf_BT: jnp.where(mask_BT, leaf_BT, 0),
      tokens.replace(mask_BT=None)).replace(mask_BT=mask_BT)


def bound(value, lower, upper):
  """clip() with gradient 1 on the closed interval, bounds included, else 0.

  jnp.clip and jnp.minimum split the gradient at a tie; here a value exactly
  at a bound is not clipped.
  """
  return jnp.where(value > upper, upper, jnp.where(value < lower, lower, value))


def exp(value):
  """exp of the value bounded to +-20 (as in verl), gradient 0 beyond."""
  return jnp.exp(bound(value, -20.0, 20.0))


def mean(value_BT, mask_BT):
  """Mean over the valid tokens; 0 when there are none."""
  total = jnp.sum(jnp.where(mask_BT, value_BT, 0))
  return total / jnp.maximum(jnp.sum(mask_BT), 1).astype(total.dtype)


def share(fraction, mask_BT):
  """max(1, floor(fraction * N)), the product always in float64.

  In float32, 2e-3 * 1500 may fall below 3, so the host computes for which N
  the result increases.
  """
  counts = np.floor(fraction * np.arange(mask_BT.size + 1))
  steps = np.flatnonzero(np.diff(counts)) + 1
  return jnp.maximum(1, jnp.sum(jnp.sum(mask_BT) >= steps))


def largest(value_BT, candidate_BT, count):
  """Mask of the `count` candidates of largest value; of ties, the first."""
  value_BT = jnp.where(candidate_BT, value_BT, -jnp.inf)
  order = jnp.argsort(value_BT.reshape(-1), descending=True)
  first = jnp.arange(order.size) < count
  chosen = jnp.zeros(order.size, bool).at[order].set(first)
  return chosen.reshape(candidate_BT.shape) & candidate_BT


def draw(rng, shape):
  """A uniform number per token, a function of (rng, row, column) alone.

  Rows or columns of padding do not change the draws of the others.
  """
  def one(row, column):
    key = jax.random.fold_in(jax.random.fold_in(rng, row), column)
    return jax.random.uniform(key)
  rows, columns = map(jnp.arange, shape)
  return jax.vmap(jax.vmap(one, (None, 0)), (0, None))(rows, columns)
