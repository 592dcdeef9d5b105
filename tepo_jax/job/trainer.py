"""A training run: rollout steps, evaluations, checkpoints, records."""

import dataclasses
import json
import pathlib
import signal
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
from tepo_jax.learning import update
from tepo_jax.rollout import collect
from tepo_jax.rollout import dump
from tepo_jax.runtime import checkpoint
from tepo_jax.runtime import environment
from tepo_jax.runtime import mesh as mesh_lib
from tepo_jax.runtime import metrics
from tepo_jax.tasks import prompts

MAX_SKIPPED = 3  # updates in a row that are not finite before a run stops


class Trainer:
  """One run: the policy's state, and what a rollout step does to it.

  Attributes:
    state: update.TrainState. cursor: the data order's place. step: rollout
    steps done. skipped_in_a_row: updates that were not finite. These, and the
    config, are all there is to a run.
  """

  def __init__(self, config: ml_collections.ConfigDict,
               session: session_lib.Session):
    """Reads and checks all that a run needs; writes nothing."""
    self.config, self.session = config, session
    rollout = config.rollout
    _check_rows(config, session.mesh)
    self.programs = steps.make(config, session.model, session.mesh)
    self.prompts = session.prompts(config.data.name, None, config.data.limit)
    self.order = collect.DataOrder(len(self.prompts), config.seed)
    self.sampler = session.sampler(
        prompts_at_once=rollout.prompts, samples=rollout.samples,
        max_tokens=rollout.max_tokens, temperature=rollout.temperature)
    self.evaluations = evaluation.prepare(session) if config.eval.period else []
    self.progress = metrics.Progress(config.steps)

  def open(self, workdir: pathlib.Path) -> None:
    """Makes `workdir` this run's, and goes to its last checkpoint."""
    cli.claim_workdir(self.config, workdir)
    self.workdir = workdir
    settings = self.config.checkpoint
    self.checkpointer = checkpoint.Checkpointer(
        workdir / session_lib.CHECKPOINTS, settings.keep, settings.keep_every)
    self.writer = metrics.Writer(
        workdir, self.config.wandb_project, self.config.to_dict())
    self._restore()
    environment.record(workdir, self.step)

  def _restore(self):
    """The last good checkpoint, or the model's weights at step 0."""
    saved = self.checkpointer.restore_last_good(
        steps.abstract_state(self.programs))
    if saved is None:
      self.progress.phase(f'loading {self.session.folder}')
      self.state = self.programs.init_state(self.session.load_params())
      self.cursor, self.step, self.skipped_in_a_row = 0, 0, 0
      self.writer.truncate(-1)
    else:
      self.step, self.state, extra = saved
      self.cursor = extra['cursor']
      self.skipped_in_a_row = extra['skipped_in_a_row']
      self.writer.truncate(self.step)
      print(f'continuing {self.workdir} after step {self.step}', flush=True)

  def run(self, stop: 'StopRequest') -> None:
    """Steps until `config.steps`, or until it is asked to stop."""
    if self.step == 0 and self.evaluations:
      self.writer.write(0, self.evaluate())
    score = None
    while self.step < self.config.steps and not stop.requested:
      scalars = self.rollout_step()
      self.step += 1
      if self._is_due(self.config.eval.period):
        scalars |= self.evaluate()
      self.writer.write(self.step, scalars)
      self.progress.step(self.step, summary(scalars), evaluated(scalars))
      score = next((value for name, value in scalars.items()
                    if name.startswith('eval/') and '/avg@' in name), None)
      if self._is_due(self.config.checkpoint.period):
        self._save(score)
    if self.step and self.checkpointer.latest() != self.step:
      self._save(score)  # asked to stop between two checkpoints

  def close(self) -> None:
    """Waits for the last checkpoint and closes the records."""
    self.progress.close()
    self.checkpointer.close()
    self.writer.close()

  def _save(self, score):
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
    scalars = rollout_metrics(rollout, self.config.rollout)
    scalars |= {f'grading/{name}': count
                for name, count in self.sampler.counts.items()}
    self.sampler.counts.clear()
    if rollout.groups:
      self.progress.phase('updating')
      scalars |= self._update(number, rollout.groups)
    self._dump(number, rollout)
    seconds = time.perf_counter() - start
    scalars |= {f'seconds/{phase}': value
                for phase, value in self.session.timers.pop().items()}
    tokens = sum(g.length_G.sum() for g in rollout.sampled)
    return scalars | {'seconds/step': seconds,
                      'tokens_per_second': tokens / seconds}

  def _collect(self, number):
    rollout = self.config.rollout
    with self.session.timers('reshard'):
      params = jax.block_until_ready(
          self.programs.to_decode(self.state.params))
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
    scalars = {'noise_floor': plan.noise_floor} | self._gap(plan.batch)
    old_params = (self.programs.to_old_policy(self.state.params)
                  if self.programs.policy_loss.needs_kl else None)
    history = []
    with self.session.timers('update'):
      for index, rows in enumerate(plan.order):
        self.state, outcome = self.programs.train_step(
            self.state, self.on_devices(plan.batch, rows), plan.rng(index),
            plan.noise_floor, old_params)
        history.append(jax.device_get(outcome))
        self._count_skipped(history[-1])
    return scalars | average(history)

  def plan_updates(self, number: int, groups: list[collect.Group]) -> 'Plan':
    """The updates of rollout step `number`, from the policy as it is now."""
    batch = self.to_batch(groups, self.programs.policy_loss.row.estimator)
    with self.session.timers('score'):
      batch = self._score(batch)
      noise_floor = self._noise_floor(batch)
    key = jax.random.fold_in(steps.stream(self.config.seed, 'update'), number)
    return Plan(batch, noise_floor, self._order(batch, number), key)

  def to_batch(self, groups: list[collect.Group], estimator: str,
               rows: int | None = None) -> update.Batch:
    """Host arrays of the groups; `rows` is a rollout's if not given."""
    rollout = self.config.rollout
    return collect.to_batch(
        groups, _rewards(groups, rollout),
        rows=rows or rollout.prompts * rollout.samples,
        width=self.config.data.max_prompt_tokens, estimator=estimator)

  def on_devices(self, batch: update.Batch, rows: np.ndarray) -> update.Batch:
    """Some rows of a host batch, as `train_step` takes them."""
    return steps.take_rows(self.session.mesh, batch, rows)

  def _order(self, batch, number):
    """The rows of each update; one of filler alone (mode 'drop') is none."""
    settings = self.config.train
    order = collect.minibatch_order(
        len(batch.mask_BT), self.config.rollout.samples,
        settings.minibatch_prompts, settings.epochs, self.config.seed, number)
    return [rows for rows in order if batch.mask_BT[rows].any()]

  def _score(self, batch):
    """ℓ° and H°, in the minibatches of the first epoch."""
    rows = np.arange(len(batch.mask_BT)).reshape(-1, self._minibatch_rows())
    scored = [self._score_rows(batch, some) for some in rows]
    return jax.tree.map(lambda *x: np.concatenate(x), *scored)

  def _score_rows(self, batch, rows):
    return mesh_lib.to_host(self.programs.score(
        self.state.params, steps.take_rows(self.session.mesh, batch, rows)))

  def _minibatch_rows(self):
    return self.config.train.minibatch_prompts * self.config.rollout.samples

  def _noise_floor(self, batch):
    """p99 of |H − H°| when only the rows' places in a minibatch change, nats.

    What later epochs see of rounding, measured on the first minibatch.
    """
    rows = np.arange(self._minibatch_rows())[::-1]
    again = self._score_rows(batch, rows)
    moved = np.abs(again.old_entropy_BT - batch.old_entropy_BT[rows])
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
    params = self.programs.to_decode(self.state.params)
    scalars, start = {}, time.perf_counter()
    key = steps.stream(self.config.seed, 'eval')
    for index, item in enumerate(self.evaluations):
      _, results = item.run(params, jax.random.fold_in(key, index))
      scalars |= {f'eval/{item.name}/{name}': value
                  for name, value in results.items()}
    self.session.timers.pop()
    return scalars | {'seconds/eval': time.perf_counter() - start}

  def _dump(self, number, rollout):
    """rollouts/step_N.jsonl: one record a completion."""
    settings, data = self.config.dump, self.config.data
    if not settings.period or number % settings.period:
      return
    rewards_B = _rewards(rollout.sampled, self.config.rollout)
    dump.write(
        self.workdir / session_lib.ROLLOUTS, number, dump.records(
            number, rollout, np.split(rewards_B, len(rollout.sampled)),
            data.name, prompts.get(data.template).style),
        settings.format, settings.max_megabytes)


