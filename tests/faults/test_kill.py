"""A short run of `python -m tests.faults.kill`."""

import pytest

from tests.faults import kill
from tests import runs

pytestmark = pytest.mark.long


def test_kills_do_not_change_results(tmp_path):
  model = tmp_path / 'model'
  runs.run('pretrain', '--config=configs/tiny.py', f'--out={model}',
           *runs.UNTRAINED)
  assert kill.kill_and_compare(model, tmp_path, kills=3, seed=1) == []
  assert len(kill.fingerprint(tmp_path / 'alone')) > 10


def test_interrupts_do_not_change_results(tmp_path):
  model = tmp_path / 'model'
  runs.run('pretrain', '--config=configs/tiny.py', f'--out={model}',
           *runs.UNTRAINED)
  assert kill.kill_and_compare(
      model, tmp_path, kills=4, seed=2, interrupts=True) == []
