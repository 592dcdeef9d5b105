"""The device functions of sampling: prefill, insert, decode, compact.

Arrays in, arrays out; `schedule` decides on the host when each of them runs.
The cache is of pages, see `policy.pages`, or a rectangle of N slots by W
columns. In a decode step all slots of a rectangle write the same column: one
update in place. `insert` gives a free slot a new prompt, whose keys go into the
columns just before the current one; the slot's older columns get position −1,
which hides them. When the columns run out, `compact` moves the live slots and
used columns into a cache of another size.

Axes: N slots · W columns of the cache · C tokens of a chunk · Q prompts of a
prefill · P prompt columns · R prompts inserted · M slots after `compact` ·
V vocabulary · Y columns of a page; K, H as in `transformer`.
"""

from collections.abc import Callable
import dataclasses
from typing import Any

import flax.struct
import jax
from jax import numpy as jnp
import numpy as np

from tepo_jax.policy import cache as cache_lib
from tepo_jax.policy import transformer
from tepo_jax.rollout import draw as draw_lib


class Slots(flax.struct.PyTreeNode):
  """The state of the slots: int32 [N] each, kept by the host.

  token: the last token, which is the next input. start: prompt tokens.
  length: tokens drawn. limit: the most tokens to draw. prompt_id, sample:
  select the random numbers. live: bool, whether the slot has a completion to
  continue.
  given_NY: only with pages: the last tokens of the prompt, right-aligned. A
  slot of length -n takes n of them as if it had drawn them.
  born, drawn: only where completions are carried: the rollout step, which
  selects the random numbers too, and how many of the `start` tokens earlier
  steps drew of the completion.
  """
  token: Any
  start: Any
  length: Any
  limit: Any
  prompt_id: Any
  sample: Any
  live: Any
  given_NY: Any = None
  born: Any = None
  drawn: Any = None


def idle_slots(count: int, page: int = 0, carries: bool = False) -> Slots:
  """The state of slots none of which is live; page: Y, 0 without pages;
  carries: whether completions are carried."""
  zeros = [np.zeros(count, np.int32) for _ in range(8)]
  return Slots(*zeros[:6], live=np.zeros(count, bool),
               given_NY=np.zeros((count, page), np.int32) if page else None,
               **dict(zip(('born', 'drawn'), zeros[6:])) if carries else {})


@flax.struct.dataclass
class Chunk:
  """The tokens that `decode` drew, from column 0 on in slots that were live.

  token_NC int32, logp_NC float32: 0 after a completion's end. Tokens that
  were given have log-probability 0.
  length_N: tokens drawn since the completion's start.
  ended_N: bool, whether an EOS was drawn. live_N: bool, whether the completion
  is neither ended nor at its limit. steps: int32, steps computed.
  """
  token_NC: jax.Array
  logp_NC: jax.Array
  length_N: jax.Array
  ended_N: jax.Array
  live_N: jax.Array
  steps: jax.Array


def prefill(config: transformer.ModelConfig, params: Any,
            token_QP: jax.Array, position_QP: jax.Array,
            prefix: transformer.KVCache | None = None) -> transformer.KVCache:
  """Keys and values of prompts without their last tokens.

  Decoding takes the last token of a prompt as its first input.

  prefix: one row, this function's result for the tokens with which all the
    prompts begin and which `token_QP` lacks. The result has its columns, then
    the P columns. None: there are no such tokens.
  """
  batch, length = token_QP.shape
  if prefix is None:
    cache = cache_lib.init_cache(config, batch, length, config.dtype)
  else:
    cache = _extended(prefix, batch, length)
    # The other backends see only the new columns.
    config = dataclasses.replace(config, attention='xla')
  return transformer.forward(config, params, token_QP, position_QP, cache)[1]


def _extended(prefix, rows, columns):
  """A cache that has the prefix in each of so many rows, with more columns."""
  def extended(array, axis, empty=0):
    widths = [(0, 0)] * array.ndim
    widths[axis] = (0, columns)
    return jnp.pad(jnp.broadcast_to(array, (rows, *array.shape[1:])), widths,
                   constant_values=empty)

  return transformer.KVCache(
      k=tuple(extended(k, 3) for k in prefix.k),
      v=tuple(extended(v, 2) for v in prefix.v),
      position=extended(prefix.position, 1, -1), index=prefix.index)


def insert(cache: transformer.KVCache, prompts: transformer.KVCache,
           source_R: jax.Array, slot_R: jax.Array) -> transformer.KVCache:
  """Writes prompt source_R[r] to slot slot_R[r], or nowhere if slot_R[r] is N.

  It goes into the P columns before the current one.
  """
  width = prompts.position.shape[1]
  column = cache.index - width

  def put(store, prompt, axis):
    """Writes windows of `prompt` [Q, …P…] to `store` [N, …W…]."""
    index_R2 = jnp.stack([slot_R, jnp.full_like(slot_R, column)], 1)
    dimensions = jax.lax.ScatterDimensionNumbers(
        update_window_dims=tuple(range(1, store.ndim)),
        inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0, axis))
    return jax.lax.scatter(
        store, index_R2, prompt[source_R], dimensions, unique_indices=False,
        mode=jax.lax.GatherScatterMode.FILL_OR_DROP)

  empty = cache.position.at[slot_R].set(-1, mode='drop')
  return transformer.KVCache(
      k=tuple(put(*pair, 3) for pair in zip(cache.k, prompts.k)),
      v=tuple(put(*pair, 2) for pair in zip(cache.v, prompts.v)),
      position=put(empty, prompts.position, 1), index=cache.index)


