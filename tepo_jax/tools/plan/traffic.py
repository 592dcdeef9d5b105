"""Counts how often each program of a rollout runs, at given lengths.

It runs the sampler's own schedule with programs that compute nothing: a table
of lengths and verdicts decides where a completion ends, and which prompts are
sampled.
"""

import collections
import types
from typing import Any, NamedTuple

import numpy as np

from tepo_jax.policy import pages
from tepo_jax.rollout import engine
from tepo_jax.rollout import schedule
from tepo_jax.rollout import shapes as shapes_lib
from tepo_jax.tools import streaming
from tepo_jax.tools import workload as workload_lib

_BATCHES = 64  # of prompts, enough for any share of mixed groups that trains


class Shape(NamedTuple):
  """A sampling program and the array sizes it was called with.

  name: 'prefill', 'insert', 'compact' or 'decode'; with pages 'store' and
  'copy' instead of 'insert' and 'compact'. rows, columns: of the cache; for
  'prefill' and 'store', of the prompts; for 'copy', shards and pages. more: for
  'insert', the width of the prompts; for 'compact', (rows, columns) of the new
  cache; else None.
  """
  name: str
  rows: int
  columns: int
  more: Any = None


class Traffic(NamedTuple):
  """A rollout. runs: of each Shape; for 'decode', the steps. syncs: chunks of
  decode steps, after each of which the host reads the tokens; one that ends
  early, as slots are refilled or fewer are needed, counts as a whole one.
  columns: of each decode Shape, those that the kernel for pages reads in all
  slots and steps together.
  """
  runs: collections.Counter
  syncs: int
  columns: collections.Counter

  @property
  def decode_steps(self) -> int:
    return round(sum(count for shape, count in self.runs.items()
                     if shape.name == 'decode'))


def of_rollout(workload: workload_lib.Workload, shapes: shapes_lib.Shapes,
               mixed_share: float, sample: Any = streaming.stream) -> Traffic:
  """Counts what a rollout runs.

  mixed_share: of all groups, those that can be trained on. sample: `stream` or
  `batches` of `tools.streaming`.
  """
  known = _table(workload, _BATCHES, mixed_share)
  counts, columns, chunks = collections.Counter(), collections.Counter(), []
  programs = counting(known, shapes, counts, columns, chunks)
  for _ in sample(schedule.Schedule(programs, shapes), None, known,
                  workload.prompts, None, schedule.Stats()):
    pass
  return Traffic(counts, len(chunks), columns)


def of_carried(workload: workload_lib.Workload, shapes: shapes_lib.Shapes,
               mixed_share: float, mode: str, max_versions: int
               ) -> tuple[Traffic, float]:
  """Counts what a rollout runs where completions are carried: the mean of some
  steps, after some others; and the mean age of the tokens that they train on,
  in rollout steps.

  mode, max_versions: of config.rollout.
  """
  # Where a few completions are much longer than the others, they end together,
  # in a step that must complete its groups: about every max_versions + 1 steps.
  warm_up, measured = max_versions + 3, 3 * (max_versions + 1)
  steps = warm_up + measured
  known = _table(workload, _BATCHES * steps, mixed_share)
  counts, columns, chunks = collections.Counter(), collections.Counter(), []
  programs, ages = counting(known, shapes, counts, columns, chunks), []
  for step, age_T in enumerate(streaming.carried(
      schedule.Schedule(programs, shapes), known, workload.prompts, mode,
      max_versions, steps)):
    if step >= warm_up:
      ages.append(age_T)
    else:
      counts.clear()
      columns.clear()
      chunks.clear()

  def mean(counter):
    return collections.Counter({
        shape: count / measured for shape, count in counter.items()})

  return (Traffic(mean(counts), round(len(chunks) / measured), mean(columns)),
          float(np.concatenate(ages).mean()))


def _table(workload, batches, mixed_share):
  """The sampler does not know the lengths before it has drawn them."""
  return streaming.table(workload, batches, mixed_share)._replace(
      limit=workload.max_tokens)


def counting(known: streaming.Table, shapes: shapes_lib.Shapes,
             counts: collections.Counter, columns: collections.Counter,
             chunks: list[int]) -> shapes_lib.SamplingPrograms:
  """Programs that draw completions of known lengths and compute nothing.

  They add their calls to `counts` and `columns`, see `Traffic`, and the steps
  of each chunk to `chunks`.
  """
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

  def store(kv, prompts, _):
    counts[Shape('store', *prompts.position.shape)] += 1
    return kv

  def copy(kv, source_SM, _):
    counts[Shape('copy', *source_SM.shape)] += 1
    return kv

  def decode(_, cache, rows, __, steps, enough):
    done_N = rows.length + (rows.drawn if shapes.carries else 0)
    left_N = np.where(
        rows.live, known.length_QG[rows.prompt_id, rows.sample] - done_N, 0)
    steps = _steps(left_N[rows.live], steps, enough,
                   engine.count_every(shapes.shards))
    shape = Shape('decode', *(
        cache.table_NW if shapes.page else cache.position).shape)
    counts[shape] += steps
    columns[shape] += steps * _columns_read(rows, steps)
    chunks.append(steps)
    live_N = rows.live & (left_N > steps)
    zeros_NC = np.zeros((len(left_N), max(steps, 1)), np.int32)
    return cache, engine.Chunk(
        zeros_NC, zeros_NC.astype(np.float32),
        rows.length + np.minimum(left_N, steps), rows.live & ~live_N, live_N,
        np.int32(steps))

  return shapes_lib.SamplingPrograms(*(
      (lambda *_: None, prefill, store, copy) if shapes.page else
      (lambda slots, columns, _: _cache(slots, columns), prefill, insert,
       compact)), decode)


def _columns_read(rows, steps):
  """The columns that a step in the middle of a chunk reads with the kernel for
  pages, of all slots."""
  length_N = np.where(rows.live, rows.start + rows.length + steps // 2, 1)
  return int(pages.columns_read(np.maximum(length_N, 1)).sum())


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
