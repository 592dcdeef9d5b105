"""The policy: one decoder-only transformer for Qwen2, Qwen3, Llama, Mistral.

The families differ by fields of `ModelConfig` only. Parameters are a plain
nested dict with the layers stacked on axis 0; the key/value cache is an
argument in and a value out.

Axes: B completions, S token slots, M = B * S, T key slots, V vocabulary,
D model, F feed-forward, L layers, N query heads, K key/value heads, H head
size. Nothing here divides a sequence into prompt and completion.
"""

import dataclasses
import functools
from typing import Any

import flax
from flax import linen as nn
import jax
import jax.numpy as jnp

from tepo_jax.policy import attention
from tepo_jax.policy import layers as layers_lib
from tepo_jax.policy import lora as lora_lib
from tepo_jax.policy import padding as padding_lib
from tepo_jax.policy import prompt_sharing
from tepo_jax.policy import rope


@dataclasses.dataclass(frozen=True)
class ModelConfig:
  """What the model is, and below the gap how it is executed."""

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
  # Positions a query sees, itself included; None: all before it.
  sliding_window: int | None = None
  # The first layers ignore the window (Qwen's max_window_layers).
  num_full_layers: int = 0

  dtype: str = 'float32'  # of the computation; parameters are cast at use
  remat: str = 'none'  # what the backward pass recomputes: of REMAT
  unroll: int = 1  # layers per scan step; num_layers: no loop at all
  attention: str = 'xla'  # a name of attention.BACKENDS

  lora: lora_lib.Lora | None = None  # adapters in the same tree

  # What a mesh asks for: see `on_mesh.sharded_over`.
  vocab_padding: int = 0  # rows of embedding and head beyond the vocabulary
  kv_copies: int = 1  # of each key/value head, in attention and in the cache

  @property
  def cache_heads(self) -> int:
    return self.num_kv_heads * self.kv_copies


# Not of the model: changed with dataclasses.replace, never saved.
EXECUTION_FIELDS = (
    'dtype', 'remat', 'unroll', 'attention', 'lora', 'vocab_padding',
    'kv_copies')

# What is recomputed in the backward pass: nothing; all of a layer; all but the
# outputs of its linear maps (attention and what is element by element).
REMAT = {'none': None, 'full': None,
         'dots': jax.checkpoint_policies.dots_with_no_batch_dims_saveable}

@flax.struct.dataclass
class KVCache:
  """Keys and values of every layer; `index` is the next column to write.

  Stacked as noted, or one array a layer: see `decoding.init_cache`.
  """

  k: Any  # [L, B, T, K, H]
  v: Any  # [L, B, T, K, H]
  position: jax.Array  # i32 [B, T], -1 = empty
  index: jax.Array  # i32 []


def init(config: ModelConfig, key: jax.Array) -> dict[str, Any]:
  """Random float32 parameters: normal(0, INIT_STDDEV), scales 1, biases 0."""
  return nn.meta.unbox(_boxed(config, key))


def logical_axes(config: ModelConfig) -> dict[str, Any]:
  """The tree of `init`, each leaf a tuple of one logical name a dimension."""
  boxed = jax.eval_shape(functools.partial(_boxed, config), jax.random.key(0))
  return jax.tree.map(
      lambda leaf: tuple(leaf.names), boxed, is_leaf=_is_boxed)


def abstract_params(config: ModelConfig, dtype='float32') -> dict[str, Any]:
  """The tree of `init` as ShapeDtypeStructs of `dtype`."""
  shapes = jax.eval_shape(functools.partial(init, config), jax.random.key(0))
  return jax.tree.map(
      lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), shapes)


def init_cache(
    config: ModelConfig, batch: int, length: int, dtype) -> KVCache:
  """An empty cache for `batch` rows of `length` slots."""
  shape = (config.num_layers, batch, length,
           config.cache_heads, config.head_dim)
  return KVCache(
      k=jnp.zeros(shape, dtype), v=jnp.zeros(shape, dtype),
      position=jnp.full((batch, length), -1, jnp.int32),
      index=jnp.zeros((), jnp.int32))


def forward(config: ModelConfig, params, token_BS, position_BS,
            cache: KVCache | None = None, segment_BS=None,
            sequences: prompt_sharing.Sequences | None = None):
  """Hidden states after the final norm.

  Args:
    config: static under jit.
    params: as of `init`, in any floating dtype: cast to config.dtype at use. Or
      as of `decoding.convert`, with a cache of `decoding.init_cache`.
    token_BS: i32 ids; a padding slot may hold any valid id.
    position_BS: i32, -1 = padding (its output means nothing).
    cache: None: the S tokens see each other. Else the S new columns are
      written at cache.index (which must leave room: the caller's promise) and
      the tokens see the whole cache. Several tokens at once (a prefill) see
      only each other where config.attention is not 'xla': the cache must be
      empty then, or all is NaN.
    segment_BS: i32, which sequence of a packed row a slot belongs to; tokens
      see their own sequence only. None: a row is one sequence. Not with a
      cache.
    sequences: the rows that attention sees instead of these. Not with a cache.

  Returns:
    hidden_BSD in config.dtype, and the cache with index + S (None without).
  """
  return _Transformer(config).apply(
      {'params': params}, token_BS, position_BS, cache, segment_BS, sequences)


