"""Processes that cannot join a job say why, in one line."""

import contextlib
import errno
import os
import socket
import subprocess
import sys
import types

import pytest

from tepo_jax import errors
from tepo_jax.runtime import joining
from tests import runs

pytestmark = pytest.mark.long

STEP = {'SLURM_JOB_ID': '7', 'SLURM_STEP_NODELIST': 'node[1-2]',
        'SLURM_STEP_TASKS_PER_NODE': '8(x2)'}


@pytest.mark.parametrize('changes, said', [
    ({'SLURM_STEP_NODELIST': None}, 'not started by srun; use `srun python -m'),
    ({'SLURM_STEP_TASKS_PER_NODE': '1(x2)'},
     '1 Slurm tasks on this node see 8 GPUs, of which each takes one; use '
     '`srun --ntasks-per-node=8 python -m '),
    ({}, None), ({'SLURM_JOB_ID': None, 'SLURM_STEP_NODELIST': None}, None),
    ({'SLURM_STEP_NODELIST': None, 'JAX_COORDINATOR_ADDRESS': 'a:1'}, None),
    ({'SLURM_STEP_TASKS_PER_NODE': '1', 'CUDA_VISIBLE_DEVICES': '3'}, None),
    # launch/gpu.sh, with a task per node
    ({'SLURM_STEP_TASKS_PER_NODE': '1(x2)',
      'JAX_LOCAL_DEVICE_IDS': '0,1,2,3,4,5,6,7'}, None)])
def test_slurm(changes, said):
  environment = STEP | {'CUDA_VISIBLE_DEVICES': '0,1,2,3,4,5,6,7'} | changes
  environment = {name: value for name, value in environment.items() if value}
  if said is None:
    joining.check_slurm(environment)
    return
  with pytest.raises(errors.InputError) as error:
    joining.check_slurm(environment)
  assert said in str(error.value)


def _join(**environment):
  """The status and lines of a program that joins a job."""
  program = ('from tepo_jax import cli; from tepo_jax.runtime import joining, '
             'processes; joining._SAY_SECONDS = 1; joining.WAIT_SECONDS = 4; '
             'cli.run(processes.initialize, joins_job=True)')
  done = subprocess.run(
      [sys.executable, '-c', program], capture_output=True, text=True,
      cwd=runs.ROOT, timeout=60, env={
          name: value for name, value in os.environ.items()
          if not name.startswith(('SLURM_', 'JAX_COORD'))
      } | {'TEPO_MULTIHOST': '1', 'PYTHONPATH': str(runs.ROOT)} | environment)
  return done.returncode, done.stderr


@pytest.mark.parametrize('is_job', ['0', '1'])
def test_several_slices_are_refused(is_job):
  status, said = _join(MEGASCALE_NUM_SLICES='2', TEPO_MULTIHOST=is_job)
  assert status == 2, said
  assert said == (
      '-c: error: 2 TPU slices as one job are not supported; take one larger '
      'slice, or start a job per slice, each with its own --workdir\n')


def test_one_slice_is_not_refused():
  for count in '1', '':
    status, said = _join(MEGASCALE_NUM_SLICES=count, TEPO_MULTIHOST='0')
    assert status == 0, said


def test_a_port_that_is_taken_is_named():
  with socket.socket() as other:
    other.bind(('', 0))
    other.listen()
    port = other.getsockname()[1]
    status, said = _join(
        JAX_COORDINATOR_ADDRESS=f'localhost:{port}', JAX_NUM_PROCESSES='2',
        JAX_PROCESS_ID='0')
  assert status == 2, said
  assert said.splitlines() == [
      f'-c: error: JAX_COORDINATOR_ADDRESS=localhost:{port}: {port} is taken '
      'by another program on this host; choose another port for all processes']


def test_a_port_that_may_not_be_opened_is_named(monkeypatch):
  def bind(*_):
    raise PermissionError(errno.EACCES, 'Permission denied')

  monkeypatch.setattr(joining.socket, 'socket', lambda: contextlib.nullcontext(
      types.SimpleNamespace(setsockopt=lambda *_: None, bind=bind)))
  with pytest.raises(errors.InputError) as error:
    joining._check_port('host:80')
  assert str(error.value) == (
      'JAX_COORDINATOR_ADDRESS=host:80: 80 cannot be opened (Permission denied)'
      ' on this host; choose another port for all processes')


def test_a_process_says_for_whom_it_waits_and_ends():
  with socket.socket() as probe:
    probe.bind(('', 0))
    port = probe.getsockname()[1]
  status, said = _join(
      JAX_COORDINATOR_ADDRESS=f'localhost:{port}', JAX_NUM_PROCESSES='2',
      JAX_PROCESS_ID='1')
  assert status == errors.LOST
  assert said.endswith(
      'error: cannot join the job: waited 4 s for process 0 at '
      f'JAX_COORDINATOR_ADDRESS=localhost:{port}\n')
  assert (f'waiting for process 0 at JAX_COORDINATOR_ADDRESS=localhost:{port}, '
          'for 1 of 4 s') in said
  assert 'Traceback' not in said


def test_a_job_that_nothing_names_is_refused():
  status, said = _join()
  assert status == 2, said
  assert said.startswith(
      '-c: error: TEPO_MULTIHOST=1, but this is no TPU slice')
  assert len(said.splitlines()) == 1


def test_a_job_without_srun_ends_in_one_line():
  status, said = _join(SLURM_JOB_ID='7')
  assert status == 2, said
  assert said.startswith('-c: error: ') and said.count('\n') == 1
  assert 'not started by srun; use `srun python -m' in said
