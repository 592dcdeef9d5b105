"""What a run prints: header, columns, closing table, next command."""

import json
import pathlib
import sys
import types

import jax
import numpy as np
import pytest

from configs import methods
from configs import reference
from configs import tiny
from tepo_jax import train
from tepo_jax.job import session as session_lib
from tepo_jax.job import summaries
from tepo_jax.rollout import groups as groups_lib
from tepo_jax.runtime import checkpoint
from tepo_jax.runtime import mesh as mesh_lib


def _scalars(**changed):
  return {'reward': 0.5, 'accuracy': 0.75, 'entropy': 0.25, 'grad_norm': 1.0,
          'clip_fraction_low': 0.01, 'clip_fraction_high': 0.02,
          'response_length_mean': 29.7, 'response_length_max': 48,
          'mixed_share': 0.9,
          'tokens_per_second': 7375.0, 'seconds/step': 2.06} | changed


def test_every_column_is_named_and_explained():
  line = summaries.summary(_scalars())
  assert line == (
      'reward 0.5  accuracy 0.75  entropy 0.25  gradient 1  clip 3.00%  '
      'tokens 29.7  max 48  mixed 0.9  tokens/s 7375  seconds 2.06')
  for part in line.split('  '):
    assert part.split()[0].partition('/')[0] in summaries.LEGEND
  assert max(map(len, summaries.LEGEND.splitlines())) <= 80


def _rollout(texts, verdicts, rewards, ended=(True, True)):
  """A rollout of a group per row."""
  groups = [types.SimpleNamespace(
      text_G=texts, accuracy_G=np.array(verdict), ended_G=np.array(ended))
            for verdict in verdicts]
  return types.SimpleNamespace(
      completed=groups, mixed=[len(set(v)) > 1 for v in verdicts],
      rewards=types.SimpleNamespace(reward_NG=np.array(rewards, np.float32)))


@pytest.mark.parametrize('texts, verdicts, rewards, said', [
    # The reward of one's own differs where the verdicts agree.
    ([r'\boxed{1}', 'no'], [[0, 0], [0, 1], [1, 1]],
     [[.5, .1], [0, 1], [1, 1]],
     '; the reward differs in 1 of the groups whose verdicts agree: to learn '
     'from these too, set --config.rollout.mixed=reward'),
    # The template asks for another form than the model writes.
    (['It is \n' + 'very ' * 99, '7'], [[0, 0]], [[.5, .1]],
     '; no completion had an answer that could be read '
     f"(data.template=plain), for example: '{('It is ' + 'very ' * 99)[:200]}'"
     ),
    ([r'\boxed{1}', 'no'], [[0, 0]], [[0, 0]], '')])
def test_a_starved_step_says_why(texts, verdicts, rewards, said):
  config = tiny.get_config()
  config.data.template = 'plain'
  assert summaries.why_starved(
      _rollout(texts, verdicts, rewards), config, 'boxed') == said


@pytest.mark.parametrize('setting, ended', [
    (('mixed', 'reward'), (True, True)),
    (('truncated', 'exclude'), (True, False))])
def test_a_starved_step_advises_nothing_that_cannot_help(setting, ended):
  config = tiny.get_config()
  config.rollout[setting[0]] = setting[1]
  assert summaries.why_starved(
      _rollout([r'\boxed{1}', ''], [[0, 0]], [[.5, .1]], ended), config,
      'boxed') == ''


@pytest.mark.parametrize('settings, causes', [
    (dict(dynamic_sampling='drop'),
     'no group was mixed, or no gradient was finite; if your reward differs '
     'where verdicts agree, set --config.rollout.mixed=reward; '),
    (dict(dynamic_sampling='refill', mixed='reward'),
     'fewer than rollout.prompts=32 groups were mixed, or no gradient was '
     'finite; '),
    (dict(dynamic_sampling='off', truncated='mask'),
     'every completion to train on was truncated (rollout.truncated=mask), or '
     'no gradient was finite; ')])
def test_a_run_without_an_update_says_what_can_have_caused_it(
    settings, causes):
  config = tiny.get_config()
  config.rollout.update(settings)
  assert summaries.nothing_trained(config, 40) == (
      f'none of the 40 steps made an update: in each, {causes}the completions '
      'are in rollouts/')


