"""Parameter and cache layout for decoding: one array per layer.

With stacked arrays XLA would copy every layer's slice of weights and cache at
every token, and transpose the cache before its products.

Axes: B completions, T key columns, L layers, K key/value heads, H head size.
"""

from typing import Any

import jax
import jax.numpy as jnp

from tepo_jax.policy import layers as layers_lib
from tepo_jax.policy import transformer


def convert(config: transformer.ModelConfig, params: dict[str, Any],
            int8: bool = False) -> dict[str, Any]:
  """Returns the parameters with params['layers'] as a tuple of L dicts.

  Kernels are `layers.quantized` with `int8`, else `layers.transposed` if
  config.ops has a product for that. Call it outside the decoding loop;
  `transformer.forward` requires it with a cache.
  """
  return {**params, 'layers': tuple(
      _layer(config, jax.tree.map(lambda leaf: leaf[i], params['layers']), int8)
      for i in range(config.num_layers))}


def logical_axes(config: transformer.ModelConfig, int8: bool = False
                 ) -> dict[str, Any]:
  """The tree of `convert`; leaves as in `transformer.logical_axes`."""
  axes = transformer.logical_axes(config)
  layer = jax.tree.map(lambda names: names[1:], axes['layers'],
                       is_leaf=lambda node: isinstance(node, tuple))
  return {**axes, 'layers': (_layer(config, layer, int8),) * config.num_layers}


def init_cache(config: transformer.ModelConfig, batch: int, length: int,
               dtype) -> transformer.KVCache:
  """An empty cache for `batch` rows of `length` columns."""
  kv_heads, size = config.cache_heads, config.head_dim

  def stores(*shape):
    return tuple(
        jnp.zeros((batch, *shape), dtype) for _ in range(config.num_layers))

  return transformer.KVCache(
      k=stores(kv_heads, size, length), v=stores(kv_heads, length, size),
      position=jnp.full((batch, length), -1, jnp.int32),
      index=jnp.zeros((), jnp.int32))


def _layer(config, layer, int8):
  if int8:
    return layers_lib.quantized(layer)
  if config.ops.transposed_linear is None:
    return layer
  return layers_lib.transposed(layer)
