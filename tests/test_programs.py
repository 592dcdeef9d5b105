"""The programs as users run them: train, kill, resume, evaluate, export."""

import json
import signal
import subprocess
import time

import numpy as np
import pytest
import torch
import transformers

from tests import runs


def exported(workdir, out):
  runs.run('export', f'--workdir={workdir}', f'--out={out}')
  return (out / 'model.safetensors').read_bytes()


@pytest.fixture(scope='module')
def model(tmp_path_factory):
  out = tmp_path_factory.mktemp('model') / 'base'
  runs.make_model(out)
  return out


# A save has files open; with this period, steps 6 and 7 have none in progress.
_PERIOD = '--config.checkpoint.period=4'


@pytest.fixture(scope='module')
def finished(model, tmp_path_factory):
  """An uninterrupted run of eight steps, and its output."""
  workdir = tmp_path_factory.mktemp('finished') / 'run'
  done = runs.run('train', *runs.train_arguments(model, workdir),
                  '--config.profile.steps=(2,)', _PERIOD)
  return workdir, done


@pytest.fixture(scope='module')
def export_of_finished(finished, tmp_path_factory):
  out = tmp_path_factory.mktemp('exported') / 'hf'
  runs.run('export', f'--workdir={finished[0]}', f'--out={out}')
  return out


def test_a_run_leaves_its_records(finished):
  workdir, done = finished
  config = json.loads((workdir / 'config.json').read_text())
  assert config['steps'] == 8 and config['method']['weight'] == 'sequence'
  assert [r['step'] for r in runs.records(workdir)] == list(range(9))
  expected = {
      'reward', 'accuracy', 'response_length_mean', 'response_length_max',
      'truncated_share', 'entropy', 'kl_k3', 'kl_full', 'clip_fraction_low',
      'clip_fraction_high', 'region_share', 'grad_norm', 'mixed_share',
      'logp_gap_mean', 'logp_gap_p99', 'behaviour_ess', 'behaviour_kl',
      'padding_share', 'packing_efficiency',
      'seconds/score', 'seconds/rollout', 'seconds/update',
      'tokens_per_second'}
  start = json.loads((workdir / 'environment.jsonl').open().readline())
  assert start['step'] == 0 and start['parameters'] > 1000
  for record in runs.records(workdir)[1:]:
    assert expected <= record.keys()
    assert all(np.isfinite(value) for value in record.values())
    assert record['logp_gap_p99'] < 1e-4 and record['grad_norm'] > 0
  evaluated = [r['step'] for r in runs.records(workdir)
               if 'eval/arithmetic/avg@2' in r]
  assert evaluated == [0, 4, 8]
  lines = [json.loads(line) for line in
           (workdir / 'rollouts' / 'step_000008.jsonl').open()]
  assert len(lines) == 16 and {'completion', 'correct'} <= lines[0].keys()
  assert list((workdir / 'tensorboard').iterdir())
  assert list((workdir / 'profile').rglob('*.xplane.pb'))  # of step 2
  assert 'arithmetic/greedy' in done.stdout


def test_a_run_leaves_nothing_open(finished):
  host = [{name: value for name, value in record.items()
           if name.startswith('host/')} for record in runs.records(finished[0])]
  files = [usage['host/open_files'] for usage in host[1:]]
  assert min(files[-3:]) <= min(files[:3])  # none is saved in most of these
  assert len({usage['host/processes'] for usage in host[1:]}) == 1
  assert all(1e8 < usage['host/resident_bytes'] < 1e10 for usage in host[1:])


