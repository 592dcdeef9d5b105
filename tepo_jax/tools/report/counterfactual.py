"""Evaluates every method on one minibatch: the update each would have made.

A method's loss depends on the parameters only through ℓ, H and the exact KL of
each token. So one compiled program, their vector-Jacobian product, serves every
method; the objective itself runs on the scores.

Axes: B completions · T completion tokens.
"""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tepo_jax.learning import batch as batch_lib
from tepo_jax.learning import numerics
from tepo_jax.learning import objective
from tepo_jax.learning import update
from tepo_jax.policy import scoring


@dataclasses.dataclass(frozen=True)
class ReplayPrograms:
  """Jitted functions.

  score: (params, batch) -> ℓ, H; bit-identical to those of the run's updates.
  pull_back: (params, batch, cotangents, old_params) -> gradient, Scores; the
    function `pull_back` below with its scorer bound.
  move: (gradient, opt_state, params) -> the optimiser's change of params.
  """
  score: Callable
  pull_back: Callable
  move: Callable


@dataclasses.dataclass(frozen=True)
class Outcome:
  """One update by a method.

  clip_fraction: share of tokens that a bound clips or that are dropped.
  region_share: share of tokens in M.
  entropy_predicted: ⟨∇H̄, Δθ⟩; entropy_measured: H̄(θ + Δθ) − H̄(θ); in nats.
    H̄ is the mean entropy of the minibatch's tokens, Δθ the optimiser's change
    for the method's gradient.
  gradient: on the host.
  """
  loss: float
  grad_norm: float
  clip_fraction: float
  region_share: float
  entropy_predicted: float
  entropy_measured: float
  gradient: Any = dataclasses.field(repr=False)


def pull_back(scorer: update.Scorer, params: Any, batch: batch_lib.Minibatch,
              cotangents: scoring.Scores, old_params: Any
              ) -> tuple[Any, scoring.Scores]:
  """Returns Σ_it ⟨cotangents, ∂(ℓ, H, KL)_it/∂θ⟩ and the scores."""
  _, gradient, scores = update.loss_and_gradient(
      scorer, _linear, params, batch, cotangents, old_params)
  return gradient, scores


def _linear(tokens, cotangents):
  x = numerics.clean(tokens)
  return jnp.sum(cotangents.logp_BT * x.logp_BT
                 + cotangents.entropy_BT * x.entropy_BT
                 + cotangents.kl_BT * x.kl_BT)


def scores(programs: ReplayPrograms, params: Any, batch: batch_lib.Minibatch,
           old_params: Any) -> scoring.Scores:
  """Returns ℓ, H and the exact KL to π_old of the batch's tokens."""
  logp_BT, entropy_BT = programs.score(params, batch)
  _, whole = programs.pull_back(params, batch, _zeros(batch), old_params)
  return whole.replace(logp_BT=logp_BT, entropy_BT=entropy_BT)


def _zeros(batch):
  """Returns zero cotangents, with which `pull_back` only scores."""
  zeros_BT = jnp.zeros(batch.mask_BT.shape, jnp.float32)
  return scoring.Scores(zeros_BT, zeros_BT, zeros_BT)


def evaluate(programs: ReplayPrograms,
             losses: Mapping[str, objective.PolicyLoss],
             state: update.TrainState,
             batches: Mapping[str, batch_lib.Minibatch], rng: jax.Array,
             old_params: Any) -> dict[str, Outcome]:
  """Returns the outcome of each method at the same parameters.

  Args:
    losses: by method. batches: the minibatch by advantage estimator, on the
      devices, with ℓ° and H°.
    state: before the update. rng: of the update.
    old_params: π_old, for the exact KL.
  """
  batch = next(iter(batches.values()))
  now = scores(programs, state.params, batch, old_params)
  mean_BT = objective.token_mean(batch.mask_BT)
  d_entropy, _ = programs.pull_back(
      state.params, batch, _zeros(batch).replace(entropy_BT=mean_BT),
      old_params)

  def outcome(loss):
    mine = batches[loss.row.estimator]
    value, metrics, cotangents = _slopes(loss, update.tokens(mine, now), rng)
    gradient, _ = programs.pull_back(
        state.params, mine, cotangents, old_params)
    change = programs.move(gradient, state.opt_state, state.params)
    after = optax.apply_updates(state.params, change)
    _, entropy_BT = programs.score(after, batch)
    return Outcome(
        loss=float(value), grad_norm=float(optax.global_norm(gradient)),
        clip_fraction=float(sum(metrics[f'clip_fraction_{part}'] for part in (
            'low', 'high', 'covariance'))),
        region_share=float(metrics['region_share']),
        entropy_predicted=float(optax.tree.vdot(d_entropy, change)),
        entropy_measured=float(jnp.sum(mean_BT * jnp.where(
            batch.mask_BT > 0, entropy_BT - now.entropy_BT, 0))),
        gradient=jax.device_get(gradient))

  return {name: outcome(loss) for name, loss in losses.items()}


def _slopes(loss, tokens, rng):
  """Returns L, its metrics, and ∂L/∂(ℓ, H, KL) of the whole minibatch."""
  statistics = loss.statistics(tokens, rng)

  def value(scores):
    return loss.partial(tokens.replace(**scores), statistics)

  scores = dict(logp_BT=tokens.logp_BT, entropy_BT=tokens.entropy_BT,
                kl_BT=tokens.kl_BT)
  total, slopes = jax.value_and_grad(value)(scores)
  return total, loss.metrics(tokens, statistics), scoring.Scores(**slopes)


def cosines(outcomes: Sequence[Outcome]) -> np.ndarray:
  """Returns the cosines [n, n] of the gradients; 0 with a zero gradient."""
  flat = np.stack([np.concatenate([
      np.ravel(leaf) for leaf in jax.tree.leaves(outcome.gradient)])
      for outcome in outcomes]).astype(np.float64)
  norm = np.linalg.norm(flat, axis=1, keepdims=True)
  unit = flat / np.where(norm > 0, norm, 1)
  return unit @ unit.T
