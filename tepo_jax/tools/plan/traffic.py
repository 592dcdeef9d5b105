"""How often each program of a rollout step runs, at given lengths.

The sampler's own schedule decides, with stand-ins for the devices' part: a
completion ends where a table of lengths says so.
"""

import collections
from typing import Any, NamedTuple

import numpy as np

from tepo_jax.rollout import engine
from tepo_jax.rollout import schedule
from tepo_jax.tools.benchmark import workload as workload_lib


class Shape(NamedTuple):
  """What a program of the sampler was called with.

  name: 'prefill', 'insert', 'compact' or 'decode'. rows, columns: of the cache;
  of a prefill, prompts and their width. more: the width of the prompts
  inserted; (rows, columns) that the cache is moved into; else None.
  """
  name: str
  rows: int
  columns: int
  more: Any = None


class _Cache(NamedTuple):
  """As much of a cache as the schedule looks at: a shape."""
  position: np.ndarray


def of_rollout(workload: workload_lib.Workload, shapes: schedule.Shapes
               ) -> collections.Counter:
  """Runs of each Shape in a rollout; of 'decode', tokens a slot (steps)."""
  counts = collections.Counter()
  length_B = workload.lengths(workload.prompts * workload.samples).reshape(
      workload.prompts, workload.samples)

  def empty(slots, columns, index):
    del index
    return _cache(slots, columns)

  def prefill(weights, token_QP, position_QP):
    del weights, position_QP
    counts[Shape('prefill', *token_QP.shape)] += 1
    return _cache(*token_QP.shape)

  def insert(cache, prompts, source_R, slot_R):
    del source_R, slot_R
    counts[Shape('insert', *cache.position.shape,
                 prompts.position.shape[1])] += 1
    return cache

  def compact(cache, slot_M, shift, columns):
    del shift
    moved = len(slot_M), columns
    counts[Shape('compact', *cache.position.shape, moved)] += 1
    return _cache(*moved)

  def decode(weights, cache, rows, key, steps, enough):
    del weights, key
    length_N = length_B[rows.prompt_id, rows.sample]
    left_N = np.where(rows.live, length_N - rows.length, 0)
    steps = _steps(left_N[rows.live], steps, enough,
                   engine.count_every(shapes.shards))
    counts[Shape('decode', *cache.position.shape)] += steps
    drawn_N = np.minimum(left_N, steps)
    live_N = rows.live & (left_N > steps)
    zeros_NC = np.zeros((len(left_N), max(steps, 1)), np.int32)
    return cache, engine.Chunk(
        zeros_NC, zeros_NC.astype(np.float32), rows.length + drawn_N,
        rows.live & ~live_N, live_N, np.int32(steps))

  requests = [
      schedule.Request([0] * workload.prompt_tokens, prompt,
                       [workload.max_tokens] * workload.samples)
      for prompt in range(workload.prompts)]
  programs = schedule.SamplingPrograms(empty, prefill, insert, compact, decode)
  for _ in schedule.Schedule(programs, shapes).run(None, requests, None):
    pass
  return counts


def _cache(rows, columns):
  # Nobody looks at the entries, which take no memory so.
  return _Cache(np.broadcast_to(np.int32(-1), (rows, columns)))


def _steps(left, most, enough, count_every):
  """Steps until `most` are done, or a multiple of `count_every` of them leaves
  at most `enough` rows live."""
  ends = np.sort(left)[::-1]
  stop = ends[enough] if enough < len(ends) else 0
  return int(min(most, stop + -stop % count_every))
