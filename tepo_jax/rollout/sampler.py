"""Group sampling in one jitted program: prefill a prompt once, decode G rows.

Axes: Q prompts · G samples a prompt · B = Q·G rows · P prompt slots ·
T completion slots · V vocabulary · U blocks of the vocabulary.
"""

from typing import Any

import flax.struct
import jax
from jax import numpy as jnp

from tepo_jax.policy import transformer

_BLOCK = 128  # vocabulary entries a block in the two-level inverse CDF


@flax.struct.dataclass
class Completions:
  """Sampled tokens; `length_B`, never a token id, says where a row ends.

  token_BT: int32, EOS included; 0 behind the end.
  logp_BT: float32, log-probability of each sampled token under the
    temperature-scaled full softmax (temperature 1 when greedy), nats.
  length_B: int32, tokens up to and including EOS; T when none was drawn.
  ended_B: bool, whether EOS was drawn; False is a truncated completion.
  """
  token_BT: jax.Array
  logp_BT: jax.Array
  length_B: jax.Array
  ended_B: jax.Array


@flax.struct.dataclass
class _Loop:
  step: jax.Array
  next_B: jax.Array
  cache: transformer.KVCache
  completions: Completions


def generate(config: transformer.ModelConfig, params: Any,
             prompt_QP: jax.Array, position_QP: jax.Array,
             prompt_id_Q: jax.Array, key: jax.Array, *, group_size: int,
             max_tokens: int, temperature: float,
             eos_ids: tuple[int, ...]) -> Completions:
  """Samples `group_size` completions of every prompt.

  The number that draws token t of sample j of prompt p is a function of
  (key, p, j, t) alone: completions do not depend on the batch they are in.

  Args:
    config, params: the policy, in the dtype and layout of decoding.
    prompt_QP, position_QP: left-padded prompts; position −1 is padding. A row
      without any valid position is filler and yields an empty completion.
    prompt_id_Q: int32 names of the prompts, for the randomness.
    key: jax.random key of (seed, rollout step).
    group_size: G; row q·G + j is sample j of prompt q.
    max_tokens: T.
    temperature: 0 is greedy.
    eos_ids: token ids that end a completion.

  Returns:
    Completions of B = Q·G rows.
  """
  prompts, width = prompt_QP.shape
  rows = prompts * group_size
  cache = transformer.init_cache(config, prompts, width, config.dtype)
  hidden_QPD, cache = transformer.forward(
      config, params, prompt_QP, position_QP, cache)
  params, cache = transformer.for_decoding(
      params, _fan_out(cache, group_size, max_tokens))
  key_B = _row_keys(key, prompt_id_Q, group_size)
  prompt_length_B = jnp.repeat(
      jnp.sum(position_QP >= 0, -1), group_size, total_repeat_length=rows)
  eos = jnp.array(eos_ids, jnp.int32)

  def emit(loop, hidden_BD):
    """Draws token `loop.step` of every live row from its hidden state."""
    logits_BV = transformer.logits(config, params, hidden_BD)
    token_B, logp_B = draw(logits_BV, temperature, key_B, loop.step)
    done = loop.completions
    live_B = ~done.ended_B & (prompt_length_B > 0)
    token_B = jnp.where(live_B, token_B, 0)
    completions = Completions(
        token_BT=_write(done.token_BT, token_B, loop.step),
        logp_BT=_write(done.logp_BT, jnp.where(live_B, logp_B, 0), loop.step),
        length_B=done.length_B + live_B,
        ended_B=done.ended_B | (live_B & jnp.isin(token_B, eos)))
    return loop.replace(step=loop.step + 1, next_B=token_B,
                        completions=completions)

  def decode(loop):
    position_B = prompt_length_B + loop.step - 1
    hidden_B1D, cache = transformer.forward(
        config, params, loop.next_B[:, None], position_B[:, None], loop.cache)
    return emit(loop.replace(cache=cache), hidden_B1D[:, 0])

  def unfinished(loop):
    live_B = ~loop.completions.ended_B & (prompt_length_B > 0)
    return (loop.step < max_tokens) & jnp.any(live_B)

  empty = Completions(
      jnp.zeros((rows, max_tokens), jnp.int32),
      jnp.zeros((rows, max_tokens), jnp.float32),
      jnp.zeros(rows, jnp.int32), jnp.zeros(rows, bool))
  start = _Loop(jnp.int32(0), jnp.zeros(rows, jnp.int32), cache, empty)
  first = emit(start, jnp.repeat(hidden_QPD[:, -1], group_size, 0))
  return jax.lax.while_loop(unfinished, decode, first).completions


