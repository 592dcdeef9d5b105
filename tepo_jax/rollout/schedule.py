"""Schedules completions onto the slots of the engine; host code.

`Schedule.run` takes requests (prompts, each with some samples) and yields
completions as they end. Between two chunks of decoding the host takes more
requests, frees the slots of those no longer wanted, and refills free slots. It
compacts the cache when its columns run out and when fewer slots would do.
Decisions depend on the tokens drawn, never on the clock: all processes decide
alike, and a run repeats bit for bit. Axes as in `engine`.
"""

import collections
from collections.abc import Callable, Iterator
import dataclasses
from typing import Any

import jax
import numpy as np

from tepo_jax.policy import transformer
from tepo_jax.rollout import engine
from tepo_jax.rollout import groups as groups_lib
from tepo_jax.runtime import mesh as mesh_lib

_PREFILL_TOKENS = 1 << 14  # of one prefill, padding included
_REFILL_SHARE = 8  # refill when this part of the slots is free: 1/8


@dataclasses.dataclass(frozen=True)
class Shapes:
  """Allowed array sizes, ascending; each costs one compilation.

  slots: N. prompts: P, columns of a prefill. columns: W of the cache; the
  largest holds the longest prompt and completion and, if there is more work
  than slots, spare columns, to avoid compacting at every step.
  chunk: maximum decode steps per host sync. shards: N and Q are its multiples.
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
  """The shapes for these maxima; `work` is the completions of a queue."""
  slots = min(slots, work)
  slots += -slots % shards
  longest = prompt_tokens + max_tokens
  spare = max(chunk, longest // 8) if slots < work else 0
  return Shapes(
      slots=_halves(slots, max(8, shards), 4, shards),
      prompts=_halves(prompt_tokens, 32, 4), columns=_widths(longest + spare),
      chunk=chunk, shards=shards)


def _halves(largest, least, count, multiple=1):
  """largest, largest / 2, …: at most `count` sizes, none below `least`."""
  sizes = [largest]
  while len(sizes) < count and sizes[-1] >= 2 * least:
    size = -(-sizes[-1] // 2)
    sizes.append(size + -size % multiple)
  return tuple(reversed(sizes))


def _widths(longest):
  """Each two thirds of the next, in multiples of vector register sizes."""
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
  compact: (cache, slot_M, shift, W) -> cache; deletes the old one. slot_M has
    the slots of one shard after another, each numbered within its shard.
  decode: (weights, cache, Slots, key, steps, stop_at_live) -> cache, Chunk;
    donates the cache.
  """
  empty: Callable[..., transformer.KVCache]
  prefill: Callable[..., transformer.KVCache]
  insert: Callable[..., transformer.KVCache]
  compact: Callable[..., transformer.KVCache]
  decode: Callable[..., tuple[transformer.KVCache, engine.Chunk]]


