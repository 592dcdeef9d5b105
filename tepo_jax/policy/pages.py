"""A key/value cache of pages: decoding reads the tokens that are alive.

Token i of a slot's sequence is column i % Y of page table_NW[slot, i // Y]. The
last pages of a sequence are the slot's tail, which has a fixed place: its page
t is page t · N + slot. So a decode step writes the same column of all tails, in
place and without a scatter. As that column is the same for all slots, each must
have as many tokens before its tail as fill its pages. `rollout.paging` sees to
that: a slot begins to decode up to Y - 1 tokens before the end of its prompt.

Axes: N slots · X pages · Y columns of a page · W pages of a slot's table · Q
prompts · P prompt columns · M pages to copy · K key/value heads, J = 2 K: key
head k is 2 k, value head k is 2 k + 1 · A query heads · H head size.
"""

import functools
from typing import Any

import flax.struct
import jax
from jax import numpy as jnp
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import kernel

from tepo_jax.policy import attention
from tepo_jax.runtime import mesh as mesh_lib

_LANES = 128  # of a TPU's vector register
# Of the kernel. It reads whole blocks of keys, so that large ones read much
# that is not alive, and computes all rows of a block of queries for each
# sequence. A matrix unit has 128 rows, 8 sequences of 16 heads.
_BLOCK_COLUMNS = 256
BLOCK_QUERIES = 8
# A v5e, v5p or v6e has 1 MiB of scalar memory, which also holds the lengths.
_TABLE_BYTES = 15 << 16


@flax.struct.dataclass
class PagedCache:
  """Pages of every layer, and where a decode step finds them.

  kv: L arrays [X, Y, J, H], from `init_pages`. table_NW: i32. column: i32 [],
  the column of the tails to write next.
  """
  kv: tuple[jax.Array, ...]
  table_NW: Any
  column: Any


def init_pages(config: Any, count: int, size: int) -> tuple[jax.Array, ...]:
  """`count` pages of `size` columns; config: a transformer.ModelConfig."""
  shape = count, size, 2 * config.cache_heads, config.head_dim
  return tuple(
      jnp.zeros(shape, config.dtype) for _ in range(config.num_layers))


def write(kv_XYJH: jax.Array, k_NKH: jax.Array, v_NKH: jax.Array,
          column: jax.Array) -> jax.Array:
  """A layer's pages with a token of each slot in its tail, in place; column: of
  the PagedCache."""
  slots, heads, head_dim = k_NKH.shape
  new_N1JH = jnp.stack([k_NKH, v_NKH], 2).astype(kv_XYJH.dtype).reshape(
      slots, 1, 2 * heads, head_dim)
  page, column = jnp.divmod(column, kv_XYJH.shape[1])
  return jax.lax.dynamic_update_slice(
      kv_XYJH, new_N1JH, (page * slots, column, 0, 0))


def attend(q_NAH: jax.Array, kv_XYJH: jax.Array, position_N: jax.Array,
           table_NW: jax.Array, window: int | None, backend: str) -> jax.Array:
  """softmax(q kᵀ / √H) v over a sequence's last `window` tokens, or all.

  Args:
    q_NAH: queries of the last tokens, rotated; A = G K heads.
    position_N: of these tokens; -1 in slots that are idle, whose result is
      undefined. table_NW: of the PagedCache.
    backend: of `attention`. On TPUs JAX's Pallas kernel for ragged pages serves
      the shapes that it can; XLA gathers the pages for all others.

  Returns:
    [N, A, H] in the dtype of q; scores and softmax are float32.
  """
  function = _attend_kernel if has_kernel(
      backend, kv_XYJH.shape[2] // mesh_lib.shards('kv_heads'),
      kv_XYJH.shape[3], kv_XYJH.dtype) else _attend_xla
  return mesh_lib.per_device(
      functools.partial(function, window=window),
      [('batch', 'heads', None), (None, None, 'kv_heads', None), ('batch',),
       ('batch', None)],
      q_NAH, kv_XYJH, jnp.maximum(position_N, 0) + 1, table_NW)