@dataclasses.dataclass(frozen=True)
class Plan:
  """The updates of a rollout step.

  batch: on the host, with ℓ° and H°. noise_floor: see `update.train_step`.
  order: the rows of each update. key: of the step's random numbers.
  """
  batch: update.Batch
  noise_floor: float
  order: list[np.ndarray]
  key: jax.Array

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


def rollout_metrics(rollout: collect.Rollout,
                    settings: ml_collections.ConfigDict) -> dict[str, float]:
  """What the step's sampling looked like, over all groups sampled."""
  groups = rollout.sampled
  length_B = np.concatenate([g.length_G for g in groups])
  ended_B = np.concatenate([g.ended_G for g in groups])
  return {
      'reward': _rewards(groups, settings).mean(),
      'accuracy': np.mean([g.accuracy_G for g in groups]),
      'response_length_mean': length_B.mean(),
      'response_length_max': length_B.max(),
      'truncated_share': 1 - ended_B.mean(),
      'mixed_share': np.mean([collect.is_mixed(g) for g in groups]),
      'groups_sampled': len(groups),
      'groups_trained': len(rollout.groups)}


def average(history: list[dict[str, Any]]) -> dict[str, float]:
  """Means over a step's updates; extremes of weight_min and _max; counts."""
  reduce = {'weight_min': np.min, 'weight_max': np.max, 'skipped': np.sum,
            'empty_minibatches': np.sum}
  return {name: reduce.get(name, np.mean)([h[name] for h in history])
          for name in history[0]}


