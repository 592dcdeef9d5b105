"""Sampling programs without a model: every draw is written in its token.

Axes: Q prompts · G samples · N slots · C tokens of a chunk.
"""

from collections.abc import Mapping
import types

import numpy as np

from tepo_jax.rollout import engine
from tepo_jax.rollout import groups as groups_lib
from tepo_jax.rollout import shapes


def token(prompt_id, sample, position):
  """The token that the programs draw there."""
  return prompt_id * 10_000 + sample * 1_000 + position


def programs(length):
  """SamplingPrograms whose completions end after length(prompt_id, sample)."""

  def decode(_, cache, slots, __, steps, stop_at_live):
    before_N = 0 * slots.length if slots.drawn is None else slots.drawn
    length_N = np.array([
        length(prompt, sample) if live else 0 for prompt, sample, live in zip(
            slots.prompt_id, slots.sample, slots.live)], int) - before_N
    left_N = np.where(
        slots.live, np.minimum(length_N, slots.limit) - slots.length, 0)
    done = 0
    while done < steps and (left_N > done).sum() > stop_at_live:
      done += 1
    position_NC = (before_N + slots.length)[:, None] + np.arange(max(steps, 1))
    token_NC = token(slots.prompt_id[:, None], slots.sample[:, None],
                     position_NC)
    live_N = slots.live & (left_N > done)
    drawn_N = slots.length + np.minimum(left_N, done)
    return cache, engine.Chunk(
        token_NC.astype(np.int32), -token_NC.astype(np.float32) / 7, drawn_N,
        slots.live & ~live_N & (drawn_N == length_N), live_N, np.int32(done))

  return shapes.SamplingPrograms(
      empty=lambda slots, columns, _: _cache(slots, columns),
      prefill=lambda _, token_QP, __: _cache(*token_QP.shape),
      insert=lambda cache, *_: cache,
      move=lambda _, slot_M, __, columns: _cache(len(slot_M), columns),
      decode=decode)


def _cache(rows, columns):
  """What the schedule reads of a cache: a shape, without memory."""
  return types.SimpleNamespace(
      position=np.broadcast_to(np.int32(-1), (rows, columns)))


def assert_same(got: Mapping[tuple[int, int], groups_lib.Completion],
                want: Mapping[tuple[int, int], groups_lib.Completion]) -> None:
  """Completions by (prompt, sample): the same tokens exactly, and the same
  log-probabilities up to rounding."""
  assert got.keys() == want.keys()
  for name, completion in got.items():
    np.testing.assert_array_equal(completion.token_T, want[name].token_T)
    np.testing.assert_allclose(
        completion.logp_T, want[name].logp_T, atol=1e-5)
    assert completion.ended == want[name].ended
