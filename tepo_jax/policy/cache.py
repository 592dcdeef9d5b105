"""The form of parameters and cache for a loop over single tokens.

`transformer.forward` takes the two together, `transformer.logits` parameters in
either form. Stacked, XLA slices every layer's weights and cache by copy at
every token, and the products over the cache transpose it first.

Axes: B completions, T key slots, L layers, K key/value heads, H head size.
"""

from typing import Any

import jax
import jax.numpy as jnp

from tepo_jax.policy import layers as layers_lib
from tepo_jax.policy import transformer


def convert(params: dict[str, Any], platform: str) -> dict[str, Any]:
  """The parameters with an array of its own for each layer.

  params['layers'] is a tuple of L dicts, on a CPU with `layers.turned` kernels.
  Convert outside the loop (under the same jit or not).
  """
  count = len(jax.tree.leaves(params['layers'])[0])
  return {**params, 'layers': tuple(
      _layer(jax.tree.map(lambda leaf: leaf[i], params['layers']), platform)
      for i in range(count))}


def logical_axes(config: transformer.ModelConfig, platform: str
                 ) -> dict[str, Any]:
  """The tree of `convert`, each leaf as of `transformer.logical_axes`."""
  axes = transformer.logical_axes(config)
  layer = jax.tree.map(lambda names: names[1:], axes['layers'],
                       is_leaf=lambda node: isinstance(node, tuple))
  return {**axes, 'layers': (_layer(layer, platform),) * config.num_layers}


def init_cache(config: transformer.ModelConfig, batch: int, length: int,
               dtype) -> transformer.KVCache:
  """An empty cache for `batch` rows of `length` slots.

  Of each layer, k of [B, K, H, T] and v of [B, K, T, H].
  """
  kv_heads, size = config.cache_heads, config.head_dim

  def stores(*shape):
    return tuple(
        jnp.zeros((batch, *shape), dtype) for _ in range(config.num_layers))

  return transformer.KVCache(
      k=stores(kv_heads, size, length), v=stores(kv_heads, length, size),
      position=jnp.full((batch, length), -1, jnp.int32),
      index=jnp.zeros((), jnp.int32))


def _layer(layer, platform):
  return layers_lib.turned(layer) if platform == 'cpu' else layer
