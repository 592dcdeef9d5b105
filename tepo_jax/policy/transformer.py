"""The policy: one decoder-only transformer for Qwen2, Qwen3, Llama, Mistral.

The families differ by fields of `ModelConfig` only. Parameters are a plain
nested dict with the layers stacked on axis 0; the key/value cache is an
argument in and a value out. Prompt and completion are not distinguished here.

Axes: B rows, S columns (token indices), M = B * S, T key columns, V vocabulary,
D model, F feed-forward, L layers, N query heads, K key/value heads, H head
size.
"""

import dataclasses
import functools
from typing import Any

from flax import linen as nn
import flax.struct
import jax
import jax.numpy as jnp

from tepo_jax.policy import attention
from tepo_jax.policy import layers as layers_lib
from tepo_jax.policy import lora as lora_lib
from tepo_jax.policy import ops as ops_lib
from tepo_jax.policy import padding as padding_lib
from tepo_jax.policy import pages as pages_lib
from tepo_jax.policy import prompt_sharing
from tepo_jax.policy import remat
from tepo_jax.policy import rope
from tepo_jax.policy import sharded_layers
from tepo_jax.runtime import mesh as mesh_lib


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """Architecture first, then execution options (EXECUTION_FIELDS)."""

  vocab_size: int
  d_model: int
  num_layers: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  d_ff: int
  max_position: int
  rope_theta: float = 1e4
  rope_scaling: rope.RopeScaling | None = None
  norm_eps: float = 1e-6
  tie_embeddings: bool = False
  qkv_bias: bool = False
  qk_norm: bool = False
  # Positions a query sees, itself included; None: all up to its own.
  sliding_window: int | None = None
  # The first layers ignore the window (Qwen's max_window_layers).
  num_full_layers: int = 0

  dtype: str = 'float32'  # of the computation; parameters are cast at use
  remat: str = 'none'  # what the backward pass recomputes: of remat.POLICIES
  attention: str = 'xla'  # or a name of attention.KERNELS
  ops: ops_lib.Ops = ops_lib.PLAIN  # or the table of policy.cpu.ops

  lora: lora_lib.Lora | None = None  # adapters in the same tree

  # Set for a mesh by `padding.sharded_over`.
  vocab_padding: int = 0  # rows of embedding and head beyond the vocabulary
  kv_copies: int = 1  # of each key/value head, in attention and in the cache

  @property
  def cache_heads(self) -> int:
    return self.num_kv_heads * self.kv_copies


# Not part of the architecture: never saved with a model.
EXECUTION_FIELDS = (
    'dtype', 'remat', 'attention', 'ops', 'lora', 'vocab_padding', 'kv_copies')


@flax.struct.dataclass
class KVCache:
  """Keys and values of every layer, see `cache.init_cache`; `index` is the next
  column to write."""

  k: tuple[jax.Array, ...]  # L arrays [B, K, H, T]
  v: tuple[jax.Array, ...]  # L arrays [B, K, T, H]
  position: jax.Array  # i32 [B, T], -1 = empty
  index: jax.Array  # i32 []


def init(config: ModelConfig, key: jax.Array) -> dict[str, Any]:
  """Random float32 parameters: normal(0, INIT_STDDEV), scales 1, biases 0."""
  return nn.meta.unbox(_boxed(config, key))


def logical_axes(config: ModelConfig) -> dict[str, Any]:
  """The tree of `init`; leaves are tuples of a logical name per dimension."""
  return jax.tree.map(
      lambda leaf: tuple(leaf.names), _abstract(config),
      is_leaf=lambda node: isinstance(node, nn.LogicallyPartitioned))


def abstract_params(config: ModelConfig, dtype='float32') -> dict[str, Any]:
  """The tree of `init` as ShapeDtypeStructs of `dtype`."""
  return jax.tree.map(
      lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype),
      nn.meta.unbox(_abstract(config)))


