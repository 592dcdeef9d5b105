"""Runs, evaluations and exports on several layouts of processes and devices;
a lost process."""

import json
import re
import shutil
import signal
import time

import jax
import numpy as np
import pytest

from tepo_jax import errors
from tepo_jax.job import restore
from tepo_jax.runtime import mesh as mesh_lib
from tests import jobs

pytestmark = pytest.mark.long

_TINY = ('--config=configs/tiny.py:tepo', '--config.eval.period=0',
         '--config.rollout.prompts=2', '--config.rollout.samples=4',
         '--config.rollout.max_tokens=12',
         '--config.rollout.dynamic_sampling=off',
         '--config.train.minibatch_prompts=1', '--config.data.limit=16',
         '--config.checkpoint.period=1', '--config.pretrain.num_layers=1',
         '--config.pretrain.worked_steps=1',
         '--config.pretrain.mixed_steps=1')


def _train(workdir, count, devices, steps, *arguments):
  return jobs.start(
      count, ['-m', 'tepo_jax.train'], *_TINY, f'--workdir={workdir}',
      f'--config.steps={steps}', *arguments, devices=devices)


def _params(workdir):
  mesh = mesh_lib.make({'data': 1, 'fsdp': 1, 'tensor': 1}, jax.devices()[:1])
  return restore.restore_params(workdir, mesh)[1]


def _rollouts(workdir):
  return [file.read_text() for file in sorted(workdir.glob('rollouts/*'))]


def _tokens(workdir):
  return [json.loads(line)['token_ids'] for text in _rollouts(workdir)
          for line in text.splitlines()]


def _steps(workdir):
  file = workdir / 'metrics.jsonl'
  lines = file.read_text().splitlines(True) if file.exists() else []
  return [json.loads(line)['step'] for line in lines if line.endswith('\n')]


def _finish_after(job, ready, index, sent, seconds):
  """Sends a process of the job a signal when `ready`; the job's outcomes."""
  deadline = time.monotonic() + 400
  try:
    while not ready():
      assert time.monotonic() < deadline and job[0].poll() is None
      time.sleep(0.01)
    job[index].send_signal(sent)
    return jobs.finish(job, seconds)
  finally:
    for process in job:
      process.kill()


def _three_steps(workdir, count, devices):
  outcomes = jobs.finish(_train(workdir, count, devices, 3), 400)
  assert [status for status, *_ in outcomes] == [0] * count, outcomes
  return workdir


@pytest.fixture(name='one', scope='module')
def _one(tmp_path_factory):
  """Three steps of one process with two devices."""
  return _three_steps(tmp_path_factory.mktemp('layouts') / 'one', 1, 2)


def test_layouts_give_the_same_run(one, tmp_path):
  two = _three_steps(tmp_path / 'two', 2, 1)
  assert _rollouts(one) == _rollouts(two) and len(_rollouts(one)) == 3
  assert _steps(two) == [1, 2, 3]
  first, second = map(_params, (one, two))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6),
               first, second)


def test_a_run_resumes_on_another_mesh(one, tmp_path):
  """From fsdp=2 to fsdp=2 x tensor=2, with two slots fewer; and sampling on
  four shards instead of two."""
  same, other = tmp_path / 'same', tmp_path / 'other'
  for folder in (same, other):
    shutil.copytree(one, folder)
  (status, _, said), = jobs.finish(_train(same, 1, 2, 4), 400)
  assert status == 0 and 'bit-identical' not in said
  (status, out, said), = jobs.finish(_train(
      other, 1, 4, 4, '--config.mesh.tensor=2', '--config.rollout.tensor=1',
      '--config.rollout.slots=6',
      '--config.compute.remat=auto'), 400)
  assert status == 0 and 'continuing' in out, said
  assert ('mesh.tensor (was 1, now 2), rollout.slots (was None, now 6), '
          'rollout.tensor (was None, now 1)') in said
  assert 'remat=auto: none; an update takes 0.' in said  # as before
  assert _steps(other) == [1, 2, 3, 4]
  assert _tokens(same) == _tokens(other) and len(_tokens(other)) == 4 * 8
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6),
               _params(same), _params(other))
  (status, _, said), = jobs.finish(_train(
      other, 1, 4, 5, '--config.seed=1'), 100)
  assert status == 2 and 'seed (was 0, now 1)' in said


def test_a_lost_process_ends_the_job_which_resumes_elsewhere(one, tmp_path):
  workdir = tmp_path / 'lost'
  (status, _, said), _ = _finish_after(
      _train(workdir, 2, 1, 100), lambda: 2 in _steps(workdir) and (
          workdir / 'checkpoints/1').is_dir(), 1, signal.SIGKILL, 200)
  assert status in (errors.LOST, -6), said
  assert 'another process' in said or 'another task died' in said
  saved = max(int(step.name) for step in (workdir / 'checkpoints').iterdir()
              if step.name.isdigit())
  (status, out, _), = jobs.finish(_train(workdir, 1, 2, saved + 1), 400)
  assert status == 0 and 'continuing' in out
  assert _steps(workdir) == list(range(1, saved + 2))
  same = min(3, saved + 1)  # there may be the rollout of a step that was lost
  assert _rollouts(workdir)[:same] == _rollouts(one)[:same]


