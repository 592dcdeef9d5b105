r"""Trains a policy with TEPO or any row of configs/methods.py.

  python -m tepo_jax.train --config=configs/tiny.py:tepo --workdir=DIR \
      [--config.field=value ...]

A rollout step samples groups until enough of them are mixed, grades them,
recomputes π_old's statistics, and updates by minibatches. The same command
resumes the run in DIR from its last checkpoint. DIR then holds

  config.json      metrics.jsonl     tensorboard/
  checkpoints/     rollouts/step_*.jsonl

and base_model/ if the config names no model. With --from=OLD[@STEP] a new run
begins from a checkpoint of the run in OLD, and parent.json names it.

Methods, the rows of configs/methods.py (the part of --config after the colon):

  cispo, clip_cov, dr_grpo, entropy_advantage, gpg, grpo, grpo_original, gspo,
  gspo_original, kl_1, kl_1e-1, kl_1e-2, kl_1e-3, kl_1e-4, kl_cov, kl_k1_1,
  kl_k1_1e-1, kl_k1_1e-2, kl_k1_1e-3, kl_k1_1e-4, kl_k2_1, kl_k2_1e-1,
  kl_k2_1e-2, kl_k2_1e-3, kl_k2_1e-4, kl_k3_1, kl_k3_1e-1, kl_k3_1e-2,
  kl_k3_1e-3, kl_k3_1e-4, kl_k3_is_1, kl_k3_is_1e-1, kl_k3_is_1e-2,
  kl_k3_is_1e-3, kl_k3_is_1e-4, kl_misaligned, kl_negative_rising, max_entropy,
  min_entropy, prefix_is, reinforce_pp, reinforce_pp_baseline,
  reinforce_pp_baseline_original, rloo, rloo_original, seq_mean_token_sum,
  steer, tepo, tepo_algorithm1, tepo_covariance, tepo_no_kl, tepo_npg,
  tepo_printed, tepo_sequence_token

--help lists every field of configs/base.py with its meaning; ★ marks those that
are changed first. Examples:

  the same command again                     # resumes from the last checkpoint
  --workdir=NEW --from=OLD@40 --config.optimizer.learning_rate=1e-6     # a fork
  --config=configs/qwen2_5_7b.py:grpo                     # GRPO on Qwen2.5-7B
  --config.lora.rank=16 --config.optimizer.learning_rate=1e-5      # with LoRA
  --config=configs/base.py:tepo --config.model=FOLDER \
      --config.data.name=train.jsonl --config.eval.sets="('test.jsonl',)"
                            # own model and data: {"problem": …, "answer": …}
"""

from absl import flags

from tepo_jax import cli
from tepo_jax import errors
from tepo_jax.job import configuration
from tepo_jax.runtime import files

_CONFIG = cli.DEFINE_config()
_WORKDIR = flags.DEFINE_string(
    'workdir', None, 'Folder of the run, new or to resume; also gs://BUCKET/…',
    required=True)
_FROM = flags.DEFINE_string(
    'from', None, 'OLD[@STEP]: the workdir of another run, from whose last '
    'checkpoint, or that of rollout step STEP, a new run begins: a fork. '
    'Fields may differ.')
_NEW_OPTIMIZER = flags.DEFINE_bool(
    'new_optimizer', False, "With --from: begin with new moments of the "
    "optimiser, instead of the other run's.")
_QUIET = flags.DEFINE_bool(
    'quiet', False, 'Print no steps: only warnings, what is resumed, and '
    'the closing table.')


def main() -> None:
  # They import jax, for which a misspelt flag and --help should not wait.
  from tepo_jax.job import facts
  from tepo_jax.job import sizes
  from tepo_jax.job import training
  from tepo_jax.runtime import agreement
  from tepo_jax.runtime import processes
  from tepo_jax.runtime import progress
  config = _CONFIG.value
  configuration.check(config, cli.overridden())
  sizes.check(config)
  processes.initialize(config.compute.heartbeat)
  if _QUIET.value:
    progress.silence()
  with processes.ending_together():
    agreement.check(lambda: facts.of_start(config) | {
        f'--{flag.name}': flag.value for flag in (_FROM, _NEW_OPTIMIZER)})
    if processes.is_first() and (found := cli.caution(config)):
      errors.note(f'warning: {found}')
    training.train(config, files.path(_WORKDIR.value), _QUIET.value,
                   _FROM.value, not _NEW_OPTIMIZER.value)


if __name__ == '__main__':
  cli.run(main, joins_job=True)
