"""A training run: rollout steps, evaluations, checkpoints, records."""

from concurrent import futures
import contextlib
import shlex
import sys
import time

import jax
import ml_collections

from tepo_jax import errors
from tepo_jax.job import carrying
from tepo_jax.job import evaluation
from tepo_jax.job import facts
from tepo_jax.job import fork
from tepo_jax.job import learner as learner_lib
from tepo_jax.job import memory as memory_lib
from tepo_jax.job import programs as programs_lib
from tepo_jax.job import results
from tepo_jax.job import run_folder
from tepo_jax.job import session as session_lib
from tepo_jax.job import summaries
from tepo_jax.job import texts
from tepo_jax.rollout import draw
from tepo_jax.rollout import dump
from tepo_jax.rollout import groups as groups_lib
from tepo_jax.rollout import sampler as sampler_lib
from tepo_jax.runtime import checkpoint
from tepo_jax.runtime import files
from tepo_jax.runtime import host
from tepo_jax.runtime import mesh as mesh_lib
from tepo_jax.runtime import metrics
from tepo_jax.runtime import processes
from tepo_jax.runtime import progress as progress_lib


class Trainer:
  """One run. Its state is learner, step, cursor, carried, unrecorded,
  left_out_in_a_row, and the config.

  Attributes:
    learner: holds the policy.
    step: rollout steps done.
    cursor: position in the data order.
    carried, sizes: see `carrying`; the sizes are None until it has sampled.
    unrecorded: metrics of the last step until its evaluation is done, or None.
    left_out_in_a_row: the last steps that found too few mixed groups.
    began: 'step' and 'updates' that were done when the run began; of a fork,
      its parent's.
    workdir, checkpointer, writer: set by `open`.
    stands_on: what checkpoints say of the model folder and the data.
  """

  def __init__(self, config: ml_collections.ConfigDict,
               session: session_lib.Session):
    """Reads and checks everything that a run needs; writes nothing."""
    self.config, self.session = config, session
    self.learner = learner_lib.Learner(config, session)
    self.step, self.cursor, self.left_out_in_a_row = 0, 0, 0
    self.carried, self.sizes = (), None
    self.began = {'step': 0, 'updates': 0}
    self.unrecorded: dict[str, float] | None = None
    self.stands_on: dict[str, dict] = {}
    self.prompts = session.training_prompts()
    if config.reward.on_failure == 'stop':  # before a model is loaded
      for prompts in self.prompts.sets.values():
        processes.on_first(session.rewards.try_out, prompts[0].problem)
    self.evaluations = evaluation.prepare(session) if config.eval.period else []
    self.texts = texts.prepare(session) if config.eval.period else []
    # After this many steps nothing new should have to be compiled. Compilations
    # of a step's evaluation and save count towards the next step, as does the
    # time of the save (seconds/save).
    self.compilations = host.CompilationCounter(
        1 + max(10, config.eval.period, config.checkpoint.period))
    self.progress = progress_lib.Progress(
        config.steps, eval_period=config.eval.period,
        compile_seconds=self.compilations.seconds)
    self.background = futures.ThreadPoolExecutor(1)
    self._saved = 0.0  # when the last save or the run began

  def open(self, workdir: files.Path, parent: fork.Parent | None = None
           ) -> None:
    """Restores the last checkpoint of `workdir`, which is claimed for this run,
    or else its parent's, and compiles the update for compute.remat='auto'."""
    self.workdir, settings = workdir, self.config.checkpoint
    self.checkpointer = checkpoint.Checkpointer(
        workdir / session_lib.CHECKPOINTS, settings.keep, settings.keep_every)
    self.writer = (
        metrics.Writer(workdir, self.config.wandb_project,
                       self.config.to_dict())
        if processes.is_first() else metrics.NoWriter())
    self._restore(parent)
    rollout = self.config.rollout
    self.sampler = self.session.sampler(
        prompts=rollout.prompts, prefix=self.prompts.shared_prefix(),
        samples=rollout.samples, max_tokens=rollout.max_tokens,
        decoding=draw.Decoding(rollout.temperature),
        carries=carrying.is_on(self.config), sizes=self.sizes)
    if processes.is_first():
      host.record(workdir, self.step,
                  {'parameters': self.session.parameters(),
                   'command': shlex.join(sys.argv[1:])})

  def _restore(self, parent=None):
    """Takes the last undamaged checkpoint, or a new fork's parent's, or the
    model's weights at step 0.

    With LoRA the frozen weights come from the model folder in either case.
    """
    learner = self.learner
    learner.load_base()
    self.stands_on = learner.stands_on() | facts.of_data(
        self.config, self.prompts, self.evaluations, self.texts)
    saved = self.checkpointer.restore_last_good(
        *programs_lib.restorable(learner.programs), self._check_saved)
    is_new_fork = saved is None and parent is not None
    if is_new_fork:
      saved = fork.restore(parent, learner)
    if saved is None:
      self.progress.phase(f'loading {self.session.folder}')
      learner.state = learner.first_state()
      processes.on_first(self.writer.truncate, -1)
      learner.fit()
      return
    self.step, learner.state, extra = saved
    self.cursor, self.unrecorded = extra['cursor'], extra['unrecorded']
    self.carried, self.sizes = carrying.restored(extra)
    self.left_out_in_a_row = extra['left_out_in_a_row']
    self.began = extra['began']
    learner.skipped_in_a_row = extra['skipped_in_a_row']
    processes.on_first(
        self.writer.truncate,
        -1 if is_new_fork else self.step - (self.unrecorded is not None))
    if processes.is_first():
      for record in metrics.read(self.workdir):
        self.progress.trend(summaries.trends(record))
      print(f'continuing {parent.run if is_new_fork else self.workdir} '
            f'after step {self.step}', flush=True)
    if self.step < self.config.steps:  # else there is no update to compile
      self._fit_as(extra['remat'])
    if is_new_fork:
      self._save(None)  # the parent may delete its own

  def _fit_as(self, remat):
    """Compiles the update as the run that resumes had it, if it still fits."""
    self.learner.fit(begin=remat)
    if self.learner.programs.model.remat != remat and (
        self.config.compute.remat == 'auto' and processes.is_first()):
      errors.note(f'compute.remat=auto: {remat}, as until now, does not fit '
                  'these devices: results are not bit-identical')

  def _check_saved(self, where, extra):
    """Refuses a checkpoint of another config, model or data."""
    if extra['config_digest'] != run_folder.digest(self.config):
      raise errors.InputError(
          f'{where} belongs to another config than this workdir\'s config.json')
    self.learner.check_stands_on(where, extra)
    facts.check_data(where, extra['stands_on'], self.stands_on)

  def run(self, stop: processes.StopRequest) -> bool:
    """Makes steps until `config.steps`, or until it is asked to stop; returns
    True unless it was stopped.

    A stop request during sampling or evaluation discards that work: the run
    that resumes does it again. Updates are finished before stopping.
    """
    self._saved, is_complete = time.monotonic(), True
    if (states := self.learner.programs.old_states) is not None:
      self.progress.note(memory_lib.describe_old_states(states))
    if self.learner.update_bytes is not None:
      self.progress.note(memory_lib.describe_remat(
          self.learner.programs.model.remat, self.learner.update_bytes))
    try:
      if self.step == 0 and self.config.eval.before and (
          self.evaluations or self.texts):
        self.writer.write(0, scalars := self.evaluate(stop))
        self.progress.note(f'step 0/{self.config.steps}  '
                           f'{summaries.evaluated(scalars)}')
      if self.unrecorded is not None:
        self._record(stop)
      while self.step < self.config.steps:
        stop.check()
        with self._traced():
          self.unrecorded = self.rollout_step(stop)
        self.step += 1
        self._record(stop)
    except processes.Stopped:
      is_complete = False
    if self.step and self.checkpointer.latest() != self.step:
      self._save(None)  # stopped between two checkpoints
    return is_complete

  def _record(self, stop):
    """Evaluates if it is due; writes the step's metrics and saves."""
    scalars = self.unrecorded
    if self._is_due(self.config.eval.period):
      scalars = scalars | self.evaluate(stop)
    self.writer.write(self.step, scalars)
    self.unrecorded = None
    self.progress.trend(summaries.trends(scalars))
    self.progress.step(self.step, summaries.summary(scalars),
                       summaries.evaluated(scalars))
    if self._save_is_due() and self.checkpointer.latest() != self.step:
      self._save(next((value for name, value in scalars.items()
                       if name.startswith('eval/') and '/avg@' in name), None))

  def check_trained(self) -> None:
    """Raises a RunError if no update was made, as without a mixed group."""
    done = int(mesh_lib.to_host(self.learner.state.step))
    if done == self.began['updates']:
      raise errors.RunError(summaries.nothing_trained(
          self.config, self.config.steps - self.began['step']))

  def close(self) -> None:
    """Waits for the last checkpoint and closes all files."""
    self.background.shutdown()
    self.checkpointer.close()
    self.writer.close()

  def _traced(self):
    """A profiler trace of the next step, if the config asks for one."""
    if self.step + 1 not in self.config.profile.steps:
      return contextlib.nullcontext()
    return host.traced(self.workdir / 'profile')

  def _save(self, score):
    self._saved = time.monotonic()
    unrecorded = self.unrecorded and {
        name: float(value) for name, value in self.unrecorded.items()}
    _, unpadded = programs_lib.restorable(self.learner.programs)
    with self.session.timers('save'):
      self.checkpointer.save(self.step, self.learner.state, {
          'cursor': self.cursor, 'unrecorded': unrecorded,
          'skipped_in_a_row': self.learner.skipped_in_a_row,
          'left_out_in_a_row': self.left_out_in_a_row, 'began': self.began,
          'config_digest': run_folder.digest(self.config),
          'remat': self.learner.programs.model.remat,
          'stands_on': self.stands_on} | carrying.saved(
              self.config, self.carried, self.sizes), score, unpadded)
      if jax.default_backend() == 'cpu':  # whose memory an update needs too
        self.checkpointer.wait()

  def _save_is_due(self):
    settings = self.config.checkpoint
    # Clocks differ between processes.
    late = processes.any_of(
        settings.minutes is not None
        and time.monotonic() - self._saved >= 60 * settings.minutes)
    return late or self._is_due(settings.period)

  def _is_due(self, period):
    return bool(period) and (
        self.step % period == 0 or self.step == self.config.steps)

  def rollout_step(self, stop: processes.StopRequest) -> dict[str, float]:
    """Samples, grades and updates; returns the step's metrics."""
    start, step = time.perf_counter(), self.step + 1
    self.progress.begin(step)
    settings = self.config.rollout
    self.progress.phase(
        f'sampling {settings.prompts} × {settings.samples} completions')
    rollout, weight_bytes = self._collect(step, stop)
    self.cursor, self.carried = rollout.cursor, rollout.carried
    self.progress.sample(*summaries.first_sample(rollout))
    dumped = self.background.submit(
        self._dump, step, rollout, self.config.dump.period)
    scalars = summaries.rollout_metrics(rollout) | summaries.sampling_metrics(
        rollout) | {'sampling/weight_bytes': weight_bytes,
                    'left_out_in_a_row': self.left_out_in_a_row}
    if carrying.is_on(self.config):
      scalars |= carrying.metrics(rollout, step)
      self.sizes = carrying.of_shapes(
          self.config, self.sampler.schedule().shapes)
    if len(self.prompts.sets) > 1:
      scalars |= summaries.set_metrics(rollout, self.prompts)
    self.learner.renew_reference(step)
    scalars |= self._update(step, rollout, stop)
    dumped.result()
    seconds = time.perf_counter() - start
    scalars |= {f'seconds/{phase}': value
                for phase, value in self.session.timers.pop().items()}
    tokens = sum(g.length_G.sum() for g in rollout.sampled)
    if compilations := self.compilations.pop():
      host.settle()
    return scalars | host.usage() | {
        'seconds/step': seconds, 'tokens_per_second': tokens / seconds,
        'compilations': compilations}

  def _update(self, step, rollout, stop):
    """Learns from a rollout's groups, if it has any; if that fails, dumps it
    for a replay."""
    try:
      rollout.rewards.check(rollout.count, self.config.reward.on_failure)
      if not rollout.groups:
        return {}
      self.progress.phase('updating')
      stop.defer_interrupts()
      return self.learner.learn(step, rollout.groups, rollout.reward_B)
    except errors.RunError as error:
      raise self._failed(step, rollout, str(error)) from error

  def _failed(self, step, rollout, message):
    """Dumps the rollout of a step that fails; returns the error to raise."""
    self.background.shutdown()
    self._dump(step, rollout, period=1)
    return errors.RunError(
        f'{message}; the step\'s completions are in {session_lib.ROLLOUTS}/, '
        f'{self.checkpointer.describe_latest()}')

  def _collect(self, step, stop):
    """Samples a rollout step's groups: (rollout, bytes of the weights for it).
    """
    with self.session.timers('reshard'):
      params = jax.block_until_ready(
          self.learner.programs.to_decode(self.learner.policy()))
    key = programs_lib.stream(self.config.seed, 'rollout')
    if not carrying.is_on(self.config):
      key = jax.random.fold_in(key, step)
    try:
      rollout = self.sampler.select(
          params, self.prompts.prompt, carrying.selection(
              self.config, step, self.cursor, self.carried), key,
          self.session.rewards, stop.check)
      self.left_out_in_a_row = 0
    except groups_lib.NonFiniteError as error:
      raise errors.RunError(
          f'step {step}, problem '
          f'{self.prompts.prompt(error.prompt_id).problem.id}: {error}; '
          f'{self.checkpointer.describe_latest()}') from error
    except sampler_lib.StarvedError as error:
      rollout = error.rollout
      if self.left_out_in_a_row >= self.config.rollout.max_left_out:
        raise self._failed(step, rollout, self._why(error)) from error
      self.left_out_in_a_row += 1
    return rollout, mesh_lib.device_bytes(params)

  def _why(self, starved):
    """What a step without enough mixed groups shows."""
    rollout = starved.rollout
    try:
      rollout.rewards.check(rollout.count, self.config.reward.on_failure)
    except errors.RunError as failed:
      return str(failed)
    return str(starved) + summaries.why_starved(
        rollout, self.config, self.session.template.style)

  def evaluate(self, stop: processes.StopRequest) -> dict[str, float]:
    """Every evaluation and text of the config, as metrics 'eval/NAME/…'."""
    start = time.perf_counter()
    key = programs_lib.stream(self.config.seed, 'eval')
    with self.progress.evaluating(
        ', '.join(item.name for item in self.evaluations)):
      scalars = {f'eval/{text.name}/{results.NATS}': text.nats_per_token(
          self.learner.policy()) for text in self.texts}
      params = self.learner.programs.to_evaluate(self.learner.policy())
      for index, item in enumerate(self.evaluations):
        try:
          _, found = item.run(
              params, jax.random.fold_in(key, index), stop.check)
        except errors.RunError as error:
          raise errors.RunError(f'after step {self.step}: {error}') from error
        scalars |= {f'eval/{item.name}/{name}': value
                    for name, value in found.items()}
    self.session.timers.pop()
    return scalars | {'seconds/eval': time.perf_counter() - start}

  def _dump(self, step, rollout, period):
    """Writes rollouts/step_N.jsonl: one record per completion."""
    if not processes.is_first() or not period or step % period:
      return
    dump.write(
        self.workdir / session_lib.ROLLOUTS, step, dump.records(
            step, rollout, self.prompts.name, self.session.template.style),
        self.config.dump.format)