def test_metrics_by_set():
  """Of groups that alternate a a b a, by hand."""
  def group(prompt_id, accuracy, length):
    return types.SimpleNamespace(
        prompt=types.SimpleNamespace(prompt_id=prompt_id),
        accuracy_G=np.array(accuracy), length_G=np.array(length))

  prompts = groups_lib.Mixture(
      {'x/a.csv': [None], 'b.jsonl': [None], 'c.jsonl': [None]}, [3, 1, 9],
      seed=0)
  prompts.name = lambda prompt_id: ['x/a.csv', 'b.jsonl'][prompt_id == 6]
  groups = [group(4, [1, 0], [2, 4]), group(5, [0, 0], [6, 6]),
            group(6, [1, 1], [1, 3]), group(7, [0, 0], [0, 0])]
  found = summaries.set_metrics(types.SimpleNamespace(
      sampled=groups, groups=groups[:1],
      mixed=[True, False, False, False, True], rewards=types.SimpleNamespace(
          reward_NG=np.array([[1, 0], [.5, 0], [1, 1], [0, 0], [9, 9]]))),
                                prompts)
  assert found == {
      'data/a/reward': 0.25, 'data/a/accuracy': pytest.approx(1 / 6),
      'data/a/response_length_mean': 3, 'data/a/mixed_share':
      pytest.approx(1 / 3), 'data/a/groups_sampled': 3,
      'data/a/groups_trained': 1,
      'data/b/reward': 1, 'data/b/accuracy': 1,
      'data/b/response_length_mean': 2, 'data/b/mixed_share': 0,
      'data/b/groups_sampled': 1, 'data/b/groups_trained': 0}


def _write(folder, *records):
  (folder / 'metrics.jsonl').write_text(
      ''.join(json.dumps(record) + '\n' for record in records))


def _evaluation(step, name, k, value, **more):
  return {'step': step, f'eval/{name}/avg@{k}': value,
          f'eval/{name}/pass@{k}': value + 0.1,
          f'eval/{name}/maj@{k}': value + 0.05,
          f'eval/{name}/mean_length': 20 + step,
          f'eval/{name}/truncated': 0.01, f'eval/{name}/low': 0.0} | more


def test_the_closing_table_has_five_rows(tmp_path):
  _write(tmp_path, *(_evaluation(step, 'a', 8, value, **{
      'eval/a/greedy/avg@1': value / 2}) for step, value in (
          (0, 0.2), (10, 0.6), (20, 0.5))), {'step': 21})
  lines = summaries.results_table(tmp_path).splitlines()
  assert lines[0].split('  ')[-1].strip() == 'best, step 10'
  assert [line.split() for line in lines[1:]] == [
      ['a/avg@8', '20.0%', '50.0%', '60.0%'],
      ['a/greedy/avg@1', '10.0%', '25.0%', '30.0%'],
      ['a/pass@8', '30.0%', '60.0%', '70.0%'],
      ['a/maj@8', '25.0%', '55.0%', '65.0%'],
      ['a/mean_length', '20.0', '40.0', '30.0']]
  assert len({len(line) for line in lines}) == 1  # columns are aligned


def test_the_closing_table_has_every_set(tmp_path):
  records = [_evaluation(step, 'a', 8, 0.5) for step in (0, 10)]
  for record in records:
    record |= {f'eval/set{i}/avg@1': 0.1 for i in range(6)}
  _write(tmp_path, *records)
  names = [line.split()[0]
           for line in summaries.results_table(tmp_path).splitlines()[1:]]
  assert names == ['a/avg@8', *(f'set{i}/avg@1' for i in range(6))]
  _write(tmp_path, {'step': 1, 'reward': 0.5})
  assert summaries.results_table(tmp_path) == 'no evaluation was recorded'


def test_texts_alone_are_shown(tmp_path):
  _write(tmp_path, *({'step': step, 'eval/prose/nats_per_token': 3.25 + step}
                     for step in (0, 10)))
  assert [line.split() for line in summaries.results_table(
      tmp_path).splitlines()] == [
          ['step', '0', 'step', '10'],
          ['prose/nats_per_token', '3.2500', '13.2500']]


def test_texts_are_shown_in_nats_per_token(tmp_path):
  records = [_evaluation(step, 'a', 8, 0.5) | {
      'eval/prose/nats_per_token': 3.25 + step} for step in (0, 10)]
  _write(tmp_path, *records)
  *_, last = summaries.results_table(tmp_path).splitlines()
  assert last.split() == ['prose/nats_per_token', '3.2500', '13.2500', '3.2500']
  records[1]['eval/prose/nats_per_token'] = None  # were not finite
  _write(tmp_path, *records)
  *_, last = summaries.results_table(tmp_path).splitlines()
  assert last.split() == ['prose/nats_per_token', '3.2500', 'not', 'finite',
                          '3.2500']
  assert summaries.evaluated(records[0]).endswith(
      'prose/nats_per_token 3.2500')


