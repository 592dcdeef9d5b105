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


def config(**changed):
  """Fields of a run for `make_run`, which changes these sections."""
  return {'steps': 2, 'model': 'm', 'rollout': {
      'prompts': 8, 'samples': 4, 'max_tokens': 16, 'temperature': 1.0},
          'train': {'minibatch_prompts': 4, 'epochs': 1},
          'eval': {'sets': ['sums'], 'limit': 64}, 'data': {'name': 'sums'},
          'lora': {'rank': 0}, 'optimizer': {
              'learning_rate': 1e-5, 'beta2': 0.999}} | changed


@pytest.fixture(name='finished')
def _finished(make_run, monkeypatch):
  """finished('name', evaluated, field=value, …): a run; `evaluated`: the share
  of 'sums', or all evaluations. Its KL to the start is made up."""
  monkeypatch.setattr(regimes, 'start_kl', lambda runs: {
      run.name: {2: 0.1} for run in runs})

  def make(name, evaluated=0.25, **changed):
    if not isinstance(evaluated, dict):
      evaluated = {'eval/sums/avg@4': evaluated}
    return pathlib.Path(make_run(
        name, [record(1), record(2, **evaluated)], **config(**changed)))

  return make


def _update(path, *folders):
  return regimes.update(path, runs_lib.read(list(map(str, folders))))


def test_a_run_is_added_once_whatever_it_is_called(finished, tmp_path, capsys):
  """With the runs of b, those of a have longer names."""
  runs, path = tmp_path / 'runs', tmp_path / 'map.jsonl.gz'
  for seed in range(3):
    finished(f'a/tepo_{seed}', 0.2 + seed / 100, seed=seed)
  assert len(_update(path, runs / 'a')) == 3
  for seed in range(3):
    finished(f'b/tepo_{seed}', 0.3 + seed / 100, seed=seed + 3)
  found = _update(path, runs / 'a', runs / 'b')
  assert [entry.name for entry in found] == [
      *(f'b/tepo_{seed}' for seed in range(3)),
      *(f'tepo_{seed}' for seed in range(3))]
  assert sorted(entry.seed for entry in found) == [0, 1, 2, 3, 4, 5]
  before = path.read_bytes()
  assert len(_update(path, runs / 'b')) == 6
  assert path.read_bytes() == before
  assert capsys.readouterr().err == ''


def test_a_run_whose_name_is_taken_gets_a_longer_one(finished, tmp_path):
  path = tmp_path / 'map.jsonl.gz'
  _update(path, finished('a/tepo_0', seed=0))
  found = _update(path, finished('b/tepo_0', 0.5, seed=1))
  assert {entry.name: entry.last('evaluation') for entry in found} == {
      'tepo_0': 0.25, 'b/tepo_0': 0.5}


@pytest.mark.parametrize('name', ['b/tepo_0', 'b/other'])
def test_a_second_run_of_a_seed_is_named(finished, tmp_path, capsys, name):
  """Also one that only its evaluation distinguishes: it is no further seed."""
  path = tmp_path / 'map.jsonl.gz'
  _update(path, finished('a/tepo_0'))
  other = finished(name, 0.5, eval__limit=400)
  assert len(_update(path, other)) == 1
  assert capsys.readouterr().err == (
      f'not in the map: {other}: tepo_0 in it has the same method, learning '
      'rate, updates and seed, but other results\n')


def test_a_run_is_recognised_in_a_map_of_an_older_version(
    finished, tmp_path, capsys):
  """Which lacks the config and some metrics; start_kl may round differently."""
  path, run = tmp_path / 'map.jsonl.gz', finished('a')
  [entry] = map(dataclasses.asdict, _update(path, run))
  del entry['config'], entry['metrics']['accuracy']
  entry['metrics']['start_kl'] = {2: 0.2}
  path.write_bytes(gzip.compress(json.dumps(entry | {'name': 'old'}).encode()))
  assert [entry.name for entry in _update(path, run)] == ['old']
  assert capsys.readouterr().err == ''
  found = _update(path, finished('b', 0.5, seed=1, rollout__samples=8))
  assert [entry.name for entry in found] == ['b', 'old']


