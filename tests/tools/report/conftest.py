"""Made-up runs, and a browser."""

import functools

import pytest

from tests.tools.report import browser as browser_lib
from tests.tools.report import records


@pytest.fixture(name='make_run')
def _make_run(tmp_path):
  """make_run('name', lines, field=value, …): see `records.make_run`."""
  return functools.partial(records.make_run, tmp_path / 'runs')


@pytest.fixture(name='browser', scope='session')
def _browser():
  if browser_lib.find() is None:
    pytest.skip('no Chromium: apt-get install chromium')
  opened = browser_lib.Browser()
  yield opened
  opened.close()
