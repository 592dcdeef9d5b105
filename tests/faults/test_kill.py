"""A short run of `python -m tests.faults.kill`."""

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


def test_interrupts_do_not_change_results(kill_and_compare):
  assert kill_and_compare(kills=4, seed=2, interrupts=True) == []