@pytest.mark.long
def test_kill_and_the_same_command_continue_bit_for_bit(
    model, finished, tmp_path):
  workdir = tmp_path / 'run'
  arguments = runs.train_arguments(model, workdir)
  process = subprocess.Popen(
      runs.command('train', *arguments), cwd=runs.ROOT, env=runs.environment(),
      stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
  deadline = time.monotonic() + 240
  while not (workdir / 'checkpoints' / '1').exists():
    assert process.poll() is None and time.monotonic() < deadline
    time.sleep(0.05)
  process.send_signal(signal.SIGKILL)
  process.wait()
  continued = runs.run('train', *arguments).stdout
  assert f'continuing {workdir} after step' in continued
  assert 'after step 8' not in continued
  assert list(map(runs.untimed, runs.records(workdir))) == list(
      map(runs.untimed, runs.records(finished[0])))
  assert exported(workdir, tmp_path / 'a') == exported(
      finished[0], tmp_path / 'b')


@pytest.mark.long
def test_a_finished_run_is_not_run_again(model, finished):
  workdir, _ = finished
  before = (workdir / 'metrics.jsonl').read_bytes()
  again = runs.run('train', *runs.train_arguments(model, workdir), _PERIOD)
  assert 'arithmetic' in again.stdout
  assert (workdir / 'metrics.jsonl').read_bytes() == before


@pytest.mark.long
def test_sigterm_saves_and_exits_with_status_42(model, tmp_path):
  workdir = tmp_path / 'run'
  process = subprocess.Popen(
      runs.command('train', *runs.train_arguments(model, workdir),
                   '--config.steps=1000', '--config.checkpoint.period=1000'),
      cwd=runs.ROOT, env=runs.environment(),
      stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
  deadline = time.monotonic() + 240
  while not (workdir / 'rollouts').exists():
    assert process.poll() is None and time.monotonic() < deadline
    time.sleep(0.05)
  process.send_signal(signal.SIGTERM)
  assert process.wait(120) == 42
  saved = [int(entry.name) for entry in (workdir / 'checkpoints').iterdir()]
  assert saved == [runs.records(workdir)[-1]['step']]


@pytest.mark.long
def test_a_stopped_evaluation_exits_with_status_42_and_resumes(
    model, tmp_path):
  whole, stopped = tmp_path / 'whole', tmp_path / 'stopped'
  evaluate = ('evaluate', '--config=configs/tiny.py', *runs.SMALL,
              '--config.eval.limit=256', '--config.rollout.slots=4',
              f'--checkpoint={model}')
  process = subprocess.Popen(
      runs.command(*evaluate, f'--out={stopped}'), cwd=runs.ROOT, text=True,
      env=runs.environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
  samples = stopped / 'samples.jsonl'
  while not samples.exists() or not samples.stat().st_size:
    assert process.poll() is None
    time.sleep(0.05)
  process.send_signal(signal.SIGTERM)
  said = process.communicate(timeout=60)[1]
  assert process.returncode == 42, said
  assert 'stopped by SIGTERM; the same command resumes' in said
  assert not (stopped / 'results.json').exists()
  assert samples.stat().st_size
  for out in whole, stopped:
    runs.run(*evaluate, f'--out={out}')
  assert samples.read_bytes() == (whole / 'samples.jsonl').read_bytes()


@pytest.mark.long
def test_transformers_generates_the_same_text_from_the_export(
    finished, export_of_finished, tmp_path):
  runs.run('evaluate', '--config=configs/tiny.py', *runs.SMALL,
      f'--checkpoint={finished[0]}', f'--out={tmp_path / "run"}')
  runs.run('evaluate', '--config=configs/tiny.py', *runs.SMALL,
      f'--checkpoint={export_of_finished}', f'--out={tmp_path / "hf"}')
  samples = (tmp_path / 'run' / 'samples.jsonl').read_text()
  assert samples == (tmp_path / 'hf' / 'samples.jsonl').read_text()
  tokenizer = transformers.AutoTokenizer.from_pretrained(export_of_finished)
  policy = transformers.AutoModelForCausalLM.from_pretrained(
      export_of_finished, dtype=torch.float32)
  lines = [json.loads(line) for line in samples.splitlines()]
  greedy = [line for line in lines if line['set'] == 'arithmetic/greedy']
  assert len(greedy) == 8
  for line in greedy:
    inputs = tokenizer.apply_chat_template(
        [{'role': 'user', 'content': line['problem']}],
        add_generation_prompt=True, return_tensors='pt', return_dict=True)
    output = policy.generate(**inputs, max_new_tokens=16, do_sample=False)
    completion = output[0, inputs['input_ids'].shape[1]:]
    assert tokenizer.decode(
        completion, skip_special_tokens=True) == line['completion']


@pytest.mark.long
def test_results_count_what_the_samples_hold(finished, tmp_path):
  out = tmp_path / 'out'
  runs.run('evaluate', '--config=configs/tiny.py', *runs.SMALL,
      f'--checkpoint={finished[0]}', f'--out={out}')
  results = json.loads((out / 'results.json').read_text())
  lines = [json.loads(line) for line in (out / 'samples.jsonl').open()]
  for name, result in results['sets'].items():
    verdicts = [line['correct'] for line in lines if line['set'] == name]
    samples = 2 if name == 'arithmetic' else 1
    assert result[f'avg@{samples}'] == pytest.approx(np.mean(verdicts))
    assert len(verdicts) == 8 * samples
  assert results['first_decodings'] == ['arithmetic']
  assert results['avg_micro'] == results['sets']['arithmetic']['avg@2']


@pytest.mark.long
def test_a_killed_evaluation_resumes_to_the_same_results(finished, tmp_path):
  arguments = (
      '--config=configs/tiny.py', *runs.SMALL, '--config.eval.limit=64',
      f'--checkpoint={finished[0]}')
  whole, killed = tmp_path / 'whole', tmp_path / 'killed'
  runs.run('evaluate', *arguments, f'--out={whole}')
  process = subprocess.Popen(
      runs.command('evaluate', *arguments, f'--out={killed}'), cwd=runs.ROOT,
      env=runs.environment(), stdout=subprocess.DEVNULL,
      stderr=subprocess.DEVNULL)
  deadline = time.monotonic() + 240
  while not (killed / 'samples.jsonl').exists():
    assert process.poll() is None and time.monotonic() < deadline
    time.sleep(0.01)
  process.send_signal(signal.SIGKILL)
  process.wait()
  assert not (killed / 'results.json').exists()
  with (killed / 'samples.jsonl').open('a') as file:
    file.write('{"set": "arithm')
  done = runs.run('evaluate', *arguments, f'--out={killed}')
  for name in ('samples.jsonl', 'results.json'):
    assert (killed / name).read_bytes() == (whole / name).read_bytes()
  assert 'avg_micro' in done.stdout
  same = runs.run('report', f'--compare={whole},{killed}').stdout
  assert same.startswith('arithmetic: ') and 'difference +0.00%' in same
  # Again: nothing is left to do; another evaluation is refused.
  runs.run('evaluate', *arguments, f'--out={killed}')
  refused = runs.run('evaluate', *arguments, '--config.seed=5',
                     f'--out={killed}', status=2)
  assert 'another evaluation: seed differ' in refused.stderr


@pytest.mark.long
def test_a_model_that_overflows_stops_the_run_with_the_reason(model, tmp_path):
  done = runs.run('train', *runs.train_arguments(model, tmp_path / 'run'),
             '--config.optimizer.learning_rate=1e30', status=1)
  line = done.stderr.splitlines()[-1]
  assert 'not finite' in line and 'there is no checkpoint yet' in line


@pytest.mark.long
def test_the_workdir_of_another_config_is_left_alone(model, finished):
  workdir, _ = finished
  files = {path: path.read_bytes()
           for path in workdir.rglob('*') if path.is_file()}
  done = runs.run('train', *runs.train_arguments(model, workdir, 'grpo'),
                  status=2)
  assert 'another config' in done.stderr
  assert files == {path: path.read_bytes()
                   for path in workdir.rglob('*') if path.is_file()}
