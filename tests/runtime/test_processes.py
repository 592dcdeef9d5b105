"""runtime.processes: a single process, and a job of several."""

import os
import signal

import jax
import numpy as np
import pytest

from tepo_jax import errors
from tepo_jax.runtime import processes
from tests import jobs


def test_a_single_process():
  done = []
  processes.on_first(done.append, 1)
  assert done == [1] and processes.is_first()
  assert processes.any_of(True) and not processes.any_of(False)
  assert processes.mine([1, 2, 3]) == [1, 2, 3]
  np.testing.assert_array_equal(processes.whole([1, 0, 1], 3), [1, 0, 1])
  with pytest.raises(ZeroDivisionError):
    with processes.ending_together():
      raise ZeroDivisionError


@pytest.mark.parametrize('address, count, number, named', [
    ('localhost:1', None, '0', 'JAX_NUM_PROCESSES'),
    ('localhost:1', '2', 'one', 'JAX_PROCESS_ID'),
    ('localhost:1', '2', '2', r'JAX_PROCESS_ID=2: .* from 0 to 1'),
    ('localhost', '2', '0', 'HOST:PORT'),
    ('localhost:99999', '2', '1', 'HOST:PORT')])
def test_wrong_coordinates_are_refused(
    monkeypatch, address, count, number, named):
  monkeypatch.setenv('TEPO_MULTIHOST', '1')
  monkeypatch.setenv('JAX_COORDINATOR_ADDRESS', address)
  monkeypatch.setenv('JAX_PROCESS_ID', number)
  monkeypatch.delenv('JAX_NUM_PROCESSES', raising=False)
  if count:
    monkeypatch.setenv('JAX_NUM_PROCESSES', count)
  with pytest.raises(errors.InputError, match=named):
    processes.initialize()


def test_a_job_that_cannot_be_joined_is_worth_a_restart(monkeypatch):
  """jax's error where the TPU's metadata server does not answer."""
  given = {}

  def fail(**arguments):
    given.update(arguments)
    raise OSError("HTTPConnectionPool(host='metadata.google.internal'")

  monkeypatch.setenv('TEPO_MULTIHOST', '1')
  monkeypatch.delenv('JAX_COORDINATOR_ADDRESS', raising=False)
  monkeypatch.setattr(jax.distributed, 'initialize', fail)
  with pytest.raises(errors.Lost, match='join the job: .*HTTPConnectionPool'):
    processes.initialize()
  assert given['heartbeat_timeout_seconds'] == 300


@pytest.mark.parametrize('reason, status', [
    ('UNKNOWN: TPU initialization failed: open(/dev/vfio/0): Device or '
     'resource busy', errors.LOST),
    ("Backend 'tpu' is not in the list of known backends: ['cpu'].", 2)])
def test_a_device_that_cannot_be_opened_is_worth_a_restart(
    reason, status, monkeypatch, capfd):
  """Without the orderly exit, which would wait for the other processes. A
  misspelt JAX_PLATFORMS is bad input: no restart can help."""
  statuses = []

  def end(status):
    statuses.append(status)
    raise SystemExit

  monkeypatch.setattr(os, '_exit', end)
  with pytest.raises(SystemExit):
    with processes.ending_together():
      raise RuntimeError(f"Unable to initialize backend 'tpu': {reason}")
  assert statuses == [status]
  assert reason in capfd.readouterr().err


