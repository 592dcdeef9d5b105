"""The cache as a rectangle of slots by columns: the host's part.

All slots write the same column; when the columns run out, or fewer would do,
the live slots move to a rectangle of another size. Axes as in `engine`.
"""

from typing import Any

import numpy as np

from tepo_jax.rollout import engine
from tepo_jax.rollout import groups as groups_lib
from tepo_jax.rollout import shapes as shapes_lib


class Rectangle:
  """The cache of a run."""

  left_aligned = False  # a prefilled prompt ends with the last column

  def __init__(self, programs: shapes_lib.SamplingPrograms,
               shapes: shapes_lib.Shapes):
    self.programs, self.shapes = programs, shapes
    self.first_N = np.zeros(0, int)  # first column in use
    self.index = self.columns = 0  # the current column; W
    self.cache = None

  def lacking(self, slots: engine.Slots) -> list[int]:
    """None: each slot has a whole row."""
    del slots
    return []

  def fit(self, slots: engine.Slots, count: int, waits: int, widest: int
          ) -> np.ndarray | None:
    """Moves the live slots to a cache of `count` slots, or of fewer columns, if
    theirs is full or larger than needed.

    waits: samples that have no slot. widest: columns of the widest prompt of
    these.

    Returns:
      order_SM if the slots moved: slot i of shard s is what its slot
      order_SM[s, i] was; any others are free.
    """
    live_N, shards = slots.live, self.shapes.shards
    first = self.first_N[live_N].min(initial=self.index)
    used = max(self.index - int(first), widest)
    left = (slots.limit - slots.length)[live_N]
    columns = self.width(used, waits, left)
    if (count == len(live_N) and columns >= self.columns
        and widest <= self.index < self.columns):
      return None
    live_SN = live_N.reshape(shards, -1)
    order_SN = np.argsort(~live_SN, 1, kind='stable')[:, :count // shards]
    self._move(order_SN, count, self.index - used, columns)
    return order_SN

  def width(self, used: int, waits: int, left: np.ndarray) -> int:
    """The smallest W with spare columns after the used ones; left: for each
    live slot, the most tokens that it may still draw."""
    spare = max(self.shapes.chunk, used // 4)
    if not waits and left.size:
      spare = min(spare, int(left.max()))
    fitting = [w for w in self.shapes.columns if w >= used + spare]
    return fitting[0] if fitting else self.shapes.columns[-1]

  def _move(self, order_SN, count, shift, columns):
    """Makes slot i of shard s what its slot order_SN[s, i] was, columns `shift`
    further left."""
    shards, kept = order_SN.shape
    if self.cache is None:
      self.cache = self.programs.empty(count, columns, -shift)
      self.first_N = np.zeros(count, int)
    else:
      slot_SM = np.pad(order_SN, ((0, 0), (0, count // shards - kept)))
      self.cache = self.programs.move(
          self.cache, slot_SM.ravel(), shift, columns)
      size = len(self.first_N) // shards
      slot_M = (slot_SM + size * np.arange(shards)[:, None]).ravel()
      self.first_N = self.first_N[slot_M] - shift
    self.index, self.columns = self.index - shift, columns

  def place(self, slot: int, request: groups_lib.Request) -> int:
    """Gives a free slot its columns; returns the index of the prompt's token
    that is its first input, the last: the others go before the current column.
    """
    last = len(request.token_ids) - 1
    width = self.shapes.width(last + 1)
    # After a prefix comes the padding, and then the other tokens.
    self.first_N[slot] = self.index - (
        width if self.shapes.shared(width) else last)
    return last

  def insert(self, prompts: Any, pairs: list[tuple[int, int]]) -> None:
    """Copies rows of `prompts` into slots; pairs: (row, slot)."""
    source_R = np.zeros(self.shapes.refill, np.int32)
    slot_R = np.full(self.shapes.refill, len(self.first_N), np.int32)
    for r, (row, slot) in enumerate(pairs):
      source_R[r], slot_R[r] = row, slot
    self.cache = self.programs.insert(self.cache, prompts, source_R, slot_R)

  @property
  def free_columns(self) -> int:
    """The most steps of a chunk."""
    return self.columns - self.index

  def decode(self, weights: Any, slots: engine.Slots, *more: Any
             ) -> engine.Chunk:
    """`engine.decode`; it does not wait for the devices."""
    self.cache, chunk = self.programs.decode(
        weights, self.cache, slots, *more)
    return chunk

  def advance(self, steps: int) -> None:
    """Notes the columns that a chunk wrote."""
    self.index += steps
