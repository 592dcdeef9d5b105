"""One run on several layouts of processes and devices, and a lost process."""

import json
import signal
import time

import jax
import numpy as np
import pytest

from tepo_jax.job import session
from tepo_jax.runtime import mesh as mesh_lib
from tepo_jax.runtime import processes
from tests import jobs

pytestmark = pytest.mark.long

_TINY = ('--config=configs/tiny.py:tepo', '--config.eval.period=0',
         '--config.rollout.prompts=2', '--config.rollout.samples=4',
         '--config.rollout.max_tokens=12', '--config.train.row_tokens=36',
         '--config.rollout.dynamic_sampling=off',
         '--config.train.minibatch_prompts=1', '--config.data.limit=16',
         '--config.checkpoint.period=1', '--config.pretrain.num_layers=1',
         '--config.compute.unroll=1', '--config.pretrain.worked_steps=1',
         '--config.pretrain.mixed_steps=1')
_QUICK = {'JAX_DISABLE_MOST_OPTIMIZATIONS': '1', 'JAX_PLATFORMS': 'cpu'}


def _train(workdir, count, devices, steps):
  return jobs.start(
      count, ['-m', 'tepo_jax.train'], *_TINY, f'--workdir={workdir}',
      f'--config.steps={steps}', devices=devices, **_QUICK)


def _params(workdir):
  mesh = mesh_lib.make({'data': 1, 'fsdp': 1, 'tensor': 1}, jax.devices()[:1])
  return session.restore_params(workdir, mesh)[1]


def _rollouts(workdir):
  return [file.read_text() for file in sorted(workdir.glob('rollouts/*'))]


def _steps(workdir):
  file = workdir / 'metrics.jsonl'
  lines = file.read_text().splitlines() if file.exists() else []
  return [json.loads(line)['step'] for line in lines]


@pytest.fixture(name='runs', scope='module')
def _runs(tmp_path_factory):
  """Three steps on one process with two devices, and on two with one."""
  folder = tmp_path_factory.mktemp('layouts')
  for count, devices in ((1, 2), (2, 1)):
    outcomes = jobs.finish(
        _train(folder / str(count), count, devices, 3), 400)
    assert [status for status, *_ in outcomes] == [0] * count, outcomes
  return folder / '1', folder / '2'


def test_layouts_give_the_same_run(runs):
  one, two = runs
  assert _rollouts(one) == _rollouts(two) and len(_rollouts(one)) == 3
  assert _steps(two) == [1, 2, 3]
  first, second = map(_params, runs)
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6),
               first, second)


def test_a_lost_process_ends_the_job_which_goes_on_elsewhere(runs, tmp_path):
  workdir = tmp_path / 'lost'
  job = _train(workdir, 2, 1, 100)
  try:
    deadline = time.monotonic() + 400
    while 2 not in _steps(workdir):
      assert time.monotonic() < deadline and job[0].poll() is None
      time.sleep(0.1)
    job[1].kill()
    (status, _, said), _ = jobs.finish(job, 200)
  finally:
    for process in job:
      process.kill()
  assert status in (processes.LOST, -6), said
  assert 'another process' in said or 'another task died' in said
  saved = max(int(step.name) for step in (workdir / 'checkpoints').iterdir()
              if step.name.isdigit())
  (status, out, _), = jobs.finish(_train(workdir, 1, 2, saved + 1), 400)
  assert status == 0 and 'continuing' in out
  assert _steps(workdir) == list(range(1, saved + 2))
  assert _rollouts(workdir)[:3] == _rollouts(runs[0])[:saved + 1]


def test_sigterm_to_one_process_saves_and_ends_them_all(tmp_path):
  """As when one host of a slice is to be taken away."""
  workdir = tmp_path / 'run'
  job = _train(workdir, 2, 1, 1000)
  deadline = time.monotonic() + 400
  try:
    while 2 not in _steps(workdir):
      assert time.monotonic() < deadline and job[0].poll() is None
      time.sleep(0.1)
    job[1].send_signal(signal.SIGTERM)
    outcomes = jobs.finish(job, 30)
  finally:
    for process in job:
      process.kill()
  assert [status for status, *_ in outcomes] == [0, 0], outcomes
  saved = max(int(step.name) for step in (workdir / 'checkpoints').iterdir())
  assert saved == _steps(workdir)[-1]
