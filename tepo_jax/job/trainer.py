"""A training run: rollout steps, evaluations, checkpoints, records."""

from concurrent import futures
import contextlib
import io
import pathlib
import signal
import sys
import time

import jax
import ml_collections
import numpy as np

from tepo_jax import errors
from tepo_jax.job import evaluation
from tepo_jax.job import learner as learner_lib
from tepo_jax.job import programs as programs_lib
from tepo_jax.job import run_folder
from tepo_jax.job import session as session_lib
from tepo_jax.job import summaries
from tepo_jax.rollout import draw
from tepo_jax.rollout import dump
from tepo_jax.rollout import groups as groups_lib
from tepo_jax.rollout import schedule
from tepo_jax.runtime import checkpoint
from tepo_jax.runtime import host
from tepo_jax.runtime import metrics
from tepo_jax.runtime import processes
from tepo_jax.runtime import progress as progress_lib
from tepo_jax.tasks import prompts


class Trainer:
  """One run: the policy's state, and what a rollout step does to it.

  Attributes:
    learner: the policy's state. cursor: the data order's place. step: rollout
    steps done. unrecorded: metrics of the last one while its evaluation is
    still to come, else None. These, and the config, are all there is to a run.
  """

  def __init__(self, config: ml_collections.ConfigDict,
               session: session_lib.Session):
    """Reads and checks all that a run needs; writes nothing."""
    self.config, self.session = config, session
    rollout = config.rollout
    self.learner = learner_lib.Learner(config, session)
    self.prompts = session.prompts(config.data.name, None, config.data.limit)
    self.order = groups_lib.DataOrder(len(self.prompts), config.seed)
    self.sampler = session.sampler(
        prompts=rollout.prompts, samples=rollout.samples,
        max_tokens=rollout.max_tokens,
        decoding=draw.Decoding(rollout.temperature))
    self.evaluations = evaluation.prepare(session) if config.eval.period else []
    self.progress = progress_lib.Progress(
        config.steps, sys.stderr if processes.is_first() else io.StringIO())
    self.compilations = host.CompilationCounter(_warm_up(config))
    self.background = futures.ThreadPoolExecutor(1)

  def open(self, workdir: pathlib.Path) -> None:
    """Makes `workdir` this run's, and goes to its last checkpoint."""
    processes.on_first(run_folder.claim, self.config, workdir)
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
      host.record(workdir, self.step)

  def _restore(self):
    """The last good checkpoint, or the model's weights at step 0.

    With LoRA the frozen weights are the model folder's in either case.
    """
    learner = self.learner
    learner.load_base()
    saved = self.checkpointer.restore_last_good(
        *programs_lib.restorable(learner.programs))
    if saved is None:
      self.progress.phase(f'loading {self.session.folder}')
      learner.state = learner.first_state()
      self.cursor, self.step, self.unrecorded = 0, 0, None
      self.writer.truncate(-1)
    else:
      self.step, learner.state, extra = saved
      self._check_config(extra['config_digest'])
      self.cursor, self.unrecorded = extra['cursor'], extra['unrecorded']
      learner.skipped_in_a_row = extra['skipped_in_a_row']
      self.writer.truncate(self.step - (self.unrecorded is not None))
      if processes.is_first():
        print(f'continuing {self.workdir} after step {self.step}', flush=True)

  def _check_config(self, digest):
    """The workdir's config.json is ours; are the checkpoints too?"""
    if digest != run_folder.digest(self.config):
      raise errors.InputError(
          f'{self.workdir / session_lib.CHECKPOINTS}/{self.step} is of a run '
          'with another config than this workdir\'s config.json')

  def run(self, stop: 'StopRequest') -> None:
    """Steps until `config.steps`, or until it is asked to stop.

    Asked while it samples or evaluates, it gives that up: the step, or its
    evaluation, is done anew by the run that continues. Updates are finished.
    """
    self.session.check_stop = stop.check
    try:
      if self.step == 0 and self.evaluations:
        self.writer.write(0, self.evaluate())
      if self.unrecorded is not None:
        self._record()
      while self.step < self.config.steps:
        stop.check()
        with self._traced():
          self.unrecorded = self.rollout_step()
        self.step += 1
        self._record()
    except Stopped:
      pass
    if self.step and self.checkpointer.latest() != self.step:
      self._save(None)  # asked to stop between two checkpoints

  def _record(self):
    """Evaluates where that is due; writes down and saves what a step did."""
    scalars = self.unrecorded
    if self._is_due(self.config.eval.period):
      scalars = scalars | self.evaluate()
    self.writer.write(self.step, scalars)
    self.unrecorded = None
    self.progress.step(self.step, summaries.summary(scalars),
                       summaries.evaluated(scalars))
    if (self._is_due(self.config.checkpoint.period)
        and self.checkpointer.latest() != self.step):
      self._save(next((value for name, value in scalars.items()
                       if name.startswith('eval/') and '/avg@' in name), None))

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
      self.checkpointer.save(self.step, self.learner.state, {
          'cursor': self.cursor, 'unrecorded': self._unrecorded_numbers(),
          'skipped_in_a_row': self.learner.skipped_in_a_row,
          'config_digest': run_folder.digest(self.config)}, score)

  def _unrecorded_numbers(self):
    if self.unrecorded is None:
      return None
    return {name: float(value) for name, value in self.unrecorded.items()}

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
        summaries.rewards(rollout.sampled, self.config.rollout),
        self.config.dump.period)
    scalars = summaries.rollout_metrics(rollout, self.config.rollout)
    scalars |= {f'grading/{name}': count
                for name, count in self.sampler.counts.items()}
    self.sampler.counts.clear()
    scalars |= self._sampling_metrics()
    if rollout.groups:
      self.progress.phase('updating')
      scalars |= self._update(number, rollout)
    dumped.result()
    seconds = time.perf_counter() - start
    scalars |= {f'seconds/{phase}': value
                for phase, value in self.session.timers.pop().items()}
    tokens = sum(g.length_G.sum() for g in rollout.sampled)
    compilations = self.compilations.pop()
    if compilations:
      host.settle()
    return scalars | host.usage() | {
        'seconds/step': seconds, 'tokens_per_second': tokens / seconds,
        'compilations': compilations}

  def _update(self, number, rollout):
    """The learner's; a rollout on which it fails is kept for a replay."""
    try:
      return self.learner.learn(number, rollout.groups)
    except errors.RunError as error:
      self.background.shutdown()
      self._dump(number, rollout, summaries.rewards(
          rollout.sampled, self.config.rollout), period=1)
      raise errors.RunError(
          f'{error}; the step\'s completions are in {session_lib.ROLLOUTS}/, '
          f'the last checkpoint is of step {self.checkpointer.latest()}'
      ) from error

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
          self.learner.programs.to_decode(self.learner.policy()))
    self.weight_bytes = sum(x.nbytes for x in jax.tree.leaves(params))
    key = jax.random.fold_in(programs_lib.stream(self.config.seed, 'rollout'), number)

    def draw(cursor):
      places = range(cursor, cursor + rollout.prompts)
      return [self.prompts[self.order[i]].at(i) for i in places]

    return groups_lib.collect(
        draw, lambda prompts: self.sampler(params, prompts, key),
        cursor=self.cursor, wanted=rollout.prompts,
        mode=rollout.dynamic_sampling,
        max_batches=rollout.max_generation_batches)

  def evaluate(self) -> dict[str, float]:
    """Every evaluation of the config, as metrics 'eval/SET/…'."""
    self.progress.phase('evaluating')
    params = self.learner.programs.to_decode(self.learner.policy())
    scalars, start = {}, time.perf_counter()
    key = programs_lib.stream(self.config.seed, 'eval')
    for index, item in enumerate(self.evaluations):
      _, results = item.run(params, jax.random.fold_in(key, index))
      scalars |= {f'eval/{item.name}/{name}': value
                  for name, value in results.items()}
    self.session.timers.pop()
    return scalars | {'seconds/eval': time.perf_counter() - start}

  def _dump(self, number, rollout, rewards_B, period):
    """rollouts/step_N.jsonl: one record a completion."""
    settings, data = self.config.dump, self.config.data
    if not processes.is_first() or not period or number % period:
      return
    dump.write(
        self.workdir / session_lib.ROLLOUTS, number, dump.records(
            number, rollout, np.split(rewards_B, len(rollout.sampled)),
            data.name, prompts.get(data.template).style),
        settings.format, settings.max_megabytes)


def _warm_up(config):
  """Steps until all has been compiled that every run does.

  What follows a step, its evaluation and its save, counts with the next one.
  """
  return 1 + max(10, config.eval.period, config.checkpoint.period)


class Stopped(Exception):
  """The run was asked to stop."""


class StopRequest:
  """Turns SIGTERM into a request to save and end."""

  def __init__(self):
    self.requested = False
    signal.signal(signal.SIGTERM, self._request)

  def check(self) -> None:
    """Raises Stopped on every process if one of them was asked."""
    if processes.any_of(self.requested):
      raise Stopped

  def _request(self, *_):
    self.requested = True
