"""One token a row from its logits: greedy, or by inverse CDF.

Axes: B rows · V vocabulary · U blocks of the vocabulary · b entries a block.
"""

import dataclasses

import jax
from jax import numpy as jnp

_BLOCK = 128  # vocabulary entries a block in the two-level inverse CDF


@dataclasses.dataclass(frozen=True)
class Decoding:
  """How a token is chosen; the policy that is trained draws with the defaults.

  temperature: 0 is greedy.
  top_k: only the k most probable tokens (ties with the last are kept); 0: all.
  top_p: only the smallest set of most probable tokens that holds this
    probability, of those that top_k leaves.
  """
  temperature: float = 1.0
  top_k: int = 0
  top_p: float = 1.0


def row_keys(key: jax.Array, prompt_id_B: jax.Array, sample_B: jax.Array
             ) -> jax.Array:
  """A key a row: a function of (key, prompt id, sample) alone."""
  return jax.vmap(lambda prompt, sample: jax.random.fold_in(
      jax.random.fold_in(key, prompt), sample))(prompt_id_B, sample_B)


def draw(logits_BV: jax.Array, decoding: Decoding, key_B: jax.Array,
         step_B: jax.Array) -> tuple[jax.Array, jax.Array]:
  """A token a row, int32 [B], and its log-probability, float32 [B], nats.

  The number that draws is a function of (row's key, step) alone. One uniform
  number a row replaces the V of the Gumbel trick, which on a CPU costs more
  than the model.

  Args:
    logits_BV: float32.
    decoding: static.
    key_B: of `row_keys`.
    step_B: int32, which token of its completion a row draws.

  Returns:
    The log-probability is that of the distribution drawn from: after the
    temperature, and among the tokens that top_k and top_p leave. Greedy: of
    the full softmax at temperature 1.
  """
  greedy = decoding.temperature == 0
  scaled_BV = logits_BV if greedy else logits_BV / decoding.temperature
  scaled_BV = scaled_BV - jnp.max(scaled_BV, -1, keepdims=True)
  if greedy:
    token_B = jnp.argmax(scaled_BV, -1).astype(jnp.int32)
    total_B = jnp.sum(jnp.exp(scaled_BV), -1)
  else:
    scaled_BV = _truncate(scaled_BV, decoding)
    uniform_B = jax.vmap(lambda key, step: jax.random.uniform(
        jax.random.fold_in(key, step)))(key_B, step_B)
    token_B, total_B = inverse_cdf(scaled_BV, uniform_B)
  chosen_B = jnp.take_along_axis(scaled_BV, token_B[:, None], -1)[:, 0]
  return token_B, chosen_B - jnp.log(total_B)


def inverse_cdf(logits_BV: jax.Array, uniform_B: jax.Array
                ) -> tuple[jax.Array, jax.Array]:
  """The smallest v with Σ_{u≤v} p_u > uniform · Σ p, and Σ p; p = exp(logit).

  Two levels: find the block of 128 entries by the blocks' sums, then the
  entry inside it. An entry of probability zero is never returned, whatever
  the rounding of the sums.

  Args:
    logits_BV: float32, at most about 0; −inf is impossible.
    uniform_B: float32 in [0, 1).
  """
  rows, vocabulary = logits_BV.shape
  padded_BV = jnp.pad(logits_BV, ((0, 0), (0, -vocabulary % _BLOCK)),
                      constant_values=-jnp.inf)
  logits_BUb = padded_BV.reshape(rows, -1, _BLOCK)
  mass_BU = jnp.sum(jnp.exp(logits_BUb), -1)
  total_B = jnp.sum(mass_BU, -1)
  target_B = uniform_B * total_B
  block_B, below_B = _locate(mass_BU, target_B)
  inside_Bb = jnp.exp(
      jnp.take_along_axis(logits_BUb, block_B[:, None, None], 1)[:, 0])
  entry_B, _ = _locate(inside_Bb, target_B - below_B)
  return block_B * _BLOCK + entry_B, total_B


def _locate(mass_BX, target_B):
  """First index whose cumulative mass passes the target; the mass below it."""
  total_BX = jnp.cumsum(mass_BX, -1)
  index_BX = jnp.arange(mass_BX.shape[-1], dtype=jnp.int32)
  last_B = jnp.max(jnp.where(mass_BX > 0, index_BX, 0), -1)
  passed_BX = (total_BX > target_B[:, None]) & (mass_BX > 0)
  index_B = jnp.min(jnp.where(passed_BX, index_BX, last_B[:, None]), -1)
  before_BX = jnp.where(index_BX < index_B[:, None], mass_BX, 0)
  return index_B, jnp.sum(before_BX, -1)


def _truncate(logits_BV, decoding):
  """−inf for what top_k, then top_p, leave out."""
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
