r"""Predicts whether a run fits TPUs or GPUs, and its time, without them.

  python -m tepo_jax.plan --config=configs/qwen3_14b.py:tepo \
      --topology=v5p:4x4x4 [--topology=h100x8] [--json]

Compiles the programs of a rollout step with the real compilers, for chips you
do not have (launch/setup.sh cpu plan installs both). Reads only config.json of
the model; lengths, and the share of groups that dynamic sampling keeps, are
assumed by flags. In the table, numbers are per chip and per run of a
program, which for decoding is config.rollout.chunk steps: `sent` is what a chip
sends to others, `held` is other memory that stays allocated during the run,
`ms` is a roofline, and `wait` the part of it in which the schedule waits for
communication. Predicted seconds are a range: the roofline, divided by the
shares of it that others measured, on such chips where there are measurements
(tools/plan/published.py).
Compiled programs are kept for the next plan. Exits with status 2 if a step does
not fit. With --check, on a machine that has these chips, it also compiles the
programs for them and compares the memory.
"""

import json
import math

from absl import flags
import jax

from tepo_jax import cli
from tepo_jax import errors
from tepo_jax.job import configuration
from tepo_jax.tools import workload as workload_lib
from tepo_jax.tools.plan import check
from tepo_jax.tools.plan import chips
from tepo_jax.tools.plan import gpus
from tepo_jax.tools.plan import run
from tepo_jax.tools.plan import stack
from tepo_jax.tools.plan import step
from tepo_jax.tools.plan import table

_CONFIG = cli.DEFINE_config()
_TOPOLOGY = flags.DEFINE_multi_string(
    'topology', None, 'A slice, such as v5e:4x4, or GPUs, such as h100x8',
    required=True)
_CHECK = flags.DEFINE_bool(
    'check', False, 'Compare memory with programs compiled on this machine.')
_BRIEF = flags.DEFINE_bool(
    'brief', False, 'Compile the largest program of each kind, for one mesh.')
_PROMPT = flags.DEFINE_integer(
    'prompt_tokens', 81, 'Length of the prompts, at most config.data.'
    'max_prompt_tokens. 81 is the median of DAPO-Math.', lower_bound=1)
_MEAN = flags.DEFINE_integer(
    'mean_tokens', None, 'Mean completion length; by default a quarter of '
    'config.rollout.max_tokens, at which all completions have it.',
    lower_bound=1)
_SHARE = flags.DEFINE_float(
    'mixed_share', workload_lib.MIXED_SHARE, 'Share of groups with both right '
    'and wrong answers: dynamic sampling draws more prompts where it is below '
    '1.', 0.01, 1)
_JSON = flags.DEFINE_bool('json', False, 'Print JSON lines, not tables.')


def main() -> None:
  config = _CONFIG.value
  if not _CHECK.value:
    jax.config.update('jax_platforms', 'cpu')  # nothing runs on a device
  configuration.check(config, (name for name in cli.overridden()
                               if name != 'pretrain.vocabulary'))
  slices = [(chips if ':' in name else gpus).topology(name)
            for name in _TOPOLOGY.value]
  if _CHECK.value:
    if _JSON.value:
      raise errors.InputError('--check prints text: leave out --json')
    for slice_ in slices:
      check.require(slice_, jax.devices())
  workload = workload_lib.of(
      config, _PROMPT.value,
      _MEAN.value or math.ceil(config.rollout.max_tokens / 4),
      mixed_share=_SHARE.value)
  refused = []
  for slice_ in slices:
    plan = step.make(config, workload, slice_, config.mesh, _BRIEF.value)
    plans = [plan] if _BRIEF.value else step.compare_meshes(
        config, workload, plan)
    whole = run.of(config, workload, plan)
    if _JSON.value:
      print(json.dumps(table.record(plan, plans, whole)), flush=True)
    else:
      print(table.text(plan, workload, plans, whole) + '\n', flush=True)
    if _CHECK.value:
      print(check.text(check.compare(config, workload, plan, jax.devices())),
            flush=True)
    if not plan.fits:
      refused.append(f'{slice_.name}: {table.verdict(plan)}')
  if refused:
    raise errors.InputError('; '.join(refused))


if __name__ == '__main__':
  stack.ensure()
  cli.run(main)
