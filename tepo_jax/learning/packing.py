"""Packs completions with their prompts into rows of constant shape.

This is host code. `job.learner` makes a `Batch` of graded groups. A packer
takes some of its completions and returns a `Minibatch`, for the devices:
microbatches of packed rows, and the place of every completion's scores in them.
The shapes are constants of a run, whatever the lengths: the arrays hold the
worst case, and the update loops over the microbatches that are used. The
layouts (`MODES`):

  segments   several sequences (a prompt and its completion) to a row, separated
             by segment ids
  shared     the same for attention only: the other layers compute once what
             sequences of a bin begin with, as a prompt of several completions
             or the examples of all prompts (`policy.prompt_sharing`)

Axes: B completions · T completion tokens · S tokens of a prompt and its
completion; in packed rows, M microbatches · R rows of a microbatch · S columns
of a row; of the shared layout, N bins of a microbatch (one a shard, the rows of
the layers) · S columns of a bin · R rows of attention · A columns of such a
row.
"""

from collections.abc import Sequence
import dataclasses
import fractions
import functools
import heapq
import math

import flax.struct
import jax
import numpy as np

from tepo_jax.policy import prompt_sharing
from tepo_jax.policy import scoring

MODES = ('segments', 'shared')
_ROWS = 8  # see `make`


@flax.struct.dataclass
class Batch:
  """Graded completions on the host. Filler rows have an empty mask.

  token_BS, position_BS: int32 prompt (left-padded) and completion; position
    −1 is padding.
  mask_BT: float32, 1 on completion tokens up to and including EOS.
  advantage_B: float32; [B, T] where each token has its own.
  old_logp_BT, old_entropy_BT: of π_old by the training forward, nats; zeros in
    a run, which scores minibatches.
  sampler_logp_BT: the sampler's own log-probability, nats.
  behaviour_BT: float32 behaviour weights (`behaviour`); None if they are off.
  reference_logp_BT: of a reference policy; None in a run, which scores
    minibatches.
  version_BT: int32, the rollout step that drew each token; None unless
    completions are carried.
  """
  token_BS: np.ndarray
  position_BS: np.ndarray
  mask_BT: np.ndarray
  advantage_B: np.ndarray
  old_logp_BT: np.ndarray
  old_entropy_BT: np.ndarray
  sampler_logp_BT: np.ndarray
  behaviour_BT: np.ndarray | None = None
  reference_logp_BT: np.ndarray | None = None
  version_BT: np.ndarray | None = None


@flax.struct.dataclass
class Minibatch:
  """The completions of one update, and the packed rows that hold their tokens.

  mask_BT, advantage_B, old_logp_BT, old_entropy_BT, behaviour_BT: as in
    `Batch`.
  microbatch_B, row_B, column_B: int32, where a completion's scores begin in
    the scores [M, R, C] of the rows (`scoring.Scores`); microbatch −1 is
    filler, which has none.
  reference_logp_BT: of the reference policy by the training forward, nats;
    None without one.
  used: int32 scalar, the number of microbatches that hold tokens; the first.
  rows: arrays [M, R, S].
  rate_share: float32 scalar, share of the learning rate (`optimizer`); None: 1.
  scored_at: int32 scalar, the updates that had made π_old; None: not known.
  """
  mask_BT: jax.Array | np.ndarray
  advantage_B: jax.Array | np.ndarray
  old_logp_BT: jax.Array | np.ndarray
  old_entropy_BT: jax.Array | np.ndarray
  microbatch_B: jax.Array | np.ndarray
  row_B: jax.Array | np.ndarray
  column_B: jax.Array | np.ndarray
  used: jax.Array | np.int32
  rows: scoring.PackedRows
  behaviour_BT: jax.Array | np.ndarray | None = None
  reference_logp_BT: jax.Array | np.ndarray | None = None
  rate_share: jax.Array | np.float32 | None = None
  scored_at: jax.Array | np.int32 | None = None


