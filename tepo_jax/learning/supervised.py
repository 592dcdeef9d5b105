"""Supervised next-token learning: it makes the embedded task's base model.

Axes: B sequences · S slots · T = S − 1 predicted slots.
"""

from typing import Any

import jax
from jax import numpy as jnp
import optax

from tepo_jax.learning import update
from tepo_jax.policy import scoring
from tepo_jax.policy import transformer


def next_token_loss(model: transformer.ModelConfig, params: Any,
                    token_BS: jax.Array, position_BS: jax.Array,
                    mask_BT: jax.Array) -> jax.Array:
  """−Σ m log π(y_t | s_t) / Σ m over the tokens behind the first, nats."""
  scores = scoring.score(model, params, token_BS, position_BS,
                         num_targets=mask_BT.shape[1])
  return -jnp.sum(mask_BT * scores.logp_BT) / jnp.sum(mask_BT)


def step(model: transformer.ModelConfig,
         optimizer: optax.GradientTransformation, state: update.TrainState,
         token_BS: jax.Array, position_BS: jax.Array, mask_BT: jax.Array
         ) -> tuple[update.TrainState, jax.Array]:
  """One optimiser update; returns the new state and the loss before it."""
  loss, gradient = jax.value_and_grad(next_token_loss, argnums=1)(
      model, state.params, token_BS, position_BS, mask_BT)
  updates, opt_state = optimizer.update(gradient, state.opt_state,
                                        state.params)
  params = optax.apply_updates(state.params, updates)
  return update.TrainState(state.step + 1, params, opt_state), loss
