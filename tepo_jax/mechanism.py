r"""Compares the gradients of the paper's methods on one rollout of a model.

  python -m tepo_jax.mechanism --config=configs/smollm2.py:sums \
      [--minibatches=32] --out=DIR

The policies are the model and what 1, 4 and 8 updates by the config's method on
another rollout make of it. At each, nine methods' gradients are computed on the
minibatches of a rollout of the model. To measure another point of a run, export
that step, and name the folder as config.model.

Writes mechanism.json and its tables, mechanism.md. It keeps a sketch of each
gradient, in DIR/sketches_*. If it is killed, the same command resumes after the
last minibatch.

tepo_jax/tools/README.md says what is measured.
"""

from absl import flags

from tepo_jax import cli
from tepo_jax import errors
from tepo_jax.job import configuration
from tepo_jax.job import session as session_lib
from tepo_jax.job import sizes
from tepo_jax.runtime import files
from tepo_jax.runtime import lock as lock_lib
from tepo_jax.tools.mechanism import comparison
from tepo_jax.tools.mechanism import observe
from tepo_jax.tools.mechanism import results_file
from tepo_jax.tools.mechanism import staleness

_TABLES = 'mechanism.md'

_CONFIG = cli.DEFINE_config()
_OUT = flags.DEFINE_string(
    'out', None, 'Folder for mechanism.json and mechanism.md, new or of the '
    'same measurement.', required=True)
_MINIBATCHES = flags.DEFINE_integer(
    'minibatches', 32, 'Minibatches of the rollout that is measured.',
    lower_bound=1)


def main() -> None:
  config, out = _CONFIG.value, files.path(_OUT.value)
  minibatches = _MINIBATCHES.value
  updates = max(staleness.COUNTS)
  if 'rollout.prompts' in cli.overridden():
    raise errors.InputError(
        'config.rollout.prompts: the measurement determines it; '
        'set config.train.minibatch_prompts or --minibatches')
  with config.unlocked():  # one rollout for all updates
    config.rollout.prompts = -(-updates // config.train.epochs) * (
        config.train.minibatch_prompts)
  configuration.check(config, cli.overridden())
  sizes.check(config)
  if config.model is None or config.lora.rank:
    raise errors.InputError('config.model must be a model folder, as '
                            'tepo_jax.pretrain makes, and config.lora.rank 0')
  folder = session_lib.model_folder(config, out)
  session_lib.fix_date(config, folder, results_file.saved_date(out))
  with (lock_lib.FolderLock(out) as lock,
        session_lib.open_folder(config, folder) as session):
    lab = observe.Lab(config, session, max(
        minibatches * config.train.minibatch_prompts, config.rollout.prompts))
    results = results_file.start(
        out, lock, results_file.setup(lab, minibatches))
    session_lib.cache_compilations(config)
    staleness.run(lab, results, minibatches, out)
  files.replace_text(out / _TABLES, comparison.markdown(results))
  print(f'wrote {out / results_file.NAME} and {_TABLES}')


if __name__ == '__main__':
  cli.run(main)