def make(mode: str, *, prompt_tokens: int, max_tokens: int, samples: int,
         microbatch_tokens: int, shards: int, shared_prefix: int = 0
         ) -> 'Packer | SharedPacker':
  """The packer of a mode, for groups of `samples` completions.

  A row has the length of the longest sequence, prompt_tokens + max_tokens, or
  twice that where a shard then still has _ROWS of them at a time: with more
  sequences to a row, less of it is left empty.

  With shared prompts, attention has capacity for whole groups at their maximum
  lengths: there a group takes `samples` times the longest sequence. In the
  other layers it takes `columns` columns, with its prompt stored once, behind
  the `shared_prefix` tokens of all prompts.
  """
  longest = prompt_tokens + max_tokens
  twice = microbatch_tokens >= 2 * longest * _ROWS * shards
  row_tokens = 2 * longest if twice else longest
  if mode == 'shared':
    columns = prompt_tokens - 1 - shared_prefix + samples * (max_tokens + 1)
    return SharedPacker(
        row_tokens, microbatch_tokens,
        fractions.Fraction(samples * longest, columns), shards, shared_prefix)
  return Packer(row_tokens, microbatch_tokens, shards)


@dataclasses.dataclass(frozen=True)
class Packer:
  """Packs several sequences into each row.

  row_tokens: S. microbatch_tokens: R · S at most, but at least one row for
    each shard. shards: the mesh cuts R into as many pieces.
  padded: one sequence a row and no segment ids, which the benchmark compares
    with.
  """
  row_tokens: int
  microbatch_tokens: int
  shards: int
  padded: bool = False

  def rows(self, completions: int) -> int:
    """R for that many completions, each of which may need a row."""
    wanted = min(self.microbatch_tokens // self.row_tokens, completions)
    return self.shards * max(1, wanted // self.shards)

  def __call__(self, batch: Batch) -> Minibatch:
    """The batch's completions in packed rows; ValueError if one is longer."""
    count = len(batch.mask_BT)
    rows = self.rows(count)
    sequences = _sequences(batch, self.row_tokens)
    chosen = self._choose([len(s.token_S) for s in sequences], rows)
    shape = -(-count // rows) * rows, self.row_tokens
    token_RS, scored_RS = np.zeros(shape, np.int32), np.zeros(shape, bool)
    position_RS, segment_RS = np.full((2, *shape), -1, np.int32)
    place_B, column_B = np.full(count, -1), np.zeros(count, np.int32)
    for sequence, row in zip(sequences, chosen):
      i, start = sequence.index, np.count_nonzero(position_RS[row] >= 0)
      end = start + len(sequence.token_S)
      place_B[i], column_B[i] = row, scored_RS[row].sum()
      token_RS[row, start:end] = sequence.token_S
      position_RS[row, start:end] = np.arange(end - start)
      segment_RS[row, start:end] = i
      scored_RS[row, end - 1 - sequence.scored:end - 1] = True

    def cut(x_RS):
      return x_RS.reshape(-1, rows, self.row_tokens)

    return _minibatch(batch, place_B, column_B, rows, scoring.PackedRows(
        cut(token_RS), cut(position_RS),
        None if self.padded else cut(segment_RS), cut(scored_RS)))

  def _choose(self, lengths, rows):
    """The row of each sequence, int32."""
    if self.padded:
      return np.arange(len(lengths), dtype=np.int32)
    row = first_fit_decreasing(lengths, self.row_tokens)
    count = -(-(row.max(initial=-1) + 1) // rows) * rows
    even = spread_evenly(lengths, self.row_tokens, count)
    return row if even is None else even


@dataclasses.dataclass(frozen=True)
class _Sequence:
  """A prompt and completion: tokens, of which the last `scored` are scored."""
  index: int  # of the completion
  token_S: np.ndarray
  scored: int

  @property
  def shared(self) -> int:
    """Prompt tokens that completions can share: all but the last."""
    return len(self.token_S) - self.scored - 1

  @functools.cached_property
  def prompt(self) -> bytes:
    """The tokens that can be shared; equal for completions of one prompt."""
    return self.token_S[:self.shared].tobytes()


def _sequences(batch, row_tokens):
  """The sequences of a batch, without filler; ValueError if one is too long."""
  sequences = [
      _Sequence(int(i), batch.token_BS[i, batch.position_BS[i] >= 0],
                int(batch.mask_BT[i].sum()))
      for i in np.flatnonzero(batch.mask_BT.any(1))]
  longest = max((len(s.token_S) for s in sequences), default=0)
  if longest > row_tokens:
    raise ValueError(f'a sequence of {longest} tokens does not fit into rows '
                     f'of {row_tokens}')
  return sequences


def first_fit_decreasing(lengths: Sequence[int], capacity: int) -> np.ndarray:
  """The row of each item, int32: longest first, into the first row it fits.

  At most 11/9 of the fewest rows, and 2/3 of one (Dósa 2007).
  """
  free = np.full(len(lengths), capacity)
  row = np.zeros(len(lengths), np.int32)
  for item in np.argsort(-np.asarray(lengths), kind='stable'):
    row[item] = np.argmax(free >= lengths[item])
    free[row[item]] -= lengths[item]
  return row


def spread_evenly(lengths: Sequence[int], capacity: int,
                  rows: int) -> np.ndarray | None:
  """The row of each item, longest first into the emptiest of `rows` rows.

  None if an item does not fit there.
  """
  row = np.zeros(len(lengths), np.int32)
  filled = [(0, r) for r in range(rows)]
  for item in np.argsort(-np.asarray(lengths), kind='stable'):
    total, emptiest = heapq.heappop(filled)
    if total + lengths[item] > capacity:
      return None
    row[item] = emptiest
    heapq.heappush(filled, (total + lengths[item], emptiest))
  return row


def _minibatch(batch, place_B, column_B, size, rows):
  """place_B: row (or bin) among all microbatches of `size`; −1: filler."""
  microbatch_B, row_B = np.divmod(place_B.astype(np.int32), np.int32(size))
  return Minibatch(
      mask_BT=batch.mask_BT, advantage_B=batch.advantage_B,
      old_logp_BT=batch.old_logp_BT, old_entropy_BT=batch.old_entropy_BT,
      microbatch_B=microbatch_B, row_B=np.where(place_B < 0, 0, row_B),
      column_B=column_B, used=np.int32(microbatch_B.max() + 1), rows=rows,
      behaviour_BT=batch.behaviour_BT)


@dataclasses.dataclass(frozen=True)
class SharedPacker:
  """Packs completions so that equal beginnings share their columns.

  A bin is what one shard of a microbatch computes: columns of the layers, which
  hold equal beginnings once, and rows of attention, which hold whole sequences.
  The last token of a prompt is repeated for each of its completions, because
  the state there predicts the completion's first token.

  row_tokens: A. microbatch_tokens: N · S, but S is at least A.
  attention_capacity: columns of attention for each column of the layers after
    the shared prefix, rounded up to whole rows; exact as a fraction.
  shards: the mesh cuts a microbatch into as many pieces.
  shared_prefix: tokens with which all prompts begin alike.
  """
  row_tokens: int
  microbatch_tokens: int
  attention_capacity: float | fractions.Fraction
  shards: int
  shared_prefix: int = 0

  def columns(self, completions: int) -> int:
    """S for that many completions."""
    needed = -(-completions // self.shards) * self.row_tokens
    return max(self.row_tokens,
               min(self.microbatch_tokens // self.shards, needed))

  def rows(self, completions: int) -> int:
    """R / N for that many completions."""
    return min(completions, math.ceil(
        (self.columns(completions) - self.shared_prefix)
        * self.attention_capacity / self.row_tokens))

  def __call__(self, batch: Batch) -> Minibatch:
    """The batch's completions in bins; ValueError if one is longer than a row
    of attention."""
    count, bins = len(batch.mask_BT), []
    place_B, column_B = np.full(count, -1), np.zeros(count, np.int32)
    empty = functools.partial(
        _Bin, self.columns(count), self.rows(count), self.row_tokens)
    for sequence in _by_prompt(_sequences(batch, self.row_tokens)):
      fitting = [i for i, b in enumerate(bins) if b.fits(sequence)]
      sharing = [i for i in fitting if sequence.prompt in bins[i].columns_of]
      index = min(sharing or fitting, default=len(bins))
      if index == len(bins):
        bins.append(empty())
      place_B[sequence.index] = index
      column_B[sequence.index] = bins[index].add(sequence)
    # A bin is opened only when the sequence fits into no other, so each of the
    # others holds at least as many completions as fit at the full length.
    most = -(-count // (self.columns(count) // self.row_tokens))
    most += -most % self.shards
    bins += [empty() for _ in range(most - len(bins))]
    return _minibatch(batch, place_B, column_B, self.shards, self._rows(bins))

  def _rows(self, bins):
    """The rows of all bins, arrays [M, N, S] and [M, R, A]."""
    def layers(name):
      x = np.stack([getattr(b, name) for b in bins])
      return x.reshape(-1, self.shards, *x.shape[1:])

    def attention(name):
      return (x := layers(name)).reshape(len(x), -1, self.row_tokens)

    return scoring.PackedRows(
        layers('token_S'), layers('position_S'), None, layers('scored_S'),
        prompt_sharing.Sequences(
            attention('source_RA'), attention('position_RA'),
            attention('segment_RA'), layers('home_S')))


def _by_prompt(sequences):
  """Prompts with the most tokens first; within one, the longest first."""
  groups: dict[bytes, list[_Sequence]] = {}
  for sequence in sequences:
    groups.setdefault(sequence.prompt, []).append(sequence)

  def tokens(group):
    return group[0].shared + sum(1 + s.scored for s in group)

  ordered = sorted(groups.values(), key=tokens, reverse=True)
  return [sequence for group in ordered
          for sequence in sorted(group, key=lambda s: s.scored, reverse=True)]


class _Bin:
  """A bin being filled; `columns_of`: of each prompt's shared tokens."""

  def __init__(self, columns, rows, row_tokens):
    self.token_S = np.zeros(columns, np.int32)
    self.position_S = np.full(columns, -1, np.int32)
    self.scored_S = np.zeros(columns, bool)
    self.home_S = np.zeros(columns, np.int32)
    self.source_RA = np.zeros((rows, row_tokens), np.int32)
    self.position_RA, self.segment_RA = np.full(
        (2, rows, row_tokens), -1, np.int32)
    self.columns_of: dict[bytes, np.ndarray] = {}
    self._filled, self._filled_R = 0, np.zeros(rows, np.int32)

  def fits(self, sequence: _Sequence) -> bool:
    """Whether the columns, and one of the rows, have enough left."""
    new = sequence.shared - len(self._held(sequence))
    free = len(self.token_S) - self._filled
    return (free >= new + 1 + sequence.scored
            and self._free_R().max() >= len(sequence.token_S))

  def _held(self, sequence):
    """The columns that hold a sequence's first tokens already, those of the
    prompt in the bin with which it shares most."""
    if sequence.prompt in self.columns_of:
      return self.columns_of[sequence.prompt]
    token_S, best_S = sequence.token_S[:sequence.shared], np.zeros(0, np.int32)
    for column_S in self.columns_of.values():
      size = min(len(column_S), len(token_S))
      same_S = self.token_S[column_S[:size]] == token_S[:size]
      same = size if same_S.all() else np.argmin(same_S)
      best_S = max(best_S, column_S[:same], key=len)
    return best_S

  def add(self, sequence: _Sequence) -> int:
    """Appends a completion; returns the column of its first score."""
    token_S, held_S = sequence.token_S, self._held(sequence)
    column, held = int(self.scored_S.sum()), len(held_S)
    start, self._filled = self._filled, self._filled + len(token_S) - held
    self.token_S[start:self._filled] = token_S[held:]
    self.position_S[start:self._filled] = np.arange(held, len(token_S))
    source_S = np.r_[held_S, start:self._filled].astype(np.int32)
    self.columns_of[sequence.prompt] = source_S[:sequence.shared]
    self.scored_S[source_S[sequence.shared:-1]] = True
    row = np.argmax(self._free_R() >= len(token_S))
    begin = self._filled_R[row]
    self._filled_R[row] = end = begin + len(token_S)
    self.source_RA[row, begin:end] = source_S
    self.position_RA[row, begin:end] = np.arange(len(token_S))
    # Rising within a row, as attention needs it to skip blocks.
    self.segment_RA[row, begin:end] = self.segment_RA.max() + 1
    self.home_S[start:self._filled] = (
        row * self.source_RA.shape[1] + np.arange(begin + held, end))
    return column

  def _free_R(self):
    return self.source_RA.shape[1] - self._filled_R


def efficiency(minibatch: Minibatch) -> float:
  """Share of the computed columns that hold a token; 1 if there are none."""
  position_MRS = minibatch.rows.position_RS[:minibatch.used]
  return float((position_MRS >= 0).mean()) if position_MRS.size else 1.0
