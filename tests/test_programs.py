"""The programs as users run them: train, kill, resume, evaluate, export."""

import json
import shlex
import signal
import subprocess
import time

import numpy as np
import pytest
import torch
import transformers

from tests import runs

pytestmark = [pytest.mark.long, pytest.mark.usefixtures('optimized')]

EVALUATE = ('--config=configs/tiny.py', *runs.SMALL)


@pytest.fixture(scope='module')
def model(untrained_model):
  return untrained_model


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
def export_of_finished(programs, finished, tmp_path_factory):
  out = tmp_path_factory.mktemp('exported') / 'hf'
  done = programs.run(
      'export', f'--workdir={finished[0]}', f'--out={out}', status=0)
  assert done.stdout.splitlines()[-1] == (
      f'to serve it with vLLM (untried): vllm serve {out} --dtype bfloat16')
  return out


@pytest.fixture(scope='module')
def evaluated(programs, finished, tmp_path_factory):
  """The output of an evaluation of the finished run."""
  out = tmp_path_factory.mktemp('evaluated') / 'out'
  programs.run('evaluate', *EVALUATE, f'--checkpoint={finished[0]}',
               f'--out={out}', status=0)
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


def test_kill_and_the_same_command_continue_bit_for_bit(
    programs, model, finished, export_of_finished, tmp_path):
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
  continued = programs.run('train', *arguments, status=0).stdout
  assert f'continuing {workdir} after step' in continued
  assert 'after step 8' not in continued
  assert list(map(runs.untimed, runs.records(workdir))) == list(
      map(runs.untimed, runs.records(finished[0])))
  programs.run('export', f'--workdir={workdir}', f'--out={tmp_path / "hf"}',
               status=0)
  assert (tmp_path / 'hf' / 'model.safetensors').read_bytes() == (
      export_of_finished / 'model.safetensors').read_bytes()


def test_a_finished_run_is_not_run_again(programs, model, finished):
  workdir, _ = finished
  before = (workdir / 'metrics.jsonl').read_bytes()
  again = programs.run('train', *runs.train_arguments(model, workdir), _PERIOD,
                       status=0)
  assert 'arithmetic' in again.stdout
  assert (workdir / 'metrics.jsonl').read_bytes() == before


def test_sigterm_saves_and_exits_with_status_42(model, tmp_path):
  workdir = tmp_path / 'run'
  arguments = (*runs.train_arguments(model, workdir), '--config.steps=1000',
               '--config.checkpoint.period=1000')
  process = subprocess.Popen(
      runs.command('train', *arguments), cwd=runs.ROOT, env=runs.environment(),
      stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
  deadline = time.monotonic() + 240
  while not (workdir / 'rollouts').exists():
    assert process.poll() is None and time.monotonic() < deadline
    time.sleep(0.05)
  process.send_signal(signal.SIGTERM)
  said = process.communicate(timeout=240)[1]
  assert process.returncode == 42
  [saved] = (int(entry.name) for entry in (workdir / 'checkpoints').iterdir())
  assert saved == runs.records(workdir)[-1]['step']
  stopped, resume, command = said.splitlines()[-3:]
  assert stopped.endswith(
      f'; step {saved} of 1000 is saved in {workdir}/checkpoints/{saved}')
  assert resume == 'to resume, run' and command == (
      '  .venv/bin/python -m tepo_jax.train ' + shlex.join(arguments))


def test_transformers_generates_the_same_text_from_the_export(
    programs, evaluated, export_of_finished, tmp_path):
  programs.run('evaluate', *EVALUATE, f'--checkpoint={export_of_finished}',
               f'--out={tmp_path / "hf"}', status=0)
  samples = (evaluated / 'samples.jsonl').read_text()
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


def test_results_count_what_the_samples_hold(evaluated):
  results = json.loads((evaluated / 'results.json').read_text())
  lines = [json.loads(line) for line in (evaluated / 'samples.jsonl').open()]
  for name, result in results['sets'].items():
    verdicts = [line['correct'] for line in lines if line['set'] == name]
    samples = 2 if name == 'arithmetic' else 1
    assert result[f'avg@{samples}'] == pytest.approx(np.mean(verdicts))
    assert len(verdicts) == 8 * samples
  assert results['first_decodings'] == ['arithmetic']
  assert results['avg_micro'] == results['sets']['arithmetic']['avg@2']


def _interrupted(arguments, out, size, signum):
  """The status and stderr of an evaluation that gets a signal once it has
  written more than `size` bytes of samples."""
  process = subprocess.Popen(
      runs.command('evaluate', *arguments, f'--out={out}'), cwd=runs.ROOT,
      text=True, env=runs.environment(), stdout=subprocess.DEVNULL,
      stderr=subprocess.PIPE)
  samples, deadline = out / 'samples.jsonl', time.monotonic() + 240
  try:
    while not samples.exists() or samples.stat().st_size <= size:
      assert process.poll() is None and time.monotonic() < deadline
      time.sleep(0.01)
    process.send_signal(signum)
    said = process.communicate(timeout=240)[1]
  finally:
    process.kill()
  assert not (out / 'results.json').exists()
  return process.returncode, said


def test_an_interrupted_evaluation_resumes_to_the_same_results(
    programs, finished, tmp_path):
  """It is killed, then stopped by SIGTERM, and resumes after each."""
  whole, out = tmp_path / 'whole', tmp_path / 'interrupted'
  arguments = (*EVALUATE, '--config.eval.limit=64', '--config.rollout.slots=4',
               f'--checkpoint={finished[0]}')
  assert _interrupted(arguments, out, 0, signal.SIGKILL)[0] == -signal.SIGKILL
  with (out / 'samples.jsonl').open('a') as file:
    file.write('{"set": "arithm')
  size = (out / 'samples.jsonl').stat().st_size
  status, said = _interrupted(arguments, out, size, signal.SIGTERM)
  assert status == 42, said
  assert 'stopped by SIGTERM; the same command resumes' in said
  done = programs.run('evaluate', *arguments, f'--out={out}', status=0)
  programs.run('evaluate', *arguments, f'--out={whole}', status=0)
  for name in ('samples.jsonl', 'results.json'):
    assert (out / name).read_bytes() == (whole / name).read_bytes()
  assert 'avg_micro' in done.stdout
  same = programs.run('report', f'--compare={whole},{out}', status=0).stdout
  assert same.startswith('arithmetic: ') and 'difference +0.00%' in same
  # Again: nothing is left to do; another evaluation is refused.
  programs.run('evaluate', *arguments, f'--out={out}', status=0)
  refused = programs.run('evaluate', *arguments, '--config.seed=5',
                         f'--out={out}', status=2)
  assert 'another evaluation: seed differ' in refused.stderr


def test_a_model_that_overflows_stops_the_run_with_the_reason(
    programs, model, tmp_path):
  done = programs.run('train', *runs.train_arguments(model, tmp_path / 'run'),
                      '--config.optimizer.learning_rate=1e30', status=1)
  line = done.stderr.splitlines()[-1]
  assert 'not finite' in line and 'there is no checkpoint yet' in line


def test_the_workdir_of_another_config_is_left_alone(
    programs, model, finished):
  workdir, _ = finished
  files = {path: path.read_bytes()
           for path in workdir.rglob('*') if path.is_file()}
  done = programs.run('train', *runs.train_arguments(model, workdir, 'grpo'),
                      status=2)
  assert 'another config' in done.stderr
  assert files == {path: path.read_bytes()
                   for path in workdir.rglob('*') if path.is_file()}
