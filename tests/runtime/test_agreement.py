"""Processes that were given something else end together, by name."""

import pytest

from tepo_jax.runtime import agreement
from tests import jobs

pytestmark = pytest.mark.long

_CHECK = """
import sys, jax
from tepo_jax import errors
from tepo_jax.runtime import agreement, processes
processes.initialize()
rank = jax.process_index()
for facts in ({'a': [1, (2,)], 'b': None}, {'a': 'x', 'b': rank, 'c': rank > 1},
              {str(rank): 1}):
  try:
    agreement.check(lambda: facts)
    print('the same')
  except errors.InputError as error:
    print(error)
"""


def test_three_processes_name_what_differs():
  job = jobs.start(3, ['-c', _CHECK], devices=1)
  for status, out, err in jobs.finish(job):
    assert status == 0, err
    assert out.splitlines()[-3:] == [
        'the same', 'the processes of this job differ from process 0: b '
        '(processes 1, 2), c (process 2); start all of them with the same',
        'processes 1, 2: runs another program than process 0, or another '
        'config file; start all processes with the same']


def test_one_process_needs_no_facts():
  agreement.check(None)


# The config of process 1 has another learning rate.
_CONFIG = """
import os
from configs import tiny
def get_config():
  config = tiny.get_config('tepo')
  if os.environ['JAX_PROCESS_ID'] == '1':
    config.optimizer.learning_rate = 1e-3
  return config
"""


def test_a_job_whose_configs_differ_does_not_train(tmp_path):
  (tmp_path / 'mine.py').write_text(_CONFIG)
  job = jobs.start(
      2, ['-m', 'tepo_jax.train'], f'--config={tmp_path / "mine.py"}',
      f'--workdir={tmp_path / "run"}')
  for status, _, err in jobs.finish(job, timeout=120):
    assert status == 2, err
    assert err.splitlines()[-1] == (
        'tepo_jax.train: error: the processes of this job differ from process '
        '0: config.optimizer.learning_rate (process 1); start all of them with '
        'the same')
  assert not (tmp_path / 'run').exists()
