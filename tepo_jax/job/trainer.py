"""A training run: rollout steps, evaluations, checkpoints, records."""

from concurrent import futures
import contextlib
import dataclasses
import io
import pathlib
import signal
import sys
import time
from typing import Any

import jax
import ml_collections
import numpy as np

from tepo_jax import cli
from tepo_jax import errors
from tepo_jax.job import evaluation
from tepo_jax.job import session as session_lib
from tepo_jax.job import steps
from tepo_jax.job import telling
from tepo_jax.policy import lora
from tepo_jax.learning import update
from tepo_jax.rollout import collect
from tepo_jax.rollout import draw
from tepo_jax.rollout import dump
from tepo_jax.rollout import schedule
from tepo_jax.runtime import checkpoint
from tepo_jax.runtime import environment
from tepo_jax.runtime import mesh as mesh_lib
from tepo_jax.runtime import metrics
from tepo_jax.runtime import processes
from tepo_jax.tasks import prompts

MAX_SKIPPED = 3  # updates in a row that are not finite before a run stops


class Trainer:
  """One run: the policy's state, and what a rollout step does to it.

  Attributes:
    state: update.TrainState. frozen: with LoRA the base, else None. cursor:
    the data order's place. step: rollout steps done. skipped_in_a_row: updates
    that were not finite. These, and the config, are all there is to a run.
  """

  def __init__(self, config: ml_collections.ConfigDict,
               session: session_lib.Session):
    """Reads and checks all that a run needs; writes nothing."""
    self.config, self.session = config, session
    rollout = config.rollout
    self.programs = steps.make(config, session.model, session.mesh)
    steps.check_memory(self.programs)
    self.prompts = session.prompts(config.data.name, None, config.data.limit)
    self.order = collect.DataOrder(len(self.prompts), config.seed)
    self.sampler = session.sampler(
        prompts=rollout.prompts, samples=rollout.samples,
        max_tokens=rollout.max_tokens,
        decoding=draw.Decoding(rollout.temperature))
    self.evaluations = evaluation.prepare(session) if config.eval.period else []
    self.progress = metrics.Progress(
        config.steps, sys.stderr if processes.is_first() else io.StringIO())
    self.background = futures.ThreadPoolExecutor(1)

  def open(self, workdir: pathlib.Path) -> None:
    """Makes `workdir` this run's, and goes to its last checkpoint."""
    processes.on_first(cli.claim_workdir, self.config, workdir)
    session_lib.cache_compilations(self.config, workdir)
    self.workdir = workdir
    settings = self.config.checkpoint
    self.checkpointer = checkpoint.Checkpointer(
        workdir / session_lib.CHECKPOINTS, settings.keep, settings.keep_every)
    self.writer = metrics.NoWriter()
    if processes.is_first():
      self.writer = metrics.Writer(
          workdir, self.config.wandb_project, self.config.to_dict())
    self._restore()
    if processes.is_first():
      environment.record(workdir, self.step)

  def _restore(self):
    """The last good checkpoint, or the model's weights at step 0.

    With LoRA the frozen weights are the model folder's in either case.
    """
    self.load_base()
    saved = self.checkpointer.restore_last_good(
        steps.abstract_state(self.programs))
    if saved is None:
      self.progress.phase(f'loading {self.session.folder}')
      self.state = self.first_state()
      self.cursor, self.step, self.skipped_in_a_row = 0, 0, 0
      self.writer.truncate(-1)
    else:
      self.step, self.state, extra = saved
      self.cursor = extra['cursor']
      self.skipped_in_a_row = extra['skipped_in_a_row']
      self.writer.truncate(self.step)
      if processes.is_first():
        print(f'continuing {self.workdir} after step {self.step}', flush=True)

  def load_base(self) -> None:
    """With LoRA: the model folder's weights, frozen."""
    self.frozen = None
    if self.programs.model.lora:
      self.frozen = self.programs.freeze(self.session.load_params())

  def first_state(self) -> update.TrainState:
    """Of step 0; `load_base` comes first."""
    params = (self.session.load_params() if self.frozen is None else
              self.programs.init_adapters(
                  steps.stream(self.config.seed, 'adapters')))
    return self.programs.init_state(params)

  def _policy(self):
    """The whole weights, as the model has them."""
    return lora.combine(self.frozen, self.state.params)

  def base(self) -> tuple:
    """What the jitted functions take besides, with LoRA."""
    return () if self.frozen is None else (self.frozen,)

  def run(self, stop: 'StopRequest') -> None:
    """Steps until `config.steps`, or until it is asked to stop."""
    if self.step == 0 and self.evaluations:
      self.writer.write(0, self.evaluate())
    score = None
    while self.step < self.config.steps and not processes.any_of(
        stop.requested):
      with self._traced():
        scalars = self.rollout_step()
      self.step += 1
      if self._is_due(self.config.eval.period):
        scalars |= self.evaluate()
      self.writer.write(self.step, scalars)
      self.progress.step(self.step, telling.summary(scalars),
                         telling.evaluated(scalars))
      score = next((value for name, value in scalars.items()
                    if name.startswith('eval/') and '/avg@' in name), None)
      if self._is_due(self.config.checkpoint.period):
        self._save(score)
    if self.step and self.checkpointer.latest() != self.step:
      self._save(score)  # asked to stop between two checkpoints

  def close(self) -> None:
    """Waits for the last checkpoint and closes the records."""
    self.progress.close()
    self.background.shutdown()
    self.checkpointer.close()
    self.writer.close()

  def _traced(self):
    """A profiler trace of the step that comes, if the config asks for it."""
    if self.step + 1 in self.config.profile.steps:
      return jax.profiler.trace(self.workdir / 'profile')
    return contextlib.nullcontext()

  def _save(self, score):
    with self.session.timers('save'):
      self.checkpointer.save(self.step, self.state, {
          'cursor': self.cursor, 'skipped_in_a_row': self.skipped_in_a_row,
          'config_digest': cli.config_digest(self.config)}, score)

  def _is_due(self, period):
    return bool(period) and (
        self.step % period == 0 or self.step == self.config.steps)

  def rollout_step(self) -> dict[str, float]:
    """Samples, grades, updates; returns the step's metrics."""
    start = time.perf_counter()
    number = self.step + 1
    self.progress.phase('sampling')
    rollout = self._collect(number)
    self.cursor = rollout.cursor
    dumped = self.background.submit(
        self._dump, number, rollout,
        telling.rewards(rollout.sampled, self.config.rollout))
    scalars = telling.rollout_metrics(rollout, self.config.rollout)
    scalars |= {f'grading/{name}': count
                for name, count in self.sampler.counts.items()}
    self.sampler.counts.clear()
    scalars |= self._sampling_metrics()
    if rollout.groups:
      self.progress.phase('updating')
      scalars |= self._update(number, rollout.groups)
    dumped.result()
    seconds = time.perf_counter() - start
    scalars |= {f'seconds/{phase}': value
                for phase, value in self.session.timers.pop().items()}
    tokens = sum(g.length_G.sum() for g in rollout.sampled)
    return scalars | {'seconds/step': seconds,
                      'tokens_per_second': tokens / seconds}

  def _sampling_metrics(self):
    """Of the slots, since the last call; bytes of the decoding weights."""
    stats, self.sampler.stats = self.sampler.stats, schedule.Stats()
    return {'sampling/occupancy': stats.occupancy,
            'sampling/slot_share': stats.tokens / stats.slot_steps,
            'sampling/steps': stats.steps, 'sampling/prefills': stats.prefills,
            'sampling/weight_bytes': self.weight_bytes}

  def _collect(self, number):
    rollout = self.config.rollout
    with self.session.timers('reshard'):
      params = jax.block_until_ready(
          self.programs.to_decode(self._policy()))
    self.weight_bytes = sum(x.nbytes for x in jax.tree.leaves(params))
    key = jax.random.fold_in(steps.stream(self.config.seed, 'rollout'), number)

    def draw(cursor):
      places = range(cursor, cursor + rollout.prompts)
      return [self.prompts[self.order[i]].at(i) for i in places]

    return collect.collect(
        draw, lambda prompts: self.sampler(params, prompts, key),
        cursor=self.cursor, wanted=rollout.prompts,
        mode=rollout.dynamic_sampling,
        max_batches=rollout.max_generation_batches)

  def _update(self, number, groups):
    """All the updates of a rollout; returns their metrics, averaged."""
    plan = self.plan_updates(number, groups)
    old_params = (self.programs.to_old_policy(self.state.params)
                  if self.programs.policy_loss.needs_kl else None)
    with self.session.timers('update'):
      history = jax.device_get([
          self.make_update(plan, index, old_params)
          for index in range(len(plan.order))])
    for outcome in history:
      self._count_skipped(outcome)
    return plan.scalars | telling.average(history)

  def plan_updates(self, number: int, groups: list[collect.Group]) -> 'Plan':
    """The updates of rollout step `number`, from the policy as it is now."""
    batch = self.to_batch(groups, self.programs.policy_loss.row.estimator)
    order, later = self._orders(batch, number)
    with self.session.timers('score'):
      packed = [self.programs.pack(_rows(batch, rows)) for rows in order]
      minibatches, batch = self._score(batch, order, packed)
      noise_floor = self._noise_floor(batch, number)
    return Plan(
        batch, noise_floor, order + later, minibatches,
        jax.random.fold_in(steps.stream(self.config.seed, 'update'), number),
        {'noise_floor': noise_floor} | self._gap(batch)
        | telling.packing_metrics(batch, packed))

  def to_batch(self, groups: list[collect.Group], estimator: str,
               rows: int | None = None) -> update.Batch:
    """Host arrays of the groups; `rows` is a rollout's if not given."""
    rollout = self.config.rollout
    return collect.to_batch(
        groups, telling.rewards(groups, rollout),
        rows=rows or rollout.prompts * rollout.samples,
        width=self.config.data.max_prompt_tokens, estimator=estimator)

  def make_update(self, plan: 'Plan', index: int, old_params: Any
                  ) -> dict[str, jax.Array]:
    """One of the plan's updates; its metrics, on the devices."""
    self.state, outcome = self.programs.train_step(
        self.state, self.minibatch(plan, index), plan.rng(index),
        plan.noise_floor, old_params, *self.base())
    return outcome

  def minibatch(self, plan: 'Plan', index: int) -> update.Minibatch:
    """What one of the plan's updates sees, on the devices."""
    if index < len(plan.first):
      return plan.first[index]
    return self.on_devices(_rows(plan.batch, plan.order[index]))

  def on_devices(self, batch: update.Batch) -> update.Minibatch:
    """The rows of a host batch, packed."""
    return self._put(self.programs.pack(batch))

  def _orders(self, batch, number, epochs=None):
    """Rows of each update, of the first epoch and of the others.

    A minibatch of filler alone (mode 'drop') is left out.
    """
    settings = self.config.train
    order = list(collect.minibatch_order(
        len(batch.mask_BT), self.config.rollout.samples,
        settings.minibatch_prompts, epochs or settings.epochs,
        self.config.seed, number))
    first = self.config.rollout.prompts // settings.minibatch_prompts
    return [[rows for rows in part if batch.mask_BT[rows].any()]
            for part in (order[:first], order[first:])]

  def _put(self, minibatch):
    return mesh_lib.put(minibatch, self.programs.minibatch_sharding)

  def _score(self, batch, order, packed):
    """The minibatches with ℓ° and H°, on the devices, and the batch with them.

    Each is scored as it will be trained on: the same rows, packed alike.
    """
    minibatches = list(map(self._put, packed))
    scored = [self.programs.score(self.state.params, minibatch, *self.base())
              for minibatch in minibatches]
    old_logp_BT = np.zeros_like(batch.old_logp_BT)
    old_entropy_BT = np.zeros_like(batch.old_entropy_BT)
    for rows, scores in zip(order, mesh_lib.to_host(scored)):
      old_logp_BT[rows], old_entropy_BT[rows] = scores
    return [
        minibatch.replace(old_logp_BT=logp_BT, old_entropy_BT=entropy_BT)
        for minibatch, (logp_BT, entropy_BT) in zip(minibatches, scored)
    ], batch.replace(old_logp_BT=old_logp_BT, old_entropy_BT=old_entropy_BT)

  def _noise_floor(self, batch, number):
    """p99 of |H − H°| when only the packing changes, nats.

    What later epochs see of rounding: measured on a minibatch of theirs, whose
    completions come from all over the batch.
    """
    *_, rows = self._orders(batch, number, epochs=2)[1]
    again = _rows(batch, rows)
    _, entropy_BT = mesh_lib.to_host(self.programs.score(
        self.state.params, self.on_devices(again), *self.base()))
    moved = np.abs(entropy_BT - again.old_entropy_BT)
    return float(np.quantile(moved[again.mask_BT > 0], 0.99))

  def _gap(self, batch):
    """How far the sampler's log π is from the trainer's, nats."""
    gaps = np.abs(batch.sampler_logp_BT - batch.old_logp_BT)[
        batch.mask_BT > 0]
    limit = self.config.rollout.logp_gap_limit
    if not gaps.mean() <= limit:
      raise errors.RunError(
          f'the sampler\'s log-probabilities are {gaps.mean():.3g} nats from '
          f'the trainer\'s on average, more than rollout.logp_gap_limit='
          f'{limit}: the ratios would be noise')
    return {'logp_gap_mean': gaps.mean(), 'logp_gap_p99': np.quantile(
        gaps, 0.99)}

  def _count_skipped(self, outcome):
    skipped = outcome['skipped'] > 0
    self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0
    if self.skipped_in_a_row == MAX_SKIPPED:
      raise errors.RunError(
          f'{MAX_SKIPPED} updates in a row had a loss or gradient that is not '
          f'finite (the last: loss {outcome["loss"]}, gradient norm '
          f'{outcome["grad_norm"]}) in step {self.step + 1}; the last '
          f'checkpoint is of step {self.checkpointer.latest()}')

  def evaluate(self) -> dict[str, float]:
    """Every evaluation of the config, as metrics 'eval/SET/…'."""
    self.progress.phase('evaluating')
    params = self.programs.to_decode(self._policy())
    scalars, start = {}, time.perf_counter()
    key = steps.stream(self.config.seed, 'eval')
    for index, item in enumerate(self.evaluations):
      _, results = item.run(params, jax.random.fold_in(key, index))
      scalars |= {f'eval/{item.name}/{name}': value
                  for name, value in results.items()}
    self.session.timers.pop()
    return scalars | {'seconds/eval': time.perf_counter() - start}

  def _dump(self, number, rollout, rewards_B):
    """rollouts/step_N.jsonl: one record a completion."""
    settings, data = self.config.dump, self.config.data
    if (not processes.is_first() or not settings.period
        or number % settings.period):
      return
    dump.write(
        self.workdir / session_lib.ROLLOUTS, number, dump.records(
            number, rollout, np.split(rewards_B, len(rollout.sampled)),
            data.name, prompts.get(data.template).style),
        settings.format, settings.max_megabytes)


@dataclasses.dataclass(frozen=True)
class Plan:
  """The updates of a rollout step.

  batch: on the host, with ℓ° and H°. noise_floor: see `update.train_step`.
  order: the rows of each update. first: the minibatches of the first epoch,
  on the devices. key: of the step's random numbers. scalars: metrics.
  """
  batch: update.Batch
  noise_floor: float
  order: list[np.ndarray]
  first: list[update.Minibatch]
  key: jax.Array
  scalars: dict[str, float]

  def rng(self, index: int) -> jax.Array:
    """Of one update."""
    return jax.random.fold_in(self.key, index)


class StopRequest:
  """Turns SIGTERM into a request to save and end after the step at hand."""

  def __init__(self):
    self.requested = False
    signal.signal(signal.SIGTERM, self._request)

  def _request(self, *_):
    self.requested = True


def _rows(batch, rows):
  return jax.tree.map(lambda x: x[rows], batch)
