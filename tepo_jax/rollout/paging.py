"""The cache as pages: the host's part, which assigns pages to samples.

See `policy.pages` for their contents. Each shard of the batch has pages of its
own: first the tails of its slots, then pages for whole prompts, which all
samples of a prompt share, and for the completions. Before a chunk the full
pages of the tails move to free pages.

A sample is admitted only if its shard has free pages for its prompt and, for
each sample that decodes already, `reserve` more. If pages are missing later,
the youngest samples are put back and drawn again: their random numbers depend
on the seed, the step, the prompt, the sample and the position only, so that the
tokens are the same up to rounding. All of this follows from the tokens drawn.
Axes as in `policy.pages`, S shards.
"""

import dataclasses
from typing import Any

import numpy as np

from tepo_jax.policy import pages as pages_lib
from tepo_jax.rollout import engine
from tepo_jax.rollout import groups as groups_lib
from tepo_jax.rollout import shapes as shapes_lib


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
  key: tuple[int, int, int]
  prompt: _Prompt
  shared: int
  skips: bool
  own: list[int] = dataclasses.field(default_factory=list)


class Paging:
  """The cache of a run; the same interface as `rectangle.Rectangle`."""

  left_aligned = True  # a prefilled prompt begins with the first column
  # Pages. All slots fill a page at the same step, and few completions end
  # between two such steps: pages that are free just after one are needed at the
  # next. With more pages fewer samples are drawn twice, but fewer are admitted.
  reserve = 4

  def __init__(self, programs: shapes_lib.SamplingPrograms,
               shapes: shapes_lib.Shapes):
    if shapes.pages < shapes.least_pages:
      raise ValueError(f'{shapes.pages} pages: the longest completion may need '
                       f'{shapes.least_pages}')
    self.programs, self.shapes, self.size = programs, shapes, shapes.page
    # The last is taken first.
    self.free = [list(range(shapes.pages - 1, shapes.tails - 1, -1))
                 for _ in range(shapes.shards)]
    self.rows: list[_Row | None] = []
    self.prompts: dict[tuple[int, int, int], _Prompt] = {}
    self.column = 0
    self.copies: list[list[tuple[int, int]]] = [
        [] for _ in range(shapes.shards)]  # (source, target)
    self.stores: list[tuple[int, int, list[int]]] = []  # (slot, shard, pages)
    self.kv = programs.empty(shapes.pages, self.size)

  def lacking(self, slots: engine.Slots) -> list[int]:
    """The slots to put back, so that the others have the pages that they may
    fill in the next chunk."""
    self._release(slots.live)
    found, drawn_N = [], slots.length
    if slots.drawn is not None:
      drawn_N = drawn_N + slots.drawn
    for shard, free in enumerate(self.free):
      members = sorted(
          self._members(shard), key=lambda slot: (drawn_N[slot], -slot))
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
    # Requests of one prompt are for different samples.
    key = shard, request.prompt_id, int(np.argmax(request.limits))
    prompt = self.prompts.get(key)
    new = 0 if prompt else -(-last // self.size)
    filled = self._filled(self.column)
    reserve = filled + 1 + len(self._members(shard)) * max(
        self.reserve, filled)
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

  def insert(self, prompts: Any, pairs: list[tuple[int, int]]) -> None:
    """Stores the prompts that `place` gave pages; pairs: (row, slot)."""
    rows = {slot: row for row, slot in pairs}
    count, width = prompts.position.shape
    target_SQW = np.full((self.shapes.shards, count, -(-width // self.size)),
                         self.shapes.pages, np.int32)
    for slot, shard, pages in self.stores:
      target_SQW[shard, rows[slot], :len(pages)] = pages
    if self.stores:
      self.kv = self.programs.insert(self.kv, prompts, target_SQW)
    self.stores = []

  @property
  def free_columns(self) -> int:
    """The most steps of a chunk."""
    return self.shapes.tail * self.size - self.column

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
      source_SM = np.zeros((shards, shapes.tails), np.int32)
      target_SM = np.full((shards, shapes.tails), shapes.pages, np.int32)
      for shard, pairs in enumerate(self.copies):
        if pairs:
          source_SM[shard, :len(pairs)], target_SM[shard, :len(pairs)] = zip(
              *pairs)
          pairs.clear()
      self.kv = self.programs.move(self.kv, source_SM, target_SM)

  def table(self) -> np.ndarray:
    """table_NW: of each slot, its tail last; W: see `Shapes.table_pages`."""
    own = len(self.rows) // self.shapes.shards
    pages_N = [[] if row is None else [
        *row.prompt.pages[:row.shared], *row.own, *range(
            slot % own + row.skips * own, own * self.shapes.tail, own)]
               for slot, row in enumerate(self.rows)]
    most = max(map(len, pages_N))
    width = next(w for w in self.shapes.table_pages if w >= most)
    table_NW = np.zeros((len(self.rows), width), np.int32)
    for slot, pages in enumerate(pages_N):
      table_NW[slot, :len(pages)] = pages
    return table_NW

  def advance(self, steps: int) -> None:
    """Notes the columns that a chunk wrote."""
    self.column += steps
