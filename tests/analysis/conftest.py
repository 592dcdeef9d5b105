"""Runs made up: folders as a training run leaves them, with chosen numbers."""

import json

import pytest

from tests.analysis import browser as browser_lib
from tests.analysis import records

@pytest.fixture(name='make_run')
def _make_run(tmp_path):
  """make_run('name', lines, field=value, …): the folder's path."""

  def make(name, lines, **changed):
    folder = tmp_path / 'runs' / name
    folder.mkdir(parents=True)
    config = json.loads(json.dumps(records.CONFIG))
    for dotted, value in changed.items():
      *sections, field = dotted.split('__')
      section = config
      for part in sections:
        section = section[part]
      section[field] = value
    (folder / 'config.json').write_text(json.dumps(config))
    (folder / 'metrics.jsonl').write_text(
        ''.join(json.dumps(line) + '\n' for line in lines))
    return str(folder)

  return make


@pytest.fixture(name='browser', scope='session')
def _browser():
  if browser_lib.find() is None:
    pytest.skip('no Chromium: apt-get install chromium')
  opened = browser_lib.Browser()
  yield opened
  opened.close()
