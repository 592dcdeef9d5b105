"""Completions with their prompts, packed into rows of a fixed length.

Host code. Shapes are constants of a run, whatever the lengths: arrays hold the
worst case, and the update's loop ends at the microbatches that are used.

Axes as in `update`: B completions · K blocks · M microbatches · R rows ·
S slots.
"""

import dataclasses
import heapq
from collections.abc import Sequence

import numpy as np

from tepo_jax.learning import batch as batch_lib
from tepo_jax.learning import shared_packing
from tepo_jax.policy import scoring

MODES = ('segments', 'shared', 'buckets', 'none')
_BUCKETS = (8, 4, 2, 1)  # parts of the longest


@dataclasses.dataclass(frozen=True)
class Packer:
  """Lays minibatches out.

  slots_K: S, slots of a row, of each block, ascending.
  shared: whether sequences share a row; else each goes alone to a row of the
    shortest block that holds it.
  microbatch_tokens: slots of a microbatch (a row for each shard at least).
  shards: into how many pieces the mesh cuts R.
  """
  slots_K: tuple[int, ...]
  shared: bool
  microbatch_tokens: int
  shards: int

  def rows(self, slots: int, completions: int) -> int:
    """R of a block for that many completions, which all may need a row."""
    wanted = min(self.microbatch_tokens // slots, completions)
    return self.shards * max(1, wanted // self.shards)

  def __call__(self, batch: batch_lib.Batch) -> batch_lib.Minibatch:
    """The rows' completions, laid out; host arrays."""
    tokens_B = (batch.position_BS >= 0).sum(1)
    tokens_B[batch.mask_BT.sum(1) == 0] = 0  # filler
    block_B = np.searchsorted(self.slots_K, tokens_B).astype(np.int32)
    block_B[tokens_B == 0] = -1
    if tokens_B.max() > self.slots_K[-1]:
      raise ValueError(f'a sequence of {tokens_B.max()} tokens does not fit '
                       f'into rows of {self.slots_K[-1]}')
    row_B = np.zeros(len(tokens_B), np.int32)
    microbatch_B, column_B = np.zeros_like(row_B), np.zeros_like(row_B)
    blocks, used_K = [], np.zeros(len(self.slots_K), np.int32)
    for k, slots in enumerate(self.slots_K):
      mine = np.flatnonzero(block_B == k)
      rows = self.rows(slots, len(tokens_B))
      row = self._place(tokens_B[mine], slots, rows)
      block = _Block(-(-len(tokens_B) // rows) * rows, slots, self.shared)
      for i, r in zip(mine, row):
        column_B[i] = block.add(batch, i, r)
      used_K[k] = -(-(row.max(initial=-1) + 1) // rows)
      microbatch_B[mine], row_B[mine] = np.divmod(row, rows)
      blocks.append(block.cut(rows))
    return batch_lib.Minibatch.of(
        batch, block_B=block_B, microbatch_B=microbatch_B, row_B=row_B,
        column_B=column_B, used_K=used_K, blocks=tuple(blocks))

  def _place(self, tokens, slots, rows):
    """The row of each sequence, int32."""
    if not self.shared:
      return np.arange(len(tokens), dtype=np.int32)
    row = first_fit_decreasing(tokens, slots)
    count = -(-(row.max(initial=-1) + 1) // rows) * rows
    even = spread_evenly(tokens, slots, count)
    return row if even is None else even


def make(mode: str, *, row_tokens: int, microbatch_tokens: int, room: float,
         shards: int) -> Packer | shared_packing.SharedPacker:
  """The packer of a mode.

  'segments': sequences share rows of `row_tokens`. 'shared': so they do in
  attention, with `room` slots for each slot of the layers, where completions
  share their prompt. 'buckets', for attention without segments: one sequence a
  row, in rows of an eighth, a quarter, half and the whole of `row_tokens`.
  'none': one a row of `row_tokens`.
  """
  if mode == 'shared':
    return shared_packing.SharedPacker(
        row_tokens, microbatch_tokens, room, shards)
  parts = _BUCKETS if mode == 'buckets' else (1,)
  return Packer(
      slots_K=tuple(sorted({-(-row_tokens // part) for part in parts})),
      shared=mode == 'segments', microbatch_tokens=microbatch_tokens,
      shards=shards)


def first_fit_decreasing(lengths: Sequence[int], capacity: int) -> np.ndarray:
  """The row of each item, int32: longest first, into the first row with room.

  At most 11/9 of the fewest rows, and 2/3 of one (Dósa 2007).
  """
  lengths = np.asarray(lengths)
  free = np.full(len(lengths), capacity)
  row = np.zeros(len(lengths), np.int32)
  for item in np.argsort(-lengths, kind='stable'):
    row[item] = np.argmax(free >= lengths[item])
    free[row[item]] -= lengths[item]
  return row


def spread_evenly(lengths: Sequence[int], capacity: int,
                  rows: int) -> np.ndarray | None:
  """The same into `rows` rows, each into the emptiest; None: no room."""
  row = np.zeros(len(lengths), np.int32)
  filled = [(0, r) for r in range(rows)]
  for item in np.argsort(-np.asarray(lengths), kind='stable'):
    total, row[item] = heapq.heappop(filled)
    if total + lengths[item] > capacity:
      return None
    heapq.heappush(filled, (total + lengths[item], row[item]))
  return row


def efficiency(minibatch: batch_lib.Minibatch) -> float:
  """Share of the slots computed that hold a token; 1 where there are none."""
  real = slots = 0
  for block, used in zip(minibatch.blocks, minibatch.used_K):
    real += (block.position_RS[:used] >= 0).sum()
    slots += block.position_RS[:used].size
  return real / slots if slots else 1.0


class _Block:
  """Rows in the making."""

  def __init__(self, rows, slots, shared):
    shape = rows, slots
    self._token_RS = np.zeros(shape, np.int32)
    self._position_RS = np.full(shape, -1, np.int32)
    self._segment_RS = np.full(shape, -1, np.int32) if shared else None
    self._scored_RS = np.zeros(shape, bool)
    self._filled = np.zeros(rows, np.int32)

  def add(self, batch, i, row):
    """Appends completion i to a row; the column of its first score."""
    real_S = batch.position_BS[i] >= 0
    token = batch.token_BS[i, real_S]
    scored = int(batch.mask_BT[i].sum())
    start, column = self._filled[row], self._scored_RS[row].sum()
    end = self._filled[row] = start + len(token)
    self._token_RS[row, start:end] = token
    self._position_RS[row, start:end] = np.arange(len(token))
    self._scored_RS[row, end - scored - 1:end - 1] = True
    if self._segment_RS is not None:
      self._segment_RS[row, start:end] = i
    return column

  def cut(self, rows):
    """[M, R, S]."""
    def cut(x_RS):
      return None if x_RS is None else x_RS.reshape(-1, rows, x_RS.shape[1])
    return scoring.PackedRows(*map(cut, (
        self._token_RS, self._position_RS, self._segment_RS,
        self._scored_RS)))