def head_weight(config: ModelConfig, params):
  """[D, V] of the head, or [V, D] of the tied embedding, as stored."""
  if config.tie_embeddings:
    return params['embed']['embedding']
  return params['head']['kernel']


def logits(config: ModelConfig, params, hidden):
  """float32 [..., V] of hidden [..., D]: the head, or the tied embedding.

  Where a mesh padded the vocabulary, V includes the padding. The weight comes
  first in a product where V is its first axis: on a CPU the others are slower,
  and XLA is kept from making one of them where `draw` turns the logits.
  """
  weight = head_weight(config, params).astype(config.dtype)
  hidden_MD = hidden.reshape(-1, config.d_model)
  product = functools.partial(
      jax.lax.dot_general, preferred_element_type=jnp.float32)
  if config.tie_embeddings:
    logits_MV = product(weight, hidden_MD, (((1,), (1,)), ((), ()))).T
  else:
    logits_MV = jax.lax.optimization_barrier(
        product(hidden_MD, weight, (((1,), (0,)), ((), ()))))
  return padding_lib.without_padding(config.vocab_size, logits_MV).reshape(
      *hidden.shape[:-1], -1)


def constrain(x, axes):
  """Lays x out by logical axis names, where rules for them are in force."""
  return nn.with_logical_constraint(x, axes)


class _Layer(nn.Module):
  """x += attention(norm(x)); x += mlp(norm(x)). One step of the layer scan.

  The cache of all the layers rides in the carry, so that XLA updates it in
  place; each layer writes its own S columns.
  """

  config: ModelConfig

  @nn.compact
  def __call__(self, carry, layer, turn, position_BS, key_position_BT, index,
               segment_BS, sequences):
    config = self.config
    x_MD, stores = carry
    attended_MD, stores = self._attention(
        layers_lib.Norm(config.norm_eps, name='attention_norm')(x_MD),
        stores, layer, turn, position_BS, key_position_BT, index, segment_BS,
        sequences)
    x_MD = _by_rows(x_MD + attended_MD)
    y_MD = layers_lib.Norm(config.norm_eps, name='mlp_norm')(x_MD)
    linear = functools.partial(layers_lib.Linear, lora=config.lora)
    gate_MF = linear(config.d_ff, ('embed', 'mlp'), name='gate')(y_MD)
    up_MF = linear(config.d_ff, ('embed', 'mlp'), name='up')(y_MD)
    down_MD = nn.remat(layers_lib.Gated)(
        config.d_model, ('mlp', 'embed'), lora=config.lora, name='down')(
            gate_MF, up_MF)
    return (_by_rows(x_MD + down_MD), stores), None

  def _attention(self, x_MD, stores, layer, turn, position_BS,
                 key_position_BT, index, segment_BS, sequences):
    config = self.config

    def heads(name, axis, count, norm=False):
      whole = axis == 'kv_heads' and config.kv_copies > 1
      y = layers_lib.Linear(
          count * config.head_dim, ('embed', None if whole else axis),
          config.qkv_bias, config.lora, name=name)(x_MD)
      y = y.reshape(*position_BS.shape, count, config.head_dim)
      if not norm:
        return y
      return layers_lib.Norm(config.norm_eps, name=f'{name}_norm')(y)

    q_BSNH = rope.rotate(
        heads('q', 'heads', config.num_heads, config.qk_norm), turn)
    k_BSKH = rope.rotate(
        heads('k', 'kv_heads', config.num_kv_heads, config.qk_norm), turn)
    v_BSKH = heads('v', 'kv_heads', config.num_kv_heads)
    if config.kv_copies > 1:
      k_BSKH, v_BSKH = (
          nn.with_logical_constraint(
              jnp.repeat(x, config.kv_copies, axis=2),
              ('batch', None, 'kv_heads', None)) for x in (k_BSKH, v_BSKH))
    k_BTKH, v_BTKH = k_BSKH, v_BSKH
    if stores is not None:
      stores, k_BTKH, v_BTKH = _write(stores, k_BSKH, v_BSKH, layer, index)
      if config.attention != 'xla' and position_BS.shape[1] > 1:
        # Kernels attend inside these S columns. With others before them the
        # result is wrong: NaN shows it.
        k_BTKH = jnp.where(index == 0, k_BSKH, jnp.nan)
        v_BTKH, key_position_BT = v_BSKH, None
    if sequences is None:
      out_BSNH = _attend(config, layer, q_BSNH, k_BTKH, v_BTKH, position_BS,
                         key_position_BT, segment_BS)
    else:
      out_BSNH = sequences.collect(_attend(
          config, layer, *map(sequences.spread, (q_BSNH, k_BTKH, v_BTKH)),
          sequences.position_RA, None, sequences.segment_RA))
    out_MD = layers_lib.Linear(
        config.d_model, ('heads', 'embed'), lora=config.lora, name='o')(
            out_BSNH.reshape(x_MD.shape[0], -1))
    return out_MD, stores


