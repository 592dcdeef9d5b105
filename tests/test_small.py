"""Every row of configs/small.py."""

import itertools
import json
import pathlib
import re

import pytest

from configs import small
from tepo_jax import cli
from tepo_jax import errors
from tepo_jax.job import configuration
from tepo_jax.tools.plan import chips
from tepo_jax.tools.plan import gpus

_MODELS = pathlib.Path(__file__).parent / 'tools/plan/models'
_PLANS = pathlib.Path(__file__).parents[1] / 'launch/PLANS.md'


@pytest.mark.parametrize('machine', small.MACHINES)
def test_every_row_is_a_config(machine):
  topology, devices, _ = small.MACHINES[machine]
  count = 1
  if ':' in topology:
    kind, _, torus = topology.partition(':')
    assert kind in chips.CHIPS
    for size in torus.split('x'):
      count *= int(size)
  else:
    kind, _, count = topology.rpartition('x')
    assert kind in gpus.GPUS and count in gpus.MACHINES
  assert int(count) == devices
  for model, lora, dapo in itertools.product(
      small.MODELS, ('', ',lora'), ('', ',dapo,grpo')):
    config = cli.load_config(f'configs/small.py:{model},{machine}{lora}{dapo}')
    configuration.check(config, ())
    assert config.lora.rank == (16 if lora else 0)
    assert config.method_name == ('grpo' if dapo else 'tepo')
    assert config.data.name == (
        'dapo_math' if dapo else 'openai/gsm8k:main@train')
    # A device computes at least a row of its own at a time.
    assert config.train.microbatch_tokens >= devices * (
        config.data.max_prompt_tokens + config.rollout.max_tokens)
    assert config.model.split('/')[1].lower().replace('-', '_').replace(
        '.', '_') == model
    assert json.loads((_MODELS / model / 'config.json').read_text())[
        'model_type'] == model[:5]


def _rows(text, head):
  """The cells of each row of the table with this head."""
  rows = text.partition(f'| {head}')[2].partition('\n\n')[0].splitlines()[2:]
  return [list(map(str.strip, row.strip('|').split('|'))) for row in rows]


@pytest.mark.parametrize('data', ['GSM8K', 'DAPO-Math'])
def test_what_does_not_fit_by_the_plans_is_known(data):
  rows = _rows(_PLANS.read_text('utf-8'), f'{data} | of GiB | GiB |')
  seen = set()
  for pair, *cells in rows:
    model, machine = pair.strip('`').split(',')
    argument = f'{model},{machine},grpo{",dapo" * (data != "GSM8K")}'
    config = small.get_config(argument)
    said = small.caution(config, argument)
    assert bool(said) == (cells[3] == 'does not fit'), argument
    larger = said.rpartition(': ')[2].split(', ') if said else []
    assert larger == ([] if not said else [
        name for name in small.MACHINES
        if not small.caution(config, argument.replace(machine, name))])
    assert cells[7] != 'does not fit'
    config.lora.rank = 16
    assert small.caution(config, argument) is None
    seen.add((model, machine))
  assert seen == {
      (model, machine) for model in small.MODELS for machine in small.MACHINES
      if machine in ('gpu24', 'gpu80') or (
          data == 'GSM8K' and 'qwen2_5' in model and machine != 'v5e1')}


def test_the_plans_list_what_does_not_fit():
  """Also of machines that have no row."""
  rows = _rows(_PLANS.read_text('utf-8'), 'all weights do not fit | ')
  found = {data: {machine.strip('`'): re.findall('`(.+?)`', cells[i])
                  for machine, *cells in rows if '`' in cells[i]}
           for i, data in enumerate(('', ',dapo'))}
  assert found == {data: {
      machine: too_large for machine in small.MACHINES
      if (too_large := [model for model in small.MODELS if small.caution(
          small.get_config(f'{model},{machine}{data}'),
          f'{model},{machine}{data}')])} for data in ('', ',dapo')}


@pytest.mark.long
def test_train_warns_of_what_does_not_fit(programs, tmp_path):
  done = programs.run(
      'train', '--config=configs/small.py:qwen2_5_1_5b,gpu24',
      '--config.data.name=no_such.jsonl', f'--workdir={tmp_path}/run')
  assert done.returncode == 2 and done.stderr.splitlines()[:-1] == [
      'warning: qwen2_5_1_5b,gpu24: by the plans (launch/PLANS.md), training '
      'all weights does not fit gpu24; what fits is adapters, '
      'qwen2_5_1_5b,gpu24,lora, or another machine: gpu80, gpu80x8, v5e8, '
      'v6e1']


@pytest.mark.parametrize('row, message', [
    ('qwen2_5_7b,gpu24', "no 'qwen2_5_7b' in qwen2_5_0_5b"),
    ('qwen3_0_6b,gpu48', "no 'gpu48' in gpu24"),
    ('qwen3_0_6b', "no '' in gpu24"),
    ('qwen3_0_6b,gpu24,Lora', 'unknown method'),
    ('qwen3_0_6b,gpu24,grpo,gspo', 'grpo and gspo cannot both')])
def test_other_rows_are_refused(row, message):
  with pytest.raises(errors.InputError, match=message):
    cli.load_config(f'configs/small.py:{row}')
