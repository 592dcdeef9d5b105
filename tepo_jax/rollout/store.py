"""What `schedule` asks of a cache; `rectangle` and `paging` are the two forms.

Axes: S shards · M slots after a move; others as in `engine`.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from tepo_jax.rollout import engine
from tepo_jax.rollout import groups as groups_lib


class Store(Protocol):
  """The host's part of a cache: it says where a slot's keys and values are."""

  @property
  def free_columns(self) -> int:
    """The most steps of a chunk."""
    ...

  def lacking(self, slots: engine.Slots) -> list[int]:
    """The slots to put back before the next chunk, for lack of memory."""
    ...

  def fit(self, slots: engine.Slots, count: int, waits: int, widest: int
          ) -> np.ndarray | None:
    """Makes the cache ready for a chunk of `count` slots.

    waits: samples that have no slot. widest: columns of the widest prompt of
    these.

    Returns:
      order_SM if the slots move: slot i of shard s is what its slot
      order_SM[s, i] was; any others are free.
    """
    ...

  def place(self, slot: int, request: groups_lib.Request) -> int | None:
    """Gives a free slot its part of the cache; returns the index of the first
    token to decode, None if there is no memory for it."""
    ...

  def align(self, tokens: Sequence[int], width: int) -> tuple[int, int]:
    """The columns [start, end) of a prompt's tokens in a prefill of `width`."""
    ...

  def insert(self, prompts: Any, pairs: list[tuple[int, int]]) -> None:
    """Writes the prompts of the slots just placed; pairs: (row, slot)."""
    ...

  def decode(self, weights: Any, slots: engine.Slots, *more: Any
             ) -> engine.Chunk:
    """`engine.decode` with the cache; it does not wait for it."""
    ...

  def advance(self, steps: int) -> None:
    """Notes the columns that a chunk wrote."""
    ...
