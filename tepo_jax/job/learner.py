"""The policy of a run, and its updates in a rollout step."""

import dataclasses
import functools
from typing import Any

import jax
import ml_collections
import numpy as np

from tepo_jax import errors
from tepo_jax.job import memory as memory_lib
from tepo_jax.job import minibatches as minibatches_lib
from tepo_jax.job import old_policy
from tepo_jax.job import programs as programs_lib
from tepo_jax.job import provenance
from tepo_jax.job import session as session_lib
from tepo_jax.job import summaries
from tepo_jax.learning import batch as batch_lib
from tepo_jax.learning import behaviour
from tepo_jax.learning import update
from tepo_jax.policy import lora
from tepo_jax.rollout import groups as groups_lib
from tepo_jax.runtime import mesh as mesh_lib

MAX_SKIPPED = 3  # consecutive non-finite updates before a run stops


@dataclasses.dataclass
class UpdatePlan:
  """The updates of a rollout step.

  order: the batch rows of each update. packed, first: the minibatches of the
  first epoch, on the host and on the devices. old: π_old. noise_floor: see
  `update.train_step`; on the devices. key: of the step's random numbers.
  batch: on the host. scalars: metrics; None until `Learner.fetch_scores` has
  added ℓ°, H° and b to the batch.
  """
  batch: batch_lib.Batch
  order: list[np.ndarray]
  packed: list[batch_lib.Minibatch]
  first: list[batch_lib.Minibatch]
  old: old_policy.OldPolicy
  noise_floor: jax.Array
  key: jax.Array
  scalars: dict[str, float] | None = None

  def rng(self, index: int) -> jax.Array:
    """The random key of one update."""
    return jax.random.fold_in(self.key, index)


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

  def learn(self, number: int, groups: list[groups_lib.Group]
            ) -> dict[str, float]:
    """Makes all updates of a rollout step; returns their average metrics.

    Raises:
      errors.RunError: MAX_SKIPPED consecutive updates were not finite, or the
        sampler's log-probabilities are too far from the trainer's.
    """
    # The devices have all of an epoch's work before the host waits for a part.
    with self.session.timers('score'):
      plan = self.plan_updates(number, groups)
      history = [self.make_update(plan, index)
                 for index in range(len(plan.first))]
      self.fetch_scores(plan)
    with self.session.timers('update'):
      history += [self.make_update(plan, index)
                  for index in range(len(history), len(plan.order))]
      history = mesh_lib.to_host(history)
    for outcome in history:
      self._count_skipped(outcome, number)
    return plan.scalars | summaries.average(history)

  def rewards(self, groups: list[groups_lib.Group]) -> np.ndarray:
    """Training rewards of the groups' completions: [B]."""
    rollout, settings = self.config.rollout, self.config.reward
    return minibatches_lib.rewards(
        groups, dict(zip(settings.functions, settings.weights)),
        rollout.max_tokens, rollout.overlong_buffer, rollout.overlong_factor)

  def plan_updates(self, number: int, groups: list[groups_lib.Group]
                   ) -> UpdatePlan:
    """Starts the scoring of rollout step `number` by the current policy."""
    batch = self.to_batch(groups, self.programs.policy_loss.method.estimator)
    order, later = self._orders(batch, number)
    old = old_policy.OldPolicy(self.programs, self.state.params, self.base())
    moved = self._orders(batch, number, epochs=2)[1][-1]
    moved_BT = old.score(self.on_devices(_rows(batch, moved)))[1]
    packed, first = self._score(batch, old, order)
    old.start_updates()
    plan = UpdatePlan(
        batch, order + later, packed, first, old,
        self._noise_floor(batch, order, first, moved, moved_BT),
        jax.random.fold_in(
            programs_lib.stream(self.config.seed, 'update'), number))
    if self.config.train.behaviour.weight != 'off':
      self.fetch_scores(plan)
      sharding = self.programs.minibatch_sharding.behaviour_BT
      plan.first = [minibatch.replace(behaviour_BT=mesh_lib.put(
          plan.batch.behaviour_BT[rows], sharding))
                    for rows, minibatch in zip(order, first)]
    return plan

  def fetch_scores(self, plan: UpdatePlan) -> None:
    """Waits for the scores; sets the plan's `scalars`, completes its `batch`.

    Raises:
      errors.RunError: the sampler's log-probabilities are too far from ℓ°.
    """
    if plan.scalars is not None:
      return
    old_logp_BT, old_entropy_BT = (
        np.zeros_like(plan.batch.old_logp_BT) for _ in range(2))
    for rows, minibatch in zip(plan.order, plan.first):
      old_logp_BT[rows], old_entropy_BT[rows] = mesh_lib.to_host(
          (minibatch.old_logp_BT, minibatch.old_entropy_BT))
    batch = plan.batch.replace(
        old_logp_BT=old_logp_BT, old_entropy_BT=old_entropy_BT)
    gap = self._gap(batch)
    plan.batch, weighed = self._weigh(batch)
    plan.scalars = {'noise_floor': float(plan.noise_floor)} | gap | weighed | (
        summaries.packing_metrics(batch, plan.packed))

  def to_batch(self, groups: list[groups_lib.Group], estimator: str,
               rows: int | None = None) -> batch_lib.Batch:
    """Host arrays of the groups, padded to `rows` (None: a rollout's size)."""
    rollout = self.config.rollout
    return minibatches_lib.to_batch(
        groups, self.rewards(groups),
        rows=rows or rollout.prompts * rollout.samples,
        width=self.config.data.max_prompt_tokens, estimator=estimator)

  def make_update(self, plan: UpdatePlan, index: int) -> dict[str, jax.Array]:
    """Makes one of the plan's updates; its metrics stay on the devices."""
    minibatch, old = self.minibatch(plan, index)
    self.state, outcome = self.programs.train_step(
        self.state, minibatch, plan.rng(index), plan.noise_floor, old,
        *self.base())
    return outcome

  def minibatch(self, plan: UpdatePlan, index: int
                ) -> tuple[batch_lib.Minibatch, update.OldPolicy | None]:
    """The minibatch of one of the plan's updates and, for an exact KL, π_old;
    on the devices."""
    rows = plan.order[index]
    if index < len(plan.first):
      packed, minibatch = plan.packed[index], plan.first[index]
    else:
      self.fetch_scores(plan)
      packed = self.programs.pack(_rows(plan.batch, rows))
      minibatch = self._put(packed)
    return minibatch, plan.old.of_minibatch(rows, packed, minibatch)

  def on_devices(self, batch: batch_lib.Batch) -> batch_lib.Minibatch:
    """Packs a host batch and copies it to the devices."""
    return self._put(self.programs.pack(batch))

  def _put(self, packed):
    return mesh_lib.put(packed, self.programs.minibatch_sharding)

  def _orders(self, batch, number, epochs=None):
    """The batch rows of each update: (first epoch, later epochs).

    Skips minibatches that hold only filler rows (possible in mode 'drop').
    """
    settings = self.config.train
    order = list(minibatches_lib.minibatch_order(
        len(batch.mask_BT), self.config.rollout.samples,
        settings.minibatch_prompts, epochs or settings.epochs,
        self.config.seed, number))
    first = self.config.rollout.prompts // settings.minibatch_prompts
    return [[rows for rows in part if batch.mask_BT[rows].any()]
            for part in (order[:first], order[first:])]

  def _score(self, batch, old, order):
    """The minibatches, on the host, and with ℓ° and H° on the devices.

    Each is scored exactly as it will be trained on, while the next is packed.
    """
    packed, scored = [], []
    for rows in order:
      packed.append(self.programs.pack(_rows(batch, rows)))
      minibatch = self._put(packed[-1])
      logp_BT, entropy_BT = old.score_and_keep(rows, packed[-1], minibatch)
      scored.append(minibatch.replace(
          old_logp_BT=logp_BT, old_entropy_BT=entropy_BT))
    return packed, scored

  def _noise_floor(self, batch, order, first, moved, moved_BT):
    """|H − H°| when only the packing changes: of the rows `moved`, which come
    from all parts of the rollout step."""
    entropies = [minibatch.old_entropy_BT for minibatch in first]
    # Skipped minibatches must not change the shapes.
    count = (self.config.rollout.prompts
             // self.config.train.minibatch_prompts)
    entropies += entropies[-1:] * (count - len(entropies))
    place = {row: i for i, row in enumerate(np.concatenate(order))}
    return self.programs.noise_floor(
        moved_BT, entropies,
        np.array([place.get(row, 0) for row in moved]),  # 0: a row of no token
        batch.mask_BT[moved])

  def _gap(self, batch):
    """|log π| gap of the sampler and the trainer, in nats."""
    gaps = np.abs(batch.sampler_logp_BT - batch.old_logp_BT)[batch.mask_BT > 0]
    limit = self.config.rollout.logp_gap_limit
    if not gaps.mean() <= limit:
      raise errors.RunError(
          f'the sampler\'s log-probabilities are {gaps.mean():.3g} nats from '
          f'the trainer\'s on average, more than rollout.logp_gap_limit='
          f'{limit}: the ratios would be noise')
    return {
        'logp_gap_mean': gaps.mean(), 'logp_gap_p99': np.quantile(gaps, 0.99)}

  def _weigh(self, batch):
    """Adds the behaviour weights if they are on; their metrics in any case."""
    settings = self.config.train.behaviour
    arrays = batch.old_logp_BT, batch.sampler_logp_BT, batch.mask_BT
    weight_BT = behaviour.weights(*arrays, **settings)
    scalars = behaviour.metrics(
        weight_BT, *arrays, weight=settings.weight, cap=settings.cap)
    if settings.weight != 'off':
      batch = batch.replace(behaviour_BT=weight_BT)
    return batch, scalars

  def _count_skipped(self, outcome, number):
    skipped = outcome['skipped'] > 0
    self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0
    if self.skipped_in_a_row == MAX_SKIPPED:
      raise errors.RunError(
          f'{MAX_SKIPPED} updates in a row had a loss or gradient that is not '
          f'finite (the last: loss {outcome["loss"]}, gradient norm '
          f'{outcome["grad_norm"]}) in step {number}')


def _rows(batch, rows):
  return jax.tree.map(lambda x: x[rows], batch)
