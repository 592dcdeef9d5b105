r"""Trains a policy with TEPO or any row of configs/methods.py.

  python -m tepo_jax.train --config=configs/tiny.py:tepo --workdir=DIR \
      [--config.field=value ...]

A rollout step samples groups until enough of them are mixed, grades them,
recomputes π_old's statistics, and updates by minibatches. The same command
resumes the run in DIR from its last checkpoint. DIR then holds

  config.json      metrics.jsonl     tensorboard/
  checkpoints/     rollouts/step_*.jsonl

and base_model/ if the config names no model.

Methods, the rows of configs/methods.py (the part of --config after the colon):

  cispo, clip_cov, dr_grpo, entropy_advantage, gpg, grpo, gspo, gspo_original,
  kl_1, kl_1e-1, kl_1e-2, kl_1e-3, kl_1e-4, kl_cov, kl_k1_1, kl_k1_1e-1,
  kl_k1_1e-2, kl_k1_1e-3, kl_k1_1e-4, kl_k2_1, kl_k2_1e-1, kl_k2_1e-2,
  kl_k2_1e-3, kl_k2_1e-4, kl_k3_1, kl_k3_1e-1, kl_k3_1e-2, kl_k3_1e-3,
  kl_k3_1e-4, kl_k3_is_1, kl_k3_is_1e-1, kl_k3_is_1e-2, kl_k3_is_1e-3,
  kl_k3_is_1e-4, kl_misaligned, kl_negative_rising, max_entropy, min_entropy,
  prefix_is, reinforce_pp_baseline, rloo, seq_mean_token_sum, steer, tepo,
  tepo_algorithm1, tepo_covariance, tepo_no_kl, tepo_npg, tepo_printed,
  tepo_sequence_token

--help lists every field of configs/base.py with its meaning; ★ marks those that
are changed first. Examples:

  the same command again                     # resumes from the last checkpoint
  --config=configs/qwen2_5_7b.py:grpo                     # GRPO on Qwen2.5-7B
  --config.lora.rank=16 --config.optimizer.learning_rate=1e-5      # with LoRA
  --config=configs/base.py:tepo --config.model=FOLDER \
      --config.data.name=train.jsonl --config.eval.sets="('test.jsonl',)"
                            # own model and data: {"problem": …, "answer": …}
"""

import contextlib
import functools

from absl import flags
import ml_collections

from tepo_jax import cli
from tepo_jax.job import base_model
from tepo_jax.job import configuration
from tepo_jax.job import facts
from tepo_jax.job import memory as memory_lib
from tepo_jax.job import run_folder
from tepo_jax.job import session as session_lib
from tepo_jax.job import sizes
from tepo_jax.job import summaries
from tepo_jax.job import trainer
from tepo_jax.runtime import agreement
from tepo_jax.runtime import files
from tepo_jax.runtime import host
from tepo_jax.runtime import lock as lock_lib
from tepo_jax.runtime import processes

_CONFIG = cli.DEFINE_config()
_WORKDIR = flags.DEFINE_string(
    'workdir', None, 'Folder of the run, new or to resume; also gs://BUCKET/…',
    required=True)


def train(config: ml_collections.ConfigDict, workdir: files.Path) -> None:
  """Starts the run, or resumes it from the workdir's last checkpoint.

  Nothing is written before all of the config and its files have been checked.

  Raises:
    KeyboardInterrupt: Ctrl-C stopped the run; its state is saved.
  """
  stop = processes.StopRequest()
  folder = files.path(session_lib.model_folder(config, workdir))
  is_unmade = processes.any_of(
      config.model is None and not (folder / 'config.json').exists())
  open_model = (session_lib.open_unmade if is_unmade
                else session_lib.open_folder)
  if not is_unmade:
    session_lib.fix_date(config, folder, run_folder.saved_date(workdir))
  with (lock_lib.FolderLock(workdir) as lock,
        open_model(config, folder) as session):
    run = _announced(config, session, workdir)
    processes.on_first(run_folder.claim, config, workdir, lock)
    session_lib.cache_compilations(config)
    if is_unmade:
      processes.on_first(base_model.make, config, folder)
    with (memory_lib.explaining_exhaustion(config, run.learner.programs),
          contextlib.closing(run.progress), host.compilations_shown(
              run.progress.compiling, run.progress.compiled)):
      run.open(workdir)
      with contextlib.closing(run):
        run.run(stop)
  if processes.is_first():
    print(summaries.results_table(workdir))
    print(summaries.next_command(workdir, run.step, config.steps), flush=True)
  if stop.interrupted:
    raise KeyboardInterrupt


def _announced(config: ml_collections.ConfigDict, session: session_lib.Session,
               workdir: files.Path) -> trainer.Trainer:
  """A trainer, after its run has been described: the data sets, which may take
  long to load, last."""
  if processes.is_first():
    print(summaries.header(config, session, workdir), flush=True)
  run = trainer.Trainer(config, session)
  agreement.check(lambda: facts.of_model(session.folder) | facts.of_prompts(
      config.data.name, run.prompts) | facts.of_evaluations(run.evaluations))
  if processes.is_first():
    print(summaries.data(config, len(run.prompts), run.evaluations),
          f'\n{summaries.LEGEND}', sep='', flush=True)
  return run


def main() -> None:
  config = _CONFIG.value
  configuration.check(config, cli.overridden())
  sizes.check(config)
  processes.initialize()
  with processes.ending_together():
    agreement.check(functools.partial(facts.of_start, config))
    train(config, files.path(_WORKDIR.value))


if __name__ == '__main__':
  cli.run(main, joins_job=True)
