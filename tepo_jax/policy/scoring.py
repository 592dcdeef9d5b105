"""Log-probability, entropy and exact KL of given tokens, without [B, T, V].

Axes: B completions · T completion slots · S = prompt + completion slots ·
V vocabulary · D model · C chunks of time · c slots in a chunk.
"""

from typing import Any

import flax.struct
import jax
from jax import numpy as jnp

from tepo_jax.policy import transformer


@flax.struct.dataclass
class Scores:
  """What a policy says of given tokens; masked slots hold arbitrary values.

  logp_BT: log π_θ(y_t | s_t) under the temperature-scaled full softmax, nats.
  entropy_BT: H(π_θ(· | s_t)) = −Σ_v π log π, nats.
  kl_BT: Σ_v π_θ log(π_θ / π_old) at s_t, nats; None unless it was asked for.
  """
  logp_BT: jax.Array
  entropy_BT: jax.Array
  kl_BT: jax.Array | None = None


def score(config: transformer.ModelConfig, params: Any, token_BS: jax.Array,
          position_BS: jax.Array, *, num_targets: int,
          temperature: float = 1.0, chunk_size: int = 4096,
          old_params: Any = None) -> Scores:
  """Scores the last `num_targets` tokens of each row under the policy.

  Args:
    config, params: the policy.
    token_BS, position_BS: prompt and completion; position −1 is padding.
    num_targets: T, the columns at the end of S that are scored.
    temperature: divides the logits, as it did in the sampler.
    chunk_size: tokens whose logits exist at one time (B at least);
      [chunk_size, V] floats are the peak, forwards and (by recomputation)
      backwards.
    old_params: π_old's weights; given, the exact KL is computed beside ℓ
      (TEPO Eq. 4), differentiable in `params` only.

  Returns:
    Scores over [B, T], float32.
  """
  hidden_BTD = _target_states(config, params, token_BS, position_BS,
                              num_targets)
  old_hidden_BTD = None
  if old_params is not None:
    old_params = jax.lax.stop_gradient(old_params)
    old_hidden_BTD = _target_states(config, old_params, token_BS, position_BS,
                                    num_targets)
  inputs = (hidden_BTD, token_BS[:, -num_targets:], old_hidden_BTD)

  @jax.checkpoint
  def score_chunk(chunk):
    hidden_BcD, target_Bc, old_hidden_BcD = chunk
    scaled_BcV = transformer.logits(config, params, hidden_BcD) / temperature
    logp_BcV = jax.nn.log_softmax(scaled_BcV)
    p_BcV = jnp.exp(logp_BcV)
    logp_Bc = jnp.take_along_axis(logp_BcV, target_Bc[..., None], -1)[..., 0]
    kl_Bc = None
    if old_hidden_BcD is not None:
      old_BcV = transformer.logits(config, old_params, old_hidden_BcD)
      old_logp_BcV = jax.nn.log_softmax(old_BcV / temperature)
      kl_Bc = jnp.sum(p_BcV * (logp_BcV - old_logp_BcV), -1)
    return Scores(logp_Bc, -jnp.sum(p_BcV * logp_BcV, -1), kl_Bc)

  return _map_over_time(score_chunk, inputs, chunk_size)


def _target_states(config, params, token_BS, position_BS, num_targets):
  """Hidden states that predict the last `num_targets` tokens: [B, T, D]."""
  hidden_BSD, _ = transformer.forward(config, params, token_BS, position_BS)
  return hidden_BSD[:, -num_targets - 1:-1]


def _map_over_time(function, inputs, chunk_size):
  """Applies `function` to slices of axis 1 of at most `chunk_size` tokens.

  Time is cut, not rows, so that every chunk stays spread over the mesh; a
  slice is one slot of every row at least. The slices are equally wide.
  """
  batch, length = inputs[0].shape[:2]
  chunks = -(-length // max(1, chunk_size // batch))
  width = -(-length // chunks)

  def cut(x):
    pad = [(0, 0), (0, chunks * width - length)] + [(0, 0)] * (x.ndim - 2)
    x = jnp.pad(x, pad).reshape(batch, chunks, width, *x.shape[2:])
    return jnp.moveaxis(x, 1, 0)

  def join(x):
    return jnp.moveaxis(x, 0, 1).reshape(batch, chunks * width)[:, :length]

  return jax.tree.map(join, jax.lax.map(function, jax.tree.map(cut, inputs)))
