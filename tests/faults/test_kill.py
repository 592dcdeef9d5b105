"""A short run of `python -m tests.faults.kill`."""

import json

import pytest

from tests import runs
from tests.faults import kill

pytestmark = pytest.mark.long


@pytest.fixture(name='kill_and_compare', scope='module')
def _kill_and_compare(tmp_path_factory):
  """`kill.kill_and_compare` with one undisturbed run for all tests."""
  folder = tmp_path_factory.mktemp('killed')
  model = folder / 'model'
  runs.make_model(model)
  longest = kill.undisturbed(model, folder)
  assert len(kill.fingerprint(folder / 'alone')) > 10
  return lambda **settings: kill.kill_and_compare(
      model, folder, longest, **settings)


def test_kills_do_not_change_results(kill_and_compare):
  assert kill_and_compare(kills=3, seed=1) == []


@pytest.mark.nightly
def test_kills_do_not_change_what_is_in_flight(tmp_path):
  model = tmp_path / 'model'
  runs.make_model(model)
  longest = kill.undisturbed(model, tmp_path, kill.CARRY)
  for step in 7, 8:
    saved = json.loads((
        tmp_path / f'alone/checkpoints/{step}/extra/metadata').read_text())
    assert sum(saved['extra']['carried']['length']) > 0
  assert kill.kill_and_compare(
      model, tmp_path, longest, 3, 4, fields=kill.CARRY) == []


def test_interrupts_do_not_change_results(kill_and_compare):
  assert kill_and_compare(kills=4, seed=2, interrupts=True) == []
