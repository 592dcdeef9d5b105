"""Every test runs on the CPU with four virtual devices."""

import os

import pytest

os.environ['JAX_PLATFORMS'] = 'cpu'
os.environ['XLA_FLAGS'] = (
    os.environ.get('XLA_FLAGS', '')
    + ' --xla_force_host_platform_device_count=4')


def pytest_collection_modifyitems(items):
  """The longest file first: a parallel run then ends together."""
  items.sort(key=lambda item: item.path.name != 'test_programs.py')


@pytest.fixture(scope='module')
def quick_compile():
  """Tests of many small programs spend their time in the compiler."""
  import jax  # after the environment is set
  before = jax.config.read('jax_disable_most_optimizations')
  jax.config.update('jax_disable_most_optimizations', True)
  yield
  jax.config.update('jax_disable_most_optimizations', before)


@pytest.fixture(scope='session', autouse=True)
def compile_once(tmp_path_factory):
  """For the programs that tests run: what one has compiled, all have."""
  cache = tmp_path_factory.mktemp('compiled')
  os.environ['JAX_COMPILATION_CACHE_DIR'] = str(cache)
  os.environ['JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'] = '0'