def has_kernel(backend: str, heads: int, head_dim: int, dtype: Any) -> bool:
  """Whether the kernel reads pages of J = `heads` on each device.

  A vector register holds whole lanes of a head, and 8 rows of heads or a part
  of them. Its interpreter is right about 16 and more rows only in some cases:
  it does not hand the kernel's prefetched state from one block of heads to the
  next.
  """
  rows, rest = divmod(heads, 4 // jnp.dtype(dtype).itemsize)
  return (backend == 'splash' and not rest and head_dim % _LANES == 0
          and (rows in (1, 2, 4) or rows and rows % 8 == 0))


def most_slots(width: int) -> int:
  """The most slots of a device for which the kernel takes tables of W pages: it
  copies them to a chip's scalar memory, in tiles of 8 rows by 128 columns."""
  return _TABLE_BYTES // (4 * (width + -width % _LANES)) // 8 * 8


def columns_read(length: Any) -> Any:
  """The columns that the kernel reads of sequences of so many tokens."""
  return -(-length // _BLOCK_COLUMNS) * _BLOCK_COLUMNS


def _attend_kernel(q_NAH, kv_XYJH, length_N, table_NW, *, window):
  slots, _, head_dim = q_NAH.shape
  return kernel.ragged_paged_attention(
      q_NAH, kv_XYJH, length_N, table_NW,
      jnp.arange(slots + 1, dtype=jnp.int32), jnp.full(1, slots, jnp.int32),
      sm_scale=head_dim ** -0.5, sliding_window=window,
      num_queries_per_block=min(BLOCK_QUERIES, slots),
      num_kv_pages_per_block=min(
          table_NW.shape[1], max(1, _BLOCK_COLUMNS // kv_XYJH.shape[1])))


def _attend_xla(q_NAH, kv_XYJH, length_N, table_NW, *, window):
  slots, _, head_dim = q_NAH.shape
  kv_NTK2H = kv_XYJH[table_NW].reshape(
      slots, -1, kv_XYJH.shape[2] // 2, 2, head_dim)
  columns = kv_NTK2H.shape[1]
  return attention.attend_xla(
      q_NAH[:, None], kv_NTK2H[:, :, :, 0], kv_NTK2H[:, :, :, 1],
      length_N[:, None] - 1, jnp.broadcast_to(
          jnp.arange(columns, dtype=jnp.int32), (slots, columns)),
      window, None)[:, 0]


def store(kv: tuple[jax.Array, ...], k: tuple[jax.Array, ...],
          v: tuple[jax.Array, ...], target_QW: jax.Array
          ) -> tuple[jax.Array, ...]:
  """The pages of every layer with prompts, of which token i is in column i.
  Page w of a prompt goes to target_QW, nowhere if that is X.

  k, v: as in `transformer.KVCache`, for Q prompts of P columns.
  """
  def put(kv_XYJH, k_QKHP, v_QKPH):
    _, size, heads, head_dim = kv_XYJH.shape
    prompts, width = target_QW.shape
    new_QPK2H = jnp.stack([jnp.transpose(k_QKHP, (0, 3, 1, 2)),
                           jnp.transpose(v_QKPH, (0, 2, 1, 3))], 3)
    padding = [(0, 0)] * 5
    padding[1] = 0, width * size - new_QPK2H.shape[1]
    return kv_XYJH.at[target_QW.reshape(-1)].set(
        jnp.pad(new_QPK2H, padding).reshape(
            prompts * width, size, heads, head_dim), mode='drop')

  return tuple(map(put, kv, k, v))


def copy(kv: tuple[jax.Array, ...], source_M: jax.Array, target_M: jax.Array
         ) -> tuple[jax.Array, ...]:
  """Copies pages of every layer, all of which are read before any is written;
  nowhere if the target is X."""
  return tuple(pages.at[target_M].set(pages[source_M], mode='drop')
               for pages in kv)
