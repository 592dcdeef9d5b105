"""What tests do both on a disk and in a bucket."""

import pytest

from tepo_jax.runtime import files


@pytest.fixture(name='folder', params=['disk', 'bucket'])
def _folder(request, tmp_path):
  """A folder that other processes can reach too."""
  if request.param == 'disk':
    return tmp_path
  request.getfixturevalue('bucket_server')
  return files.path(f'gs://lab/{tmp_path.name}')
