"""One optimiser update: the loss over microbatches, as if there were only one.

Takes a packed `Minibatch`, scores its rows one microbatch at a time, and hands
the scores to the objective by completion, [B, T]. Every statistic (the
denominator N, covariances, top-k) belongs to the whole minibatch: it is
computed first, and the microbatches' partial losses only add up. So the number
of microbatches, the packing and the mesh change the result by rounding only.

The exact KL needs π_old's distributions at the states of every update.
`score_minibatch` runs π_old over these tokens in any case, for ℓ° and H°; it
keeps the final hidden states, so that an update applies π_old's head to them
and need not run its layers. `score_minibatch` and `train_step` share the
forward pass and its shapes: until the weights move, w = 1, H − H° = 0 and
KL(π_old ‖ π_old) = 0 exactly. This holds on CPUs, where tests check it. On an
H200 in bfloat16 the two programs round differently: w from 0.988 to 1.005 was
seen in the first update. So that noise decides neither a clip nor a sign there,
`train_step` takes its own ℓ and H as ℓ° and H° until the weights move
(`Minibatch.scored_at`); the KL keeps the noise, 5e-5 nats.

Axes: B completions of a minibatch · T tokens of a completion · M microbatches ·
R rows of a microbatch · S columns of a row · C columns of scores · D model ·
K microbatches whose hidden states are kept.
"""

from collections.abc import Callable
import dataclasses
import functools
from typing import Any

import flax.struct
import jax
from jax import numpy as jnp
import optax

from tepo_jax.learning import objective
from tepo_jax.learning import packing
from tepo_jax.policy import lora
from tepo_jax.policy import scoring
from tepo_jax.policy import transformer
from tepo_jax.runtime import mesh as mesh_lib


@flax.struct.dataclass
class TrainState:
  """step: optimiser updates done; params: fp32 masters; opt_state: optax's;
  reference: the reference policy's params in the compute dtype, or None."""
  step: jax.Array
  params: Any
  opt_state: optax.OptState
  reference: Any = None


