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
from tepo_jax.policy import rope

INIT_STDDEV = 0.02  # of every kernel and the embedding

# Larger than any position: the window of a layer that sees everything.
_NO_WINDOW = 1 << 30


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


# Not of the model: changed with dataclasses.replace, never saved.
EXECUTION_FIELDS = ('dtype', 'remat', 'unroll', 'attention')

# What is recomputed in the backward pass: nothing; all of a layer; all but the
# outputs of its linear maps (attention and what is element by element).
REMAT = {'none': None, 'full': None,
         'dots': jax.checkpoint_policies.dots_with_no_batch_dims_saveable}


@flax.struct.dataclass
class KVCache:
  """Keys and values of every layer; `index` is the next column to write.

  Stacked as noted, or a tuple of one array a layer: see `for_decoding`.
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
  shape = (config.num_layers, batch, length, config.num_kv_heads,
           config.head_dim)
  return KVCache(
      k=jnp.zeros(shape, dtype), v=jnp.zeros(shape, dtype),
      position=jnp.full((batch, length), -1, jnp.int32),
      index=jnp.zeros((), jnp.int32))


def forward(config: ModelConfig, params, token_BS, position_BS,
            cache: KVCache | None = None, segment_BS=None):
  """Hidden states after the final norm.

  Args:
    config: static under jit.
    params: as of `init`, in any floating dtype: cast to config.dtype at use.
    token_BS: i32 ids; a padding slot may hold any valid id.
    position_BS: i32, -1 = padding (its output means nothing).
    cache: None: the S tokens see each other. Else the S new columns are
      written at cache.index (which must leave room: the caller's promise) and
      the tokens see the whole cache.
    segment_BS: i32, which sequence of a packed row a slot belongs to; tokens
      see their own sequence only. None: a row is one sequence. Not with a
      cache.

  Returns:
    hidden_BSD in config.dtype, and the cache with index + S (None without).
  """
  return _Transformer(config).apply(
      {'params': params}, token_BS, position_BS, cache, segment_BS)


def for_decoding(params: dict[str, Any], cache: KVCache):
  """(params, cache) in the form for a loop over single tokens.

  `forward` and `logits` take either form. Stacked, XLA slices every layer's
  weights and cache by copy at every token, and the products over the cache
  transpose it first. Here each layer has its own arrays: params['layers'] is
  a tuple of L dicts, cache.k one of [B, K, H, T], cache.v one of [B, K, T, H].
  Convert outside the loop (under the same jit or not), after the prefill.
  """
  def layers(tree):
    count = len(jax.tree.leaves(tree)[0])
    return tuple(
        jax.tree.map(lambda leaf: leaf[i], tree) for i in range(count))

  return {**params, 'layers': layers(params['layers'])}, cache.replace(
      k=layers(jnp.transpose(cache.k, (0, 1, 3, 4, 2))),
      v=layers(jnp.transpose(cache.v, (0, 1, 3, 2, 4))))


def head_weight(config: ModelConfig, params):
  """[D, V] of the head, or [V, D] of the tied embedding, as stored."""
  if config.tie_embeddings:
    return params['embed']['embedding']
  return params['head']['kernel']


def logits(config: ModelConfig, params, hidden):
  """float32 [..., V] of hidden [..., D]: the head, or the tied embedding."""
  weight = head_weight(config, params).astype(config.dtype)
  side = 1 if config.tie_embeddings else 0
  hidden_MD = hidden.reshape(-1, config.d_model)
  logits_MV = jax.lax.dot_general(
      hidden_MD, weight, (((1,), (side,)), ((), ())),
      preferred_element_type=jnp.float32)
  return logits_MV.reshape(*hidden.shape[:-1], config.vocab_size)


def constrain(x, axes):
  """Lays x out by logical axis names, where rules for them are in force."""
  return nn.with_logical_constraint(x, axes)


class _Norm(nn.Module):
  """RMSNorm over the last axis, in float32."""

  eps: float

  @nn.compact
  def __call__(self, x):
    scale = self.param(
        'scale', nn.with_logical_partitioning(nn.initializers.ones, ('norm',)),
        (x.shape[-1],))
    x32 = x.astype(jnp.float32)
    variance = jnp.mean(jnp.square(x32), axis=-1, keepdims=True)
    return (x32 * jax.lax.rsqrt(variance + self.eps)
            * scale.astype(jnp.float32)).astype(x.dtype)


class _Linear(nn.Module):
  """x @ kernel (+ bias), on [M, inputs]."""

  features: int
  axes: tuple[str, str]
  use_bias: bool = False

  @nn.compact
  def __call__(self, x_MI):
    kernel = self.param(
        'kernel', nn.with_logical_partitioning(
            nn.initializers.normal(INIT_STDDEV), self.axes),
        (x_MI.shape[-1], self.features))
    y_MO = x_MI @ kernel.astype(x_MI.dtype)
    if self.use_bias:
      bias = self.param(
          'bias', nn.with_logical_partitioning(
              nn.initializers.zeros, self.axes[1:]), (self.features,))
      y_MO += bias.astype(x_MI.dtype)
    return y_MO


class _Layer(nn.Module):
  """x += attention(norm(x)); x += mlp(norm(x)). One step of the layer scan.

  The cache of all the layers rides in the carry, so that XLA updates it in
  place; each layer writes its own S columns.
  """

  config: ModelConfig

  @nn.compact
  def __call__(self, carry, layer, turn, position_BS, key_position_BT, index,
               segment_BS):
    config = self.config
    x_MD, stores = carry
    attended_MD, stores = self._attention(
        _Norm(config.norm_eps, name='attention_norm')(x_MD),
        stores, layer, turn, position_BS, key_position_BT, index, segment_BS)
    x_MD = _by_rows(x_MD + attended_MD)
    y_MD = _Norm(config.norm_eps, name='mlp_norm')(x_MD)
    gate_MF = _Linear(config.d_ff, ('embed', 'mlp'), name='gate')(y_MD)
    up_MF = _Linear(config.d_ff, ('embed', 'mlp'), name='up')(y_MD)
    down_MD = _Linear(config.d_model, ('mlp', 'embed'), name='down')(
        nn.silu(gate_MF) * up_MF)
    return (_by_rows(x_MD + down_MD), stores), None

  def _attention(self, x_MD, stores, layer, turn, position_BS,
                 key_position_BT, index, segment_BS):
    config = self.config

    def heads(name, axis, count, norm=False):
      y = _Linear(count * config.head_dim, ('embed', axis),
                  config.qkv_bias, name=name)(x_MD)
      y = y.reshape(*position_BS.shape, count, config.head_dim)
      return _Norm(config.norm_eps, name=f'{name}_norm')(y) if norm else y

    q_BSNH = rope.rotate(
        heads('q', 'heads', config.num_heads, config.qk_norm), turn)
    k_BSKH = rope.rotate(
        heads('k', 'kv_heads', config.num_kv_heads, config.qk_norm), turn)
    v_BSKH = heads('v', 'kv_heads', config.num_kv_heads)
    k_BTKH, v_BTKH = k_BSKH, v_BSKH
    if stores is not None:
      stores, k_BTKH, v_BTKH = _write(stores, k_BSKH, v_BSKH, layer, index)
    out_BSNH = attention.attend(
        q_BSNH, k_BTKH, v_BTKH, position_BS, key_position_BT,
        _window(config, layer), config.attention, segment_BS, segment_BS)
    out_MD = _Linear(config.d_model, ('heads', 'embed'), name='o')(
        out_BSNH.reshape(x_MD.shape[0], -1))
    return out_MD, stores


class _Weight(nn.Module):
  """A parameter by itself: the embedding table, the head."""

  leaf: str
  shape: tuple[int, int]
  axes: tuple[str, str]

  @nn.compact
  def __call__(self):
    return self.param(self.leaf, nn.with_logical_partitioning(
        nn.initializers.normal(INIT_STDDEV), self.axes), self.shape)


class _Transformer(nn.Module):
  """Embedding, the layer scan, the final norm; `logits` applies the head."""

  config: ModelConfig

  @nn.compact
  def __call__(self, token_BS, position_BS, cache=None, segment_BS=None):
    config = self.config
    embedding_VD = _Weight(
        'embedding', (config.vocab_size, config.d_model), ('vocab', 'embed'),
        name='embed')()
    if not config.tie_embeddings:
      _Weight('kernel', (config.d_model, config.vocab_size),
              ('embed', 'vocab'), name='head')()
    x_MD = jnp.take(embedding_VD, token_BS.reshape(-1), axis=0)
    x_MD = _by_rows(x_MD.astype(config.dtype))
    stores, key_position_BT, index = None, position_BS, None
    if cache is not None:
      stores, index = (cache.k, cache.v), cache.index
      key_position_BT = jax.lax.dynamic_update_slice(
          cache.position, position_BS, (0, index))
    turn = rope.turn(
        position_BS, config.head_dim, config.rope_theta, config.rope_scaling)
    shared = (turn, position_BS, key_position_BT, index, segment_BS)
    layers = self.get_variable('params', 'layers')
    if isinstance(layers, tuple):
      layer = _layer(config)(config, parent=None)
      stores = list(zip(*stores))
      for i, params in enumerate(layers):
        (x_MD, stores[i]), _ = layer.apply(
            {'params': params}, (x_MD, stores[i]), i, *shared)
      stores = zip(*stores)
    else:
      (x_MD, stores), _ = _scan(config)(config, name='layers')(
          (x_MD, stores), jnp.arange(config.num_layers), *shared)
    x_MD = _Norm(config.norm_eps, name='final_norm')(x_MD)
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
      in_axes=(0,) + 5 * (nn.broadcast,), length=config.num_layers,
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


def _window(config: ModelConfig, layer):
  """The window of one layer: None, a number, or a scalar by its number."""
  if config.sliding_window is None or not config.num_full_layers:
    return config.sliding_window
  return jnp.where(
      layer < config.num_full_layers, _NO_WINDOW, config.sliding_window)


def _by_rows(x_MD):
  return constrain(x_MD, ('batch', None))


def _boxed(config: ModelConfig, key: jax.Array):
  zeros_BS = jnp.zeros((1, 1), jnp.int32)
  return _Transformer(config).init(key, zeros_BS, zeros_BS)['params']


def _is_boxed(node) -> bool:
  return isinstance(node, nn.LogicallyPartitioned)
