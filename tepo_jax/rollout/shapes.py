"""The array sizes of sampling, and its jitted programs.

Axes as in `engine` and `policy.pages`.
"""

from collections.abc import Callable
import dataclasses
from typing import Any

from tepo_jax.rollout import engine

_PREFILL_TOKENS = 1 << 14  # of one prefill, padding included
# Columns of a prefill after a prefix, which no attention kernel serves: at
# _PREFILL_TOKENS and 28 heads on a device, 0.5 GB of scores.
_MOST_AFTER_PREFIX = 256
_REFILL_SHARE = 8  # refill when this part of the slots is free: 1/8


@dataclasses.dataclass(frozen=True)
class Shapes:
  """Allowed array sizes, ascending; each costs one compilation.

  slots: N. prompts: P, columns of a prefill; where completions are carried, up
  to those of the longest prompt and completion. columns: W of the cache; the
  largest holds the longest prompt and completion and, if there is more work
  than slots, spare columns, to avoid compacting at every step.
  chunk: maximum decode steps per host sync. shards: N and Q are its multiples.
  page: Y, columns of a page; 0: the cache is a rectangle. pages: X of a shard.
  carries: whether completions are carried (`carry`).
  samples: completions of a prompt, which are prefilled once.
  prefix: the tokens with which all prompts begin, see `groups.shared_prefix`;
    () where completions are carried.
  """
  slots: tuple[int, ...]
  prompts: tuple[int, ...]
  columns: tuple[int, ...]
  chunk: int
  shards: int = 1
  page: int = 0
  pages: int = 0
  carries: bool = False
  samples: int = 1
  prefix: tuple[int, ...] = ()

  def width(self, tokens: int) -> int:
    """The columns of a prompt of so many tokens, its prefix included."""
    return min(width for width in self.prompts if width >= tokens)

  def shared(self, width: int) -> int:
    """The first tokens of a prompt of that width that are not prefilled with
    it, but once for all: the prefix, or none of it."""
    known = len(self.prefix)
    return known if 0 < width - known <= _MOST_AFTER_PREFIX else 0

  @property
  def refill(self) -> int:
    """R, the slots that are free at a refill, which one insert fills."""
    return max(1, self.slots[-1] // _REFILL_SHARE)

  def prefill_rows(self, width: int) -> int:
    """Q for prompts of that width: as many as fill `refill` slots, or half of
    these with groups, of which dynamic sampling asks for few at a time; at
    most _PREFILL_TOKENS. More free slots take several prefills."""
    filled = self.refill if self.samples == 1 else self.refill // 2
    rows = min(max(1, _PREFILL_TOKENS // width),
               max(1, -(-filled // self.samples)))
    return rows + -rows % self.shards

  @property
  def tail(self) -> int:
    """Pages of a slot's tail: it has up to Y - 1 columns before a chunk."""
    return -(-(self.chunk + self.page - 1) // self.page)

  @property
  def tails(self) -> int:
    """Pages of all tails of a shard, its first. No chunk needs more copies: M.
    """
    return self.slots[-1] // self.shards * self.tail

  @property
  def least_pages(self) -> int:
    """X in which the longest sequence can always be completed. Up to two pages
    of its prompt are also in its tail or in pages of its own."""
    return self.tails + -(-self.columns[-1] // self.page) + 2 + self.tail

  @property
  def table_pages(self) -> list[int]:
    """W, pages of a sequence, for each number of columns."""
    return [-(-columns // self.page) + self.tail for columns in self.columns]


def make(*, slots: int, work: int, prompt_tokens: int, max_tokens: int,
         chunk: int, shards: int, samples: int = 1, carries: bool = False,
         prefix: tuple[int, ...] = ()) -> Shapes:
  """The shapes for these maxima; `work` is the completions of a queue, samples
  those of a prompt; carries: whether completions are carried, so that there is
  always more work, and each is prefilled for itself."""
  slots = min(slots, work)
  slots += -slots % shards
  longest = prompt_tokens + max_tokens
  spare = max(chunk, longest // 8) if slots < work or carries else 0
  # A carried completion's prefill may be much wider than its tokens. After a
  # prefix that padding would stay in its slot, which could then need more
  # columns than there are.
  prefix = () if carries else prefix
  known = len(prefix)
  prompts = tuple(
      known + columns for columns in _halves(prompt_tokens - known, 32, 4))
  if carries:
    prompts = tuple(sorted({*prompts, *_halves(longest, 32, 4)}))
  return Shapes(
      slots=_halves(slots, max(8, shards), 4, shards),
      prompts=prompts, columns=_widths(longest + spare),
      chunk=chunk, shards=shards, carries=carries,
      samples=1 if carries else samples, prefix=prefix)


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
  """The functions of sampling, jitted for one model, mesh and decoding.

  The cache is a rectangle, a transformer.KVCache:

  empty: (N, W, current column) -> cache.
  prefill: (weights, token_QP, position_QP[, prefix]) -> KVCache of the prompts.
  insert: (cache, prompts, source_R, slot_R) -> cache; donates the first.
  move: (cache, slot_M, shift, W) -> cache; deletes the old one. slot_M has the
    slots of one shard after another, each numbered within its shard.
  decode: (weights, cache, Slots, key, steps, stop_at_live) -> cache, Chunk;
    donates the cache.

  Or its pages are `kv` of a PagedCache, numbered from 0 in each shard, which
  `decode` takes and returns:

  empty: (X, Y) -> kv.
  insert: (kv, prompts, target_SQW) -> kv; donates the first.
  move: (kv, source_SM, target_SM) -> kv; donates the first.
  """
  empty: Callable[..., Any]
  prefill: Callable[..., Any]
  insert: Callable[..., Any]
  move: Callable[..., Any]
  decode: Callable[..., tuple[Any, engine.Chunk]]
