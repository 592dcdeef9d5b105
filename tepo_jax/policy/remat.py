"""What a layer keeps for the backward pass, and what that recomputes.

`config` is a transformer.ModelConfig.
"""

from collections.abc import Callable
import functools
from typing import Any

import jax
from jax import ad_checkpoint
from jax import numpy as jnp

# Names of what policies keep: the results of the linear maps around attention
# and that of attention itself; the results of `gate` and `up`.
ATTENTION, MLP = 'attention', 'mlp'

_keep = jax.checkpoint_policies.save_only_these_names


def _all_but_gathered(primitive, *_, **__):
  """Keeps all but what devices gather: weights would be kept as a whole."""
  return primitive.name != 'all_gather'


# Values of the config's field, the least recomputation and the most memory
# first: nothing; elementwise operations only; the feed-forward part also; whole
# layers.
POLICIES = {'none': _all_but_gathered, 'dots': _keep(ATTENTION, MLP),
            'mlp': _keep(ATTENTION), 'full': None}
named = ad_checkpoint.checkpoint_name


def layer(config: Any) -> Callable:
  """A decorator for a layer: it is rematerialised as config.remat says."""
  return functools.partial(jax.checkpoint, **options(config))


def options(config: Any) -> dict[str, Any]:
  """The arguments of jax.checkpoint and nn.remat for a layer."""
  # XLA cannot merge the forward pass with the recomputation: they are in
  # different loops over the layers.
  return {'policy': POLICIES[config.remat], 'prevent_cse': False}


def bytes_a_token(config: Any, remat: str, tensor: int) -> float:
  """About the bytes that the layers keep of a token on each of `tensor`
  devices; of 'none' the least, as what attention and norms keep is left out."""
  heads = (config.num_heads + config.cache_heads) * config.head_dim
  kept = config.d_model  # the layer's input
  if remat != 'full':
    kept += 2 * heads + config.d_model
  if remat in ('none', 'dots'):
    kept += 2 * config.d_ff
  return config.num_layers * kept * jnp.dtype(config.dtype).itemsize / tensor
