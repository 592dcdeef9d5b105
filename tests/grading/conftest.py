"""These tests measure the grader, beside what other tests left in the process."""

import gc

import pytest


@pytest.fixture(scope='module', autouse=True)
def small_heap():
  """Collections pass over what other files' tests left, which would take longer
  than a verdict."""
  gc.collect()
  gc.freeze()
  yield
  gc.unfreeze()
