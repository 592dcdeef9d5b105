"""The layers where a mesh cuts their weights, for scoring and updates.

`fsdp` cuts the model's features: a device gathers them before it uses a weight,
and keeps its part of the sum of the weight's gradients. `tensor` cuts heads and
feed-forward columns: each device has its own for all tokens of its rows.
Between the large products it has only its own part of the tokens: it gathers
all of them before the products that heads and columns follow, and after those
that sum over heads or columns it keeps its part of the sum. So the residual
stream, norms and additions are computed once, and reduce-scatter replaces
all-reduce.

XLA finds neither by itself: under `fsdp` alone, it cuts products into rings of
small ones that pass over memory many times.

`config` is a transformer.ModelConfig. Axes: B rows, S columns, M tokens, D
model.
"""

from collections.abc import Callable
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from tepo_jax.policy import remat
from tepo_jax.runtime import mesh as mesh_lib


def are_needed(config: Any) -> bool:
  """Whether the mesh of the function that is being traced cuts the weights of a
  model that is prepared for it, see `padding.sharded_over`."""
  tensor = mesh_lib.shards('tokens')
  return (tensor * mesh_lib.shards('embed') > 1
          and config.cache_heads % tensor == 0)


def run(config: Any, axes: Any, make_layer: Callable, params: Any,
        x_BSD: jax.Array, rows: Any) -> jax.Array:
  """The layers' output [B, S, D].

  Args:
    config: static under jit.
    axes: logical names of the layers' stacked parameters.
    make_layer: (config of one device, rows of one device) -> a function of
      x_MD, the device's tokens, of a layer's parameters and of its number.
    params: of all layers, stacked.
    rows: tree of [B, ...], what the layers need besides.
  """
  one_device = _on_one_device(config)

  def layers(x_BSD, params, rows):
    layer = make_layer(one_device, rows)

    @remat.layer(config)
    def step(x_MD, params, number):
      return layer(x_MD, _own_weights(config, params, axes), number)

    x_MD, _ = jax.lax.scan(
        lambda x_MD, layer: (step(x_MD, *layer), None),
        mesh_lib.own_part(x_BSD.reshape(-1, config.d_model), 'tokens'),
        (params, jnp.arange(config.num_layers)))
    return mesh_lib.gathered(
        x_MD, 'tokens', size=x_BSD.shape[0] * x_BSD.shape[1]
    ).reshape(x_BSD.shape)

  return mesh_lib.per_device(
      layers, (('batch', None, None), axes,
               jax.tree.map(lambda _: ('batch', None), rows)),
      x_BSD, _with_kernels_cast(config, params), rows)


def _with_kernels_cast(config, params):
  """All layers' kernels in the compute dtype, as then is their gradient, of
  which a device has a whole tree for a microbatch."""
  return jax.tree_util.tree_map_with_path(
      lambda path, x: x.astype(config.dtype) if path[-1].key == 'kernel' else x,
      params)


def _on_one_device(config):
  """The config of a layer with the heads and columns of one device."""
  tensor = mesh_lib.shards('tokens')
  return dataclasses.replace(
      config, num_heads=config.num_heads // tensor,
      num_kv_heads=config.cache_heads // tensor, kv_copies=1,
      d_ff=config.d_ff // tensor)


def _own_weights(config, params, axes):
  """A layer's weights with the model's features whole, in the compute dtype."""
  def own(path, x, stacked_names):
    names = stacked_names[1:]
    linear, leaf = path[0].key, path[-1].key
    if config.kv_copies > 1 and linear in ('k', 'v') and leaf != 'lora_a':
      x = _own_kv_heads(config, x)
    if 'embed' not in names:
      return x
    return mesh_lib.gathered(
        x.astype(config.dtype), 'embed', axis=names.index('embed'))

  return jax.tree_util.tree_map_with_path(own, params, axes)


def _own_kv_heads(config, x):
  """This device's columns, of the copied key/value heads, from all heads'."""
  heads = x.reshape(*x.shape[:-1], config.num_kv_heads, config.head_dim)
  own = mesh_lib.own_part(
      jnp.repeat(heads, config.kv_copies, axis=-2), 'kv_heads', axis=-2)
  return own.reshape(*x.shape[:-1], -1)
