"""Draws one token per row of logits: greedily, or by inverse CDF.

The functions take and return rows first but compute with the vocabulary first,
because reducing over the last axis is slow on a CPU. With tied embeddings XLA
merges the transpose of the logits with the head's product.

Axes: B rows · V vocabulary · U blocks of the vocabulary · b entries of a block.
"""

import dataclasses
import functools

import jax
from jax import numpy as jnp

_BLOCK = 128  # vocabulary entries of a block in the two-level inverse CDF


@dataclasses.dataclass(frozen=True)
class Decoding:
  """How a token is chosen; training samples without truncation.

  temperature: 0 is greedy.
  top_k: only the k most probable tokens (ties with the last are kept); 0: all.
  top_p: only the smallest set of most probable tokens that holds this
    probability, of those that top_k leaves; 1: all.
  """
  temperature: float = 1.0
  top_k: int = 0
  top_p: float = 1.0


def row_keys(key: jax.Array, *numbers_B: jax.Array) -> jax.Array:
  """One key per row: its numbers folded into the key, one after the other."""
  return jax.vmap(lambda *numbers: functools.reduce(
      jax.random.fold_in, numbers, key))(*numbers_B)


def draw(logits_BV: jax.Array, decoding: Decoding, key_B: jax.Array,
         step_B: jax.Array) -> tuple[jax.Array, jax.Array]:
  """One token per row, int32 [B], and its log-probability, float32 [B], nats.

  The random number is a function of (row's key, step) alone. One uniform number
  per row replaces the V numbers of the Gumbel trick, which on a CPU costs more
  than the model.

  Args:
    logits_BV: float32. decoding: static. key_B: from `row_keys`.
    step_B: int32, the index of the token in its completion.

  Returns:
    The log-probability is that of the distribution drawn from: after the
    temperature, and among the tokens that top_k and top_p leave. Greedy: of
    the full softmax at temperature 1.
  """
  greedy = decoding.temperature == 0
  scaled_VB = logits_BV.T if greedy else logits_BV.T / decoding.temperature
  scaled_VB = scaled_VB - jnp.max(scaled_VB, 0)
  if greedy:
    token_B = jnp.argmax(scaled_VB, 0).astype(jnp.int32)
    total_B = jnp.sum(jnp.exp(scaled_VB), 0)
  else:
    scaled_VB = _truncate(scaled_VB.T, decoding).T
    uniform_B = jax.vmap(lambda key, step: jax.random.uniform(
        jax.random.fold_in(key, step)))(key_B, step_B)
    token_B, total_B = inverse_cdf(scaled_VB.T, uniform_B)
  chosen_B = jnp.take_along_axis(scaled_VB, token_B[None], 0)[0]
  return token_B, chosen_B - jnp.log(total_B)


def inverse_cdf(logits_BV: jax.Array, uniform_B: jax.Array
                ) -> tuple[jax.Array, jax.Array]:
  """The smallest v with Σ_{u≤v} p_u > uniform · Σ p, and Σ p; p = exp(logit).

  Two levels: find the block of 128 entries by the blocks' sums, then the
  entry inside it. An entry of probability zero is never returned, however
  the sums are rounded.

  Args:
    logits_BV: float32, at most about 0; −inf is impossible.
    uniform_B: float32 in [0, 1).
  """
  rows, vocabulary = logits_BV.shape
  padded_VB = jnp.pad(logits_BV.T, ((0, -vocabulary % _BLOCK), (0, 0)),
                      constant_values=-jnp.inf)
  logits_UbB = padded_VB.reshape(-1, _BLOCK, rows)
  mass_UB = jnp.sum(jnp.exp(logits_UbB), 1)
  total_B = jnp.sum(mass_UB, 0)
  target_B = uniform_B * total_B
  block_B, below_B = _locate(mass_UB, target_B)
  inside_bB = jnp.exp(
      jnp.take_along_axis(logits_UbB, block_B[None, None], 0)[0])
  entry_B, _ = _locate(inside_bB, target_B - below_B)
  return block_B * _BLOCK + entry_B, total_B


def _locate(mass_XB, target_B):
  """First index whose cumulative mass passes the target; the mass below it."""
  total_XB = jnp.cumsum(mass_XB, 0)
  index_X1 = jnp.arange(mass_XB.shape[0], dtype=jnp.int32)[:, None]
  last_B = jnp.max(jnp.where(mass_XB > 0, index_X1, 0), 0)
  passed_XB = (total_XB > target_B) & (mass_XB > 0)
  index_B = jnp.min(jnp.where(passed_XB, index_X1, last_B), 0)
  before_XB = jnp.where(index_X1 < index_B, mass_XB, 0)
  return index_B, jnp.sum(before_XB, 0)


def _truncate(logits_BV, decoding):
  """Sets to −inf what top_k, then top_p, exclude."""
  if decoding.top_k:
    k = min(decoding.top_k, logits_BV.shape[1])
    least_B1 = jax.lax.top_k(logits_BV, k)[0][:, -1:]
    logits_BV = jnp.where(logits_BV >= least_B1, logits_BV, -jnp.inf)
  if decoding.top_p < 1:
    order_BV = jnp.argsort(-logits_BV, -1)
    p_BV = jax.nn.softmax(jnp.take_along_axis(logits_BV, order_BV, -1))
    kept_BV = jnp.cumsum(p_BV, -1) - p_BV < decoding.top_p
    rank_BV = jnp.argsort(order_BV, -1)
    logits_BV = jnp.where(
        jnp.take_along_axis(kept_BV, rank_BV, -1), logits_BV, -jnp.inf)
  return logits_BV