def forward(config: ModelConfig, params, token_BS, position_BS,
            cache: KVCache | pages_lib.PagedCache | None = None,
            segment_BS=None, sequences: prompt_sharing.Sequences | None = None
            ) -> tuple[jax.Array, Any]:
  """Hidden states after the final norm.

  Args:
    config: static under jit.
    params: the tree of `init` in any floating dtype: cast to config.dtype at
      use. With a cache, the tree of `cache.convert`.
    token_BS: i32 ids; padding may hold any valid id.
    position_BS: i32, -1 = padding (its output is undefined).
    cache: None: the S tokens see each other. Else S new columns are written at
      cache.index (the caller ensures the capacity) and the tokens see the whole
      cache. If config.attention is not 'xla', several tokens at once (a
      prefill) see only each other: a cache that is not empty then yields NaN.
      A PagedCache takes one token a row, S = 1, and must have its place.
    segment_BS: i32, the sequence of a packed row that a column belongs to;
      tokens see their own sequence only. None: a row is one sequence. Not with
      a cache.
    sequences: the rows that attention processes instead of these. Not with a
      cache.

  Returns:
    hidden_BSD in config.dtype, and the cache with S more columns, or None.
  """
  return _Transformer(config).apply(
      {'params': params}, token_BS, position_BS, cache, segment_BS, sequences)


def head_weight(config: ModelConfig, params):
  """The head [D, V], or the tied embedding [V, D], in the stored dtype."""
  if config.tie_embeddings:
    return params['embed']['embedding']
  return params['head']['kernel']


def logits(config: ModelConfig, params, hidden):
  """The logits, float32 [..., V], of hidden [..., D], for decoding.

  Where a mesh padded the vocabulary, V includes the padding.
  """
  weight = head_weight(config, params).astype(config.dtype)
  logits_MV = config.ops.decoding_logits(
      hidden.reshape(-1, config.d_model), weight, config.tie_embeddings)
  return padding_lib.without_padding(config.vocab_size, logits_MV).reshape(
      *hidden.shape[:-1], -1)


@flax.struct.dataclass
class _Columns:
  """What the layers need besides hidden states; the last three with a cache.

  rotation: of `rope.rotation`. key_position_BT: positions of the cache with
  the new columns; index: the first of these. Or pages: a PagedCache, no kv.
  """

  position_BS: jax.Array
  rotation: tuple[jax.Array, jax.Array]
  segment_BS: jax.Array | None
  sequences: prompt_sharing.Sequences | None
  key_position_BT: jax.Array | None = None
  index: jax.Array | None = None
  pages: pages_lib.PagedCache | None = None


def _columns(config, position_BS, segment_BS, sequences):
  return _Columns(
      position_BS, rope.rotation(position_BS, config.head_dim,
                                 config.rope_theta, config.rope_scaling),
      segment_BS, sequences)


