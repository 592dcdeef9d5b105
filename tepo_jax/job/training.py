"""Starts or resumes a training run in its workdir."""

import contextlib
import dataclasses

import ml_collections

from tepo_jax import errors
from tepo_jax.job import base_model
from tepo_jax.job import facts
from tepo_jax.job import fork
from tepo_jax.job import memory as memory_lib
from tepo_jax.job import run_folder
from tepo_jax.job import session as session_lib
from tepo_jax.job import summaries
from tepo_jax.job import trainer
from tepo_jax.runtime import agreement
from tepo_jax.runtime import files
from tepo_jax.runtime import host
from tepo_jax.runtime import interrupts
from tepo_jax.runtime import lock as lock_lib
from tepo_jax.runtime import processes


@dataclasses.dataclass(frozen=True)
class _Model:
  """The model that a run begins from.

  folder: its place in the run. source: where it is read; in a new fork, the
  parent's. is_unmade: it is the embedded model, which is yet to be made.
  """
  folder: files.Path
  source: files.Path
  is_unmade: bool

  def open(self, config, workdir, parent):
    """The session on the model. All processes of a job must call this."""
    if self.is_unmade:
      return session_lib.open_unmade(config, self.folder)
    session_lib.fix_date(
        config, self.source, run_folder.saved_date(workdir),
        parent and run_folder.saved_date(parent.run))
    return session_lib.open_folder(config, self.source)


def _find_model(config, workdir, parent):
  folder = files.path(session_lib.model_folder(config, workdir))
  is_missing = processes.any_of(
      config.model is None and not (folder / 'config.json').exists())
  if is_missing and parent is not None:
    return _Model(folder, files.path(parent.run) / session_lib.BASE_MODEL,
                  is_unmade=False)
  return _Model(folder, folder, is_unmade=is_missing)


def train(config: ml_collections.ConfigDict, workdir: files.Path,
          is_quiet: bool = False, origin: str | None = None,
          keeps_optimizer: bool = True) -> None:
  """Starts the run, or resumes it from the workdir's last checkpoint.

  Nothing is written before all of the config and its files have been checked.
  origin, keeps_optimizer: of a new run that is a fork, see `fork.choose`.

  Raises:
    KeyboardInterrupt: Ctrl-C stopped the run; its state is saved.
    errors.Interrupted: SIGTERM did.
  """
  stop = processes.StopRequest()
  if processes.is_first():
    interrupts.set_last_words(lambda: summaries.stopped(
        interrupts.WORD, workdir, config.steps))
  parent = fork.choose(config, workdir, origin, keeps_optimizer)
  model = _find_model(config, workdir, parent)
  with (lock_lib.FolderLock(workdir) as lock,
        model.open(config, workdir, parent) as session):
    run = _checked(config, workdir, session, parent, is_quiet)
    _claim(config, workdir, lock, parent, model)
    with (memory_lib.explaining_exhaustion(config, run.learner.programs),
          contextlib.closing(run.progress), host.compilations_shown(
              config.model, run.progress.compiling, run.progress.compiled)):
      run.open(workdir, parent)
      with contextlib.closing(run):
        is_complete = run.run(stop)
  if is_complete:
    run.check_trained()
  _close(config, workdir, stop, is_complete)


def _checked(config, workdir, session, parent, is_quiet):
  """The run, whose config and files are checked; prints what it trains on."""
  says = processes.is_first() and not is_quiet
  if says:
    print(summaries.header(config, session, workdir,
                           str(parent) if parent else 'new'), flush=True)
  run = trainer.Trainer(config, session)
  agreement.check(lambda: facts.of_model(session.folder)
                  | facts.of_mixture(run.prompts)
                  | facts.of_evaluations(run.evaluations)
                  | facts.of_texts(run.texts))
  if says:
    print(summaries.data(config, run.prompts, run.evaluations),
          f'\n{summaries.LEGEND}', sep='', flush=True)
  return run


def _claim(config, workdir, lock, parent, model):
  """Writes what the workdir needs before its first checkpoint."""
  processes.on_first(run_folder.claim, config, workdir, lock)
  if parent is not None:
    processes.on_first(fork.write, parent, workdir)
  if model.source != model.folder:
    processes.on_first(fork.copy_model, parent, model.folder)
  session_lib.cache_compilations(config)
  if model.is_unmade:
    processes.on_first(base_model.make, config, model.folder)


def _close(config, workdir, stop, is_complete):
  """Prints the closing lines, or raises what stopped the run."""
  if processes.is_first():
    print(summaries.results_table(workdir), flush=True)
  if not is_complete:
    error, how = ((KeyboardInterrupt, interrupts.WORD) if stop.interrupted
                  else (errors.Interrupted, 'stopped by SIGTERM'))
    raise error(summaries.stopped(how, workdir, config.steps))
  if processes.is_first():
    if config.published.metric:
      print(summaries.published(config.published, workdir))
    print(summaries.next_command(workdir), flush=True)
