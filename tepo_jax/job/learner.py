"""The policy of a run, and its updates in a rollout step.

`Learner.learn` is the paper's Algorithm 1 from the groups on. What it calls
elsewhere:

    advantages  of the groups' rewards: `advantage.of_batch`
    pack        completions to rows: `packing.Packer`, `packing.SharedPacker`
    score, score_and_keep   ℓ° and H°: `update.score_minibatch`, jitted
    old_policy  π_old for an exact KL: `update.score_with_states`, jitted
    train_step  loss, gradient, AdamW: `update.train_step`, jitted; the loss is
                `objective.PolicyLoss`

Axes: B completions · P tokens of a prompt · T tokens of a completion ·
S = P + T · G samples of a prompt. Of π_old's hidden states [R, K, S, D]: R rows
of a microbatch, S their columns, and the K microbatches that fit into memory.
"""

from collections.abc import Sequence
import dataclasses
import functools
from typing import Any

import jax
from jax import numpy as jnp
import ml_collections
import numpy as np

from tepo_jax import errors
from tepo_jax.job import memory as memory_lib
from tepo_jax.job import programs as programs_lib
from tepo_jax.job import provenance
from tepo_jax.job import session as session_lib
from tepo_jax.job import summaries
from tepo_jax.learning import advantage
from tepo_jax.learning import behaviour
from tepo_jax.learning import choices
from tepo_jax.learning import packing
from tepo_jax.learning import update
from tepo_jax.policy import lora
from tepo_jax.rollout import groups as groups_lib
from tepo_jax.runtime import host
from tepo_jax.runtime import mesh as mesh_lib

MAX_SKIPPED = 3  # consecutive non-finite updates before a run stops


@dataclasses.dataclass(frozen=True)
class ScoredStep:
  """The minibatches of a rollout step, scored by π_old.

  The lists have an entry for each minibatch. Every epoch takes all minibatches
  in this order, so there are epochs x minibatches updates.

  batch: all completions, on the host. members: indices in `batch` of the
    completions in each minibatch.
  minibatches: on the devices, with ℓ° and H°, and ℓ of a reference policy.
  old: for an exact KL, π_old in each minibatch; empty if it is computed anew
    for each update, from the weights `old_params` in the compute dtype.
  efficiency: mean `packing.efficiency`. key: of the step's random numbers.
  """
  batch: packing.Batch
  members: list[np.ndarray]
  minibatches: list[packing.Minibatch]
  old: list[update.OldPolicy]
  old_params: Any
  epochs: int
  efficiency: float
  key: jax.Array

  @property
  def updates(self) -> int:
    """How many updates the step makes."""
    return self.epochs * len(self.minibatches)

  def minibatch_index(self, index: int) -> int:
    """Which of the minibatches the update `index` takes."""
    return index % len(self.minibatches)

  def rng(self, index: int) -> jax.Array:
    """The random key of an update."""
    return jax.random.fold_in(self.key, index)

  def old_logp_BT(self) -> np.ndarray:
    """ℓ° of `batch`, on the host; waits for it."""
    return self._gathered('old_logp_BT')

  def reference_gap_BT(self) -> np.ndarray:
    """ℓ° minus the reference policy's ℓ; as `old_logp_BT`."""
    return self.old_logp_BT() - self._gathered('reference_logp_BT')

  def _gathered(self, name):
    whole_BT = np.zeros_like(self.batch.old_logp_BT)
    for mine, minibatch in zip(self.members, self.minibatches):
      whole_BT[mine] = mesh_lib.to_host(getattr(minibatch, name))
    return whole_BT