class _Transformer(nn.Module):
  """Embedding, the layer scan, the final norm; `logits` applies the head."""

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
    stores, key_position_BT, index = None, None, None
    if cache is not None:
      stores, index = (cache.k, cache.v), cache.index
      key_position_BT = jax.lax.dynamic_update_slice(
          cache.position, position_BS, (0, index))
    turn = rope.turn(
        position_BS, config.head_dim, config.rope_theta, config.rope_scaling)
    shared = (turn, position_BS, key_position_BT, index, segment_BS, sequences)
    layers = self.get_variable('params', 'layers')
    if isinstance(layers, tuple):
      layer = _layer(config)(config, parent=None)
      stores = list(zip(*stores))
      for i, params in enumerate(layers):
        (x_MD, stores[i]), _ = layer.apply(
            {'params': params}, (x_MD, stores[i]), i, *shared)
      stores = tuple(zip(*stores))
    else:
      (x_MD, stores), _ = _scan(config)(config, name='layers')(
          (x_MD, stores), jnp.arange(config.num_layers), *shared)
    x_MD = layers_lib.Norm(config.norm_eps, name='final_norm')(x_MD)
    if cache is not None:
      cache = KVCache(*stores, key_position_BT, index + position_BS.shape[1])
    return x_MD.reshape(*position_BS.shape, config.d_model), cache


def _layer(config: ModelConfig):
  """`_Layer`, of which the backward pass recomputes what the config says."""
  if config.remat == 'none':
    return _Layer
  # Inside a loop nothing can be merged with the forward pass; unrolled, XLA
  # would merge the recomputation away.
  return nn.remat(_Layer, prevent_cse=config.unroll != 1,
                  policy=REMAT[config.remat])


def _scan(config: ModelConfig):
  """The layer over the stacked parameters; only its number varies."""
  return nn.scan(
      _layer(config), variable_axes={'params': 0}, split_rngs={'params': True},
      in_axes=(0,) + 6 * (nn.broadcast,), length=config.num_layers,
      unroll=config.unroll, metadata_params={nn.PARTITION_NAME: 'layers'})


def _write(stores, k_BSKH, v_BSKH, layer, index):
  """The stores with S new columns, and all the keys and values of the layer.

  The transposes of the decoding form cost nothing: they cancel against those
  that XLA puts before the products.
  """
  k_store, v_store = stores
  k_BSKH, v_BSKH = k_BSKH.astype(k_store.dtype), v_BSKH.astype(v_store.dtype)
  update = jax.lax.dynamic_update_slice
  if k_store.ndim == 5:
    k_store = update(k_store, k_BSKH[None], (layer, 0, index, 0, 0))
    v_store = update(v_store, v_BSKH[None], (layer, 0, index, 0, 0))
    k_BTKH, v_BTKH = (
        jax.lax.dynamic_index_in_dim(store, layer, keepdims=False)
        for store in (k_store, v_store))
  else:
    k_store = update(
        k_store, jnp.transpose(k_BSKH, (0, 2, 3, 1)), (0, 0, 0, index))
    v_store = update(
        v_store, jnp.transpose(v_BSKH, (0, 2, 1, 3)), (0, 0, index, 0))
    k_BTKH = jnp.transpose(k_store, (0, 3, 1, 2))
    v_BTKH = jnp.transpose(v_store, (0, 2, 1, 3))
  return (k_store, v_store), k_BTKH, v_BTKH


def _attend(config: ModelConfig, layer, q_BSNH, k_BTKH, v_BTKH, position_BS,
            key_position_BT, segment_BS):
  """`attention.attend` with the window of this layer."""
  def attend(window, *arrays):
    return attention.attend(
        *arrays, position_BS, key_position_BT, window, config.attention,
        segment_BS)

  arrays = (q_BSNH, k_BTKH, v_BTKH)
  if not config.num_full_layers:
    return attend(config.sliding_window, *arrays)
  return jax.lax.cond(
      layer < config.num_full_layers, functools.partial(attend, None),
      functools.partial(attend, config.sliding_window), *arrays)


def _by_rows(x_MD):
  return constrain(x_MD, ('batch', None))


def _boxed(config: ModelConfig, key: jax.Array):
  zeros_BS = jnp.zeros((1, 1), jnp.int32)
  return _Transformer(config).init(key, zeros_BS, zeros_BS)['params']


def _is_boxed(node) -> bool:
  return isinstance(node, nn.LogicallyPartitioned)
