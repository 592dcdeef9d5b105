"""The cache as pages: the host's part, which says whose each page is.

See `policy.pages` for what they hold. Each shard of the batch has pages of its
own: first the tails of its slots, then pages for whole prompts, which all
samples of a prompt share, and for the completions. Before a chunk the full
pages of the tails move to free pages.

A sample is admitted only if its shard has free pages for its prompt and, for
it and all samples that decode already, for the pages that they may fill in the
next chunk. If these are missing later, the youngest samples are put back and
drawn again: to the same tokens, as draws depend on nothing but their names.
All of this follows from the tokens drawn. Axes as in `policy.pages`, S shards.
"""

from collections.abc import Callable, Sequence
import dataclasses
from typing import Any

import jax
import numpy as np

from tepo_jax.policy import pages as pages_lib
from tepo_jax.rollout import engine
from tepo_jax.rollout import groups as groups_lib


def tail_pages(chunk: int, size: int) -> int:
  """T: a tail of up to Y - 1 columns takes a chunk."""
  return -(-(chunk + size - 1) // size)


def least_pages(longest: int, chunk: int, size: int, slots: int) -> int:
  """X of a shard of `slots` slots in which a sequence of `longest` tokens can
  always be completed. Up to two pages of its prompt are also in its tail or in
  pages of its own."""
  tail = tail_pages(chunk, size)
  return slots * tail + -(-longest // size) + 2 + tail


def table_pages(shapes: Any) -> list[int]:
  """W, of a schedule.Shapes."""
  return [-(-columns // shapes.page) + tail_pages(shapes.chunk, shapes.page)
          for columns in shapes.columns]


def most_copies(shapes: Any) -> int:
  """M, of a schedule.Shapes."""
  return shapes.slots[-1] // shapes.shards * tail_pages(
      shapes.chunk, shapes.page)


@dataclasses.dataclass(frozen=True)
class PagedPrograms:
  """The functions of sampling with pages, jitted for one model, mesh and
  decoding; X and pages count from 0 in each shard.

  empty: (X, Y) -> kv of a PagedCache.
  prefill: (weights, token_QP, position_QP) -> KVCache.
  store: (kv, KVCache, target_SQW) -> kv; donates the first.
  copy: (kv, source_SM, target_SM) -> kv; donates the first.
  decode: (weights, PagedCache, Slots, key, steps, stop_at_live) -> PagedCache,
    Chunk; donates the cache.
  """
  empty: Callable[..., tuple[jax.Array, ...]]
  prefill: Callable[..., Any]
  store: Callable[..., tuple[jax.Array, ...]]
  copy: Callable[..., tuple[jax.Array, ...]]
  decode: Callable[..., tuple[pages_lib.PagedCache, engine.Chunk]]


@dataclasses.dataclass
class _Prompt:
  """A prompt's pages in a shard, and the slots that read them."""
  pages: list[int]
  users: int = 0


@dataclasses.dataclass
class _Row:
  """A slot's part of the cache. shared: how many of its prompt's pages it
  reads. own: its pages after them. skips: whether its sequence begins with the
  second page of its tail, as its prompt is too short for the column."""
  key: tuple[int, int]
  prompt: _Prompt
  shared: int
  skips: bool
  own: list[int] = dataclasses.field(default_factory=list)


class Paging:
  """The cache of a run; see `store.Store`."""

  def __init__(self, programs: PagedPrograms, shapes: Any):
    self.programs, self.shapes, self.size = programs, shapes, shapes.page
    self.tail = tail_pages(shapes.chunk, self.size)
    first = most_copies(shapes)
    # The last is taken first.
    self.free = [list(range(shapes.pages - 1, first - 1, -1))
                 for _ in range(shapes.shards)]
    self.rows: list[_Row | None] = []
    self.prompts: dict[tuple[int, int], _Prompt] = {}
    self.column = 0
    self.copies: list[list[tuple[int, int]]] = [
        [] for _ in range(shapes.shards)]  # (source, target)
    self.stores: list[tuple[int, int, list[int]]] = []  # (slot, shard, pages)
    self.kv = programs.empty(shapes.pages, self.size)

  def lacking(self, slots: engine.Slots) -> list[int]:
    """The slots to put back, so that the others have the pages that they may
    fill in the next chunk."""
    self._release(slots.live)
    found = []
    for shard, free in enumerate(self.free):
      members = sorted(
          self._members(shard), key=lambda slot: (slots.length[slot], -slot))
      while len(members) * self._filled(self.column) > len(free):
        found.append(members.pop(0))
        self._free(found[-1])
    return found

  def _filled(self, column):
    """The most pages of a tail that are full after the next chunk."""
    return (column + self.shapes.chunk) // self.size

  def _members(self, shard):
    """The slots of a shard that hold pages."""
    size = len(self.rows) // self.shapes.shards
    return [slot for slot in range(shard * size, (shard + 1) * size)
            if self.rows[slot] is not None]

  def _release(self, live_N):
    """Frees the pages of slots that are not live."""
    for slot, row in enumerate(self.rows):
      if row is not None and not live_N[slot]:
        self._free(slot)

  def _free(self, slot):
    row, shard = self.rows[slot], slot * self.shapes.shards // len(self.rows)
    self.free[shard] += row.own[::-1]
    row.prompt.users -= 1
    if not row.prompt.users:
      self.free[shard] += self.prompts.pop(row.key).pages[::-1]
    self.rows[slot] = None

  def fit(self, slots: engine.Slots, count: int, waits: int, widest: int
          ) -> np.ndarray | None:
    """Frees the tails' full pages, and moves the live slots if `count` differs
    from their number."""
    del waits, widest
    self._release(slots.live)
    shards, before = self.shapes.shards, len(self.rows)
    full, self.column = divmod(self.column, self.size)
    if not slots.live.any():
      self.column = 0
    if count == before and not full:
      return None
    live_SN = slots.live.reshape(shards, -1)
    order_SN = (np.tile(np.arange(before // shards), (shards, 1))
                if count == before else
                np.argsort(~live_SN, 1, kind='stable')[:, :count // shards])
    own = before // shards  # slots of a shard
    rows: list[_Row | None] = [None] * count
    old, self.rows = self.rows, rows
    for shard, order_N in enumerate(order_SN):
      for new, slot in enumerate(order_N):
        row = old[shard * own + slot]
        if row is not None:
          self._flush(row, shard, range(int(slot), full * own, own))
          if self.column:
            self.copies[shard].append((full * own + int(slot), new))
          self.rows[shard * count // shards + new] = row
    return None if count == before else order_SN

  def _flush(self, row, shard, tail):
    """Moves full pages of a tail to free pages."""
    for page in tail:
      if row.skips:
        row.skips = False
      else:
        row.own.append(self.free[shard].pop())
        self.copies[shard].append((page, row.own[-1]))

  def place(self, slot: int, request: groups_lib.Request) -> int | None:
    """Gives a free slot its pages.

    Returns:
      The index of the prompt's token that is the slot's first input, negative
      if it has to wait for so many steps; None if there are too few free pages.
    """
    shard, number = divmod(slot, len(self.rows) // self.shapes.shards)
    last, free = len(request.token_ids) - 1, self.free[shard]
    key = shard, request.prompt_id
    prompt = self.prompts.get(key)
    new = 0 if prompt else -(-last // self.size)
    reserve = (len(self._members(shard)) + 1) * self._filled(self.column)
    if len(free) < new + reserve:
      return None
    if prompt is None:
      prompt = self.prompts[key] = _Prompt([free.pop() for _ in range(new)])
      self.stores.append((slot, shard, prompt.pages))
    prompt.users += 1
    shared = (last - self.column) // self.size
    if self.column and shared >= 0:
      self.copies[shard].append((prompt.pages[shared], number))
    self.rows[slot] = _Row(key, prompt, max(shared, 0), shared < 0)
    return shared * self.size + self.column

  def align(self, tokens: Sequence[int], width: int) -> tuple[int, int]:
    """Prompts begin with their first column."""
    del width
    return 0, len(tokens)

  def insert(self, prompts: Any, pairs: list[tuple[int, int]]) -> None:
    """Stores the prompts that `place` gave pages; pairs: (row, slot)."""
    rows = {slot: row for row, slot in pairs}
    count, width = prompts.position.shape
    target_SQW = np.full((self.shapes.shards, count, -(-width // self.size)),
                         self.shapes.pages, np.int32)
    for slot, shard, pages in self.stores:
      target_SQW[shard, rows[slot], :len(pages)] = pages
    if self.stores:
      self.kv = self.programs.store(self.kv, prompts, target_SQW)
    self.stores = []

  @property
  def free_columns(self) -> int:
    """The most steps of a chunk."""
    return self.tail * self.size - self.column

  def decode(self, weights: Any, slots: engine.Slots, *more: Any
             ) -> engine.Chunk:
    """`engine.decode`, after the copies that it needs."""
    self._copy()
    cache, chunk = self.programs.decode(
        weights, pages_lib.PagedCache(
            self.kv, self.table(), np.int32(self.column)), slots, *more)
    self.kv = cache.kv
    return chunk

  def _copy(self):
    if any(self.copies):
      shards, shapes = self.shapes.shards, self.shapes
      most = most_copies(shapes)
      source_SM = np.zeros((shards, most), np.int32)
      target_SM = np.full((shards, most), shapes.pages, np.int32)
      for shard, pairs in enumerate(self.copies):
        if pairs:
          source_SM[shard, :len(pairs)], target_SM[shard, :len(pairs)] = zip(
              *pairs)
          pairs.clear()
      self.kv = self.programs.copy(self.kv, source_SM, target_SM)

  def table(self) -> np.ndarray:
    """table_NW: of each slot, its tail last; W is one of `table_pages`."""
    own = len(self.rows) // self.shapes.shards
    pages_N = [[] if row is None else [
        *row.prompt.pages[:row.shared], *row.own, *range(
            slot % own + row.skips * own, own * self.tail, own)]
               for slot, row in enumerate(self.rows)]
    most = max(map(len, pages_N))
    width = next(w for w in table_pages(self.shapes) if w >= most)
    table_NW = np.zeros((len(self.rows), width), np.int32)
    for slot, pages in enumerate(pages_N):
      table_NW[slot, :len(pages)] = pages
    return table_NW

  def advance(self, steps: int) -> None:
    """Notes the columns that a chunk wrote."""
    self.column += steps
