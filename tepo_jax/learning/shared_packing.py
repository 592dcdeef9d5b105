"""Completions packed so that those of one prompt share its slots.

A bin is what one shard of a microbatch computes: slots of the layers, which
hold a prompt once, and rows of attention, which hold whole sequences
(`policy.prompt_sharing`). Of a prompt the last token stands in front of every
completion, as the state there is the first that predicts.

Axes: B completions · N bins of a microbatch, a shard each · S slots of a bin ·
R rows of attention of a microbatch · A slots of such a row · M microbatches.
"""

import dataclasses
import math

import numpy as np

from tepo_jax.learning import batch as batch_lib
from tepo_jax.policy import prompt_sharing
from tepo_jax.policy import scoring


@dataclasses.dataclass(frozen=True)
class SharedPacker:
  """Lays minibatches out.

  row_tokens: A. microbatch_tokens: slots of the layers of a microbatch, at
    least A a shard. room: slots of attention for each of them, in whole rows.
  shards: into how many pieces the mesh cuts a microbatch.
  """
  row_tokens: int
  microbatch_tokens: int
  room: float
  shards: int

  def slots(self, completions: int) -> int:
    """S for that many completions."""
    needed = -(-completions // self.shards) * self.row_tokens
    return max(self.row_tokens,
               min(self.microbatch_tokens // self.shards, needed))

  def rows(self, completions: int) -> int:
    """R / N for that many completions."""
    return math.ceil(self.slots(completions) * self.room / self.row_tokens)

  def __call__(self, batch: batch_lib.Batch) -> batch_lib.Minibatch:
    """The rows' completions, laid out; host arrays."""
    count, bins = len(batch.mask_BT), []
    column_B, bin_B = np.zeros((2, count), np.int32)
    for sequence in _sequences(batch):
      index = self._choose(bins, sequence, count)
      bin_B[sequence.index] = index
      column_B[sequence.index] = bins[index].add(sequence)
    # A new bin is begun when no other has room: each of those has as many
    # completions as fit at their longest.
    most = -(-count // (self.slots(count) // self.row_tokens))
    most += -most % self.shards
    bins += [self._bin(count) for _ in range(most - len(bins))]
    microbatch_B, row_B = np.divmod(bin_B, np.int32(self.shards))
    real_B = batch.mask_BT.any(1)
    used = bin_B[real_B].max(initial=-1) // self.shards + 1
    return batch_lib.Minibatch.of(
        batch, block_B=np.where(real_B, 0, -1).astype(np.int32),
        microbatch_B=microbatch_B, row_B=row_B, column_B=column_B,
        used_K=np.array([used], np.int32), blocks=(self._block(bins),))

  def _choose(self, bins, sequence, count):
    """The first bin with room, of those with its prompt if there is one."""
    if len(sequence.token_S) > self.row_tokens:
      raise ValueError(f'a sequence of {len(sequence.token_S)} tokens does not '
                       f'fit into rows of {self.row_tokens}')
    with_room = [i for i, b in enumerate(bins) if b.has_room(sequence)]
    for index in with_room:
      if sequence.prompt in bins[index].prompts:
        return index
    if with_room:
      return with_room[0]
    bins.append(self._bin(count))
    return len(bins) - 1

  def _bin(self, count):
    return _Bin(self.slots(count), self.rows(count), self.row_tokens)

  def _block(self, bins):
    """scoring.PackedRows of the bins, arrays [M, N, S] and [M, R, A]."""
    def slots(name):
      x = np.stack([getattr(b, name) for b in bins])
      return x.reshape(-1, self.shards, *x.shape[1:])

    def rows(name):
      x = slots(name)
      return x.reshape(len(x), -1, self.row_tokens)

    return scoring.PackedRows(
        slots('token_S'), slots('position_S'), None, slots('scored_S'),
        prompt_sharing.Sequences(
            rows('source_RA'), rows('position_RA'), rows('segment_RA'),
            slots('home_S')))


@dataclasses.dataclass(frozen=True)
class _Sequence:
  """index: the completion's. prompt: its tokens but the last, as bytes.

  token_S: prompt and completion; the first `shared` are those of `prompt`, the
  last `scored` the completion's.
  """
  index: int
  prompt: bytes
  token_S: np.ndarray
  shared: int
  scored: int


def _sequences(batch):
  """Prompts with the most tokens first; of each the longest first."""
  found: dict[bytes, list[_Sequence]] = {}
  for i in np.flatnonzero(batch.mask_BT.any(1)):
    token_S = batch.token_BS[i, batch.position_BS[i] >= 0]
    scored = int(batch.mask_BT[i].sum())
    shared = len(token_S) - scored - 1
    prompt = token_S[:shared].tobytes()
    found.setdefault(prompt, []).append(
        _Sequence(i, prompt, token_S, shared, scored))

  def tokens(group):
    return group[0].shared + sum(1 + s.scored for s in group)

  return [sequence for group in sorted(found.values(), key=tokens, reverse=True)
          for sequence in sorted(group, key=lambda s: s.scored, reverse=True)]


class _Bin:
  """A bin in the making: its arrays, and `prompts` -> where each begins."""

  def __init__(self, slots, rows, row_tokens):
    self.token_S = np.zeros(slots, np.int32)
    self.position_S = np.full(slots, -1, np.int32)
    self.scored_S = np.zeros(slots, bool)
    self.home_S = np.zeros(slots, np.int32)
    self.source_RA = np.zeros((rows, row_tokens), np.int32)
    self.position_RA = np.full((rows, row_tokens), -1, np.int32)
    self.segment_RA = np.full((rows, row_tokens), -1, np.int32)
    self.prompts: dict[bytes, int] = {}
    self._filled, self._filled_R = 0, np.zeros(rows, np.int32)

  def has_room(self, sequence: _Sequence) -> bool:
    """In the slots and in one of the rows."""
    new = 0 if sequence.prompt in self.prompts else sequence.shared
    free = len(self.token_S) - self._filled
    return (free >= new + 1 + sequence.scored
            and self._free_R().max() >= len(sequence.token_S))

  def add(self, sequence: _Sequence) -> int:
    """Appends a completion; the column of its first score."""
    token_S, shared = sequence.token_S, sequence.shared
    column = int(self.scored_S.sum())
    is_new = sequence.prompt not in self.prompts
    if is_new:
      self.prompts[sequence.prompt] = self._append(token_S[:shared], 0)
    first = self.prompts[sequence.prompt]
    start = self._append(token_S[shared:], shared)
    self.scored_S[start:start + sequence.scored] = True
    source_S = np.r_[first:first + shared, start:self._filled]
    row = np.argmax(self._free_R() >= len(token_S))
    begin = self._filled_R[row]
    self._filled_R[row] = end = begin + len(token_S)
    self.source_RA[row, begin:end] = source_S
    self.position_RA[row, begin:end] = np.arange(len(token_S))
    self.segment_RA[row, begin:end] = sequence.index
    at_home = slice(0 if is_new else shared, None)
    self.home_S[source_S[at_home]] = (
        row * self.source_RA.shape[1] + np.arange(begin, end)[at_home])
    return column

  def _free_R(self):
    return self.source_RA.shape[1] - self._filled_R

  def _append(self, token_S, position):
    """Into the next slots; where they begin."""
    start, end = self._filled, self._filled + len(token_S)
    self.token_S[start:end] = token_S
    self.position_S[start:end] = position + np.arange(len(token_S))
    self._filled = end
    return start