class Learner:
  """The policy and its updates.

  Attributes:
    state: update.TrainState; set it before anything is learned or sampled.
    update_bytes: of a device, see `fit`.
    frozen: with LoRA the base weights, else None.
    base_digests: of the base weights, {} without LoRA; see `provenance`.
    skipped_in_a_row: consecutive updates that were not finite.
  """

  def __init__(self, config: ml_collections.ConfigDict,
               session: session_lib.Session):
    self.config, self.session = config, session
    programs = programs_lib.make(config, session.model, session.mesh)
    memory_lib.check(programs)
    self.programs = memory_lib.keeping(
        programs, config.rollout.prompts // config.train.minibatch_prompts)
    self.update_bytes: float | None = None
    self.state: update.TrainState | None = None
    self.frozen, self.skipped_in_a_row = None, 0
    self.base_digests: dict[str, int] = {}

  def fit(self, begin: str | None = None) -> None:
    """For compute.remat='auto', compiles the update and chooses what it
    recomputes; arguments and results are those of `memory.fitted`."""
    self.programs, self.update_bytes = memory_lib.fitted(
        self.config, self.programs,
        functools.partial(memory_lib.update_bytes, self.config), begin=begin)

  def load_base(self) -> None:
    """With LoRA, loads the model folder's weights as the frozen base."""
    if self.programs.model.lora:
      params = self.session.load_params()
      self.base_digests = provenance.weight_digests(
          self.programs.model, params)
      self.frozen = self.programs.freeze(params)

  def first_state(self) -> update.TrainState:
    """The state of step 0; call `load_base` before."""
    params = (self.session.load_params() if self.frozen is None else
              self.programs.init_adapters(
                  programs_lib.stream(self.config.seed, 'adapters')))
    return self.programs.init_state(params)

  def stands_on(self) -> dict[str, dict]:
    """For checkpoints, the `provenance.record`; call `load_base` before."""
    return provenance.record(self.session.folder, self.base_digests)

  def check_stands_on(self, where: str, extra: dict[str, Any]) -> None:
    """A `checkpoint.Check`: refuses a run on another model folder; call
    `load_base` before."""
    provenance.check(where, extra['stands_on'], self.session.folder,
                     self.base_digests)

  def policy(self) -> Any:
    """The complete weights of the policy."""
    return lora.combine(self.frozen, self.state.params)

  def base(self) -> tuple:
    """The jitted functions' last arguments: with LoRA, the base weights."""
    return () if self.frozen is None else (self.frozen,)

  def renew_reference(self, step: int) -> None:
    """Makes the policy the reference policy, before the first step of each
    `method.reference.period`."""
    period = self.programs.policy_loss.method.reference.period
    if self.state.reference is not None and period and (step - 1) % period == 0:
      self.state = self.state.replace(reference=None)  # never two at once
      self.state = self.state.replace(
          reference=self.programs.to_old_policy(self.state.params))

  def learn(self, step: int, groups: list[groups_lib.Group],
            reward_B: np.ndarray) -> dict[str, float]:
    """Makes all updates of a rollout step; returns their average metrics.

    reward_B: of the groups' completions, see `reward.Rewards`.

    Raises:
      errors.RunError: MAX_SKIPPED consecutive updates were not finite, or the
        sampler's log-probabilities are too far from the trainer's.
    """
    host.trim()
    with self.session.timers('score'):
      scored = self.pack_and_score(step, groups, reward_B)
      if not scored.updates:  # all completions are masked
        return {}
      # The devices have all of the step's work before the host waits, but
      # where behaviour weights or a penalty in the reward need ℓ° first.
      history = [self.make_update(scored, index)
                 for index in range(scored.updates)]
      scalars = self._compare(scored, step)
    with self.session.timers('update'):
      history = mesh_lib.to_host(history)
    for outcome in history:
      self._count_skipped(outcome, step)
    share = self.programs.rate_share(step)
    return scalars | summaries.average(history) | {
        'optimizer/learning_rate': self.config.optimizer.learning_rate * (
            1 if share is None else float(share))}

  def pack_and_score(self, step: int, groups: list[groups_lib.Group],
                     reward_B: np.ndarray) -> ScoredStep:
    """Packs each minibatch of rollout step `step`, and scores it by the
    current policy, and by the reference policy, if there is one; adds the
    behaviour weights if they are on."""
    programs, method = self.programs, self.programs.policy_loss.method
    batch = self.to_batch(groups, reward_B, method.estimator)
    members = self._split(batch)
    packed, minibatches, old = self._score(
        batch, members, rate_share=programs.rate_share(step),
        scored_at=np.int32(mesh_lib.to_host(self.state.step)))
    old_params = None
    if old and sum(p.used for p in packed) > programs.old_states.shape[1]:
      old = []  # frees the hidden states, which are not complete
      old_params = programs.to_old_policy(self.state.params)
    scored = ScoredStep(
        batch, members, minibatches, old, old_params, self.config.train.epochs,
        np.mean(list(map(packing.efficiency, packed)) or [0]),
        jax.random.fold_in(
            programs_lib.stream(self.config.seed, 'update'), step))
    if method.reference.is_in_reward:
      # In the place of the batch's own, which lack the KL: it needs ℓ°. Both
      # are made from the rewards, so that nothing is normalised twice.
      scored = self._with(scored, advantage_B=self.advantages(
          scored, groups, reward_B, method))
    if self.config.train.behaviour.weight != 'off':
      scored = self._with(scored, behaviour_BT=behaviour.weights(
          scored.old_logp_BT(), batch.sampler_logp_BT, batch.mask_BT,
          **self.config.train.behaviour))
    return scored

  def to_batch(self, groups: list[groups_lib.Group], reward_B: np.ndarray,
               estimator: str, rows: int | None = None) -> packing.Batch:
    """Host arrays of the groups, padded to `rows` (None: a rollout's size)."""
    rollout = self.config.rollout
    return batch_of(
        groups, reward_B, rows=rows or rollout.prompts * rollout.samples,
        width=self.config.data.max_prompt_tokens, estimator=estimator,
        truncated=rollout.truncated)

  def _split(self, batch):
    """The completions of each minibatch: whole groups in the data's order.

    Skips minibatches that hold only filler (possible in mode 'drop').
    """
    size = self.config.train.minibatch_prompts * self.config.rollout.samples
    every_one = np.arange(len(batch.mask_BT)).reshape(-1, size)
    return [mine for mine in every_one if batch.mask_BT[mine].any()]

  def _score(self, batch, members, **scalars):
    """The packed minibatches on the host; the same on the devices, scored
    exactly as they will be trained on; for an exact KL, π_old in each."""
    programs, params, base = self.programs, self.state.params, self.base()
    packed, minibatches, old, first, used = [], [], None, [], 0
    states_RKSD = None if programs.old_states is None else jnp.zeros(
        programs.old_states.shape, programs.old_states.dtype,
        device=programs.old_states.sharding)
    for mine in members:  # the devices score one while the host packs the next
      packed.append(programs.pack(jax.tree.map(
          lambda x: x[mine], batch)).replace(**scalars))
      minibatch = mesh_lib.put(packed[-1], programs.minibatch_sharding)
      if states_RKSD is None:
        logp_BT, entropy_BT = programs.score(params, minibatch, *base)
      else:
        logp_BT, entropy_BT, old = programs.score_and_keep(
            params, minibatch, states_RKSD, used, *base)
        states_RKSD, used = old.states_RKSD, used + int(packed[-1].used)
        first.append(old.first)
      minibatches.append(minibatch.replace(
          old_logp_BT=logp_BT, old_entropy_BT=entropy_BT,
          reference_logp_BT=self._reference_logp_BT(minibatch)))
    # Every call has added to one buffer: the last has the states of all.
    return packed, minibatches, [old.replace(first=m) for m in first]

  def _reference_logp_BT(self, minibatch):
    """ℓ of the reference policy; None if there is none."""
    if self.state.reference is None:
      return None
    return self.programs.score(
        self.state.reference, minibatch, *self.base())[0]

  def advantages(self, scored: ScoredStep, groups: list[groups_lib.Group],
                 reward_B: np.ndarray, method: choices.Method) -> np.ndarray:
    """The advantages of any method in the step, as of `advantage.of_batch`.

    A KL in the reward is that of π_old to the run's reference policy, and 0 if
    the run has none. groups, reward_B: of the step.
    """
    penalty_BT, reference = None, method.reference
    if reference.is_in_reward and self.state.reference is not None:
      penalty_BT = reference.coef * np.asarray(
          reference.estimator(scored.reference_gap_BT()))
    return _advantages(
        groups, reward_B, scored.batch.mask_BT, method.estimator,
        self.config.rollout.truncated, penalty_BT)

  def _with(self, scored, **whole):
    """The step with host arrays of all completions in batch and minibatches."""
    sharding = self.programs.minibatch_sharding
    return dataclasses.replace(
        scored, batch=scored.batch.replace(**whole), minibatches=[
            minibatch.replace(**{
                name: mesh_lib.put(x[mine], getattr(sharding, name))
                for name, x in whole.items()})
            for mine, minibatch in zip(scored.members, scored.minibatches)])

  def make_update(self, scored: ScoredStep, index: int) -> dict[str, jax.Array]:
    """Makes one of the step's updates; its metrics stay on the devices."""
    minibatch = scored.minibatches[scored.minibatch_index(index)]
    self.state, outcome = self.programs.train_step(
        self.state, minibatch, scored.rng(index),
        self.old_policy(scored, index), *self.base())
    return outcome

  def old_policy(self, scored: ScoredStep, index: int
                 ) -> update.OldPolicy | None:
    """π_old in the minibatch of an update; None without an exact KL."""
    which = scored.minibatch_index(index)
    if scored.old_params is None:
      return scored.old[which] if scored.old else None
    return self.programs.old_policy(
        scored.old_params, scored.minibatches[which], *self.base())

  def _compare(self, scored, step):
    """Metrics of the packing, and of the sampler's log-probabilities compared
    with the trainer's; errors as of `behaviour.gap`."""
    settings, batch = self.config.train.behaviour, scored.batch
    both = scored.old_logp_BT(), batch.sampler_logp_BT
    mask_BT = drawn_BT = batch.mask_BT
    if batch.version_BT is not None:  # only the tokens that π_old itself drew
      drawn_BT = mask_BT * (batch.version_BT == step)
    gap = behaviour.gap(*both, drawn_BT, self.config.rollout.logp_gap_limit)
    return gap | behaviour.metrics(
        behaviour.weights(*both, mask_BT, **settings), *both, mask_BT,
        weight=settings.weight, cap=settings.cap) | {
            'padding_share': np.mean(batch.position_BS < 0),
            'packing_efficiency': scored.efficiency}

  def _count_skipped(self, outcome, step):
    skipped = outcome['skipped'] > 0
    self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0
    if self.skipped_in_a_row == MAX_SKIPPED:
      raise errors.RunError(
          f'{MAX_SKIPPED} updates in a row had a loss or gradient that is not '
          f'finite (the last: loss {outcome["loss"]}, gradient norm '
          f'{outcome["grad_norm"]}) in step {step}')

  def on_devices(self, batch: packing.Batch) -> packing.Minibatch:
    """Packs a host batch and copies it to the devices."""
    return mesh_lib.put(
        self.programs.pack(batch), self.programs.minibatch_sharding)


def batch_of(groups: Sequence[groups_lib.Group], reward_B: np.ndarray, *,
             rows: int, width: int, estimator: str, truncated: str = 'count'
             ) -> packing.Batch:
  """The batch of the groups, with filler rows (an empty mask) up to `rows`.

  Args:
    groups: those to train on. reward_B: of their completions, in order.
    rows: B, a constant of the run. width: P, the longest prompt.
    estimator: see `advantage.group_advantage`.
    truncated: `rollout.truncated`. With 'mask' and 'exclude', truncated
      completions have an empty mask; with 'exclude', they do not count in the
      advantages of their groups either.
  """
  def stacked(arrays):
    joined = np.concatenate(arrays)
    padding = [(0, rows - len(joined))] + [(0, 0)] * (joined.ndim - 1)
    return np.pad(joined, padding)

  group_size, length = groups[0].token_GT.shape
  token_BS = np.zeros((rows, width + length), np.int32)
  position_BS = np.full((rows, width + length), -1, np.int32)
  token_BS[:, width:] = stacked([g.token_GT for g in groups])
  length_B = stacked([g.length_G for g in groups])
  prompts = [g.prompt.token_ids for g in groups for _ in range(group_size)]
  for i, prompt in enumerate(prompts):
    start, end = width - len(prompt), width + length_B[i]
    token_BS[i, start:width] = prompt
    position_BS[i, start:end] = np.arange(end - start)
  mask_BT = np.arange(length) < length_B[:, None]
  if truncated != 'count':
    mask_BT &= stacked([g.ended_G for g in groups])[:, None]
  zeros_BT = np.zeros((rows, length), np.float32)
  return packing.Batch(
      token_BS=token_BS, position_BS=position_BS,
      mask_BT=mask_BT.astype(np.float32),
      advantage_B=_advantages(
          groups, reward_B, mask_BT, estimator, truncated),
      old_logp_BT=zeros_BT, old_entropy_BT=zeros_BT,
      sampler_logp_BT=stacked([g.logp_GT for g in groups]),
      version_BT=None if groups[0].version_GT is None else stacked(
          [g.version_GT for g in groups]))


def _advantages(groups, reward_B, mask_BT, estimator, truncated,
                penalty_BT=None):
  counted_B = (np.concatenate([g.ended_G for g in groups])
               if truncated == 'exclude' else None)
  return advantage.of_batch(reward_B, len(groups[0].length_G), estimator,
                            mask_BT, counted_B, penalty_BT)