def compact(array: jax.Array, slot_M: jax.Array, shift: jax.Array, *,
            axis: int, columns: int, empty: int = 0) -> jax.Array:
  """Slots slot_M of one array of the cache, its columns moved left by `shift`.

  On a mesh each shard calls it for its own slots, so that nothing is sent.
  `array` is [N, …W…] with the columns on `axis`, `columns` the W of the
  result, and `empty` the value of new columns.
  """
  array, padding = array[slot_M], [(0, 0)] * array.ndim
  padding[axis] = (0, max(0, columns - array.shape[axis]))
  array = jnp.pad(array, padding, constant_values=empty)
  return jax.lax.slice_in_dim(
      jnp.roll(array, -shift, axis), 0, columns, axis=axis)


def decode(config: transformer.ModelConfig, params: Any,
           cache: transformer.KVCache, slots: Slots, key: jax.Array,
           steps: jax.Array, stop_at_live: jax.Array, *, chunk: int,
           decoding: draw_lib.Decoding, eos_ids: tuple[int, ...],
           count_every: int = 1,
           total: Callable[[jax.Array], jax.Array] = lambda count: count
           ) -> tuple[transformer.KVCache, Chunk]:
  """Draws tokens for `steps` steps, or until few enough slots are live.

  Args:
    config, params: the policy, with `params` cast and laid out for decoding.
    cache: with at least `steps` free columns.
    slots: their state. key: of (seed, rollout step); where completions are
      carried, of the seed. steps: at most `chunk`.
    stop_at_live: return once at most this many slots are live.
    chunk, decoding, eos_ids: static.
    count_every: steps between counts of the live slots, see `count_every`;
      they are also counted before the first step.
    total: sums over the shards of the batch, each of which has its own slots.
  """
  slots = jax.tree.map(jnp.asarray, slots)
  born = [] if slots.born is None else [slots.born]
  key_N = draw_lib.row_keys(key, *born, slots.prompt_id, slots.sample)
  count = slots.token.shape[0]

  def enough_live(live_N):
    return total(jnp.sum(live_N)) > stop_at_live

  def unfinished(loop):
    _, _, drawn, enough = loop
    return (drawn.steps < steps) & enough

  def step(loop):
    *loop, enough = loop
    cache, token_N, drawn = _step(
        config, params, slots, key_N, *loop, decoding=decoding, eos_ids=eos_ids)
    enough = jax.lax.cond(drawn.steps % count_every == 0, enough_live,
                          lambda _: enough, drawn.live_N)
    return cache, token_N, drawn, enough

  drawn = Chunk(
      jnp.zeros((count, chunk), jnp.int32),
      jnp.zeros((count, chunk), jnp.float32), slots.length,
      jnp.zeros(count, bool), slots.live, jnp.int32(0))
  cache, _, drawn, _ = jax.lax.while_loop(
      unfinished, step, (cache, slots.token, drawn, enough_live(slots.live)))
  return cache, drawn


def _step(config, params, slots, key_N, cache, token_N, drawn, *, decoding,
          eos_ids):
  """Draws one token for each live slot: cache, tokens, Chunk with them."""
  live_N, place_N = drawn.live_N, slots.start + drawn.length_N - 1
  counts_N, shown_N = live_N, live_N
  if slots.given_NY is not None:
    # A slot may wait for the column with which its prompt begins.
    counts_N, shown_N = live_N & (drawn.length_N >= 0), live_N & (place_N >= 0)
  position_N = jnp.where(shown_N, place_N, -1)
  hidden_N1D, cache = transformer.forward(
      config, params, token_N[:, None], position_N[:, None], cache)
  logits_NV = transformer.logits(config, params, hidden_N1D[:, 0])
  index_N = drawn.length_N
  if slots.drawn is not None:
    index_N = index_N + slots.drawn
  token_N, logp_N = draw_lib.draw(logits_NV, decoding, key_N, index_N)
  token_N = _given(slots.given_NY, drawn.length_N, token_N)
  length_N = drawn.length_N + live_N
  token_N = jnp.where(live_N, token_N, 0)
  ended_N = counts_N & jnp.isin(token_N, jnp.array(eos_ids, jnp.int32))
  return cache, token_N, Chunk(
      token_NC=_write(drawn.token_NC, token_N, drawn.steps),
      logp_NC=_write(
          drawn.logp_NC, jnp.where(counts_N, logp_N, 0), drawn.steps),
      length_N=length_N, ended_N=drawn.ended_N | ended_N,
      live_N=live_N & ~ended_N & (length_N < slots.limit),
      steps=drawn.steps + 1)


def _given(given_NY, length_N, token_N):
  """token_N, or where its number length_N is negative, the prompt's token."""
  if given_NY is None:
    return token_N
  index_N1 = jnp.maximum(given_NY.shape[1] + length_N, 0)[:, None]
  given_N = jnp.take_along_axis(given_NY, jnp.minimum(
      index_N1, given_NY.shape[1] - 1), 1)[:, 0]
  return jnp.where(length_N < 0, given_N, token_N)


def count_every(shards: int) -> int:
  """Steps between counts of live slots: more with shards, which communicate."""
  return 4 if shards > 1 else 1


def _write(x_NC, value_N, step):
  return jax.lax.dynamic_update_slice_in_dim(x_NC, value_N[:, None], step, 1)