def draw(logits_BV: jax.Array, temperature: float, key_B: jax.Array,
         step: jax.Array) -> tuple[jax.Array, jax.Array]:
  """One token a row and its log-probability, by inverse CDF.

  One uniform number a row replaces the V of the Gumbel trick, which on a CPU
  costs more than the model.
  """
  scale = temperature if temperature > 0 else 1.0
  logp_BV = jax.nn.log_softmax(logits_BV / scale)
  if temperature > 0:
    uniform_B = jax.vmap(
        lambda key: jax.random.uniform(jax.random.fold_in(key, step)))(key_B)
    token_B = inverse_cdf(jnp.exp(logp_BV), uniform_B)
  else:
    token_B = jnp.argmax(logits_BV, -1).astype(jnp.int32)
  return token_B, jnp.take_along_axis(logp_BV, token_B[:, None], -1)[:, 0]


def inverse_cdf(p_BV: jax.Array, uniform_B: jax.Array) -> jax.Array:
  """The smallest v with Σ_{u≤v} p_u > uniform · Σ p: int32 [B].

  Two levels: find the block of 128 entries by the blocks' sums, then the
  entry inside it. An entry of probability zero is never returned, whatever
  the rounding of the sums.
  """
  rows, vocabulary = p_BV.shape
  p_BV = jnp.pad(p_BV, ((0, 0), (0, -vocabulary % _BLOCK)))
  p_BUb = p_BV.reshape(rows, -1, _BLOCK)
  mass_BU = jnp.sum(p_BUb, -1)
  target_B = uniform_B * jnp.sum(mass_BU, -1)
  block_B, below_B = _locate(mass_BU, target_B)
  inside_Bb = jnp.take_along_axis(p_BUb, block_B[:, None, None], 1)[:, 0]
  entry_B, _ = _locate(inside_Bb, target_B - below_B)
  return block_B * _BLOCK + entry_B


def _locate(mass_BX, target_B):
  """First index whose cumulative mass passes the target; the mass below it."""
  total_BX = jnp.cumsum(mass_BX, -1)
  index_BX = jnp.arange(mass_BX.shape[-1], dtype=jnp.int32)
  last_B = jnp.max(jnp.where(mass_BX > 0, index_BX, 0), -1)
  passed_BX = (total_BX > target_B[:, None]) & (mass_BX > 0)
  index_B = jnp.min(jnp.where(passed_BX, index_BX, last_B[:, None]), -1)
  before_BX = jnp.where(index_BX < index_B[:, None], mass_BX, 0)
  return index_B, jnp.sum(before_BX, -1)


def _row_keys(key, prompt_id_Q, group_size):
  prompt_key_Q = jax.vmap(lambda i: jax.random.fold_in(key, i))(prompt_id_Q)
  sample_G = jnp.arange(group_size)
  key_QG = jax.vmap(lambda k: jax.vmap(
      lambda j: jax.random.fold_in(k, j))(sample_G))(prompt_key_Q)
  return key_QG.reshape(-1)


def _fan_out(cache, group_size, max_tokens):
  """Gives each of the G samples its prompt's cache, with room for T − 1."""
  room = max(max_tokens - 1, 0)

  def widen(x_LQPKH):
    x = jnp.pad(x_LQPKH, ((0, 0), (0, 0), (0, room), (0, 0), (0, 0)))
    return jnp.repeat(x, group_size, 1)

  position_QS = jnp.pad(cache.position, ((0, 0), (0, room)),
                        constant_values=-1)
  return cache.replace(k=widen(cache.k), v=widen(cache.v),
                       position=jnp.repeat(position_QS, group_size, 0))


def _write(x_BT, value_B, step):
  return jax.lax.dynamic_update_slice_in_dim(
      x_BT, value_B[:, None].astype(x_BT.dtype), step, 1)