def summary(scalars: dict[str, float]) -> str:
  """What a step was like, for the progress lines."""
  clipped = [scalars[f'clip_fraction_{part}'] for part in (
      'low', 'high', 'covariance') if f'clip_fraction_{part}' in scalars]
  shown = {'reward': 'reward', 'accuracy': 'acc', 'entropy': 'H',
           'grad_norm': 'grad', 'response_length_mean': 'len',
           'response_length_max': 'max', 'tokens_per_second': 'tok/s',
           'seconds/step': 's'}
  parts = [f'{label} {scalars[name]:.{4 if scalars[name] >= 1000 else 3}g}'
           for name, label in shown.items() if name in scalars]
  if clipped:
    parts.insert(4, f'clip {sum(clipped):.2%}')
  return '  '.join(parts)


def evaluated(scalars: dict[str, float]) -> str:
  """The evaluations of a step, or nothing."""
  return '  '.join(f'{name.removeprefix("eval/")} {value:.1%}'
                   for name, value in scalars.items()
                   if name.startswith('eval/') and '/avg@' in name)


def _rewards(groups, settings):
  return collect.rewards(groups, settings.max_tokens, settings.overlong_buffer,
                         settings.overlong_factor)


def _check_rows(config, mesh):
  """Refuses a microbatch that cannot be spread over the mesh."""
  rows = config.train.minibatch_prompts * config.rollout.samples
  rows //= config.train.microbatches
  shards = mesh_lib.batch_shards(mesh)
  if rows % shards:
    raise errors.InputError(
        f'a microbatch has {rows} rows (train.minibatch_prompts x '
        f'rollout.samples / train.microbatches), not a multiple of the mesh\'s '
        f'data x fsdp = {shards}')


def results_table(workdir: pathlib.Path) -> str:
  """Before and after, from the first and last evaluation on record."""
  records = [json.loads(line) for line in
             (workdir / 'metrics.jsonl').read_text().splitlines()]
  records = [r for r in records if any(name.startswith('eval/') for name in r)]
  if not records:
    return 'no evaluation on record'
  first, last = records[0], records[-1]
  rows = [f'{"":<36}{"step " + str(first["step"]):>10}'
          f'{"step " + str(last["step"]):>10}']
  for name in first:
    if name.startswith('eval/') and not name.endswith('/problems'):
      rows.append(f'{name.removeprefix("eval/"):<36}{first[name]:>10.3f}'
                  f'{last[name]:>10.3f}')
  return '\n'.join(rows)
