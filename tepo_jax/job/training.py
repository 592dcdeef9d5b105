"""Starts or resumes a training run in its workdir."""

import contextlib

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


def _open(config, workdir, parent):
  """The session on the model that the run begins from, and whether that is the
  embedded model, which is yet to be made; a new fork reads its parent's. All
  processes of a job must call this."""
  folder = files.path(session_lib.model_folder(config, workdir))
  is_missing = processes.any_of(
      config.model is None and not (folder / 'config.json').exists())
  if is_missing and parent is None:
    return session_lib.open_unmade(config, folder), True
  if is_missing:
    folder = files.path(parent.run) / session_lib.BASE_MODEL
  session_lib.fix_date(
      config, folder, run_folder.saved_date(workdir),
      parent and run_folder.saved_date(parent.run))
  return session_lib.open_folder(config, folder), False


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
  session, is_unmade = _open(config, workdir, parent)
  with lock_lib.FolderLock(workdir) as lock, session:
    run = _checked(config, workdir, session, parent, is_quiet)
    _claim(config, workdir, lock, parent, session, is_unmade)
    with (memory_lib.explaining_exhaustion(config, run.learner.programs),
          contextlib.closing(run.progress), host.compilations_shown(
              run.progress.compiling, run.progress.compiled)):
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
                  | facts.of_prompts(
                      facts.data_sets(run.prompts.sets, run.evaluations))
                  | facts.of_texts(run.texts))
  if says:
    print(summaries.data(config, run.prompts, run.evaluations),
          f'\n{summaries.LEGEND}', sep='', flush=True)
  return run


def _claim(config, workdir, lock, parent, session, is_unmade):
  """Writes what the workdir needs before its first checkpoint."""
  processes.on_first(run_folder.claim, config, workdir, lock)
  if parent is not None:
    processes.on_first(fork.write, parent, workdir)
  folder = workdir / session_lib.BASE_MODEL
  if config.model is None and session.folder != str(folder):
    processes.on_first(fork.copy_model, parent, folder)
  session_lib.cache_compilations(config)
  if is_unmade:
    processes.on_first(base_model.make, config, folder)


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
