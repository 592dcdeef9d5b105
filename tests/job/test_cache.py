"""The folder of compiled programs."""

import jax
import pytest

from configs import tiny
from tepo_jax.job import session


@pytest.mark.usefixtures('compilation_folder')
@pytest.mark.parametrize('set_before, in_config, want', [
    (None, None, 'runs/.jax_cache'), ('elsewhere', None, 'elsewhere'),
    ('elsewhere', 'named', 'named')])
def test_folder(tmp_path, monkeypatch, set_before, in_config, want):
  """Next to the workdir, unless the environment or the config sets it."""
  monkeypatch.chdir(tmp_path)
  config = tiny.get_config()
  config.compute.cache = in_config
  jax.config.update('jax_compilation_cache_dir', set_before)
  session.cache_compilations(config, 'runs/one')
  found = jax.config.jax_compilation_cache_dir
  assert str(tmp_path / found) == str(tmp_path / want)
