"""The policy of a run, and its updates in a rollout step.

`Learner.learn` is the paper's Algorithm 1 from the groups on. What it calls
elsewhere:

    to_batch    advantages: `advantage.group_advantage`
    pack        completions to rows: `packing.Packer`, `packing.SharedPacker`
    score, score_and_keep   ℓ° and H°: `update.score_minibatch`, jitted
    train_step  loss, gradient, AdamW: `update.train_step`, jitted; the loss is
                `objective.PolicyLoss`

`programs.kept`, which is None without an exact KL, is the room for π_old's
hidden states, [R, K, S, D]; K microbatches fit into the devices' memory.

Axes: B completions · P tokens of a prompt · T tokens of a completion ·
S = P + T.
"""

import dataclasses
import functools
from typing import Any

import jax
from jax import numpy as jnp
import ml_collections
import numpy as np

from tepo_jax import errors
from tepo_jax.job import batching
from tepo_jax.job import memory as memory_lib
from tepo_jax.job import programs as programs_lib
from tepo_jax.job import provenance
from tepo_jax.job import session as session_lib
from tepo_jax.job import summaries
from tepo_jax.learning import batch as batch_lib
from tepo_jax.learning import behaviour
from tepo_jax.learning import packing
from tepo_jax.learning import update
from tepo_jax.policy import lora
from tepo_jax.rollout import groups as groups_lib
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
  batch: batch_lib.Batch
  members: list[np.ndarray]
  minibatches: list[batch_lib.Minibatch]
  old: list[update.OldPolicy]
  old_params: Any
  epochs: int
  efficiency: float
  key: jax.Array

  @property
  def updates(self) -> int:
    """How many updates the step makes."""
    return self.epochs * len(self.minibatches)

  def minibatch_of(self, index: int) -> int:
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

  def learn(self, step: int, groups: list[groups_lib.Group],
            reward_B: np.ndarray) -> dict[str, float]:
    """Makes all updates of a rollout step; returns their average metrics.

    reward_B: of the groups' completions, see `reward.Rewards`.

    Raises:
      errors.RunError: MAX_SKIPPED consecutive updates were not finite, or the
        sampler's log-probabilities are too far from the trainer's.
    """
    with self.session.timers('score'):
      scored = self.pack_and_score(step, groups, reward_B)
      if not scored.updates:  # all completions are masked
        return {}
      # The devices have all of the step's work before the host waits.
      history = [self.make_update(scored, index)
                 for index in range(scored.updates)]
      scalars = self._compare(scored)
    with self.session.timers('update'):
      history = mesh_lib.to_host(history)
    for outcome in history:
      self._count_skipped(outcome, step)
    return scalars | summaries.average(history)

  def pack_and_score(self, step: int, groups: list[groups_lib.Group],
                     reward_B: np.ndarray) -> ScoredStep:
    """Packs each minibatch of rollout step `step`, and scores it by the
    current policy, and by the reference policy, if there is one; adds the
    behaviour weights if they are on."""
    programs, method = self.programs, self.programs.policy_loss.method
    batch = self.to_batch(groups, reward_B, method.estimator)
    members = self._split(batch)
    packed, minibatches, old = self._score(batch, members)
    old_params = None
    if old and sum(p.used for p in packed) > programs.kept.shape[1]:
      old = []  # frees the hidden states, which are not complete
      old_params = programs.to_old_policy(self.state.params)
    scored = ScoredStep(
        batch, members, minibatches, old, old_params, self.config.train.epochs,
        np.mean(list(map(packing.efficiency, packed)) or [0]),
        jax.random.fold_in(
            programs_lib.stream(self.config.seed, 'update'), step))
    if method.reference.coef and method.reference.place == 'reward':
      scored = self._penalise(scored, groups, reward_B)
    weighted = self.config.train.behaviour.weight != 'off'
    return self._weigh(scored) if weighted else scored

  def renew_reference(self, step: int) -> None:
    """Makes the policy the reference policy, before the first step of each
    `method.reference.period`."""
    period = self.programs.policy_loss.method.reference.period
    if self.state.reference is not None and period and (step - 1) % period == 0:
      self.state = self.state.replace(
          reference=self.programs.to_old_policy(self.state.params))

  def make_update(self, scored: ScoredStep, index: int) -> dict[str, jax.Array]:
    """Makes one of the step's updates; its metrics stay on the devices."""
    minibatch = scored.minibatches[scored.minibatch_of(index)]
    self.state, outcome = self.programs.train_step(
        self.state, minibatch, scored.rng(index),
        self.old_policy(scored, index), *self.base())
    return outcome

  def old_policy(self, scored: ScoredStep, index: int
                 ) -> update.OldPolicy | None:
    """π_old in the minibatch of an update; None without an exact KL."""
    mine = scored.minibatch_of(index)
    if scored.old_params is None:
      return scored.old[mine] if scored.old else None
    return self.programs.old_policy(
        scored.old_params, scored.minibatches[mine], *self.base())

  