STUDY = sorted((programs.ROOT / 'launch/study').glob('*.jsonl.gz'))


@pytest.mark.parametrize('path', STUDY, ids=lambda path: path.name)
def test_the_maps_of_the_study_are_read(path):
  before = path.read_bytes()
  assert regimes.table(regimes.update(path, []))
  assert path.read_bytes() == before


ZETA_FIRST = {'eval/zeta/avg@4': 0.75, 'eval/alpha/avg@4': 0.25}


def test_the_first_set_is_the_primary_measure(finished, tmp_path):
  """Not the alphabetically first; and all runs must have the same."""
  path, sets = tmp_path / 'map.jsonl.gz', ['zeta.jsonl', 'alpha.jsonl']
  [found] = _update(path, finished('a', ZETA_FIRST, eval__sets=sets))
  assert found.metrics['evaluation'] == {2: 0.75}
  assert found.metrics['eval/alpha/avg@4'] == {2: 0.25}
  assert 'eval/zeta/avg@4' not in found.metrics
  other = finished('b', dict(reversed(ZETA_FIRST.items())), seed=1,
                   eval__sets=sets[::-1])
  with pytest.raises(errors.InputError, match=r'b is not comparable with .*: '
                     r'it differs in eval.sets \(\["alpha.jsonl", '):
    _update(path, other)


OTHER = {'samples': ('rollout__samples', 8, r'rollout.samples \(8, but 4 in a'),
         'temperature': ('rollout__temperature', 0.5, 'rollout.temperature'),
         'tokens': ('rollout__max_tokens', 32, 'rollout.max_tokens'),
         'data': ('data__name', 'countdown', 'data.name'),
         'adapters': ('lora__rank', 16, 'lora.rank'),
         'steps': ('steps', 1, 'steps'),
         'optimiser': ('optimizer__beta2', 0.95, 'optimizer.beta2')}


@pytest.mark.parametrize('later', [False, True], ids=['at once', 'later'])
@pytest.mark.parametrize('field, value, what', OTHER.values(), ids=OTHER)
def test_runs_that_differ_in_another_field_are_refused(
    finished, tmp_path, later, field, value, what):
  """They would count as seeds of one method."""
  path = tmp_path / 'map.jsonl.gz'
  first, other = finished('a'), finished('b', 0.5, seed=1, **{field: value})
  if later:
    _update(path, first)
  with pytest.raises(errors.InputError, match=(
      f'map.jsonl.gz: b is not comparable with .*: it differs in {what}')):
    _update(path, *[first, other][later:])


def test_runs_may_differ_in_what_is_compared_or_changes_no_training(
    finished, tmp_path):
  """As the study's: seeds 0 and 1 are evaluated on fewer problems."""
  found = _update(
      tmp_path / 'map.jsonl.gz', finished('a'), finished(
          'b', 0.5, seed=2, eval__limit=400, eval__before=False,
          checkpoint={'period': 1}, dump={'period': 2}),
      finished('c', method_name='tepo', method__clip__low=0.1,
               optimizer__learning_rate=3e-5, train__minibatch_prompts=8))
  assert len(found) == 3


def test_a_run_without_a_field_of_this_version_is_refused(finished, tmp_path):
  run = finished('a', train={'epochs': 1})
  with pytest.raises(errors.InputError, match='a/config.json: '
                     'train.minibatch_prompts is missing'):
    _update(tmp_path / 'map.jsonl.gz', run)


def test_runs_from_different_models_are_refused(make_run):
  paths = [make_run(name, [record(1)], steps=1, model=name) for name in 'ab']
  with pytest.raises(errors.InputError, match='one config.model'):
    regimes.start_kl(runs_lib.read(paths))


def test_a_run_of_another_version_is_refused(make_run):
  path = make_run('a', [record(1)], steps=1, model='m')
  with pytest.raises(errors.InputError, match='a/config.json was not written '
                     'by this version: .* is missing'):
    regimes.start_kl(runs_lib.read([path]))
