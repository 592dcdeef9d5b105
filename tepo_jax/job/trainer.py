"""A training run: rollout steps, evaluations, checkpoints, records."""

from concurrent import futures
import contextlib
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
from tepo_jax.rollout import packing
from tepo_jax.runtime import checkpoint
from tepo_jax.runtime import mesh as mesh_lib
from tepo_jax.runtime import metrics

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
    self.programs = steps.make(config, session.model, session.mesh)
    self.prompts = session.prompts(config.data.name, None, config.data.limit)
    self.order = collect.DataOrder(len(self.prompts), config.seed)
    self.sampler = session.sampler(
        prompts_at_once=rollout.prompts, samples=rollout.samples,
        max_tokens=rollout.max_tokens, temperature=rollout.temperature)
    self.evaluations = evaluation.prepare(session) if config.eval.period else []
    self.progress = metrics.Progress(config.steps)
    self.background = futures.ThreadPoolExecutor(1)

  def open(self, workdir: pathlib.Path) -> None:
    """Makes `workdir` this run's, and goes to its last checkpoint."""
    cli.claim_workdir(self.config, workdir)
    session_lib.cache_compilations(self.config, workdir)
    self.workdir = workdir
    settings = self.config.checkpoint
    self.checkpointer = checkpoint.Checkpointer(
        workdir / session_lib.CHECKPOINTS, settings.keep, settings.keep_every)
    self.writer = metrics.Writer(workdir)
    self._restore()

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
      with self._traced():
        scalars = self.rollout_step()
      self.step += 1
      if self._is_due(self.config.eval.period):
        scalars |= self.evaluate()
      self.writer.write(self.step, scalars)
      self.progress.step(self.step, _summary(scalars))
      score = next((value for name, value in scalars.items()
                    if name.startswith('eval/') and '/avg@' in name), None)
      if self._is_due(self.config.checkpoint.period):
        self._save(score)
    if self.step and self.checkpointer.latest() != self.step:
      self._save(score)  # asked to stop between two checkpoints

  def close(self) -> None:
    """Waits for the last checkpoint and closes the records."""
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
    dumped = self.background.submit(self._dump, number, rollout)
    scalars = rollout_metrics(rollout, self.config.rollout)
    scalars |= {f'grading/{name}': count
                for name, count in self.sampler.counts.items()}
    self.sampler.counts.clear()
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
    config, programs = self.config, self.programs
    rollout, timers = config.rollout, self.session.timers
    rewards_B = _rewards(groups, rollout)
    rows = rollout.prompts * rollout.samples
    batch = collect.to_batch(
        groups, rewards_B, rows=rows, width=config.data.max_prompt_tokens,
        estimator=programs.policy_loss.row.estimator)
    order, later = self._orders(batch, number)
    with timers('score'):
      packed = [programs.pack(_rows(batch, rows)) for rows in order]
      minibatches, batch = self._score(batch, order, packed)
      noise_floor = self._noise_floor(batch, number)
    scalars = {'noise_floor': noise_floor} | self._gap(batch)
    scalars |= packing_metrics(batch, packed)
    old_params = (programs.to_old_policy(self.state.params)
                  if programs.policy_loss.needs_kl else None)
    rng = jax.random.fold_in(steps.stream(config.seed, 'update'), number)
    history = []
    with timers('update'):
      for index, rows in enumerate(order + later):
        minibatch = minibatches[index] if index < len(order) else (
            self._put(programs.pack(_rows(batch, rows))))
        self.state, outcome = programs.train_step(
            self.state, minibatch, jax.random.fold_in(rng, index), noise_floor,
            old_params)
        history.append(outcome)
      history = jax.device_get(history)
    for outcome in history:
      self._count_skipped(outcome)
    return scalars | average(history)

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
    return jax.device_put(minibatch, self.programs.minibatch_sharding)

  def _score(self, batch, order, packed):
    """The minibatches with ℓ° and H°, on the devices, and the batch with them.

    Each is scored as it will be trained on: the same rows, packed alike.
    """
    minibatches = list(map(self._put, packed))
    scored = [self.programs.score(self.state.params, minibatch)
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
        self.state.params, self._put(self.programs.pack(again))))
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
    """rollouts/step_N.jsonl: one line a completion."""
    folder = self.workdir / 'rollouts'
    folder.mkdir(exist_ok=True)
    lines = evaluation.sample_lines(self.config.data.name, rollout.sampled)
    with (folder / f'step_{number:06d}.jsonl').open('w') as file:
      file.writelines(json.dumps(line) + '\n' for line in lines)


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


def packing_metrics(batch: update.Batch,
                    minibatches: list[update.Minibatch]) -> dict[str, float]:
  """padding_share: of the slots of unpacked rows, what holds no token.

  packing_efficiency: of the slots that the updates compute, what holds one.
  """
  shares = [packing.efficiency(m) for m in minibatches]
  return {'padding_share': np.mean(batch.position_BS < 0),
          'packing_efficiency': np.mean(shares)}


def average(history: list[dict[str, Any]]) -> dict[str, float]:
  """Means over a step's updates; extremes of weight_min and _max; counts."""
  reduce = {'weight_min': np.min, 'weight_max': np.max, 'skipped': np.sum,
            'empty_minibatches': np.sum}
  return {name: reduce.get(name, np.mean)([h[name] for h in history])
          for name in history[0]}


def _summary(scalars):
  shown = {'accuracy': 'acc', 'response_length_mean': 'len',
           'entropy': 'H', 'grad_norm': 'grad', 'seconds/step': 's'}
  parts = [f'{label} {scalars[name]:.3g}'
           for name, label in shown.items() if name in scalars]
  parts += [f'{name.removeprefix("eval/")} {value:.1%}'
            for name, value in scalars.items()
            if name.startswith('eval/') and '/avg@' in name]
  return '  '.join(parts)


def _rows(batch, rows):
  return jax.tree.map(lambda x: x[rows], batch)


def _rewards(groups, settings):
  return collect.rewards(groups, settings.max_tokens, settings.overlong_buffer,
                         settings.overlong_factor)


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
