"""Schedules completions onto the slots of the engine; host code.

`Schedule.run` takes requests (prompts, each with some samples) and yields
completions as they end. Between two chunks of decoding the host takes more
requests, frees the slots of those no longer wanted, and refills free slots.
`rectangle` and `paging` say where their keys and values are, by one interface.
Decisions depend on the tokens drawn, never on the clock: all processes decide
alike, and a run repeats bit for bit. Axes as in `engine`.

A request may continue a completion that an earlier rollout step began
(`carry`). The weights have changed since, so that its prompt and its tokens so
far are prefilled together, as a prompt is, whatever the cache; then it is a
completion as others, but for its random numbers, which are those that it would
have had. Requests of earlier steps come first.
"""

import collections
from collections.abc import Callable, Iterator
import dataclasses
import functools
import itertools
from typing import Any

import jax
import numpy as np

from tepo_jax.rollout import engine
from tepo_jax.rollout import groups as groups_lib
from tepo_jax.rollout import paging
from tepo_jax.rollout import rectangle
from tepo_jax.rollout import shapes as shapes_lib
from tepo_jax.runtime import mesh as mesh_lib


@dataclasses.dataclass
class Stats:
  """Counts of the work done.

  tokens: drawn. slot_steps: the most that could have been, steps times slots.
  busy_tokens, busy_slot_steps: the same while the queue was not empty.
  put_back: samples that went back to the queue for lack of memory, and
  redrawn: their tokens, which are drawn twice.
  """
  tokens: int = 0
  slot_steps: int = 0
  busy_tokens: int = 0
  busy_slot_steps: int = 0
  steps: int = 0
  chunks: int = 0
  prefills: int = 0
  put_back: int = 0
  redrawn: int = 0

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

  Where completions are carried, `Requests.stopped` takes those that are not
  needed any more, and the key is of the seed alone.
  """
  programs: shapes_lib.SamplingPrograms
  shapes: shapes_lib.Shapes
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


@dataclasses.dataclass
class _Sample:
  """What a slot draws: sample number `sample` of a request.

  stop: see `Schedule`, or None. parts: (tokens, their log-probabilities) of
  each chunk so far, after those of the request.
  """
  request: groups_lib.Request
  sample: int
  stop: Callable[[np.ndarray], int | None] | None
  parts: list[tuple[np.ndarray, np.ndarray]] = dataclasses.field(
      default_factory=list)

  def completion(self, ended: bool) -> groups_lib.Completion:
    """All that is drawn."""
    token_T, logp_T = map(np.concatenate, zip(*self.parts))
    return groups_lib.Completion(
        self.request, self.sample, token_T, logp_T, ended)


class _Run:
  """One run: the cache, and the host's record of the slots."""

  def __init__(self, schedule, weights, requests, key, stats):
    self.programs, self.shapes = schedule.programs, schedule.shapes
    self.stop, self.stats = schedule.stop, stats
    self.weights, self.requests, self.key = weights, requests, key
    self.batches = collections.deque()  # of prompts to prefill, see `_batches`
    self.waiting = collections.deque()  # (prompts' cache, row, request, sample)
    self.slots = engine.idle_slots(0, self.shapes.page, self.shapes.carries)
    self.work = []  # the _Sample of each slot; of a free one the last, or None
    self.store = (paging.Paging if self.shapes.page else rectangle.Rectangle)(
        self.programs, self.shapes)

  def prepare(self) -> bool:
    """Gets the slots ready for a chunk; returns whether any slot is live."""
    self._take()
    self._cancel()
    self._put_back()
    if self._waits() or self.slots.live.any():
      self._fit()
      self._admit()
    if self._waits() and not self.slots.live.any():
      raise RuntimeError('the cache has no memory for a single completion')
    return bool(self.slots.live.any())

  def _take(self):
    """Takes requests for the free slots and for the next refill."""
    free = self.shapes.slots[-1] - int(self.slots.live.sum())
    missing = free + self.shapes.refill - self._waits()
    requests = self.requests.take(max(0, missing))
    for _, same in itertools.groupby(requests, lambda request: request.born):
      self.batches.extend(self._batches(
          (request, np.flatnonzero(request.limits).tolist())
          for request in same))

  def _cancel(self):
    """Frees the slots, and drops the waiting samples, of unwanted requests."""
    wanted = self.requests.wanted
    for slot in np.flatnonzero(self.slots.live):
      self.slots.live[slot] = wanted(self.work[slot].request.prompt_id)
      if self.shapes.carries and not self.slots.live[slot]:
        self.requests.stopped(self.work[slot].completion(ended=False))
    self.waiting = collections.deque(
        sample for sample in self.waiting if wanted(sample[2].prompt_id))
    self.batches = collections.deque(
        (width, rows, kept) for width, rows, members in self.batches
        if (kept := [m for m in members if wanted(m[0].prompt_id)]))

  def _put_back(self):
    """Returns samples to the queue, to be drawn again from their beginning."""
    slots = self.store.lacking(self.slots)
    if not slots:
      return
    self.slots.live[slots] = False
    self.stats.put_back += len(slots)
    self.stats.redrawn += int(np.maximum(self.slots.length[slots], 0).sum())
    members = {}  # by request: the request, and its samples
    for work in (self.work[slot] for slot in slots):
      members.setdefault(id(work.request), (work.request, []))[1].append(
          work.sample)
    self.batches.extendleft(reversed(list(self._batches(members.values()))))

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
        slot, (_, row, request, sample) = int(free.popleft()), self.waiting[0]
        first = self.store.place(slot, request)
        if first is not None:
          self.waiting.popleft()
          self._start(slot, request, sample, first)
          pairs.append((row, slot))
      if pairs:
        self.store.insert(prompts, pairs)

  def _fit(self):
    """Fits the cache to the slots: to the live ones if fewer would do, or to
    more if more samples wait than it has slots for."""
    live_N, shards = self.slots.live, self.shapes.shards
    live_SN = live_N.reshape(shards, -1)
    wanted = max(int(live_N.sum()) + self._waits(),
                 shards * int(live_SN.sum(1).max(initial=0)))
    count = next((n for n in self.shapes.slots if n >= wanted),
                 self.shapes.slots[-1])
    self._move(self.store.fit(
        self.slots, count, self._waits(), self._widest_waiting()), count)

  def _move(self, order_SN, count):
    """Makes slot i of shard s what its slot order_SN[s, i] was, unless that is
    None. More slots than that are free."""
    if order_SN is None:
      return
    shards, kept = order_SN.shape
    if not self.work:
      self.slots = engine.idle_slots(
          count, self.shapes.page, self.shapes.carries)
      self.work = [None] * count
      return
    slot_SM = np.pad(order_SN, ((0, 0), (0, count // shards - kept)))
    size = len(self.work) // shards
    slot_M = (slot_SM + size * np.arange(shards)[:, None]).ravel()
    self.slots = jax.tree.map(lambda x: x[slot_M], self.slots)
    self.slots.live.reshape(shards, -1)[:, kept:] = False
    self.work = [self.work[slot] for slot in slot_M]

  def decode(self) -> engine.Chunk:
    """Starts a chunk and does not wait for it.

    It ends early when enough slots are free to refill them, or as few are live
    as a smaller cache has. Then `_fit` compacts, unless a shard has too many.
    """
    live_N = self.slots.live
    live = int(live_N.sum())  # if samples wait, as many as have memory
    stop_at_live = max(live - self.shapes.refill, 0) if self._waits() else max(
        (n for n in self.shapes.slots if n < live), default=0)
    left = (self.slots.limit - self.slots.length)[live_N]
    # Between two counts, a shard does not notice that all slots are done.
    steps = min(self.shapes.chunk, self.store.free_columns, int(left.max()))
    return self.store.decode(
        self.weights, self.slots, self.key, steps, stop_at_live)

  def harvest(self, chunk: engine.Chunk) -> list[groups_lib.Completion]:
    """Waits for a chunk and records its tokens; returns ended completions."""
    chunk = jax.tree.map(np.array, mesh_lib.to_host(chunk))
    self._count(chunk)
    self.store.advance(int(chunk.steps))
    before = self.slots
    last = chunk.token_NC[:, max(int(chunk.steps) - 1, 0)]
    self.slots = before.replace(
        token=last, length=chunk.length_N, live=chunk.live_N)
    _check_finite(chunk, before)
    done = []
    for slot in np.flatnonzero(before.live):
      given, first = max(-before.length[slot], 0), max(before.length[slot], 0)
      count = max(chunk.length_N[slot], 0) - first
      token_T, logp_T = (x[slot, given:given + count]
                         for x in (chunk.token_NC, chunk.logp_NC))
      ended, work = bool(chunk.ended_N[slot]), self.work[slot]
      if work.stop is not None:
        cut = work.stop(token_T)
        if cut is not None:
          count, ended, self.slots.live[slot] = cut, True, False
      work.parts.append((token_T[:count], logp_T[:count]))
      if not self.slots.live[slot]:
        done.append(work.completion(ended))
    return done

  def _waits(self):
    """The number of samples that no slot has yet."""
    return len(self.waiting) + sum(
        len(samples) for *_, members in self.batches for _, samples in members)

  def _widest_waiting(self):
    """Columns of the widest prompt that waits."""
    widths = [width for width, *_ in self.batches]
    if self.waiting:
      widths += {prompts.position.shape[1] for prompts, *_ in self.waiting}
    return max(widths, default=0)

  def _prefill(self):
    """Prefills the next prompts and adds their samples to `waiting`."""
    width, rows, members = self.batches.popleft()
    shared = self.shapes.shared(width)
    token_QP = np.zeros((rows, width - shared), np.int32)
    position_QP = np.full_like(token_QP, -1)
    for row, (request, _) in enumerate(members):
      if tuple(request.token_ids[:shared]) != self.shapes.prefix[:shared]:
        raise ValueError(f'prompt {request.prompt_id} lacks the prefix')
      inner = request.token_ids[shared:-1]
      start = 0 if self.store.left_aligned else width - shared - len(inner)
      columns = slice(start, start + len(inner))
      token_QP[row, columns] = inner
      position_QP[row, columns] = shared + np.arange(len(inner))
    prompts = self.programs.prefill(
        self.weights, token_QP, position_QP,
        *[self._prefix] if shared else [])
    self.stats.prefills += 1
    self.waiting.extend(
        (prompts, row, request, sample)
        for row, (request, samples) in enumerate(members) for sample in samples)

  @functools.cached_property
  def _prefix(self):
    """Keys and values of the prefix, one row."""
    shape = self.shapes.shards, len(self.shapes.prefix)
    cache = self.programs.prefill(
        self.weights, np.broadcast_to(np.int32(self.shapes.prefix), shape),
        np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape))
    return jax.tree.map(lambda x: x[:1] if x.ndim else x, cache)

  def _start(self, slot, request, sample, first):
    """Records what a slot draws; `first`: see `place`."""
    slots, tokens = self.slots, request.token_ids
    slots.token[slot] = tokens[max(first, 0)]
    slots.start[slot] = len(tokens)
    slots.length[slot] = first + 1 - len(tokens)
    slots.limit[slot] = request.limits[sample]
    slots.prompt_id[slot], slots.sample[slot] = request.prompt_id, sample
    slots.live[slot] = True
    if slots.given_NY is not None:
      slots.given_NY[slot, -len(tokens):] = tokens[-self.shapes.page:]
    self.work[slot] = work = _Sample(
        request, sample, None if self.stop is None else self.stop())
    if self.shapes.carries:
      slots.born[slot], slots.drawn[slot] = request.born, 0
    if request.drawn is not None:
      slots.drawn[slot] = len(request.drawn.token_T)
      work.parts.append((request.drawn.token_T, request.drawn.logp_T))
      if work.stop is not None:
        work.stop(request.drawn.token_T)

  def _count(self, chunk):
    stats, steps = self.stats, int(chunk.steps)
    drawn_N = np.maximum(chunk.length_N, 0) - np.maximum(self.slots.length, 0)
    tokens = int(drawn_N[self.slots.live].sum())
    possible = steps * len(self.slots.live)
    stats.steps += steps
    stats.chunks += 1
    stats.tokens += tokens
    stats.slot_steps += possible
    if self._waits():
      stats.busy_tokens += tokens
      stats.busy_slot_steps += possible

  def _batches(self, members):
    """(width, Q, members) of each prefill, the widest first; members: requests
    with the numbers of their samples."""
    by_width = collections.defaultdict(list)
    for request, samples in members:
      if len(samples):
        by_width[self.shapes.width(len(request.token_ids))].append(
            (request, samples))
    for width in sorted(by_width, reverse=True):
      members, rows = by_width[width], self.shapes.prefill_rows(width)
      for start in range(0, len(members), rows):
        yield width, rows, members[start:start + rows]


def _check_finite(chunk, slots):
  """Refuses tokens whose log-probabilities, and so logits, are not finite."""
  bad_N = ~np.isfinite(chunk.logp_NC).all(1)
  if bad_N.any():
    raise groups_lib.NonFiniteError(int(slots.prompt_id[np.argmax(bad_N)]))
