"""Plans of tests neither read nor fill the user's folder of programs."""

import pytest

from tepo_jax.tools.plan import compilation


@pytest.fixture(scope='session', autouse=True)
def compiled_folder(tmp_path_factory):
  """Where these tests keep compiled programs."""
  folder = tmp_path_factory.mktemp('plans')
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(compilation, 'folder', lambda: folder)
    yield folder
