r"""Measures a config's programs on this machine, and compares other libraries.

  python -m tepo_jax.benchmark --config=configs/benchmark.py:tiny \
      [--parts=machine,update] [--peer=transformers,trl,tunix] [--json]

Each part is timed after a warm-up, several times, interleaved with what it is
compared with. A line shows the median, followed by the extremes in parentheses.
Weights and prompts, of config.data.max_prompt_tokens, are random. On several
hosts (TEPO_MULTIHOST=1) all take part, and the first prints its times; the
parts machine and memory are of each host.
"""

import dataclasses
import json

from absl import flags
import jax

from tepo_jax import cli
from tepo_jax import errors
from tepo_jax.job import configuration
from tepo_jax.job import sizes
from tepo_jax.runtime import processes
from tepo_jax.tools import workload as workload_lib
from tepo_jax.tools.benchmark import machine
from tepo_jax.tools.benchmark import memory
from tepo_jax.tools.benchmark import registry
from tepo_jax.tools.benchmark import sampling
from tepo_jax.tools.benchmark import timing
from tepo_jax.tools.benchmark import updating

# Functions of (config, workload, peers) that yield Measurements.
PARTS = {
    'machine': machine.measure, 'sampling': sampling.measure,
    'rollout': sampling.measure_rollout,
    'scoring': updating.measure_scoring,
    'update': updating.measure_update, 'growth': updating.measure_growth,
    'step': updating.measure_step, 'memory': memory.measure}

_CONFIG = cli.DEFINE_config()
_PARTS = flags.DEFINE_list(
    'parts', list(PARTS), f'Parts to measure: {", ".join(PARTS)}.')
_PEERS = flags.DEFINE_list(
    'peer', [], f'Libraries to compare with: {", ".join(registry.PEERS)}. The '
    'part "sampling" compares with transformers only, which trl also uses.')
_MEAN = flags.DEFINE_integer(
    'mean_tokens', None, 'Mean completion length; by default all have '
    'config.rollout.max_tokens.', lower_bound=1)
_SHARE = flags.DEFINE_float(
    'mixed_share', workload_lib.MIXED_SHARE, 'Share of groups with both right '
    'and wrong answers, in the part "rollout".', 0.01, 1)
_ROUNDS = flags.DEFINE_integer(
    'rounds', workload_lib.ROUNDS, 'Timed runs of each function.',
    lower_bound=1)
_JSON = flags.DEFINE_bool('json', False, 'Print JSON lines, not a table.')


def main() -> None:
  config = _CONFIG.value
  for part in _PARTS.value:
    if part not in PARTS:
      raise errors.InputError(
          f'--parts: unknown part {part!r}; one of: {", ".join(PARTS)}')
  configuration.check_values(config)
  sizes.check(config)
  peers = registry.load(_PEERS.value)
  processes.initialize(config.compute.heartbeat)
  with processes.ending_together(), processes.first_writes():
    if peers and jax.process_count() > 1:
      raise errors.InputError('--peer: other libraries run as one process')
    workload = workload_lib.of(
        config, mean_tokens=_MEAN.value, mixed_share=_SHARE.value,
        rounds=_ROUNDS.value)
    for part in _PARTS.value:
      for measurement in PARTS[part](config, workload, peers):
        print(_line(measurement), flush=True)


def _line(measurement: timing.Measurement) -> str:
  if _JSON.value:
    return json.dumps(dataclasses.asdict(measurement))
  spread = '' if measurement.low is None else (
      f'  ({measurement.low:.4g} … {measurement.high:.4g})')
  return (f'{measurement.name:<48}{measurement.value:>12.4g} '
          f'{measurement.unit}{spread}')


if __name__ == '__main__':
  cli.run(main, joins_job=True)
