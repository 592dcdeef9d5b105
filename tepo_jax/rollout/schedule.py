"""Which completion is drawn in which slot, and when: the host's decisions.

A queue of (prompt, sample) pairs goes through a fixed number of slots. Between
two chunks of decoding the host refills finished slots while work waits, and
gathers the live ones into smaller shapes when none does. Every decision
follows from what was drawn, never from the clock: all processes take the same
ones, and a run repeats bit for bit. Axes as in `engine`; G samples a prompt.
"""

import collections
from collections.abc import Callable, Iterator, Sequence
import dataclasses
from typing import Any

import jax
import numpy as np

from tepo_jax.policy import transformer
from tepo_jax.rollout import engine
from tepo_jax.runtime import mesh as mesh_lib

_PREFILL_TOKENS = 1 << 14  # of one prefill, padding included
_REFILL_SHARE = 8  # slots are refilled when one in so many is free


@dataclasses.dataclass(frozen=True)
class Shapes:
  """The sizes that arrays may have, each in rising order: few, so that little
  is compiled.

  slots: N. prompts: P, columns of a prefill. columns: W of the cache; the
  last one holds the longest prompt and completion, and with more work than
  slots some room, so that the columns are not moved at every step.
  chunk: most tokens between two looks of the host. shards: of the batch; N and
  Q are multiples of it.
  """
  slots: tuple[int, ...]
  prompts: tuple[int, ...]
  columns: tuple[int, ...]
  chunk: int
  shards: int = 1

  @property
  def refill(self) -> int:
    """R, prompts inserted by one call."""
    return max(1, self.slots[-1] // _REFILL_SHARE)


def make_shapes(*, slots: int, work: int, prompt_tokens: int, max_tokens: int,
           chunk: int, shards: int) -> Shapes:
  """Shapes for at most so many slots, completions of a queue and tokens."""
  slots = min(slots, work)
  slots += -slots % shards
  longest = prompt_tokens + max_tokens
  room = max(chunk, longest // 8) if slots < work else 0
  return Shapes(
      slots=_halves(slots, max(8, shards), 4, shards),
      prompts=_halves(prompt_tokens, 32, 4), columns=_widths(longest + room),
      chunk=chunk, shards=shards)


def _halves(largest, least, count, multiple=1):
  """largest, largest / 2, …: at most `count` sizes, none below `least`."""
  sizes = [largest]
  while len(sizes) < count and sizes[-1] >= 2 * least:
    size = -(-sizes[-1] // 2)
    sizes.append(size + -size % multiple)
  return tuple(reversed(sizes))


def _widths(longest):
  """Two thirds of the next each, in units that vector registers like."""
  sizes = [longest + -longest % _unit(longest)]
  while len(sizes) < 8 and sizes[-1] >= 96:
    size = 2 * sizes[-1] // 3
    sizes.append(size + -size % _unit(size))
  return tuple(reversed(sizes))


def _unit(columns):
  return 128 if columns > 512 else 32


@dataclasses.dataclass(frozen=True)
class SamplingPrograms:
  """The functions of `engine`, jitted for one model, mesh and decoding.

  empty: (N, W, current column) -> cache.
  prefill: (weights, token_QP, position_QP) -> cache.
  insert: (cache, prompts, source_R, slot_R) -> cache; donates the first.
  relay: (cache, row_M, shift, W) -> cache; the old one is used up.
  decode: (weights, cache, rows, key, steps, enough) -> cache, Chunk; donates
  the cache.
  """
  empty: Callable[..., transformer.KVCache]
  prefill: Callable[..., transformer.KVCache]
  insert: Callable[..., transformer.KVCache]
  relay: Callable[..., transformer.KVCache]
  decode: Callable[..., tuple[transformer.KVCache, engine.Chunk]]


@dataclasses.dataclass(frozen=True)
class Request:
  """A prompt of the queue: its tokens, its name for the randomness, and the
  most tokens (at least 1) that each of its samples may have."""
  token_ids: Sequence[int]
  prompt_id: int
  limits: Sequence[int]


@dataclasses.dataclass(frozen=True)
class Completion:
  """One sample: of request `request`, its number `sample`.

  token_T int32, EOS included, and logp_T float32 (see `draw.draw`), of its
  length. ended: False is a truncated completion.
  """
  request: int
  sample: int
  token_T: np.ndarray
  logp_T: np.ndarray
  ended: bool


@dataclasses.dataclass
class Stats:
  """What a run of the queue took. Steps are of decoding.

  tokens, slot_steps: drawn, and that could have been drawn.
  busy_tokens, busy_slot_steps: the same while work waited.
  """
  tokens: int = 0
  slot_steps: int = 0
  busy_tokens: int = 0
  busy_slot_steps: int = 0
  steps: int = 0
  chunks: int = 0
  prefills: int = 0

  @property
  def occupancy(self) -> float:
    """Share of the slots at work while work waited; 1 where none did."""
    if not self.busy_slot_steps:
      return 1.0
    return self.busy_tokens / self.busy_slot_steps


@dataclasses.dataclass(frozen=True)
class Schedule:
  """Runs queues through the slots.

  stop: None, or a function of nothing that gives a function of a completion's
    next tokens: the number of them up to which it goes, or None to go on.
  """
  programs: SamplingPrograms
  shapes: Shapes
  stop: Callable[[], Callable[[np.ndarray], int | None]] | None = None

  def run(self, weights: Any, requests: Sequence[Request], key: jax.Array,
          stats: Stats | None = None) -> Iterator[list[Completion]]:
    """The completions of all the requests' samples: a list after each chunk.

    What the caller does with them happens while the devices decode on.
    """
    run = _Run(self, weights, requests, key, Stats() if stats is None
               else stats)
    done = []
    while run.admit():
      run.fit()
      chunk = run.decode()
      yield done
      done = run.harvest(chunk)
    yield done

  def prefill_rows(self, width: int) -> int:
    """Q, prompts of one prefill of that width."""
    rows = min(max(1, _PREFILL_TOKENS // width), self.shapes.refill)
    return rows + -rows % self.shapes.shards


class _Run:
  """A queue on its way: the cache, and what the host knows of the slots."""

  def __init__(self, schedule, weights, requests, key, stats):
    self.programs, self.shapes = schedule.programs, schedule.shapes
    self.stop, self.stats = schedule.stop, stats
    self.weights, self.requests, self.key = weights, requests, key
    self.batches = _batches(requests, self.shapes, schedule.prefill_rows)
    self.waiting = collections.deque()  # (prompts' cache, row, request, sample)
    self.rows = no_rows(self.shapes.slots[-1])
    self.work = np.full((len(self.rows.token), 2), -1)  # request and sample
    self.first_N = np.zeros(len(self.rows.token), int)  # first column in use
    self.drawn = [[] for _ in self.rows.token]
    self.stops = [None for _ in self.rows.token]
    self.index = self._widest_waiting()
    self.columns = self._columns(self.index)
    self.cache = None

  def admit(self) -> bool:
    """Gives free slots to what waits; whether any slot is at work then."""
    free = collections.deque(np.flatnonzero(~self.rows.live))
    while free and self._waits():
      if not self.waiting:
        self._prefill()
      prompts = self.waiting[0][0]
      pairs = []
      while (self.waiting and self.waiting[0][0] is prompts and free
             and len(pairs) < self.shapes.refill):
        pairs.append((self.waiting.popleft()[1:], int(free.popleft())))
      self._insert(prompts, pairs)
    return bool(self.rows.live.any())

  def fit(self) -> None:
    """Moves the live rows and used columns where the shape should change."""
    live_N = self.rows.live
    used = max(self.index - int(self.first_N[live_N].min()),
               self._widest_waiting())
    columns, slots = self._columns(used), len(live_N)
    if not self._waits():
      slots = min(n for n in self.shapes.slots if n >= live_N.sum())
    if (slots == len(live_N) and columns >= self.columns
        and self.index < self.columns):
      return
    order = np.argsort(~live_N, kind='stable')[:slots]
    shift = self.index - used
    self.cache = self.programs.relay(self.cache, order, shift, columns)
    self.rows = jax.tree.map(lambda x: x[order], self.rows)
    self.work, self.first_N = self.work[order], self.first_N[order] - shift
    self.drawn = [self.drawn[slot] for slot in order]
    self.stops = [self.stops[slot] for slot in order]
    self.index, self.columns = used, columns

  def decode(self) -> engine.Chunk:
    """Starts a chunk; its end is not waited for."""
    slots = len(self.rows.live)
    if self._waits():
      enough = slots - self.shapes.refill
    else:
      enough = max((n for n in self.shapes.slots if n < slots), default=0)
    # Between two counts, shards do not see by themselves that all is done.
    longest = int(self._left().max())
    steps = min(self.shapes.chunk, self.columns - self.index, longest)
    self.cache, chunk = self.programs.decode(
        self.weights, self.cache, self.rows, self.key, steps, enough)
    return chunk

  def harvest(self, chunk: engine.Chunk) -> list[Completion]:
    """Waits for a chunk, takes over what it drew; the completions it ended."""
    chunk = jax.tree.map(np.array, mesh_lib.to_host(chunk))
    self._count(chunk)
    before, self.index = self.rows, self.index + int(chunk.steps)
    last = chunk.token_NC[:, max(int(chunk.steps) - 1, 0)]
    self.rows = before.replace(
        token=last, length=chunk.length_N, live=chunk.live_N)
    done = []
    for slot in np.flatnonzero(before.live):
      count = int(chunk.length_N[slot] - before.length[slot])
      ended = bool(chunk.ended_N[slot])
      if self.stops[slot] is not None:
        cut = self.stops[slot](chunk.token_NC[slot, :count])
        if cut is not None:
          count, ended, self.rows.live[slot] = cut, True, False
      self.drawn[slot].append((chunk.token_NC[slot, :count],
                               chunk.logp_NC[slot, :count]))
      if not self.rows.live[slot]:
        token_T, logp_T = map(np.concatenate, zip(*self.drawn[slot]))
        done.append(Completion(*map(int, self.work[slot]), token_T, logp_T,
                               ended))
    return done

  def _waits(self):
    return bool(self.waiting or self.batches)

  def _widest_waiting(self):
    """Columns of the next prompts; later ones are no wider."""
    if self.waiting:
      return self.waiting[0][0].position.shape[1]
    return self.batches[0][0] if self.batches else 0

  def _columns(self, used):
    """W for so many used columns: with room for a while, or for all."""
    left = self._left()
    room = max(self.shapes.chunk, used // 4)
    if not self._waits() and left.size:
      room = min(room, int(left.max()))
    fitting = [w for w in self.shapes.columns if w >= used + room]
    return fitting[0] if fitting else self.shapes.columns[-1]

  def _left(self):
    """Of each live row, the most tokens still to come."""
    return (self.rows.limit - self.rows.length)[self.rows.live]

  def _prefill(self):
    """Computes the next prompts of the queue; all their samples wait then."""
    width, rows, members = self.batches.popleft()
    token_QP = np.zeros((rows, width), np.int32)
    position_QP = np.full((rows, width), -1, np.int32)
    for row, index in enumerate(members):
      inner = self.requests[index].token_ids[:-1]
      token_QP[row, width - len(inner):] = inner
      position_QP[row, width - len(inner):] = np.arange(len(inner))
    prompts = self.programs.prefill(self.weights, token_QP, position_QP)
    self.stats.prefills += 1
    self.waiting.extend(
        (prompts, row, index, sample) for row, index in enumerate(members)
        for sample in range(len(self.requests[index].limits)))

  def _insert(self, prompts, pairs):
    """Puts (row of `prompts`, request, sample) into slots."""
    if self.cache is None:
      self.cache = self.programs.empty(
          len(self.rows.live), self.columns, self.index)
    source_R = np.zeros(self.shapes.refill, np.int32)
    slot_R = np.full(self.shapes.refill, len(self.rows.live), np.int32)
    rows = self.rows
    for place, ((row, index, sample), slot) in enumerate(pairs):
      request = self.requests[index]
      source_R[place], slot_R[place] = row, slot
      rows.token[slot] = request.token_ids[-1]
      rows.start[slot] = len(request.token_ids)
      rows.length[slot] = 0
      rows.limit[slot] = request.limits[sample]
      rows.prompt_id[slot], rows.sample[slot] = request.prompt_id, sample
      rows.live[slot] = True
      self.work[slot] = index, sample
      self.first_N[slot] = self.index - len(request.token_ids) + 1
      self.drawn[slot] = []
      self.stops[slot] = None if self.stop is None else self.stop()
    self.cache = self.programs.insert(self.cache, prompts, source_R, slot_R)

  def _count(self, chunk):
    stats, steps = self.stats, int(chunk.steps)
    tokens = int((chunk.length_N - self.rows.length)[self.rows.live].sum())
    possible = steps * len(self.rows.live)
    stats.steps += steps
    stats.chunks += 1
    stats.tokens += tokens
    stats.slot_steps += possible
    if self._waits():
      stats.busy_tokens += tokens
      stats.busy_slot_steps += possible


def no_rows(slots: int) -> engine.Rows:
  """Slots without work."""
  zeros = [np.zeros(slots, np.int32) for _ in range(6)]
  return engine.Rows(*zeros, live=np.zeros(slots, bool))


def _batches(requests, shapes, prefill_rows):
  """(width, rows, requests) of each prefill: the long prompts first."""
  by_width = collections.defaultdict(list)
  for index, request in enumerate(requests):
    if len(request.limits):
      length = len(request.token_ids)
      by_width[min(w for w in shapes.prompts if w >= length)].append(index)
  batches = collections.deque()
  for width in sorted(by_width, reverse=True):
    members, rows = by_width[width], prefill_rows(width)
    for start in range(0, len(members), rows):
      batches.append((width, rows, members[start:start + rows]))
  return batches
