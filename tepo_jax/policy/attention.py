"""Attention over positions: one function, several backends.

The visibility rule: a key is visible iff 0 <= its position <= the query's (and
it is of the same segment, and within the window: its position > the query's -
window). It covers causality, padding, empty cache columns, packed rows and
sliding windows.

Backends: `xla` handles every case and holds the scores [B, N, S, T] of one
block of queries. `cudnn` (GPU) and `splash` (TPU) hold no scores and serve
sequences that attend to themselves: prefill, scoring, training.

Axes: B rows, S query columns, T key columns, N query heads, K key/value heads,
G = N / K query heads per key/value head, H head size.
"""

import functools

import jax
from jax.experimental.pallas.ops.tpu import splash_attention as splash
import jax.numpy as jnp

from tepo_jax import errors
from tepo_jax.policy import remat
from tepo_jax.runtime import mesh as mesh_lib

# A hidden key's score: finite, so that a query without a visible key (padding)
# yields no NaN, neither in its output nor in its gradient.
HIDDEN = -1e30
# Queries and keys that the kernel holds at a time. By a count, larger blocks
# and the fused backward pass take longer in packed rows (launch/PLANS.md).
_SPLASH_BLOCK = 512
_MIN_BLOCK = 64  # columns of a block of queries of `xla`
_MAX_BLOCKS = 8  # they are unrolled
# Logical axes of queries, keys, values and per-column arrays, for `per_device`.
_AXES = (('batch', None, 'heads', None), ('batch', None, 'kv_heads', None),
         ('batch', None, 'kv_heads', None), ('batch', None))


def attend(q_BSNH, k_BTKH, v_BTKH, query_position_BS, key_position_BT=None,
           window=None, backend='xla', segment_BS=None, *, block=None):
  """softmax(q kᵀ / √H) v over the visible keys.

  Args:
    q_BSNH: queries, rotated.
    k_BTKH: keys, rotated; N is a multiple of K, heads n // G share key head. A
      mesh's `tensor` divides both.
    v_BTKH: values.
    query_position_BS: i32, -1 for padding (whose output is undefined).
    key_position_BT: i32, -1 for padding and empty cache columns. None: keys and
      queries are the same columns, each sequence lies contiguously in its row,
      and its positions rise by one per column; padding may stand anywhere
      between sequences. All backends but xla require None or the queries'
      positions.
    window: how many positions back a query sees, itself included; None: all.
    backend: 'xla' or a name of KERNELS. Single queries (decoding) always use
      xla.
    segment_BS: i32, the sequence of a packed row that a column belongs to, of
      queries and keys alike (T = S); None: a row is one sequence.
    block: the form of `attend_block` that xla runs; None: that of this module.

  Returns:
    out_BSNH in the dtype of q; scores and softmax are float32.
  """
  single = q_BSNH.shape[1] == 1
  if backend == 'xla' or single:
    function = functools.partial(attend_xla, block=block or attend_block)
  else:
    function = KERNELS[backend]
  out_BSNH = function(q_BSNH, k_BTKH, v_BTKH, query_position_BS,
                      key_position_BT, window, segment_BS)
  if function in (KERNELS['splash'], KERNELS['splash_interpreted']):
    return out_BSNH  # it names what its own backward pass needs
  return remat.named(out_BSNH, remat.ATTENTION)


def choose(backend, platform, dtype, head_dim) -> str:
  """Returns the backend for a choice of one.

  Args:
    backend: one of CHOICES; 'auto' selects the platform's fastest.
    platform: of the devices: 'cpu', 'gpu' or 'tpu'.
    dtype: of the computation.
    head_dim: H.

  Raises:
    InputError: the backend does not support the platform, dtype or head size.
  """
  fits_cudnn = dtype == 'bfloat16' and head_dim % 8 == 0 and head_dim <= 128
  if backend == 'auto':
    fastest = {'gpu': 'cudnn' if fits_cudnn else 'xla', 'tpu': 'splash'}
    return fastest.get(platform, 'xla')
  needed = {'cudnn': 'gpu', 'splash': 'tpu'}.get(backend, platform)
  if platform != needed:
    raise errors.InputError(
        f'attention by {backend} needs a {needed}, and the devices are '
        f'{platform}')
  if backend == 'cudnn' and not fits_cudnn:
    raise errors.InputError(
        'attention by cudnn needs bfloat16 and a head size of 8 to 128 in '
        f'steps of 8; here {dtype} and {head_dim}')
  return backend


