"""Attention over positions: one function, several backends.

One visibility rule serves causality, padding, empty cache slots, packed rows
and sliding windows: a key is visible iff it is of the query's segment, 0 <= its
position <= the query's, and, with a window w, its position > the query's - w.

Backends: `xla` does everything, and holds the scores [B, N, S, T] of one block
of queries; on a CPU it skips what is hidden in long packed rows. `cudnn` (GPU)
and `splash` (TPU) hold none, and serve sequences that attend to themselves:
prefill, scoring, training. One query a row (decoding) is always xla's.

Axes: B completions, S query slots, T key slots, N query heads, K key/value
heads, G = N / K query heads a key/value head, H head size.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention as splash

from tepo_jax import errors
from tepo_jax.policy.cpu import packed_attention
from tepo_jax.policy import plain_attention
from tepo_jax.policy import visibility
from tepo_jax.runtime import mesh as mesh_lib

_SPLASH_BLOCK = 512  # queries and keys that the kernel holds at a time
_SHORT = 256  # slots of a packed row in which skipping blocks gains nothing
# Of queries, keys, values, and of what each slot has, for `per_device`.
_AXES = (('batch', None, 'heads', None), ('batch', None, 'kv_heads', None),
         ('batch', None, 'kv_heads', None), ('batch', None))


def attend(q_BSNH, k_BTKH, v_BTKH, query_position_BS, key_position_BT=None,
           window=None, backend='xla', query_segment_BS=None,
           key_segment_BT=None):
  """softmax(q k^T / sqrt(H)) v over the visible keys.

  Args:
    q_BSNH: queries, rotated.
    k_BTKH: keys, rotated; N is a multiple of K, heads n // G share key head. A
      mesh's `tensor` divides both.
    v_BTKH: values.
    query_position_BS: i32, -1 for padding (whose output means nothing).
    key_position_BT: i32, -1 for padding and empty cache slots. None: keys and
      queries are the same slots, and inside a sequence positions rise by one a
      slot (padding before, behind and between sequences is well). xla then
      computes on half of the square at most; the others ask for it.
    window: how many positions back a query sees, itself included; None: all.
    backend: a name of BACKENDS.
    query_segment_BS, key_segment_BT: i32, which sequence of a packed row a
      slot belongs to; None: a row is one sequence. key_segment_BT goes with
      key_position_BT.

  Returns:
    out_BSNH in the dtype of q; scores and softmax are float32.
  """
  if q_BSNH.shape[1] == 1:
    backend = 'xla'
  return BACKENDS[backend](
      q_BSNH, k_BTKH, v_BTKH, query_position_BS, key_position_BT, window,
      query_segment_BS, key_segment_BT)


def choose(backend, platform, dtype, head_dim) -> str:
  """The name of BACKENDS for a config's choice; 'auto' is the platform's own.

  Args:
    backend: a name of CHOICES.
    platform: of the devices: 'cpu', 'gpu' or 'tpu'.
    dtype: of the computation.
    head_dim: H.

  Raises:
    InputError: that backend cannot serve here.
  """
  fits_cudnn = dtype == 'bfloat16' and head_dim % 8 == 0 and head_dim <= 128
  if backend == 'auto':
    own = {'gpu': 'cudnn' if fits_cudnn else 'xla', 'tpu': 'splash'}
    return own.get(platform, 'xla')
  needed = {'cudnn': 'gpu', 'splash': 'tpu'}.get(backend, platform)
  if platform != needed:
    raise errors.InputError(
        f'config.compute.attention={backend}: needs a {needed}, and the '
        f'devices are {platform}')
  if backend == 'cudnn' and not fits_cudnn:
    raise errors.InputError(
        f'config.compute.attention=cudnn: needs bfloat16 and a head size of 8 '
        f'to 128 in steps of 8; here {dtype} and {head_dim}')
  return backend


def _attend_xla(q_BSNH, k_BTKH, v_BTKH, query_position_BS, key_position_BT,
                window, query_segment_BS, key_segment_BT):
  """By `packed_attention` long packed rows on a CPU, else `_attend_blocks`."""
  blocks = functools.partial(_attend_blocks, window=window)
  if (key_position_BT is not None or query_segment_BS is None
      or q_BSNH.shape[1] <= _SHORT):
    return blocks(q_BSNH, k_BTKH, v_BTKH, query_position_BS, query_segment_BS,
                  key_position_BT, key_segment_BT)
  return jax.lax.platform_dependent(
      q_BSNH, k_BTKH, v_BTKH, query_position_BS, query_segment_BS,
      cpu=functools.partial(_attend_packed, window=window), default=blocks)


def _attend_packed(q_BSNH, k_BSKH, v_BSKH, position_BS, segment_BS, window):
  """On each device's own piece: it takes one row after the other."""
  def of_piece(q_BSNH, k_BSKH, v_BSKH, *layout):
    return packed_attention.attend(
        window, _by_key_head(q_BSNH, k_BSKH), k_BSKH, v_BSKH, *layout
    ).reshape(q_BSNH.shape)

  return mesh_lib.per_device(
      of_piece, _AXES + (('batch', None),), q_BSNH, k_BSKH, v_BSKH,
      position_BS, segment_BS)


