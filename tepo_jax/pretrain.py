r"""Makes an embedded task's base model, as a Hugging Face folder.

  python -m tepo_jax.pretrain --config=configs/tiny.py --out=DIR

Trains next-token prediction on demonstrations. Like real corpora they mix short
direct answers, which a small model mostly gets wrong, with worked solutions,
which it mostly gets right. The task is config.data.name. `tepo_jax.train` does
the same if the config names no model. On several hosts (TEPO_MULTIHOST=1) the
first one does all.
"""

from absl import flags
import ml_collections

from tepo_jax import cli
from tepo_jax import errors
from tepo_jax.job import base_model
from tepo_jax.job import configuration
from tepo_jax.job import run_folder
from tepo_jax.runtime import processes

_CONFIG = cli.DEFINE_config()
_OUT = flags.DEFINE_string(
    'out', None, 'Folder to make; if it exists, it must be empty.',
    required=True)


def main() -> None:
  config = _CONFIG.value
  configuration.check_values(config)
  if 'pretrain' not in config:
    raise errors.InputError(
        'this config does not make a model: it has no section pretrain')
  processes.initialize(config.compute.heartbeat)
  with processes.ending_together():
    processes.on_first(pretrain, config)


def pretrain(config: ml_collections.ConfigDict) -> None:
  """Makes the model: on one host, whatever the job's number of them."""
  out = run_folder.check_out(_OUT.value)
  base_model.make(config, out)
  print(f'made {out}')


if __name__ == '__main__':
  cli.run(main, joins_job=True)