def test_sigterm_to_one_process_saves_and_ends_them_all(tmp_path):
  """As when one host of a slice is preempted."""
  workdir = tmp_path / 'run'
  job = _train(workdir, 4, 1, 1000, '--config.checkpoint.period=1000',
               '--config.checkpoint.minutes=0.001',
               '--config.checkpoint.keep=1000',
               '--config.train.microbatch_tokens=144')
  outcomes = _finish_after(
      job, lambda: 2 in _steps(workdir), 2, signal.SIGTERM, 120)
  # By the clock: the period has not passed.
  assert (workdir / 'checkpoints/1').is_dir()
  assert [status for status, *_ in outcomes] == (
      [errors.INTERRUPTED] * 4), outcomes
  saved = max(int(step.name) for step in (workdir / 'checkpoints').iterdir())
  assert saved == _steps(workdir)[-1]


# What jax's transport prints. Its threads write at once, so that lines may be
# made of parts of several, or be empty.
_GLOO = re.compile(r'(\[Gloo\] Rank | is connected to | peer ranks\. |\d+|'
                   r'Expected number of connected peer ranks is : )*')


def _program(name, count, devices, *arguments):
  """Runs a program as that many processes; the lines that the first printed."""
  outcomes = jobs.finish(jobs.start(
      count, ['-m', f'tepo_jax.{name}'], *arguments, devices=devices), 400)
  assert {status for status, *_ in outcomes} == {0}, outcomes
  first, *others = (
      [line for line in out.splitlines() if not _GLOO.fullmatch(line)]
      for _, out, _ in outcomes)
  assert first and not any(others)
  return first


def test_evaluations_and_exports_do_not_depend_on_the_processes(one, tmp_path):
  """1 × 4, 4 × 1 and 2 × 2 processes × devices, also if a process is lost."""
  evaluate = ('--config=configs/tiny.py', f'--checkpoint={one}',
              '--config.eval.limit=96', '--config.rollout.max_tokens=12',
              '--config.eval.max_tokens=12',
              '--config.rollout.slots=64')
  whole, resumed = tmp_path / 'whole', tmp_path / 'resumed'
  printed = _program('evaluate', 1, 4, *evaluate, f'--out={whole}')
  job = jobs.start(4, ['-m', 'tepo_jax.evaluate'], *evaluate,
                   f'--out={resumed}', devices=1)
  (status, _, said), *_ = _finish_after(
      job, (resumed / 'samples.jsonl').exists, 1, signal.SIGKILL, 200)
  assert status in (errors.LOST, -6), said
  lines = (resumed / 'samples.jsonl').read_text().count('\n')
  assert 0 < lines < 96 * 9
  assert _program(
      'evaluate', 2, 2, *evaluate, f'--out={resumed}') == printed
  for name in ('samples.jsonl', 'results.json'):
    assert (resumed / name).read_bytes() == (whole / name).read_bytes()

  exported = []
  for count in (1, 2, 4):
    out = tmp_path / f'exported_{count}'
    _program('export', count, 4 // count, f'--workdir={one}', f'--out={out}')
    exported.append({file.name: file.read_bytes() for file in out.iterdir()})
  assert 'model.safetensors' in exported[0]
  assert exported[0] == exported[1] == exported[2]


def test_an_inspection_and_a_benchmark_by_two_processes(one, tmp_path):
  """The first process writes; the numbers are those of one process."""
  found = []
  for count in (1, 2):
    out = tmp_path / f'report_{count}'
    _program('report', count, 2 // count, f'--runs={one}', f'--out={out}',
             '--inspect=3')
    assert (out / 'report.html').exists()
    found.append([json.loads(line) for line in (
        out / 'inspect_one_3.jsonl').read_text().splitlines()])
  assert len(found[0]) == 8
  for first, second in zip(*found):
    assert first['token_ids'] == second['token_ids']
    assert first == {name: pytest.approx(values, rel=1e-4, abs=1e-6)
                     for name, values in second.items()}

  lines = _program(
      'benchmark', 2, 1, '--config=configs/benchmark.py:tiny',
      '--parts=scoring', '--rounds=1',
      '--config.rollout.prompts=4', '--config.rollout.samples=2',
      '--config.rollout.max_tokens=16', '--json')
  assert {json.loads(line)['name'] for line in lines} >= {
      'scoring/packed/seconds', 'scoring/packed/tokens'}
