"""What `python -m tests.faults.kill_one` records, with stand-ins for a run."""

import pytest

from tests import jobs
from tests.faults import kill_one


@pytest.fixture(name='attempt')
def _attempt(tmp_path, monkeypatch):
  """Makes the first kill, of two processes that execute `program`."""
  phases = [tmp_path / f'phases.{rank}' for rank in range(2)]
  for file in phases:
    file.write_text('sampling updating sampling')
  monkeypatch.setattr(kill_one, 'LIMIT_S', 0.5)

  def attempt(program):
    job = jobs.start(2, ['-c', program])
    monkeypatch.setattr(kill_one, 'start', lambda *_: (job, phases))
    if program == 'pass':
      for process in job:
        process.wait()
    return kill_one.attempt(tmp_path, tmp_path / 'run', 0)

  return attempt


def test_a_process_that_does_not_end_in_time_is_recorded(attempt):
  record = attempt('import time; time.sleep(60)')
  assert record['statuses'] == [-9, -9] and not record['is_right']
  assert record['seconds'] >= 0.5


def test_a_process_that_has_ended_is_not_killed(attempt):
  assert attempt('pass') is None
