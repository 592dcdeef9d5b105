"""Aggregates: how a loss averages tokens, as coefficients c of a minibatch.

Each takes the mask as floats, 1 on completion tokens, and returns c, 0
elsewhere; its numbers are annotated with their ranges (`ranges`). n_i: tokens
of completion i, N: of the minibatch. Axes: B completions, T tokens of a
completion.
"""

import jax.numpy as jnp

from tepo_jax.learning import ranges


def token_mean(mask_BT):
  """m / N, the same for every token: TEPO (Eq. 4), DAPO (Table 5)."""
  return mask_BT / jnp.maximum(jnp.sum(mask_BT), 1)


def seq_mean_token_sum(mask_BT):
  """m / number of non-empty completions (Tables 3D, 5)."""
  return mask_BT / jnp.maximum(jnp.sum(jnp.max(mask_BT, axis=1)), 1)


def seq_mean_token_mean(mask_BT):
  """m / (n_i * number of non-empty ones): GRPO's paper, GSPO (Tables 3D, 5)."""
  count_B1 = jnp.sum(mask_BT, axis=1, keepdims=True)
  return seq_mean_token_sum(mask_BT) / jnp.maximum(count_B1, 1)


def constant_length(mask_BT, *, length: ranges.POSITIVE):
  """m / (length * number of non-empty completions): Dr. GRPO (2503.20783).

  `length` is a constant, the longest completion allowed, so that a token's
  weight does not depend on its completion's length.
  """
  return seq_mean_token_sum(mask_BT) / length


AGGREGATES = dict(
    token_mean=token_mean, seq_mean_token_mean=seq_mean_token_mean,
    seq_mean_token_sum=seq_mean_token_sum, constant_length=constant_length)
