r"""Measures gradient estimators off policy, TEPO's mask, and its KL penalty.

  python -m tepo_jax.mechanism --config=configs/countdown.py:grpo \
      --config.model=FOLDER --out=DIR
  python -m tepo_jax.mechanism --config=configs/smollm2.py:sums \
      --minibatches=32 --out=DIR

The policies are the model, θ_0, and what 8, 16 and 32 updates on one rollout
make of it: by the config's method, by sequence weights with two bounds, and by
TEPO with growing β. Prompts are those of the first of config.eval.sets.

Writes mechanism.json and its tables, mechanism.md. If it is killed, the same
command resumes after the last policy that is complete. For small models: it
holds one gradient per prompt.

With --minibatches it compares the gradients of nine methods instead, on one
rollout of so many minibatches, at the model and after 1, 4 and 8 updates by the
config's method on another rollout. For large models: it keeps a sketch of each
gradient, in DIR/sketches_*, and resumes after the last minibatch. At another
point of a run: export that step, and name the folder as config.model.

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
from tepo_jax.tools.mechanism import measure
from tepo_jax.tools.mechanism import observe
from tepo_jax.tools.mechanism import progression
from tepo_jax.tools.mechanism import staleness
from tepo_jax.tools.mechanism import tables

_TABLES = 'mechanism.md'

_CONFIG = cli.DEFINE_config()
_OUT = flags.DEFINE_string(
    'out', None, 'Folder for mechanism.json and mechanism.md, new or of the '
    'same measurement.', required=True)
_MINIBATCHES = flags.DEFINE_integer(
    'minibatches', 0, 'Compare the gradients of methods on so many minibatches '
    'instead; 0: do not.', lower_bound=0)


def main() -> None:
  config, out = _CONFIG.value, files.path(_OUT.value)
  minibatches = _MINIBATCHES.value
  updates = max(staleness.COUNTS if minibatches else measure.COUNTS)
  with config.unlocked():  # one rollout for all updates
    config.rollout.prompts = -(-updates // config.train.epochs) * (
        config.train.minibatch_prompts)
  configuration.check(config, cli.overridden())
  sizes.check(config)
  if config.model is None or config.lora.rank:
    raise errors.InputError('config.model must be a model folder, as '
                            'tepo_jax.pretrain makes, and config.lora.rank 0')
  folder = session_lib.model_folder(config, out)
  session_lib.fix_date(config, folder, progression.saved_date(out))
  with (lock_lib.FolderLock(out) as lock,
        session_lib.open_folder(config, folder) as session):
    lab = observe.Lab(config, session)
    setup = (staleness.setup(lab, minibatches) if minibatches
             else progression.setup(lab))
    results = progression.start(out, lock, setup)
    session_lib.cache_compilations(config)
    if minibatches:
      staleness.run(lab, results, minibatches, out)
    else:
      progression.run(lab, results, out)
  page = comparison.markdown if minibatches else tables.markdown
  files.replace_text(out / _TABLES, page(results))
  print(f'wrote {out / progression.RESULTS} and {_TABLES}')


if __name__ == '__main__':
  cli.run(main)
