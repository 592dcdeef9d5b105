"""One optimiser update: the loss over microbatches, as if there were one.

Everything that is a statistic (the denominator N, covariances, top-k) belongs
to the whole minibatch: it is computed first, then sliced, and the partial
losses of the microbatches only add up. So neither the number of microbatches
nor the mesh changes the result.

Axes: B completions of a minibatch · M microbatches · T completion slots ·
S = prompt + completion slots.
"""

from collections.abc import Callable
import dataclasses
from typing import Any

import flax.struct
import jax
from jax import numpy as jnp
import optax

from tepo_jax.learning import objective
from tepo_jax.policy import scoring
from tepo_jax.policy import transformer


@flax.struct.dataclass
class Batch:
  """Graded completions, ready for updates. Filler rows have an empty mask.

  token_BS, position_BS: int32 prompt (left-padded) and completion; position
    −1 is padding.
  mask_BT: float32, 1 on completion tokens up to and including EOS.
  advantage_B: float32.
  old_logp_BT, old_entropy_BT: of π_old by the training forward, nats.
  sampler_logp_BT: the sampler's own log-probability, nats.
  """
  token_BS: jax.Array
  position_BS: jax.Array
  mask_BT: jax.Array
  advantage_B: jax.Array
  old_logp_BT: jax.Array
  old_entropy_BT: jax.Array
  sampler_logp_BT: jax.Array


@flax.struct.dataclass
class TrainState:
  """step: optimiser updates done; params: fp32 masters; opt_state: optax's."""
  step: jax.Array
  params: Any
  opt_state: optax.OptState


@dataclasses.dataclass(frozen=True)
class Scorer:
  """How completions are scored: the same for ℓ°, H° and for the update.

  microbatches: forward/backward passes a minibatch is cut into.
  temperature: the sampler's. chunk_size: see `scoring.score`.
  """
  model: transformer.ModelConfig
  microbatches: int
  temperature: float
  chunk_size: int

  def __call__(self, params: Any, rows: Batch,
               old_params: Any = None) -> scoring.Scores:
    return scoring.score(
        self.model, params, rows.token_BS, rows.position_BS,
        num_targets=rows.mask_BT.shape[1], temperature=self.temperature,
        chunk_size=self.chunk_size, old_params=old_params)


def old_policy_statistics(scorer: Scorer, params: Any, batch: Batch) -> Batch:
  """Fills ℓ° and H° by the training forward at the training shapes.

  The sampler's own numbers differ from these by rounding, which would move
  every ratio off 1 and draw TEPO's mask at random (METHODS reading 2).
  """
  scores = _score(scorer, params, batch)
  return batch.replace(old_logp_BT=scores.logp_BT,
                       old_entropy_BT=scores.entropy_BT)


def train_step(scorer: Scorer, policy_loss: objective.PolicyLoss,
               optimizer: optax.GradientTransformation, state: TrainState,
               batch: Batch, rng: jax.Array, noise_floor: jax.Array,
               old_params: Any = None
               ) -> tuple[TrainState, dict[str, jax.Array]]:
  """One update from one minibatch (TEPO Eq. 4, Algorithm 1 steps 5–7).

  A gradient that is not finite leaves the state as it was and sets the metric
  `skipped` to 1. `noise_floor` is how far H − H° moves by rounding alone
  (nats), for the metrics; `old_params` is needed iff `policy_loss.needs_kl`.

  Returns:
    The new state and float32 scalars: those of the objective, `loss`,
    `grad_norm` (before clipping) and `skipped`.
  """
  scores = None
  if policy_loss.needs_scoring:
    scores = _score(scorer, state.params, batch)
  statistics = policy_loss.statistics(tokens(batch, scores), rng)
  loss, gradient, scores = loss_and_gradient(
      scorer, policy_loss.partial, state.params, batch, statistics, old_params)
  metrics = policy_loss.metrics(tokens(batch, scores), statistics, noise_floor)
  state, update_metrics = _apply(optimizer, state, loss, gradient)
  return state, metrics | update_metrics


def loss_and_gradient(scorer: Scorer, partial: Callable[..., jax.Array],
                      params: Any, batch: Batch, statistics: Any,
                      old_params: Any) -> tuple[jax.Array, Any, scoring.Scores]:
  """A loss that adds up over rows, its gradient in `params`, and the scores.

  Args:
    partial: (objective.Tokens, statistics) of some rows -> their part.
    statistics: tree of [B, T], sliced by rows.
    old_params: of π_old, or None: no exact KL.
  """
  def partial_loss(params, rows, row_statistics):
    row_scores = scorer(params, rows, old_params)
    return partial(tokens(rows, row_scores), row_statistics), row_scores

  def accumulate(carry, microbatch):
    loss, gradient = carry
    (part, row_scores), partial_gradient = jax.value_and_grad(
        partial_loss, has_aux=True)(params, *microbatch)
    gradient = jax.tree.map(jnp.add, gradient, partial_gradient)
    return (loss + part, gradient), row_scores

  zero = jnp.float32(0), jax.tree.map(jnp.zeros_like, params)
  (loss, gradient), scores = _over_microbatches(
      accumulate, zero, (batch, statistics), scorer.microbatches)
  return loss, gradient, scores


def _apply(optimizer, state, loss, gradient):
  """The optimiser's step, or none when the gradient is not finite."""
  grad_norm = optax.global_norm(gradient)
  finite = jnp.isfinite(grad_norm) & jnp.isfinite(loss)
  updates, opt_state = optimizer.update(gradient, state.opt_state,
                                        state.params)
  new = TrainState(state.step + 1, optax.apply_updates(state.params, updates),
                   opt_state)
  state = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, state)
  return state, {'loss': loss, 'grad_norm': grad_norm,
                 'skipped': 1.0 - finite}


def tokens(batch: Batch, scores: scoring.Scores | None) -> objective.Tokens:
  """What the objective sees of a batch; `scores` None: masks only."""
  scores = scores or scoring.Scores(None, None, None)
  return objective.Tokens(
      logp_BT=scores.logp_BT, entropy_BT=scores.entropy_BT,
      old_logp_BT=batch.old_logp_BT, old_entropy_BT=batch.old_entropy_BT,
      advantage_BT=jnp.broadcast_to(batch.advantage_B[:, None],
                                    batch.mask_BT.shape),
      mask_BT=batch.mask_BT, kl_BT=scores.kl_BT)


def _score(scorer, params, batch):
  """Scores of a whole minibatch, one microbatch at a time."""
  def body(_, rows):
    return None, scorer(params, rows)
  _, scores = _over_microbatches(body, None, batch, scorer.microbatches)
  return scores


def _over_microbatches(body, carry, rows, microbatches):
  """Scans `body` over the rows, cut in strides; joins what it returns.

  Row i·M + m goes to microbatch m: each microbatch stays spread over the
  devices that hold the minibatch's contiguous blocks.
  """
  def cut(x):
    return x.reshape(-1, microbatches, *x.shape[1:]).swapaxes(0, 1)

  def join(x):
    return x.swapaxes(0, 1).reshape(-1, *x.shape[2:])

  carry, out = jax.lax.scan(body, carry, jax.tree.map(cut, rows))
  return carry, jax.tree.map(join, out)
