"""The map of regimes: made-up entries, and a small run of no trained model."""

import dataclasses
import gzip
import json
import pathlib

import numpy as np
import pytest

from configs import fields as fields_lib
from configs import methods
from tepo_jax import errors
from tepo_jax.tools.report import regimes
from tepo_jax.tools.report import runs as runs_lib
from tests import runs as programs
from tests.tools.report.records import record

STEPS = 4


def entry(method, rate, updates, seed, end, **numbers):
  return regimes.Entry(
      f'{method}{numbers}@{rate}@{updates}@{seed}', method,
      {'clip.low': 0.2} | numbers, rate, updates, seed,
      {'evaluation': {0: 0.1, 24: end}, 'start_kl': {24: 0.5},
       'entropy': {24: 1.0}, 'tokens': {24: 30.0},
       'accuracy': {step: step / 100 for step in range(1, 25)}})


ENTRIES = [
    entry('grpo', 1e-4, 8, 0, 0.20), entry('grpo', 3e-4, 8, 0, 0.25),
    entry('grpo', 1e-4, 32, 0, 0.22), entry('grpo', 1e-4, 8, 1, 0.90),
    entry('tepo', 1e-4, 8, 0, 0.30),
    entry('tepo', 1e-4, 8, 0, 0.31, **{'clip.low': 3e-4})]


def test_methods_with_other_numbers_are_rows_of_their_own():
  assert sorted(set(regimes.labels(ENTRIES).values())) == [
      'grpo', 'tepo (clip.low=0.0003)', 'tepo (clip.low=0.2)']


def test_an_entry_without_the_fields_of_a_reference_has_its_rows_label(
    tmp_path):
  """As maps made before there was `method.reference` have them."""
  path, row = tmp_path / 'map.jsonl.gz', fields_lib.flat(
      methods.methods(1e-3)['grpo'])
  old = {name: value for name, value in row.items()
         if not name.startswith('reference.')}
  lines = [json.dumps(dataclasses.asdict(dataclasses.replace(
      ENTRIES[0], name=name, method=method)))
           for name, method in (('old', old), ('new', row))]
  path.write_bytes(gzip.compress('\n'.join(lines).encode()))
  assert regimes.labels(regimes.read(path)) == {'old': 'grpo', 'new': 'grpo'}


def test_a_map_that_is_only_read_is_not_written(tmp_path):
  """Not even with the fields that it was made without."""
  path = tmp_path / 'map.jsonl.gz'
  path.write_bytes(gzip.compress(json.dumps(dataclasses.asdict(
      ENTRIES[0])).encode()))
  before = path.read_bytes()
  assert len(regimes.update(path, [])) == 1
  assert path.read_bytes() == before


def test_a_run_that_did_not_finish_is_named(make_run, tmp_path, capsys):
  path = make_run('half', [record(1)])
  with pytest.raises(errors.InputError, match='no finished run to map'):
    regimes.update(tmp_path / 'map.jsonl.gz', runs_lib.read([path]))
  assert 'not in the map: half: ' in capsys.readouterr().err


def test_the_best_rate_is_chosen_on_the_first_seed():
  """Seed 1 exists only where a rate was best, and must not count."""
  assert [(e.method_name, e.updates, e.learning_rate, e.seed)
          for e in regimes.best(ENTRIES)] == [
              ('grpo', 8, 3e-4, 0), ('grpo', 32, 1e-4, 0),
              ('tepo', 8, 1e-4, 0), ('tepo', 8, 1e-4, 0)]


def test_the_table_has_the_mean_over_seeds_by_regime():
  lines = regimes.table(ENTRIES).splitlines()
  assert lines[0] == '| method | learning rate | 8 updates | 32 updates |'
  assert lines[2] == (
      '| grpo | 1e-4 | **55.0** (middle 12.0, KL 0.5, H 1, 30 tokens, 2 seeds) '
      '| '
      '**22.0** (middle 12.0, KL 0.5, H 1, 30 tokens) |')
  assert lines[3].endswith(
      '| **25.0** (middle 12.0, KL 0.5, H 1, 30 tokens) |  |')


def test_a_run_that_recorded_no_accuracy_has_none_in_the_middle():
  bare = entry('grpo', 1e-4, 8, 0, 0.2)
  bare.metrics.pop('accuracy')
  assert 'middle nan' in regimes.table([bare])


