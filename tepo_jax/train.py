r"""Trains a policy with TEPO or any row of configs/methods.py.

  python -m tepo_jax.train --config=configs/tiny.py:tepo --workdir=DIR \
      [--config.field=value ...]

A rollout step samples groups until enough of them are mixed, grades them,
recomputes π_old's statistics, and updates by minibatches. The same command
resumes the run in DIR from its last checkpoint. DIR then holds

  config.json      metrics.jsonl     tensorboard/
  checkpoints/     rollouts/step_*.jsonl

and base_model/ if the config names no model.
"""

import contextlib
import pathlib
import tempfile

from absl import flags
import ml_collections

from tepo_jax import cli
from tepo_jax import errors
from tepo_jax.job import base_model
from tepo_jax.job import checks
from tepo_jax.job import memory as memory_lib
from tepo_jax.job import run_folder
from tepo_jax.job import session as session_lib
from tepo_jax.job import sizes
from tepo_jax.job import summaries
from tepo_jax.job import trainer
from tepo_jax.runtime import lock as lock_lib
from tepo_jax.runtime import processes

_CONFIG = cli.DEFINE_config()
_WORKDIR = flags.DEFINE_string(
    'workdir', None, 'Folder of the run, new or to resume.', required=True)


def make_base_model(config: ml_collections.ConfigDict, workdir: pathlib.Path,
                    folder: pathlib.Path, lock: lock_lib.FolderLock) -> None:
  """Makes the embedded model, after checking the rest of the config."""
  with tempfile.TemporaryDirectory() as scratch:
    untrained = pathlib.Path(scratch) / 'untrained'
    base_model.make(config, untrained, trained=False)
    with session_lib.open_folder(config, untrained) as session:
      trainer.Trainer(config, session)
  run_folder.claim(config, workdir, lock)
  session_lib.cache_compilations(config, workdir)
  base_model.make(config, folder)


def train(config: ml_collections.ConfigDict, workdir: pathlib.Path) -> None:
  """Starts the run, or resumes it from the workdir's last checkpoint.

  Raises:
    KeyboardInterrupt: Ctrl-C stopped the run; its state is saved.
  """
  stop = processes.StopRequest()
  folder = pathlib.Path(session_lib.model_folder(config, workdir))
  with lock_lib.FolderLock(workdir) as lock:
    if processes.any_of(config.model is None and not folder.exists()):
      processes.on_first(make_base_model, config, workdir, folder, lock)
    with session_lib.open_folder(config, folder) as session:
      run = trainer.Trainer(config, session)
      with memory_lib.explaining_exhaustion(config, run.learner.programs):
        run.open(workdir, lock)
        with contextlib.closing(run):
          run.run(stop)
  if stop.interrupted:
    raise KeyboardInterrupt
  if processes.is_first():
    print(summaries.results_table(workdir))


def main() -> None:
  config = _CONFIG.value
  if '://' in _WORKDIR.value:
    raise errors.InputError(
        f'--workdir={_WORKDIR.value}: must be a local folder; mount the bucket '
        '(BUCKET=... launch/tpu_vm.sh setup)')
  checks.check(config, cli.overridden())
  sizes.check(config)
  processes.initialize()
  with processes.ending_together():
    train(config, pathlib.Path(_WORKDIR.value))


if __name__ == '__main__':
  cli.run(main, joins_job=True)