class _Layer(nn.Module):
  """x += attention(norm(x)); x += mlp(norm(x)). One step of the layer scan.

  `stores` are the layer's part of the cache, returned with S new columns. In
  `sharded_layers`, x_MD and the config are those of one device.
  """

  config: ModelConfig

  @nn.compact
  def __call__(self, x_MD, layer, columns, stores=None):
    config = self.config
    linear = functools.partial(
        layers_lib.Linear, lora=config.lora, ops=config.ops)

    def normed(name):
      return mesh_lib.gathered(
          layers_lib.Norm(config.norm_eps, name=name)(x_MD), 'tokens',
          size=columns.position_BS.size)

    attended_MD, stores = self._attention(
        normed('attention_norm'), linear, layer, columns, stores)
    x_MD = _by_rows(x_MD + remat.named(
        mesh_lib.summed(attended_MD, 'tokens'), remat.ATTENTION))
    y_MD = normed('mlp_norm')
    gate_MF, up_MF = (
        remat.named(linear(config.d_ff, ('embed', 'mlp'), name=name)(y_MD),
                    remat.MLP) for name in ('gate', 'up'))
    down_MD = nn.remat(layers_lib.Gated)(
        config.d_model, ('mlp', 'embed'), lora=config.lora, ops=config.ops,
        name='down')(gate_MF, up_MF)
    return _by_rows(x_MD + mesh_lib.summed(down_MD, 'tokens')), stores

  def _attention(self, x_MD, linear, layer, columns, stores):
    config = self.config
    q_BSNH, k_BSKH, v_BSKH = self._project(x_MD, linear, columns)
    if columns.pages is None:
      out_BSNH, stores = self._attend_columns(
          q_BSNH, k_BSKH, v_BSKH, layer, columns, stores)
    else:
      stores = pages_lib.write(
          stores, k_BSKH[:, 0], v_BSKH[:, 0], columns.pages.column)
      out_BSNH = attention.by_window(
          config, layer, lambda window, *arrays: pages_lib.attend(
              *arrays, window, config.attention), q_BSNH[:, 0], stores,
          columns.position_BS[:, 0], columns.pages.table_NW)
    out_MD = linear(config.d_model, ('heads', 'embed'), name='o')(
        out_BSNH.reshape(x_MD.shape[0], -1))
    return out_MD, stores

  def _attend_columns(self, q_BSNH, k_BSKH, v_BSKH, layer, columns, stores):
    """Attention among the tokens, or over a KVCache's columns."""
    config, position_BS = self.config, columns.position_BS
    key_position_BT = columns.key_position_BT
    k_BTKH, v_BTKH = k_BSKH, v_BSKH
    if stores is not None:
      stores, k_BTKH, v_BTKH = _write(stores, k_BSKH, v_BSKH, columns.index)
      if config.attention != 'xla' and position_BS.shape[1] > 1:
        # These backends see only the S new columns. NaN if there are others.
        k_BTKH = jnp.where(columns.index == 0, k_BSKH, jnp.nan)
        v_BTKH, key_position_BT = v_BSKH, None
    if columns.sequences is None:
      out_BSNH = _attend(config, layer, q_BSNH, k_BTKH, v_BTKH, position_BS,
                         key_position_BT, columns.segment_BS)
    else:
      sequences = columns.sequences
      out_BSNH = sequences.collect(_attend(
          config, layer, *map(sequences.spread, (q_BSNH, k_BTKH, v_BTKH)),
          sequences.position_RA, None, sequences.segment_RA))
    return out_BSNH, stores

  def _project(self, x_MD, linear, columns):
    """Queries, keys and values by head; queries and keys are rotated."""
    config = self.config

    def heads(name, axis, count, norm=False):
      whole = axis == 'kv_heads' and config.kv_copies > 1
      y = remat.named(linear(
          count * config.head_dim, ('embed', None if whole else axis),
          config.qkv_bias, name=name)(x_MD), remat.ATTENTION)
      y = y.reshape(*columns.position_BS.shape, count, config.head_dim)
      if not norm:
        return y
      return layers_lib.Norm(config.norm_eps, name=f'{name}_norm')(y)

    q_BSNH = rope.rotate(
        heads('q', 'heads', config.num_heads, config.qk_norm),
        columns.rotation)
    k_BSKH = rope.rotate(
        heads('k', 'kv_heads', config.num_kv_heads, config.qk_norm),
        columns.rotation)
    v_BSKH = heads('v', 'kv_heads', config.num_kv_heads)
    if config.kv_copies > 1:
      k_BSKH, v_BSKH = (
          mesh_lib.constrain(jnp.repeat(x, config.kv_copies, axis=2),
                    ('batch', None, 'kv_heads', None))
          for x in (k_BSKH, v_BSKH))
    return q_BSNH, k_BSKH, v_BSKH