@pytest.mark.parametrize('content', [
    b'', b'not gzip', gzip.compress(b'[1]', mtime=0)], ids=[
        'empty', 'not gzip', 'no entry'])
def test_a_damaged_map_is_refused(tmp_path, content):
  path = tmp_path / 'map.jsonl.gz'
  path.write_bytes(content)
  with pytest.raises(errors.InputError, match='map.jsonl.gz'):
    regimes.update(path, [])


@pytest.mark.nightly
def test_a_map_of_a_run(tmp_path):
  model, run = tmp_path / 'base', tmp_path / 'grpo'
  programs.make_model(model)
  programs.run('train', *programs.train_arguments(model, run, 'grpo'),
               f'--config.steps={STEPS}',
               '--config.optimizer.learning_rate=3e-3')
  out, path = tmp_path / 'out', tmp_path / 'map.jsonl.gz'
  arguments = f'--map={path}', f'--out={out}'
  done = programs.run('report', *arguments, f'--runs={run}')
  again = programs.run('report', *arguments)  # from the file alone
  assert done.stdout == again.stdout == (out / 'map.md').read_text()
  assert (out / 'best.txt').read_text() == 'grpo\n'
  assert (out / 'map.svg').stat().st_size and (out / 'map.png').stat().st_size
  [found] = regimes.read(path)
  assert (found.updates, found.seed, found.learning_rate) == (4, 0, 3e-3)
  assert found.metrics['evaluation'][STEPS] == pytest.approx(
      programs.records(run)[-1]['eval/arithmetic/avg@2'], rel=1e-4)
  assert list(found.metrics['start_kl']) == [1, 2, 3, 4]
  for step, value in found.metrics['start_kl'].items():
    assert value == pytest.approx(_start_kl(run, model, step), abs=2e-5)
  assert abs(found.metrics['start_kl'][1]) < 1e-5
  assert found.last('start_kl') > 1e-3  # the policy did move


def _start_kl(run, model, step):
  """By transformers: mean log π − log π_start of the sampled tokens."""
  import torch
  import transformers
  start = transformers.AutoModelForCausalLM.from_pretrained(
      model, dtype=torch.float32)
  gaps = []
  for line in (run / f'rollouts/step_{step:06d}.jsonl').open():
    record = json.loads(line)
    prompt, tokens = record['prompt_ids'], record['token_ids']
    with torch.no_grad():
      logits = start(torch.tensor([prompt + tokens])).logits[0]
    logp = torch.log_softmax(logits[len(prompt) - 1:-1], -1)[
        range(len(tokens)), tokens]
    gaps += list(record['sampler_logp'] - logp.numpy())
  return np.mean(gaps)


def test_an_entry_has_every_evaluation_and_text(make_run, monkeypatch):
  monkeypatch.setattr(regimes, 'start_kl', lambda runs: {
      run.name: {2: 0.1} for run in runs})
  evaluated = {'eval/sums/avg@4': 0.25, 'eval/sums/greedy/avg@1': 0.5,
               'eval/prose/nats_per_token': 4.7}
  path = make_run('a', [record(1), record(2, **evaluated)], steps=2,
                  rollout={'prompts': 8},
                  train={'minibatch_prompts': 4, 'epochs': 1})
  [found] = regimes.update(
      pathlib.Path(path).parent / 'map.jsonl.gz', runs_lib.read([path]))
  assert found.metrics['evaluation'] == {2: 0.25}
  assert found.metrics['eval/sums/greedy/avg@1'] == {2: 0.5}
  assert found.metrics['eval/prose/nats_per_token'] == {2: 4.7}
  assert 'eval/sums/avg@4' not in found.metrics


def test_runs_from_different_models_are_refused(make_run):
  paths = [make_run(name, [record(1)], steps=1, model=name) for name in 'ab']
  with pytest.raises(errors.InputError, match='one config.model'):
    regimes.start_kl(runs_lib.read(paths))


def test_a_run_of_another_version_is_refused(make_run):
  path = make_run('a', [record(1)], steps=1, model='m')
  with pytest.raises(errors.InputError, match='a/config.json was not written '
                     'by this version: .* is missing'):
    regimes.start_kl(runs_lib.read([path]))
