"""Forms of a model that a mesh asks for; config: transformer.ModelConfig."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from tepo_jax import errors

_IMPOSSIBLE = -1e9  # a logit


def sharded_over(config: Any, tensor: int) -> Any:
  """The model in the form that `tensor` shards of the heads can hold.

  The vocabulary is padded to a multiple of `tensor`; padding that does already
  is left. Where it does not divide
  the key/value heads, each shard holds copies of those it needs: their weights
  are then whole on every shard, only activations and cache are sharded.

  Raises:
    InputError: `tensor` does not divide the query heads.
  """
  if config.num_heads % tensor:
    raise errors.InputError(
        f'mesh tensor={tensor} does not divide the {config.num_heads} query '
        f'heads (over {config.num_kv_heads} key/value heads) of the model')
  padding = config.vocab_padding
  if (config.vocab_size + padding) % tensor:
    padding = -config.vocab_size % tensor
  return dataclasses.replace(
      config, vocab_padding=padding,
      kv_copies=tensor // math.gcd(config.num_kv_heads, tensor))


def repad(config: Any, params: dict[str, Any]) -> dict[str, Any]:
  """The parameters with the vocabulary's padding that `config` says, zeros."""
  def fit(weight, axis):
    real = jax.lax.slice_in_dim(weight, 0, config.vocab_size, axis=axis)
    widths = [(0, 0), (0, 0)]
    widths[axis] = (0, config.vocab_padding)
    return jnp.pad(real, widths)

  changed = {'embed': {'embedding': fit(params['embed']['embedding'], 0)}}
  if not config.tie_embeddings:
    changed['head'] = {'kernel': fit(params['head']['kernel'], 1)}
  return params | changed


def without_padding(vocabulary: int, logits):
  """The logits, those of padding so low that their probability is 0.

  Finite, as entropies multiply them by it.
  """
  if logits.shape[-1] == vocabulary:
    return logits
  return jnp.where(
      jnp.arange(logits.shape[-1]) < vocabulary, logits, _IMPOSSIBLE)
