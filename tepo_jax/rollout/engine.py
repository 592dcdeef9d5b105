"""What runs on the devices while sampling: prefill, insert, decode, relay.

The cache is a rectangle of N slots by W columns. All slots write the same
column at a step: one update in place. A prompt that takes over a slot puts its
keys into the columns just before the current one; what stands further left
belongs to the slot's past and is made invisible by its position, −1. When the
columns run out, `relay` moves the used ones to the left, into a rectangle of
another size where that fits better.

Axes: N slots · W columns of the cache · C tokens a chunk · Q prompts of a
prefill · P prompt columns · R rows inserted · V vocabulary; K, H as in
`transformer`.
"""

from collections.abc import Callable
from typing import Any

import flax.struct
import jax
from jax import numpy as jnp

from tepo_jax.policy import cache as cache_lib
from tepo_jax.policy import transformer
from tepo_jax.rollout import draw as draw_lib

_COUNT_EVERY = 4  # steps, where a count is a word between several shards


@flax.struct.dataclass
class Rows:
  """What the slots work on: int32 [N] each, kept by the host.

  token: the last token, which is the next input. start: tokens of the prompt.
  length: tokens drawn. limit: the most that may be drawn. prompt_id, sample:
  names, for the randomness. live: bool, whether the slot is at work.
  """
  token: Any
  start: Any
  length: Any
  limit: Any
  prompt_id: Any
  sample: Any
  live: Any


@flax.struct.dataclass
class Chunk:
  """What `decode` drew: a row that was live has its tokens from column 0 on.

  token_NC int32, logp_NC float32: behind a row's end, 0.
  length_N: tokens drawn since the completion's start.
  ended_N: bool, whether an EOS was drawn. live_N: bool, not ended, not full.
  steps: int32, steps done.
  """
  token_NC: jax.Array
  logp_NC: jax.Array
  length_N: jax.Array
  ended_N: jax.Array
  live_N: jax.Array
  steps: jax.Array


def prefill(config: transformer.ModelConfig, params: Any,
            token_QP: jax.Array, position_QP: jax.Array
            ) -> transformer.KVCache:
  """Keys and values of left-padded prompts without their last tokens.

  The last token of a prompt is the first input of its samples' decoding.
  """
  cache = cache_lib.init_cache(config, *token_QP.shape, config.dtype)
  return transformer.forward(
      config, params, token_QP, position_QP, cache)[1]


def insert(cache: transformer.KVCache, prompts: transformer.KVCache,
           source_R: jax.Array, slot_R: jax.Array) -> transformer.KVCache:
  """Puts prompt source_R[r] into slot slot_R[r]; a slot of N is nowhere.

  The columns are the P before the current one.
  """
  width = prompts.position.shape[1]
  column = cache.index - width

  def put(store, prompt, axis):
    """The rows of `prompt` [Q, …P…] into `store` [N, …W…], whole windows."""
    index_R2 = jnp.stack([slot_R, jnp.full_like(slot_R, column)], 1)
    dimensions = jax.lax.ScatterDimensionNumbers(
        update_window_dims=tuple(range(1, store.ndim)),
        inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0, axis))
    return jax.lax.scatter(
        store, index_R2, prompt[source_R], dimensions, unique_indices=False,
        mode=jax.lax.GatherScatterMode.FILL_OR_DROP)

  empty = cache.position.at[slot_R].set(-1, mode='drop')
  return cache.replace(
      k=tuple(put(*pair, 3) for pair in zip(cache.k, prompts.k)),
      v=tuple(put(*pair, 2) for pair in zip(cache.v, prompts.v)),
      position=put(empty, prompts.position, 1))


def relay(array: jax.Array, row_M: jax.Array, shift: jax.Array, *, axis: int,
          columns: int, empty: int = 0) -> jax.Array:
  """Rows row_M of one array of the cache, its columns moved left by `shift`.

  Args:
    array: [N, …W…] with the columns on `axis`.
    columns: W afterwards.
    empty: what stands in new columns.
  """
  array = jnp.roll(array[row_M], -shift, axis)
  width = array.shape[axis]
  if columns <= width:
    return jax.lax.slice_in_dim(array, 0, columns, axis=axis)
  padding = [(0, 0)] * array.ndim
  padding[axis] = (0, columns - width)
  return jnp.pad(array, padding, constant_values=empty)


def decode(config: transformer.ModelConfig, params: Any,
           cache: transformer.KVCache, rows: Rows, key: jax.Array,
           steps: jax.Array, enough: jax.Array, *, chunk: int,
           decoding: draw_lib.Decoding, eos_ids: tuple[int, ...],
           count_every: int = 1,
           total: Callable[[jax.Array], jax.Array] = lambda count: count
           ) -> tuple[transformer.KVCache, Chunk]:
  """Draws tokens until `steps` are done or a count finds few live rows.

  Args:
    config, params: the policy, `params` of `decoding.convert`.
    cache: with room for `steps` columns.
    rows: of the slots. key: of (seed, rollout step).
    steps: at most `chunk`. enough: live rows that are few.
    chunk, decoding, eos_ids: static.
    count_every: of `count_every`; there is a count before the first step too.
    total: sums over the shards of the batch, where each has its own slots.
  """
  rows = jax.tree.map(jnp.asarray, rows)
  key_N = draw_lib.row_keys(key, rows.prompt_id, rows.sample)
  eos = jnp.array(eos_ids, jnp.int32)
  slots = rows.token.shape[0]

  def count(live_N):
    return total(jnp.sum(live_N)) > enough

  def unfinished(loop):
    _, _, drawn, many = loop
    return (drawn.steps < steps) & many

  def step(loop):
    cache, token_N, drawn, many = loop
    position_N = jnp.where(drawn.live_N, rows.start + drawn.length_N - 1, -1)
    hidden_N1D, cache = transformer.forward(
        config, params, token_N[:, None], position_N[:, None], cache)
    logits_NV = transformer.logits(config, params, hidden_N1D[:, 0])
    token_N, logp_N = draw_lib.draw(
        logits_NV, decoding, key_N, drawn.length_N)
    live_N = drawn.live_N
    token_N = jnp.where(live_N, token_N, 0)
    length_N = drawn.length_N + live_N
    ended_N = live_N & jnp.isin(token_N, eos)
    drawn = Chunk(
        token_NC=_write(drawn.token_NC, token_N, drawn.steps),
        logp_NC=_write(
            drawn.logp_NC, jnp.where(live_N, logp_N, 0), drawn.steps),
        length_N=length_N, ended_N=drawn.ended_N | ended_N,
        live_N=live_N & ~ended_N & (length_N < rows.limit),
        steps=drawn.steps + 1)
    many = jax.lax.cond(
        drawn.steps % count_every == 0, count, lambda _: many, drawn.live_N)
    return cache, token_N, drawn, many

  drawn = Chunk(
      jnp.zeros((slots, chunk), jnp.int32),
      jnp.zeros((slots, chunk), jnp.float32), rows.length,
      jnp.zeros(slots, bool), rows.live, jnp.int32(0))
  cache, _, drawn, _ = jax.lax.while_loop(
      unfinished, step, (cache, rows.token, drawn, count(rows.live)))
  return cache, drawn


def count_every(shards: int) -> int:
  """Steps from one count of the live rows to the next."""
  return _COUNT_EVERY if shards > 1 else 1


def _write(x_NC, value_N, step):
  return jax.lax.dynamic_update_slice_in_dim(x_NC, value_N[:, None], step, 1)
