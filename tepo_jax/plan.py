r"""Says before a slice is rented whether a run fits, and how fast it can be.

  python -m tepo_jax.plan --config=configs/qwen3_14b.py:tepo \
      --topology=v5p:4x4x4 [--topology=v6e:8x8] [--json]

Compiles the programs of a rollout step with the real TPU compiler, for chips
that are not there (launch/setup.sh cpu tests installs it). Of the model only
config.json is read. Lengths are those of config.benchmark; `sent` is what a
chip sends to others; `ms` is a roofline, and predicted seconds are that over
the share of it that good programs reach. One batch of prompts a step is
assumed; dynamic sampling takes more of them. Status 2 where it does not fit.
"""

import json

from absl import flags
import jax

from tepo_jax import cli
from tepo_jax import errors
from tepo_jax.job import checks
from tepo_jax.tools.benchmark import workload as workload_lib
from tepo_jax.tools.plan import advice
from tepo_jax.tools.plan import chips
from tepo_jax.tools.plan import step
from tepo_jax.tools.plan import table

_CONFIG = cli.DEFINE_config()
_TOPOLOGY = flags.DEFINE_multi_string(
    'topology', None, 'A slice: v5e:4x4, v5p:2x2x2, v6e:8x8. Several may be '
    'given.', required=True)
_JSON = flags.DEFINE_bool('json', False, 'Print JSON lines, not tables.')


def main() -> None:
  config = _CONFIG.value
  jax.config.update('jax_platforms', 'cpu')  # whatever this machine has
  checks.check(config, (name for name in cli.overridden()
                        if not name.startswith('benchmark.')))
  slices = [chips.topology(name) for name in _TOPOLOGY.value]
  workload = workload_lib.of(config)
  refused = []
  for slice_ in slices:
    plan = step.make(config, workload, slice_, config.mesh)
    choices = advice.choices(config, workload, plan)
    if _JSON.value:
      print(json.dumps(table.record(plan, choices)), flush=True)
    else:
      print(table.text(plan, workload, choices) + '\n', flush=True)
    if not plan.fits:
      refused.append(f'{slice_.name}: {table.verdict(plan)}')
  if refused:
    raise errors.InputError('; '.join(refused))


if __name__ == '__main__':
  cli.run(main)