@dataclasses.dataclass
class Stats:
  """Counts of the work done.

  tokens: drawn. slot_steps: the most that could have been, steps times slots.
  busy_tokens, busy_slot_steps: the same while the queue was not empty.
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
    """Share of live slots while the queue was not empty; 1 if it always was."""
    return (self.busy_tokens / self.busy_slot_steps
            if self.busy_slot_steps else 1.0)


@dataclasses.dataclass(frozen=True)
class Schedule:
  """Runs requests.

  stop: None, or makes for each completion a function of its next tokens, which
    returns how many of them to keep if the completion stops there, else None.
  """
  programs: SamplingPrograms
  shapes: Shapes
  stop: Callable[[], Callable[[np.ndarray], int | None]] | None = None

  def run(self, weights: Any, requests: groups_lib.Requests, key: jax.Array,
          stats: Stats | None = None
          ) -> Iterator[list[groups_lib.Completion]]:
    """Yields the completions that ended, a list after each chunk.

    The devices decode the next chunk while the caller works on a list.
    """
    run, done = _Run(self, weights, requests, key, stats or Stats()), []
    while True:
      chunk = run.decode() if run.prepare() else None
      yield done
      if chunk is not None:
        done = run.harvest(chunk)
      elif done:
        done = []  # now that the caller has seen them, there may be more to do
      else:
        return

  def prefill_rows(self, width: int) -> int:
    """Q for prompts of that width."""
    rows = min(max(1, _PREFILL_TOKENS // width), self.shapes.refill)
    return rows + -rows % self.shapes.shards


@dataclasses.dataclass
class _Sample:
  """What a slot draws: sample number `sample` of a request.

  stop: see `Schedule`, or None. parts: (tokens, their log-probabilities) of
  each chunk so far.
  """
  request: groups_lib.Request
  sample: int
  stop: Callable[[np.ndarray], int | None] | None
  parts: list[tuple[np.ndarray, np.ndarray]] = dataclasses.field(
      default_factory=list)


class _Run:
  """One run: the cache, and the host's record of the slots."""

  def __init__(self, schedule, weights, requests, key, stats):
    self.programs, self.shapes = schedule.programs, schedule.shapes
    self.prefill_rows = schedule.prefill_rows
    self.stop, self.stats = schedule.stop, stats
    self.weights, self.requests, self.key = weights, requests, key
    self.batches = collections.deque()  # of prompts to prefill, see `_batches`
    self.waiting = collections.deque()  # (prompts' cache, row, request, sample)
    self.slots = engine.idle_slots(0)
    self.work = []  # the _Sample of each slot; of a free one the last, or None
    self.first_N = np.zeros(0, int)  # first column in use
    self.index = self.columns = 0  # the current column; W
    self.cache = None

  def prepare(self) -> bool:
    """Gets the slots ready for a chunk; returns whether any slot is live."""
    self._take()
    self._cancel()
    if self._waits() or self.slots.live.any():
      self._fit()
      self._admit()
    return bool(self.slots.live.any())

  def _take(self):
    """Takes requests for the free slots and for the next refill."""
    free = self.shapes.slots[-1] - int(self.slots.live.sum())
    missing = free + self.shapes.refill - self._waits()
    requests = self.requests.take(max(0, missing))
    self.batches.extend(_batches(requests, self.shapes, self.prefill_rows))

  def _cancel(self):
    """Frees the slots, and drops the waiting samples, of unwanted requests."""
    wanted = self.requests.wanted
    for slot in np.flatnonzero(self.slots.live):
      self.slots.live[slot] = wanted(self.work[slot].request.prompt_id)
    self.waiting = collections.deque(
        sample for sample in self.waiting if wanted(sample[2].prompt_id))
    self.batches = collections.deque(
        (width, rows, kept) for width, rows, members in self.batches
        if (kept := [m for m in members if wanted(m.prompt_id)]))

  def _admit(self):
    """Gives free slots to waiting samples, of the emptiest shard first."""
    live_SN = self.slots.live.reshape(self.shapes.shards, -1)
    load_SN = live_SN.sum(1, keepdims=True) + np.cumsum(~live_SN, 1)
    slots = np.argsort(load_SN, None, 'stable')
    free = collections.deque(slots[~self.slots.live[slots]])
    while free and self._waits():
      if not self.waiting:
        self._prefill()
      prompts = self.waiting[0][0]
      pairs = []
      while (self.waiting and self.waiting[0][0] is prompts and free
             and len(pairs) < self.shapes.refill):
        pairs.append((self.waiting.popleft()[1:], int(free.popleft())))
      self._insert(prompts, pairs)

  def _fit(self):
    """Moves the live slots to a cache of another size if theirs is full, if a
    smaller one would do, or if more samples wait than it has slots for."""
    live_N, shards = self.slots.live, self.shapes.shards
    first = self.first_N[live_N].min(initial=self.index)
    used = max(self.index - int(first), self._widest_waiting())
    live_SN = live_N.reshape(shards, -1)
    wanted = max(int(live_N.sum()) + self._waits(),
                 shards * int(live_SN.sum(1).max()))
    slots = next((n for n in self.shapes.slots if n >= wanted),
                 self.shapes.slots[-1])
    columns = self._columns(used)
    if (slots == len(live_N) and columns >= self.columns
        and self._widest_waiting() <= self.index < self.columns):
      return
    order_SN = np.argsort(~live_SN, 1, kind='stable')[:, :slots // shards]
    self._move(order_SN, slots, self.index - used, columns)

  def _move(self, order_SN, slots, shift, columns):
    """Makes slot i of shard s what its slot order_SN[s, i] was, columns `shift`
    further left. More slots than that are free."""
    shards, kept = order_SN.shape
    if self.cache is None:
      self.cache = self.programs.empty(slots, columns, -shift)
      self.slots, self.work = engine.idle_slots(slots), [None] * slots
      self.first_N = np.zeros(slots, int)
    else:
      slot_SM = np.pad(order_SN, ((0, 0), (0, slots // shards - kept)))
      self.cache = self.programs.compact(
          self.cache, slot_SM.ravel(), shift, columns)
      size = len(self.slots.live) // shards
      slot_M = (slot_SM + size * np.arange(shards)[:, None]).ravel()
      self.slots = jax.tree.map(lambda x: x[slot_M], self.slots)
      self.slots.live.reshape(shards, -1)[:, kept:] = False
      self.work = [self.work[slot] for slot in slot_M]
      self.first_N = self.first_N[slot_M] - shift
    self.index, self.columns = self.index - shift, columns

  def decode(self) -> engine.Chunk:
    """Starts a chunk and does not wait for it.

    It ends early when enough slots are free to refill them, or as few are live
    as a smaller cache has. Then `_fit` compacts, unless a shard has too many.
    """
    live_N = self.slots.live
    stop_at_live = len(live_N) - self.shapes.refill if self._waits() else max(
        (n for n in self.shapes.slots if n < live_N.sum()), default=0)
    # Between two counts, a shard does not notice that all slots are done.
    steps = min(self.shapes.chunk, self.columns - self.index,
                int(self._left().max()))
    self.cache, chunk = self.programs.decode(
        self.weights, self.cache, self.slots, self.key, steps, stop_at_live)
    return chunk

  def harvest(self, chunk: engine.Chunk) -> list[groups_lib.Completion]:
    """Waits for a chunk and records its tokens; returns ended completions."""
    chunk = jax.tree.map(np.array, mesh_lib.to_host(chunk))
    self._count(chunk)
    before, self.index = self.slots, self.index + int(chunk.steps)
    last = chunk.token_NC[:, max(int(chunk.steps) - 1, 0)]
    self.slots = before.replace(
        token=last, length=chunk.length_N, live=chunk.live_N)
    _check_finite(chunk, before)
    done = []
    for slot in np.flatnonzero(before.live):
      count = int(chunk.length_N[slot] - before.length[slot])
      ended, work = bool(chunk.ended_N[slot]), self.work[slot]
      if work.stop is not None:
        cut = work.stop(chunk.token_NC[slot, :count])
        if cut is not None:
          count, ended, self.slots.live[slot] = cut, True, False
      work.parts.append((chunk.token_NC[slot, :count],
                         chunk.logp_NC[slot, :count]))
      if not self.slots.live[slot]:
        token_T, logp_T = map(np.concatenate, zip(*work.parts))
        done.append(groups_lib.Completion(
            work.request, work.sample, token_T, logp_T, ended))
    return done

  def _waits(self):
    """The number of samples that no slot has yet."""
    return len(self.waiting) + sum(
        len(m.limits) for *_, members in self.batches for m in members)

  def _widest_waiting(self):
    """Columns of the widest prompt that waits."""
    widths = [width for width, *_ in self.batches]
    if self.waiting:
      widths += {prompts.position.shape[1] for prompts, *_ in self.waiting}
    return max(widths, default=0)

  def _columns(self, used):
    """The smallest W with spare columns after the used ones."""
    left = self._left()
    spare = max(self.shapes.chunk, used // 4)
    if not self._waits() and left.size:
      spare = min(spare, int(left.max()))
    fitting = [w for w in self.shapes.columns if w >= used + spare]
    return fitting[0] if fitting else self.shapes.columns[-1]

  def _left(self):
    """For each live slot, the most tokens that it may still draw."""
    return (self.slots.limit - self.slots.length)[self.slots.live]

  def _prefill(self):
    """Prefills the next prompts and adds their samples to `waiting`."""
    width, rows, members = self.batches.popleft()
    token_QP = np.zeros((rows, width), np.int32)
    position_QP = np.full((rows, width), -1, np.int32)
    for row, request in enumerate(members):
      inner = request.token_ids[:-1]
      token_QP[row, width - len(inner):] = inner
      position_QP[row, width - len(inner):] = np.arange(len(inner))
    prompts = self.programs.prefill(self.weights, token_QP, position_QP)
    self.stats.prefills += 1
    self.waiting.extend(
        (prompts, row, request, sample) for row, request in enumerate(members)
        for sample in range(len(request.limits)))

  def _insert(self, prompts, pairs):
    """Inserts prompts; pairs: ((row of `prompts`, request, sample), slot)."""
    slots = self.slots
    source_R = np.zeros(self.shapes.refill, np.int32)
    slot_R = np.full(self.shapes.refill, len(slots.live), np.int32)
    for r, ((row, request, sample), slot) in enumerate(pairs):
      source_R[r], slot_R[r] = row, slot
      slots.token[slot] = request.token_ids[-1]
      slots.start[slot] = len(request.token_ids)
      slots.length[slot] = 0
      slots.limit[slot] = request.limits[sample]
      slots.prompt_id[slot], slots.sample[slot] = request.prompt_id, sample
      slots.live[slot] = True
      self.work[slot] = _Sample(
          request, sample, None if self.stop is None else self.stop())
      self.first_N[slot] = self.index - len(request.token_ids) + 1
    self.cache = self.programs.insert(self.cache, prompts, source_R, slot_R)

  def _count(self, chunk):
    stats, steps = self.stats, int(chunk.steps)
    tokens = int((chunk.length_N - self.slots.length)[self.slots.live].sum())
    possible = steps * len(self.slots.live)
    stats.steps += steps
    stats.chunks += 1
    stats.tokens += tokens
    stats.slot_steps += possible
    if self._waits():
      stats.busy_tokens += tokens
      stats.busy_slot_steps += possible


def _check_finite(chunk, slots):
  """Refuses tokens whose log-probabilities, and so logits, are not finite."""
  bad_N = ~np.isfinite(chunk.logp_NC).all(1)
  if bad_N.any():
    raise groups_lib.NonFiniteError(int(slots.prompt_id[np.argmax(bad_N)]))


def _batches(requests, shapes, prefill_rows):
  """(width, Q, requests) of each prefill, the widest first."""
  by_width = collections.defaultdict(list)
  for request in requests:
    if len(request.limits):
      length = len(request.token_ids)
      by_width[min(w for w in shapes.prompts if w >= length)].append(request)
  for width in sorted(by_width, reverse=True):
    members, rows = by_width[width], prefill_rows(width)
    for start in range(0, len(members), rows):
      yield width, rows, members[start:start + rows]
