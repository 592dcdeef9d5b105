"""Padding and KV-head replication for tensor sharding.

`config` is a transformer.ModelConfig.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from tepo_jax import errors

_IMPOSSIBLE = -1e9  # a logit
_LANES = 128  # of a TPU's vector registers


def sharded_over(config: Any, tensor: int) -> Any:
  """The config with what `tensor` shards of the heads require.

  The vocabulary is padded to a multiple of `tensor`, and where that adds less
  than 1 % to whole registers of each shard: a decode step on a v5p reads the
  head of another size twice. If `tensor` does not divide the key/value heads,
  each shard holds copies of the heads it needs: their weights are then
  replicated, only activations and cache are sharded.

  Raises:
    InputError: `tensor` does not divide the query heads.
  """
  if config.num_heads % tensor:
    raise errors.InputError(
        f'mesh tensor={tensor} does not divide the {config.num_heads} query '
        f'heads (over {config.num_kv_heads} key/value heads) of the model')
  padding = -config.vocab_size % tensor
  whole = -config.vocab_size % (tensor * _LANES)
  if tensor > 1 and whole < config.vocab_size / 100:
    padding = whole
  return dataclasses.replace(
      config, vocab_padding=padding,
      kv_copies=tensor // math.gcd(config.num_kv_heads, tensor))


def unpadded(config: Any, state: Any) -> dict[str, tuple[int, ...]]:
  """Shapes without vocabulary padding, by path ('params/head/kernel').

  Covers the arrays of a training state that have a vocabulary axis. The
  padding depends on the mesh, and is 0 in parameters and moments.
  """
  found = {}
  for path, leaf in jax.tree_util.tree_flatten_with_path(state)[0]:
    axis = _vocabulary_axis(path)
    if axis is not None:
      shape = list(leaf.shape)
      shape[axis] = config.vocab_size
      found[_name(path)] = tuple(shape)
  return found


def padded_as(config: Any, params: Any) -> Any:
  """The parameters with the config's vocabulary padding; they may have that of
  another number of shards."""
  size = config.vocab_size + config.vocab_padding

  def padded(path, leaf):
    axis = _vocabulary_axis(path)
    if axis is None or leaf.shape[axis] == size:
      return leaf
    widths = [(0, 0)] * leaf.ndim
    widths[axis] = 0, config.vocab_padding
    return jnp.pad(jax.lax.slice_in_dim(
        leaf, 0, config.vocab_size, axis=axis), widths)

  return jax.tree_util.tree_map_with_path(padded, params)


def _vocabulary_axis(path):
  """The axis that is padded; None if the array has none."""
  return next((axis for ending, axis in (
      ('embed/embedding', 0), ('head/kernel', 1))
               if _name(path).endswith(ending)), None)


def _name(path):
  return jax.tree_util.keystr(path, simple=True, separator='/')


def without_padding(vocabulary: int, logits):
  """The logits, with those of padding so low that their probability is 0.

  They are finite because entropies multiply them by that probability.
  """
  if logits.shape[-1] == vocabulary:
    return logits
  return jnp.where(
      jnp.arange(logits.shape[-1]) < vocabulary, logits, _IMPOSSIBLE)
