"""Counts how often each program of a rollout runs, at given lengths.

It runs the sampler's own schedule with programs that compute nothing: a table
of lengths decides where a completion ends.
"""

import collections
import types
from typing import Any, NamedTuple

import numpy as np

from tepo_jax.rollout import engine
from tepo_jax.rollout import schedule
from tepo_jax.tools.benchmark import workload as workload_lib


class Shape(NamedTuple):
  """A sampling program and the array sizes it was called with.

  name: 'prefill', 'insert', 'compact' or 'decode'. rows, columns: of the cache;
  for 'prefill', of the prompts. more: for 'insert', the width of the prompts;
  for 'compact', (rows, columns) of the new cache; else None.
  """
  name: str
  rows: int
  columns: int
  more: Any = None


def of_rollout(workload: workload_lib.Workload, shapes: schedule.Shapes
               ) -> collections.Counter:
  """Counts the runs of each Shape in a rollout; for 'decode', the steps."""
  counts = collections.Counter()
  length_QG = workload.lengths(workload.prompts * workload.samples).reshape(
      workload.prompts, workload.samples)

  def prefill(_, token_QP, __):
    counts[Shape('prefill', *token_QP.shape)] += 1
    return _cache(*token_QP.shape)

  def insert(cache, prompts, *_):
    counts[Shape('insert', *cache.position.shape,
                 prompts.position.shape[1])] += 1
    return cache

  def compact(cache, slot_M, _, columns):
    moved = len(slot_M), columns
    counts[Shape('compact', *cache.position.shape, moved)] += 1
    return _cache(*moved)

  def decode(_, cache, rows, __, steps, enough):
    left_N = np.where(
        rows.live, length_QG[rows.prompt_id, rows.sample] - rows.length, 0)
    steps = _steps(left_N[rows.live], steps, enough,
                   engine.count_every(shapes.shards))
    counts[Shape('decode', *cache.position.shape)] += steps
    live_N = rows.live & (left_N > steps)
    zeros_NC = np.zeros((len(left_N), max(steps, 1)), np.int32)
    return cache, engine.Chunk(
        zeros_NC, zeros_NC.astype(np.float32),
        rows.length + np.minimum(left_N, steps), rows.live & ~live_N, live_N,
        np.int32(steps))

  requests = [
      schedule.Request([0] * workload.prompt_tokens, prompt,
                       [workload.max_tokens] * workload.samples)
      for prompt in range(workload.prompts)]
  programs = schedule.SamplingPrograms(
      lambda slots, columns, _: _cache(slots, columns), prefill, insert,
      compact, decode)
  for _ in schedule.Schedule(programs, shapes).run(None, requests, None):
    pass
  return counts


def _cache(rows, columns):
  """Returns what the schedule reads of a cache: a shape, without memory."""
  return types.SimpleNamespace(
      position=np.broadcast_to(np.int32(-1), (rows, columns)))


def _steps(left, most, enough, count_every):
  """Returns `most`, or the first multiple of `count_every` steps after which at
  most `enough` rows are live, if that is less."""
  ends = np.sort(left)[::-1]
  stop = ends[enough] if enough < len(ends) else 0
  return int(min(most, stop + -stop % count_every))