_AGREE = """
import jax, numpy as np
from tepo_jax import errors
from tepo_jax.runtime import agreement, mesh as mesh_lib, processes
processes.initialize()
mesh = mesh_lib.make({'data': 2, 'fsdp': -1, 'tensor': 1})
rank = jax.process_index()
batch = mesh_lib.put(np.arange(8), mesh_lib.batch_sharding(mesh))
assert batch.shape == (8,) and not batch.is_fully_addressable
assert [int(s.data[0]) for s in batch.addressable_shards] == [4 * rank,
                                                              4 * rank + 2]
double = jax.jit(lambda x: 2 * x)
assert mesh_lib.to_host(double(batch)).tolist() == list(range(0, 16, 2))
assert processes.any_of(rank == 1) and not processes.any_of(False)
assert processes.mine('abcde') == ('ace', 'bd')[rank]
part = processes.mine([5, 6, 7, 8, 9])
assert processes.whole(part, 5).tolist() == [5, 6, 7, 8, 9]
assert processes.least((3 + rank) << 20) == 3 << 20
assert processes.greatest(3 + rank) == 4
processes.on_first(print, f'written by {rank}')
def refuse():
  raise errors.InputError('what: why')
try:
  processes.on_first(refuse)
except errors.InputError as error:
  assert str(error) == 'what: why'
  assert type(error) is errors.InputError
def wait():
  raise errors.Unanswered('busy')
try:
  processes.on_first(wait)
except errors.Unanswered as error:
  assert str(error) == 'busy'
try:
  agreement.check(lambda: wait() if rank else {})
except errors.Unanswered:
  print('agreed')
"""


def test_two_processes_agree():
  (first, *_), (second, *_) = outcomes = jobs.finish(
      jobs.start(2, ['-c', _AGREE]))
  assert first == second == 0, outcomes
  assert outcomes[0][1].splitlines()[-2:] == ['written by 0', 'agreed']
  assert outcomes[1][1].splitlines()[-1:] == ['agreed']
  assert 'written' not in outcomes[1][1]


def test_sigterm_ends_a_program_that_does_not_handle_it():
  job = jobs.start(2, ['-c', """
import time
from tepo_jax.runtime import processes
processes.initialize()
print('joined', flush=True)
time.sleep(60)
"""])
  for process in job:
    assert process.stdout.readline() == 'joined\n'
  for process in job:
    process.terminate()
  assert [status for status, *_ in jobs.finish(job, 50)] == 2 * [
      -signal.SIGTERM]


_LOSE = """
import os, sys, time
import jax, numpy as np
from tepo_jax.runtime import processes
processes.initialize(heartbeat=20)
with processes.ending_together():
  while True:
    processes.total(np.ones(3))
    if jax.process_index() == int(sys.argv[1]):
      {how}
"""


@pytest.mark.parametrize('lost', [0, 1])
def test_a_killed_process_ends_the_other(lost):
  program = _LOSE.format(how='os.kill(os.getpid(), 9)')
  outcomes = jobs.finish(jobs.start(2, ['-c', program], str(lost)), 200)
  status, _, said = outcomes[1 - lost]
  # JAX's own heartbeat may detect the loss first: it aborts.
  assert status in (errors.LOST, -6)
  assert 'another process of the job is gone' in said or (
      'another task died' in said)


@pytest.mark.parametrize('how, status, said', [
    ('raise ValueError("of its own")', 1, 'ValueError: of its own'),
    ('from tepo_jax.runtime import buckets; '
     'raise buckets.BucketError("gs://b/x: no permission")', 2,
     'error: process 0: gs://b/x: no permission\n'),
    ('from tepo_jax.runtime import buckets; '
     'raise buckets.SilentBucketError("gs://b/x: connection reset")', 3,
     'error: process 0: gs://b/x: connection reset\n')])
def test_a_failing_process_ends_the_other_and_reports_why(how, status, said):
  program = _LOSE.format(how=how)
  failed, other = jobs.finish(jobs.start(2, ['-c', program], '0'), 200)
  assert failed[0] == status and said in failed[2]
  assert other[0] in (errors.LOST, -6)


def test_a_bucket_s_error_is_no_lost_process():
  text = 'UNAVAILABLE: connection reset'
  assert processes._lost(RuntimeError(text)) == text
  assert processes._lost(RuntimeError(f'checkpoint gs://b/1: {text}')) is None


def test_a_service_of_a_reward_function_is_no_lost_process():
  text = 'UNAVAILABLE: connection reset'
  failed = errors.RunError(f'reward judge:score: {text}')
  assert processes._lost(failed) is None
  failed.__cause__ = RuntimeError(text)  # as of a save that failed
  assert processes._lost(failed) == text