class _Transformer(nn.Module):
  """Embedding, layers, final norm; `logits` applies the head.

  The layers are scanned; with a cache they are applied one by one.
  """

  config: ModelConfig

  @nn.compact
  def __call__(self, token_BS, position_BS, cache=None, segment_BS=None,
               sequences=None):
    config = self.config
    vocabulary = config.vocab_size + config.vocab_padding
    embedding_VD = layers_lib.Weight(
        'embedding', (vocabulary, config.d_model), ('vocab', 'embed'),
        name='embed')()
    if not config.tie_embeddings:
      layers_lib.Weight('kernel', (config.d_model, vocabulary),
                        ('embed', 'vocab'), name='head')()
    x_MD = jnp.take(embedding_VD, token_BS.reshape(-1), axis=0)
    x_MD = _by_rows(x_MD.astype(config.dtype))
    columns = _columns(config, position_BS, segment_BS, sequences)
    if isinstance(cache, pages_lib.PagedCache):
      columns = columns.replace(pages=cache.replace(kv=()))
      x_MD, kv = self._decode(x_MD, columns, cache.kv)
      cache = cache.replace(kv=kv, column=cache.column + 1)
    elif cache is not None:
      columns = columns.replace(
          index=cache.index, key_position_BT=jax.lax.dynamic_update_slice(
              cache.position, position_BS, (0, cache.index)))
      x_MD, stores = self._decode(x_MD, columns, zip(cache.k, cache.v))
      cache = KVCache(*zip(*stores), columns.key_position_BT,
                      cache.index + position_BS.shape[1])
    elif sharded_layers.are_needed(config) and not self.is_initializing():
      x_MD = self._sharded(x_MD, position_BS, segment_BS, sequences)
    else:
      x_MD, _ = _scan(config)(config, name='layers')(
          x_MD, jnp.arange(config.num_layers), columns)
    x_MD = layers_lib.Norm(config.norm_eps, name='final_norm')(x_MD)
    return x_MD.reshape(*position_BS.shape, config.d_model), cache

  def _sharded(self, x_MD, *rows):
    """The layers on a mesh that cuts their weights."""
    config = self.config

    def make_layer(own, rows):
      columns = _columns(config, *rows)
      return lambda x_MD, params, number: _Layer(own, parent=None).apply(
          {'params': params}, x_MD, number, columns)[0]

    x_BSD = sharded_layers.run(
        config, logical_axes(config)['layers'], make_layer,
        self.get_variable('params', 'layers'),
        x_MD.reshape(*rows[0].shape, -1), rows)
    return _by_rows(x_BSD.reshape(x_MD.shape))

  def _decode(self, x_MD, columns, stores):
    """The layers, each with its own parameters and part of the cache."""
    layer, written = _layer(self.config)(self.config, parent=None), []
    for i, (params, store) in enumerate(
        zip(self.get_variable('params', 'layers'), stores)):
      x_MD, new = layer.apply({'params': params}, x_MD, i, columns, store)
      written.append(new)
    return x_MD, tuple(written)


def _layer(config: ModelConfig):
  """`_Layer`, rematerialised as config.remat says."""
  if config.remat == 'none':
    return _Layer
  return nn.remat(_Layer, **remat.options(config))


def _scan(config: ModelConfig):
  """Scans the layer over the stacked parameters and the layers' numbers."""
  return nn.scan(
      _layer(config), variable_axes={'params': 0}, split_rngs={'params': True},
      in_axes=(0, nn.broadcast), length=config.num_layers,
      metadata_params={nn.PARTITION_NAME: 'layers'})


def _write(stores, k_BSKH, v_BSKH, index):
  """Returns a layer's stores with S new columns, and all its keys and values.

  The transposes are free: they cancel against those of attention's products.
  """
  k_store, v_store = stores
  k_BSKH, v_BSKH = k_BSKH.astype(k_store.dtype), v_BSKH.astype(v_store.dtype)
  update = jax.lax.dynamic_update_slice
  k_store = update(
      k_store, jnp.transpose(k_BSKH, (0, 2, 3, 1)), (0, 0, 0, index))
  v_store = update(
      v_store, jnp.transpose(v_BSKH, (0, 2, 1, 3)), (0, 0, index, 0))
  k_BTKH = jnp.transpose(k_store, (0, 3, 1, 2))
  v_BTKH = jnp.transpose(v_store, (0, 2, 1, 3))
  return (k_store, v_store), k_BTKH, v_BTKH


def _attend(config: ModelConfig, layer, q_BSNH, k_BTKH, v_BTKH, position_BS,
            key_position_BT, segment_BS):
  """`attention.attend` with this layer's window."""
  return attention.by_window(
      config, layer, lambda window, *arrays: attention.attend(
          *arrays, position_BS, key_position_BT, window, config.attention,
          segment_BS, block=config.ops.attend_block), q_BSNH, k_BTKH, v_BTKH)


def _by_rows(x_MD):
  return mesh_lib.constrain(x_MD, ('batch', None))


def _boxed(config: ModelConfig, key: jax.Array):
  zeros_BS = jnp.zeros((1, 1), jnp.int32)
  return _Transformer(config).init(key, zeros_BS, zeros_BS)['params']


@functools.cache  # asked for about 30 times when a run starts
def _abstract(config: ModelConfig):
  return jax.eval_shape(functools.partial(_boxed, config), jax.random.key(0))