def _attend_blocks(q_BSNH, k_BTKH, v_BTKH, query_position_BS, query_segment_BS,
                   key_position_BT=None, key_segment_BT=None, *, window):
  """Block by block; the repeated keys are never written out."""
  q_BSKGH = _by_key_head(q_BSNH, k_BTKH)
  k_BTKH, v_BTKH = (x.astype(q_BSNH.dtype) for x in (k_BTKH, v_BTKH))
  pieces = [(slice(None), slice(None))]
  if key_position_BT is None:
    key_position_BT, key_segment_BT = query_position_BS, query_segment_BS
    pieces = plain_attention.blocks(q_BSNH.shape[1], window)

  def of_piece(x, piece):
    return None if x is None else x[:, piece]

  def block(mine, keys):
    return plain_attention.attend(
        q_BSKGH[:, mine], k_BTKH[:, keys], v_BTKH[:, keys],
        visibility.visible(
            query_position_BS[:, mine], key_position_BT[:, keys], window,
            of_piece(query_segment_BS, mine), of_piece(key_segment_BT, keys)))

  out_BSKGH = jnp.concatenate(
      [block(mine, keys) for mine, keys in pieces], axis=1)
  return out_BSKGH.reshape(q_BSNH.shape)


def _by_key_head(q_BSNH, k_BTKH):
  """[B, S, K, G, H]."""
  batch, length, heads, size = q_BSNH.shape
  kv_heads = k_BTKH.shape[2]
  return q_BSNH.reshape(batch, length, kv_heads, heads // kv_heads, size)


def _attend_cudnn(q_BSNH, k_BTKH, v_BTKH, query_position_BS, key_position_BT,
                  window, query_segment_BS, key_segment_BT,
                  implementation='cudnn'):
  """cuDNN's flash attention under the visibility rule as a mask.

  The mask costs 2 B S T bytes, a head's 1/N of what xla holds. cuDNN by itself
  knows lengths and causality but no segments, with which packed sequences
  would see each other; with the mask nothing is left to its own rules.
  Causality beside it only spares the half that the mask forbids anyway.
  """
  del key_position_BT, key_segment_BT  # as the queries'
  length = q_BSNH.shape[1]
  pad = -length % 2  # with a mask, its gradient takes even lengths alone
  visible_BST = visibility.visible(
      query_position_BS, query_position_BS, window, query_segment_BS,
      query_segment_BS)
  out_BSNH = jax.nn.dot_product_attention(
      *(_pad(x, 1, pad) for x in (q_BSNH, k_BTKH, v_BTKH)),
      mask=_pad(_pad(visible_BST, 1, pad), 2, pad)[:, None],
      is_causal=True, implementation=implementation)
  return out_BSNH[:, :length]


def _attend_splash(q_BSNH, k_BTKH, v_BTKH, query_position_BS, key_position_BT,
                   window, query_segment_BS, key_segment_BT, interpret=False):
  """Splash attention of jax's Pallas kernels, on each device's own piece.

  It tells slots apart by order and segment: padding is a segment of its own.
  """
  del key_position_BT, key_segment_BT  # as the queries'
  segment_BS = 0 if query_segment_BS is None else query_segment_BS
  segment_BS = jnp.where(query_position_BS >= 0, segment_BS, -1)
  return mesh_lib.per_device(
      functools.partial(_splash_piece, window=window, interpret=interpret),
      _AXES, q_BSNH, k_BTKH, v_BTKH, segment_BS)


def _splash_piece(q_BSNH, k_BSKH, v_BSKH, segment_BS, *, window, interpret):
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
          block)), interpret=interpret)
  segment_BS = jnp.pad(segment_BS, ((0, 0), (0, pad)), constant_values=-1)
  out_BNSH = jax.vmap(kernel)(
      *map(heads_first, (scaled_BSNH, k_BSKH, v_BSKH)),
      splash.SegmentIds(segment_BS, segment_BS))
  return jnp.swapaxes(out_BNSH, 1, 2)[:, :length].astype(q_BSNH.dtype)


def _pad(x, axis, amount):
  widths = [(0, 0)] * x.ndim
  widths[axis] = (0, amount)
  return jnp.pad(x, widths)


BACKENDS = {
    'xla': _attend_xla,
    'cudnn': _attend_cudnn,
    'splash': _attend_splash,
    # The same kernels on any device, very slowly: for tests.
    'splash_interpreted': functools.partial(_attend_splash, interpret=True),
}
CHOICES = ('auto', 'xla', 'cudnn', 'splash')  # of a config