def test_a_published_number_and_the_runs_own(tmp_path):
  config = reference.get_config('slime_0_5b').published
  _write(tmp_path, {'step': 90, config.metric: 0.4}, {
      'step': 100, config.metric: 0.4805})
  said = summaries.published(config, tmp_path)
  assert said == (
      'eval/gsm8k/greedy/avg@1: 48.0% after step 100; published: 50.2% after '
      'training, 43.6% before (https://github.com/THUDM/slime/pull/1835)')
  config.metric, config.source = 'eval/other/avg@1', None
  assert summaries.published(config, tmp_path) == (
      'eval/other/avg@1: was not recorded; published: 50.2% after training, '
      '43.6% before')


def test_the_next_command(monkeypatch):
  done = summaries.next_command(pathlib.Path('runs/a b'))
  assert "tepo_jax.report --runs='runs/a b' --out='runs/a b/report'" in done


def test_the_last_lines_of_a_stopped_run(monkeypatch, tmp_path):
  monkeypatch.delenv('TEPO_COMMAND', raising=False)
  monkeypatch.delenv('TEPO_REMARK', raising=False)
  monkeypatch.setattr(sys, 'argv', ['train.py', "--config.eval.sets=('a',)"])
  command = ('  .venv/bin/python -m tepo_jax.train '
             """'--config.eval.sets=('"'"'a'"'"',)'""")
  assert summaries.stopped('interrupted', tmp_path, 40).splitlines() == [
      'interrupted; no step was finished, so nothing is saved',
      'to resume, run', command]
  monkeypatch.setattr(checkpoint, 'steps', lambda folder: [5, 20])
  assert summaries.stopped('interrupted', tmp_path, 40).splitlines() == [
      f'interrupted; step 20 of 40 is saved in {tmp_path}/checkpoints/20',
      'to resume, run', command]
  monkeypatch.setenv('TEPO_COMMAND', 'launch/gpu.sh --workdir=a')
  assert summaries.stopped('interrupted', tmp_path, 40).splitlines()[1:] == [
      'to resume, run', '  launch/gpu.sh --workdir=a']
  monkeypatch.setenv('TEPO_REMARK', 'on your machine')
  assert summaries.stopped('interrupted', tmp_path, 40).splitlines()[1] == (
      'to resume (on your machine), run')


def _session(parameters):
  return types.SimpleNamespace(
      mesh=mesh_lib.make({'data': 1, 'fsdp': -1, 'tensor': 1}),
      parameters=lambda: parameters)


@pytest.mark.parametrize('count, text', [
    (7_615_616_512, '7.6B'), (212_345, '0.2M'), (4_321, '4,321')])
def test_the_header(count, text, tmp_path, monkeypatch):
  config = tiny.get_config('gspo')
  config.lora.rank = 16
  header = summaries.header(config, _session(count), tmp_path)
  devices = f'{jax.device_count()} × {jax.devices()[0].device_kind}'
  for shown in ('gspo', f'{text} parameters, LoRA of rank 16', devices, 'fsdp',
                '40, each 32 prompts × 8', f'{tmp_path}, new'):
    assert shown in header
  (tmp_path / session_lib.CHECKPOINTS / '20').mkdir(parents=True)
  (tmp_path / session_lib.CHECKPOINTS / '5').mkdir()
  (tmp_path / session_lib.CHECKPOINTS / 'damaged_25').mkdir()
  with monkeypatch.context() as terminal:
    terminal.setattr(summaries.sys.stdout, 'isatty', lambda: True)
    terminal.setenv('COLUMNS', '40')
    lines = summaries.header(config, _session(count), tmp_path).splitlines()
  assert 'completions of at most' in ' '.join(' '.join(lines).split())
  assert {line[:12].strip() for line in lines} > {'', 'steps'}
  assert 'resumes after step 20' in summaries.header(
      config, _session(count), tmp_path)


def test_the_data_sets_with_their_sizes():
  sets = [types.SimpleNamespace(name='arithmetic', prompts=[0] * 512,
                                samples=8)]
  def mixture(**sizes):
    return groups_lib.Mixture({name: [0] * size for name, size in
                               sizes.items()}, [1] * len(sizes), seed=0)

  config = tiny.get_config()
  lines = summaries.data(config, mixture(arithmetic=4096), sets)
  assert 'arithmetic: 4,096 problems' in lines
  assert 'arithmetic: 512 problems × 8, every 10 steps' in lines
  few = summaries.data(config, mixture(arithmetic=1), [])
  assert 'arithmetic: 1 problem\n' in few and few.endswith('none')
  config.data.sets = (('a', 3), ('b', 1))
  assert 'a: 2 problems, weight 3; b: 1 problem, weight 1\n' in (
      summaries.data(config, mixture(a=2, b=1), []))


def test_help_lists_every_method():
  words = train.__doc__.replace(',', ' ').split()
  assert set(methods.methods(1e-3)) <= set(words)
  assert 'configs/base.py' in train.__doc__
  assert max(map(len, train.__doc__.splitlines())) <= 80
