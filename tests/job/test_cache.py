"""The folder of compiled programs."""

import os

import jax
import pytest

from configs import tiny
from tepo_jax.job import session

pytestmark = pytest.mark.usefixtures('compilation_folder')


def _cache(in_config=None):
  config = tiny.get_config()
  config.compute.cache = in_config
  session.cache_compilations(config)
  return jax.config.jax_compilation_cache_dir


@pytest.mark.parametrize('set_before, in_config, want', [
    (None, None, 'home/tepo_jax'), ('elsewhere', None, 'elsewhere'),
    ('elsewhere', 'named', 'named')])
def test_folder(tmp_path, monkeypatch, capsys, set_before, in_config, want):
  """The user's own, unless the environment or the config sets it; private."""
  monkeypatch.chdir(tmp_path)
  monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'home'))
  jax.config.update('jax_compilation_cache_dir', set_before)
  before = os.umask(0)
  try:
    found = _cache(in_config)
  finally:
    os.umask(before)
  assert str(tmp_path / found) == str(tmp_path / want)
  assert (tmp_path / found).stat().st_mode & 0o777 == 0o700
  assert not capsys.readouterr().err


@pytest.mark.parametrize('mode, warns', [
    (0o777, True), (0o1777, True), (0o770, True), (0o755, False)])
def test_a_folder_that_others_can_write_to_gets_a_warning(
    tmp_path, capsys, mode, warns):
  (tmp_path / 'shared').mkdir()
  (tmp_path / 'shared').chmod(mode)
  _cache(str(tmp_path / 'shared'))
  said = capsys.readouterr().err
  assert said.startswith('warning: compute.cache=') == warns
  assert ('other users can write to it' in said) == warns


@pytest.mark.skipif(os.getuid(), reason='only root may give a folder away')
def test_a_folder_of_another_user_gets_a_warning(tmp_path, capsys):
  (tmp_path / 'theirs').mkdir(0o755)
  os.chown(tmp_path / 'theirs', 12345, -1)
  _cache(str(tmp_path / 'theirs'))
  assert 'other users can write to it' in capsys.readouterr().err


def test_a_folder_that_cannot_be_made_costs_a_warning(tmp_path, capsys):
  (tmp_path / 'file').write_text('')
  jax.config.update('jax_compilation_cache_dir', None)
  assert _cache(str(tmp_path / 'file' / 'cache')) is None
  assert 'compiled programs are not kept' in capsys.readouterr().err
