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
seen in the first update.

Axes: B completions of a minibatch · T tokens of a completion · M microbatches ·
R rows of a microbatch · S columns of a row · C columns of scores · D model ·
K microbatches whose hidden states are kept.
"""

from collections.abc import Callable
import dataclasses
from typing import Any

import flax.struct
import jax
from jax import numpy as jnp
import optax

from tepo_jax.learning import batch as batch_lib
from tepo_jax.learning import objective
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

  def states(self, params: Any, rows: scoring.PackedRows
             ) -> tuple[jax.Array, jax.Array]:
    """As `scoring.states`."""
    return scoring.states(
        self.model, lora.combine(self.frozen, params), rows)

  def score(self, states: tuple[jax.Array, jax.Array],
            rows: scoring.PackedRows, old: Any = None) -> scoring.Scores:
    """The scores from `states`, and the exact KL to `old`, if given."""
    return scoring.score_states(
        self.model, *states, rows, temperature=self.temperature,
        chunk_size=self.chunk_size, shards=self.shards, old=old)


def score_minibatch(
    scorer: Scorer, params: Any, minibatch: batch_lib.Minibatch,
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
    states = scorer.states(params, rows)
    new = _by_completion(scorer.score(states, rows), minibatch, mine_B)
    if kept_RKSD is not None:
      kept_RKSD = jax.lax.dynamic_update_slice_in_dim(
          kept_RKSD, states[0][:, None], first + m, axis=1)
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
    scorer: Scorer, params: Any, minibatch: batch_lib.Minibatch
) -> tuple[jax.Array, jax.Array, OldPolicy]:
  """`score_minibatch` with the hidden states of this minibatch kept."""
  microbatches, rows, columns = minibatch.rows.token_RS.shape
  model = scorer.model
  logp_BT, entropy_BT, old = score_minibatch(
      scorer, params, minibatch, jnp.zeros(
          (rows, microbatches, columns, model.d_model), model.dtype))
  assert old is not None  # the states were kept
  return logp_BT, entropy_BT, old


def train_step(
    scorer: Scorer, policy_loss: objective.PolicyLoss,
    optimizer: optax.GradientTransformation, state: TrainState,
    minibatch: batch_lib.Minibatch, rng: jax.Array,
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
  statistics = policy_loss.statistics(tokens(minibatch, scores), rng)
  loss, gradient, scores = loss_and_gradient(
      scorer, policy_loss.partial, state.params, minibatch, statistics,
      old if policy_loss.needs_kl else None)
  metrics = policy_loss.metrics(tokens(minibatch, scores), statistics)
  state, update_metrics = _apply(
      optimizer, state, loss, gradient, minibatch.rate_share)
  return state, metrics | update_metrics


def loss_and_gradient(
    scorer: Scorer, partial: Callable[..., jax.Array], params: Any,
    minibatch: batch_lib.Minibatch, statistics: Any, old: OldPolicy | None
) -> tuple[jax.Array, Any, scoring.Scores]:
  """A loss that adds up over completions, its gradient, and the scores.

  Args:
    partial: (objective.Tokens, statistics) -> the part of the loss that the
      unmasked completions contribute.
    minibatch: with ℓ°, if `old` is given. statistics: tree of [B, T].
    old: π_old, or None: no exact KL.
  """
  def with_kl(scores):
    return scores if old is None else scoring.add_log_ratio(
        scores, minibatch.old_logp_BT)

  def partial_loss(params, m, rows, mine_B):
    scores = scores_of_microbatch(
        scorer, params, minibatch, rows, mine_B, old and old.of_microbatch(m))
    # Completions of other microbatches get mask 0 and coefficient 0.
    mine = jax.tree.map(
        lambda x_BT: jnp.where(mine_B[:, None], x_BT, 0).astype(x_BT.dtype),
        (tokens(minibatch, with_kl(scores)), statistics))
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
  return loss, gradient, with_kl(scores)


def scores_of_microbatch(
    scorer: Scorer, params: Any, minibatch: batch_lib.Minibatch,
    rows: scoring.PackedRows, mine_B: jax.Array,
    old: tuple[jax.Array, jax.Array] | None) -> scoring.Scores:
  """Scores [B, T] of the completions mine_B in the rows, zeros elsewhere; with
  `OldPolicy.of_microbatch`, the exact KL less ℓ − ℓ°."""
  return _by_completion(
      scorer.score(scorer.states(params, rows), rows, old), minibatch, mine_B)


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


def tokens(minibatch: batch_lib.Minibatch, scores: scoring.Scores | None
           ) -> objective.Tokens:
  """The objective's input; without `scores` it has only what is known before
  the policy is scored."""
  scored = vars(scores) if scores else dict(logp_BT=None, entropy_BT=None)
  return objective.Tokens(
      old_logp_BT=minibatch.old_logp_BT,
      old_entropy_BT=minibatch.old_entropy_BT,
      advantage_BT=batch_lib.by_token(
          minibatch.advantage_B, minibatch.mask_BT),
      mask_BT=minibatch.mask_BT, behaviour_BT=minibatch.behaviour_BT,
      reference_logp_BT=minibatch.reference_logp_BT, **scored)


def _no_scores(minibatch, with_kl):
  zeros_BT = jnp.zeros(minibatch.mask_BT.shape, jnp.float32)
  return scoring.Scores(zeros_BT, zeros_BT, zeros_BT if with_kl else None)


def _by_completion(scores, minibatch, mine_B):
  """[R, C] -> [B, T]: the microbatch's own completions, zeros elsewhere.

  Takes T scores from each completion's first. Past its end these are
  the scores of whatever follows in the row; the mask hides them.
  """
  length = minibatch.mask_BT.shape[1]

  def take(x_RC):
    flat = jnp.pad(x_RC.reshape(-1), (0, length))
    start_B = minibatch.row_B * x_RC.shape[1] + minibatch.column_B
    start_B = jnp.where(mine_B, start_B, x_RC.size)
    return jax.vmap(lambda start: jax.lax.dynamic_slice_in_dim(
        flat, start, length))(start_B)

  return jax.tree.map(take, scores)


def _over_microbatches(body, carry, minibatch):
  """carry = body(carry, m, rows, mine_B) over the microbatches that are used.

  m: the microbatch's number. mine_B: whether a completion is in it. The number
  of microbatches used is an array, so one compiled program handles every
  packing.
  """
  def step(m, carry):
    rows = jax.tree.map(lambda x: _at(x, m), minibatch.rows)
    return body(carry, m, rows, minibatch.microbatch_B == m)
  return jax.lax.fori_loop(0, minibatch.used, step, carry)


def _at(x_M, m):
  return jax.lax.dynamic_index_in_dim(x_M, m, keepdims=False)