@flax.struct.dataclass
class OldPolicy:
  """π_old's distributions in a minibatch, for the exact KL.

  states_RKSD: its final hidden states, in the compute dtype.
  first: int32, where among the K the minibatch's microbatches begin.
  head_weight: [D, V], or [V, D] if tied, in the compute dtype.
  """
  states_RKSD: jax.Array
  first: jax.Array
  head_weight: jax.Array

  def of_microbatch(self, m: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Hidden states [R, S, D] of a microbatch, and the head's weight."""
    hidden_RSD = jax.lax.dynamic_index_in_dim(
        self.states_RKSD, self.first + m, axis=1, keepdims=False)
    return mesh_lib.constrain(
        hidden_RSD, ('batch', None, None)), self.head_weight


@dataclasses.dataclass(frozen=True)
class Scorer:
  """Scores rows under a policy: the same for ℓ°, H° and for the update.

  temperature: the sampler's. chunk_size, shards: see `scoring.score_states`.
  frozen: with LoRA the frozen base weights, whose adapters are the params.
  """
  model: transformer.ModelConfig
  temperature: float
  chunk_size: int
  shards: int
  frozen: Any = None

  def score(self, params: Any, minibatch: packing.Minibatch,
            rows: scoring.PackedRows, mine_B: jax.Array,
            old: tuple[jax.Array, jax.Array] | None = None
            ) -> tuple[scoring.Scores, jax.Array]:
    """Scores a microbatch.

    Args:
      rows: the microbatch's. mine_B: whether a completion is in it.
      old: of `OldPolicy.of_microbatch`, for the exact KL; then the minibatch
        has ℓ°.

    Returns:
      Scores [B, T], 0 of other microbatches' completions; and the final hidden
      states [R, S, D].
    """
    params = lora.combine(self.frozen, params)
    hidden_RSD, _ = transformer.forward(
        self.model, params, rows.token_RS, rows.position_RS,
        segment_BS=rows.segment_RS, sequences=rows.sequences)
    scores = scoring.score_states(
        self.model, hidden_RSD, transformer.head_weight(self.model, params),
        rows, temperature=self.temperature, chunk_size=self.chunk_size,
        shards=self.shards, old=old)
    return scoring.by_completion(
        scores, minibatch.row_B, minibatch.column_B, mine_B,
        minibatch.old_logp_BT), hidden_RSD


def score_minibatch(
    scorer: Scorer, params: Any, minibatch: packing.Minibatch,
    states_RKSD: jax.Array | None = None, first: int | jax.Array = 0
) -> tuple[jax.Array, jax.Array, OldPolicy | None]:
  """ℓ° and H° [B, T] by the training forward at the training shapes.

  The sampler's own numbers differ from these by rounding: as π_old's they would
  move every ratio off 1, and noise would decide the sign of H − H° and so
  TEPO's mask.

  Args:
    states_RKSD: where the hidden states are kept, from microbatch `first` of
      the K; None: nowhere.

  Returns:
    ℓ°, H°, and π_old for `train_step`; None without `states_RKSD`.
  """
  def body(carry, m, rows, mine_B):
    scores, kept_RKSD = carry
    new, hidden_RSD = scorer.score(params, minibatch, rows, mine_B)
    if kept_RKSD is not None:
      kept_RKSD = jax.lax.dynamic_update_slice_in_dim(
          kept_RKSD, hidden_RSD[:, None], first + m, axis=1)
    return jax.tree.map(jnp.add, scores, new), kept_RKSD

  scores, states_RKSD = _over_microbatches(
      body, (_no_scores(minibatch, False), states_RKSD), minibatch)
  old = None
  if states_RKSD is not None:
    head_weight = transformer.head_weight(
        scorer.model, lora.combine(scorer.frozen, params))
    old = OldPolicy(states_RKSD, jnp.int32(first),
                    head_weight.astype(scorer.model.dtype))
  return scores.logp_BT, scores.entropy_BT, old


def score_with_states(
    scorer: Scorer, params: Any, minibatch: packing.Minibatch
) -> tuple[jax.Array, jax.Array, OldPolicy]:
  """`score_minibatch` with the hidden states of this minibatch kept."""
  microbatches, rows, columns = minibatch.rows.token_RS.shape
  model = scorer.model
  logp_BT, entropy_BT, old = score_minibatch(
      scorer, params, minibatch, jnp.zeros(
          (rows, microbatches, columns, model.d_model), model.dtype))
  assert old is not None  # the states were kept
  return logp_BT, entropy_BT, old


def _over_microbatches(body, carry, minibatch):
  """carry = body(carry, m, rows, mine_B) over the microbatches that are used.

  m: the microbatch's number. mine_B: whether a completion is in it. The number
  of microbatches used is an array, so one compiled program handles every
  packing.
  """
  def step(m, carry):
    rows = jax.tree.map(lambda x_M: jax.lax.dynamic_index_in_dim(
        x_M, m, keepdims=False), minibatch.rows)
    return body(carry, m, rows, minibatch.microbatch_B == m)
  return jax.lax.fori_loop(0, minibatch.used, step, carry)


def _no_scores(minibatch, with_kl):
  zeros_BT = jnp.zeros(minibatch.mask_BT.shape, jnp.float32)
  return scoring.Scores(zeros_BT, zeros_BT, zeros_BT if with_kl else None)


def train_step(
    scorer: Scorer, policy_loss: objective.PolicyLoss,
    optimizer: optax.GradientTransformation, state: TrainState,
    minibatch: packing.Minibatch, rng: jax.Array,
    old: OldPolicy | None = None) -> tuple[TrainState, dict[str, jax.Array]]:
  """One update from one minibatch (TEPO Eq. 4, Algorithm 1 steps 5–7).

  A gradient that is not finite leaves the state unchanged and sets the metric
  `skipped` to 1. `old` is needed iff `policy_loss.needs_kl`.

  Returns:
    The new state and float32 scalars: those of the objective, `loss`,
    `grad_norm` (before clipping) and `skipped`.
  """
  scores = None
  if policy_loss.whole_minibatch:
    logp_BT, entropy_BT, _ = score_minibatch(
        scorer, state.params, minibatch)
    scores = scoring.Scores(logp_BT, entropy_BT)
  seen = functools.partial(_from_old, minibatch.scored_at, state.step)
  statistics = policy_loss.statistics(seen(tokens(minibatch, scores)), rng)
  loss, gradient, scores = loss_and_gradient(
      scorer, lambda x, statistics: policy_loss.partial(seen(x), statistics),
      state.params, minibatch, statistics,
      old if policy_loss.needs_kl else None)
  metrics = policy_loss.metrics(seen(tokens(minibatch, scores)), statistics)
  state, update_metrics = _apply(
      optimizer, state, loss, gradient, minibatch.rate_share)
  return state, metrics | update_metrics


def tokens(minibatch: packing.Minibatch, scores: scoring.Scores | None
           ) -> objective.Tokens:
  """The objective's input; without `scores` it has only what is known before
  the policy is scored."""
  scored = vars(scores) if scores else dict(logp_BT=None, entropy_BT=None)
  return objective.Tokens(
      old_logp_BT=minibatch.old_logp_BT,
      old_entropy_BT=minibatch.old_entropy_BT,
      advantage_BT=by_token(minibatch.advantage_B, minibatch.mask_BT),
      mask_BT=minibatch.mask_BT, behaviour_BT=minibatch.behaviour_BT,
      reference_logp_BT=minibatch.reference_logp_BT, **scored)


def _from_old(scored_at, step, x):
  """Tokens with ℓ° = ℓ and H° = H while the policy is π_old."""
  if scored_at is None or x.logp_BT is None:
    return x
  is_old, new = scored_at == step, jax.lax.stop_gradient(x)
  return x.replace(
      old_logp_BT=jnp.where(is_old, new.logp_BT, x.old_logp_BT),
      old_entropy_BT=jnp.where(is_old, new.entropy_BT, x.old_entropy_BT))


def by_token(advantage_B, mask_BT):
  """`advantage_B` for each token, [B, T]."""
  if advantage_B.ndim == 1:
    advantage_B = advantage_B[:, None]
  return jnp.broadcast_to(advantage_B, mask_BT.shape)


def loss_and_gradient(
    scorer: Scorer, partial: Callable[..., jax.Array], params: Any,
    minibatch: packing.Minibatch, statistics: Any, old: OldPolicy | None
) -> tuple[jax.Array, Any, scoring.Scores]:
  """A loss that adds up over completions, its gradient, and the scores.

  Args:
    partial: (objective.Tokens, statistics) -> the part of the loss that the
      unmasked completions contribute.
    minibatch: with ℓ°, if `old` is given. statistics: tree of [B, T].
    old: π_old, or None: no exact KL.
  """
  def partial_loss(params, m, rows, mine_B):
    scores, _ = scorer.score(
        params, minibatch, rows, mine_B, old and old.of_microbatch(m))
    # Completions of other microbatches get mask 0 and coefficient 0.
    mine = jax.tree.map(
        lambda x_BT: jnp.where(mine_B[:, None], x_BT, 0).astype(x_BT.dtype),
        (tokens(minibatch, scores), statistics))
    return partial(*mine), scores

  def accumulate(carry, m, rows, mine_B):
    loss, gradient, scores = carry
    part, backward, new = jax.vjp(
        lambda params: partial_loss(params, m, rows, mine_B), params,
        has_aux=True)
    # The backward pass adds a layer's gradient to the sum in place; only where
    # a mesh cuts the layers is there first a tree of a microbatch's gradient.
    sums = jax.tree.map(jax.new_ref, gradient)
    backward.with_refs(sums)(jnp.ones_like(part))
    return (loss + part, jax.tree.map(jax.freeze, sums),
            jax.tree.map(jnp.add, scores, new))

  loss, gradient, scores = _over_microbatches(accumulate, (
      jnp.float32(0), jax.tree.map(jnp.zeros_like, params),
      _no_scores(minibatch, old is not None)), minibatch)
  return loss, gradient, scores


def _apply(optimizer, state, loss, gradient, rate_share):
  """The optimiser's step, or none when the gradient is not finite."""
  grad_norm = optax.global_norm(gradient)
  finite = jnp.isfinite(grad_norm) & jnp.isfinite(loss)
  updates, opt_state = change(
      optimizer, gradient, state.opt_state, state.params, rate_share)
  new = state.replace(
      step=state.step + 1, opt_state=opt_state,
      params=optax.apply_updates(state.params, updates))
  state = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, state)
  return state, {
      'loss': loss, 'grad_norm': grad_norm, 'skipped': 1.0 - finite}


def change(optimizer: optax.GradientTransformation, gradient: Any,
           opt_state: optax.OptState, params: Any,
           rate_share: jax.Array | None = None) -> tuple[Any, optax.OptState]:
  """The change of the parameters, and the optimiser's new state.

  rate_share: of the learning rate; None: 1. AdamW's change is proportional to
  the rate, its weight decay included, and its state does not depend on it.
  """
  updates, opt_state = optimizer.update(gradient, opt_state, params)
  if rate_share is not None:
    updates = optax.tree.scale(rate_share, updates)
  return updates, opt_state
