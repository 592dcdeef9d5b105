"""job.learner: when non-finite updates stop a run."""

import types

import pytest

from tepo_jax import errors
from tepo_jax.job import learner as learner_lib


def _count(run, skipped):
  learner_lib.Learner._count_skipped(run, {
      'skipped': float(skipped), 'loss': float('nan'), 'grad_norm': 1.0}, 5)


def test_a_finite_update_resets_the_count_of_skipped_ones():
  run = types.SimpleNamespace(skipped_in_a_row=0)
  for skipped in (True, True, False, True, True):
    _count(run, skipped)
  assert run.skipped_in_a_row == 2
  with pytest.raises(errors.RunError, match='3 updates in a row .* in step 5'):
    _count(run, True)