def by_window(config, layer, function, *arrays):
  """function(window of this layer, *arrays); config: a transformer.ModelConfig.
  """
  if not config.num_full_layers:
    return function(config.sliding_window, *arrays)
  return jax.lax.cond(
      layer < config.num_full_layers, functools.partial(function, None),
      functools.partial(function, config.sliding_window), *arrays)


@jax.checkpoint  # The backward pass computes the scores again.
def attend_block(q_BSKGH, k_BTKH, v_BTKH, visible_BST):
  """softmax(q kᵀ / √H) v over the visible keys, [B, S, K, G, H]."""
  product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
  score_BKSGT = product('BSKGH,BTKH->BKSGT', q_BSKGH, k_BTKH)
  score_BKSGT *= q_BSKGH.shape[-1] ** -0.5
  weight_BKSGT = jax.nn.softmax(
      jnp.where(visible_BST[:, None, :, None], score_BKSGT, HIDDEN))
  return product('BKSGT,BTKH->BSKGH', weight_BKSGT.astype(q_BSKGH.dtype),
                 v_BTKH).astype(q_BSKGH.dtype)


def attend_xla(q_BSNH, k_BTKH, v_BTKH, query_position_BS, key_position_BT,
               window, segment_BS, *, block=attend_block):
  """Backend `xla`: one block of queries after the other.

  Without key_position_BT a block skips the columns after it, so b blocks
  compute a share (b + 1) / 2b of all scores, and less with a window.
  """
  batch, length, heads, size = q_BSNH.shape
  kv_heads = k_BTKH.shape[2]
  q_BSKGH = q_BSNH.reshape(
      batch, length, kv_heads, heads // kv_heads, size)
  k_BTKH, v_BTKH = (x.astype(q_BSNH.dtype) for x in (k_BTKH, v_BTKH))
  pieces = [(slice(None), slice(None))]
  if key_position_BT is None:
    key_position_BT = query_position_BS
    pieces = _blocks(length, window)

  def attend_piece(queries, keys):
    segments = None
    if segment_BS is not None:
      segments = segment_BS[:, queries], segment_BS[:, keys]
    return block(
        q_BSKGH[:, queries], k_BTKH[:, keys], v_BTKH[:, keys],
        visible(query_position_BS[:, queries], key_position_BT[:, keys],
                window, segments))

  out_BSKGH = jnp.concatenate(
      [attend_piece(*piece) for piece in pieces], axis=1)
  return out_BSKGH.reshape(q_BSNH.shape)


def visible(query_position_BS, key_position_BT, window=None, segments=None):
  """The visibility rule, bool [B, S, T]; segments: of queries and of keys."""
  query_BS1 = query_position_BS[:, :, None]
  key_B1T = key_position_BT[:, None, :]
  visible_BST = (key_B1T >= 0) & (key_B1T <= query_BS1)
  if window is not None:
    visible_BST &= key_B1T > query_BS1 - window
  if segments is not None:
    query_segment_BS, key_segment_BT = segments
    visible_BST &= query_segment_BS[:, :, None] == key_segment_BT[:, None, :]
  return visible_BST


def _blocks(length, window):
  """Yields (queries, keys) of each block, as slices of a row's columns."""
  size = max(_MIN_BLOCK, -(-length // _MAX_BLOCKS))
  for start in range(0, length, size):
    stop = min(start + size, length)
    first = 0 if window is None else max(0, start - window + 1)
    yield slice(start, stop), slice(first, stop)


def _attend_cudnn(q_BSNH, k_BTKH, v_BTKH, query_position_BS, key_position_BT,
                  window, segment_BS, implementation='cudnn'):
  """cuDNN's flash attention, with the visibility rule as a mask.

  The mask takes 2 B S T bytes, 1/N of the scores. cuDNN itself supports
  lengths and causality but not segments: without the mask, packed sequences
  would see each other. `is_causal` only skips the half that the mask hides.
  """
  del key_position_BT  # equal to the queries'
  length = q_BSNH.shape[1]
  pad = -length % 2  # with a mask, its gradient requires even lengths
  visible_BST = visible(
      query_position_BS, query_position_BS, window,
      None if segment_BS is None else (segment_BS, segment_BS))
  out_BSNH = jax.nn.dot_product_attention(
      *(_pad(x, 1, pad) for x in (q_BSNH, k_BTKH, v_BTKH)),
      mask=_pad(_pad(visible_BST, 1, pad), 2, pad)[:, None],
      is_causal=True, implementation=implementation)
  return out_BSNH[:, :length]


def _attend_splash(q_BSNH, k_BTKH, v_BTKH, query_position_BS, key_position_BT,
                   window, segment_BS, interpret=False):
  """JAX's Pallas splash attention, on each device's own rows and heads.

  The kernel sees only the order and the segments of columns, not positions, so
  padding is given a segment of its own.
  """
  del key_position_BT  # equal to the queries'
  is_packed = segment_BS is not None
  segment_BS = jnp.where(
      query_position_BS >= 0, segment_BS if is_packed else 0, -1)
  return mesh_lib.per_device(
      functools.partial(_splash_piece, window=window, interpret=interpret,
                        is_packed=is_packed),
      _AXES, q_BSNH, k_BTKH, v_BTKH, segment_BS)


def _splash_piece(q_BSNH, k_BSKH, v_BSKH, segment_BS, *, window, interpret,
                  is_packed):
  length, size = q_BSNH.shape[1], q_BSNH.shape[3]
  lanes = splash.splash_attention_kernel.NUM_LANES
  block = min(_SPLASH_BLOCK, length + -length % lanes)
  pad = -length % block

  def heads_first(x_BSNH):
    return jnp.swapaxes(_pad(x_BSNH, 1, pad), 1, 2)

  shape = (length + pad, length + pad)
  mask = splash.CausalMask(shape) if window is None else splash.LocalMask(
      shape, (window - 1, 0), 0)
  # The kernel does not scale.
  scaled_BSNH = (q_BSNH.astype(jnp.float32) * size ** -0.5).astype(q_BSNH.dtype)
  kernel = splash.make_splash_mha_single_device(
      splash.splash_attention_mask.MultiHeadMask([mask] * q_BSNH.shape[2]),
      block_sizes=splash.BlockSizes(**dict.fromkeys((
          'block_q', 'block_kv', 'block_kv_compute', 'block_q_dkv',
          'block_kv_dkv', 'block_kv_dkv_compute', 'block_q_dq', 'block_kv_dq'),
          block)), residual_checkpoint_name=remat.ATTENTION,
      interpret=interpret)
  segment_BS = jnp.pad(segment_BS, ((0, 0), (0, pad)), constant_values=-1)
  arrays = (*map(heads_first, (scaled_BSNH, k_BSKH, v_BSKH)),
            splash.SegmentIds(segment_BS, segment_BS))
  if is_packed:
    kernel = _skipping(kernel, block)
  if is_packed and len(segment_BS) > 1:  # a call has one set of blocks to skip
    out_BNSH = jax.lax.map(lambda row: kernel(*row), arrays)
  else:
    out_BNSH = jax.vmap(kernel)(*arrays)
  return jnp.swapaxes(out_BNSH, 1, 2)[:, :length].astype(q_BSNH.dtype)


def _skipping(kernel, block):
  """The kernel, which also skips the blocks of queries and keys that share no
  segment: of packed rows most of what the causal mask leaves."""
  def attend(q_NSH, k_KSH, v_KSH, segments):
    shared_QT = blocks_share(segments.q, block)

    def without(info, axis):
      # Where a window shortens the grid, `data_next` has the blocks' places.
      shown = jnp.take_along_axis(
          shared_QT, info.data_next[0].astype(jnp.int32), axis)
      return info._replace(block_mask=jnp.where(
          shown, info.block_mask, 0).astype(info.block_mask.dtype))

    return splash.splash_attention_kernel.SplashAttentionKernel(
        without(kernel.fwd_mask_info, 1), without(kernel.dq_mask_info, 1),
        without(kernel.dkv_mask_info, 0), **kernel.kwargs)(
            q_NSH, k_KSH, v_KSH, segments)

  return attend


def blocks_share(segment_S, block):
  """Whether a block of queries and one of keys may share a segment, bool
  [blocks, blocks]: their ranges of ids overlap. Padding, -1, is ignored, but a
  block always shares with itself.
  """
  segment_QI = segment_S.reshape(-1, block)
  last_Q = segment_QI.max(1)
  first_Q = jnp.where(segment_QI < 0, last_Q[:, None], segment_QI).min(1)
  overlap_QT = (first_Q[:, None] <= last_Q) & (first_Q <= last_Q[:, None])
  real_Q = last_Q >= 0
  return (overlap_QT & real_Q[:, None] & real_Q) | jnp.eye(
      len(last_Q), dtype=bool)


def _pad(x, axis, amount):
  widths = [(0, 0)] * x.ndim
  widths[axis] = (0, amount)
  return jnp.pad(x, widths)


KERNELS = {
    'cudnn': _attend_cudnn,
    'splash': _attend_splash,
    # The same kernels on any device, very slow: for tests.
    'splash_interpreted': functools.partial(_attend_splash, interpret=True),
}
CHOICES = ('auto', 'xla', 'cudnn', 'splash')  # values of the config's field
