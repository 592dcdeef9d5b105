"""Every test runs on the CPU with four virtual devices, except those that need
a GPU or TPU: launch/test.sh names it in TEPO_TEST_DEVICE."""

import os
import pathlib
import shutil

import filelock
import pytest

from tests import runs

os.environ['JAX_PLATFORMS'] = {
    None: 'cpu', 'gpu': 'cuda,cpu', 'tpu': 'tpu,cpu'}[
        os.environ.get('TEPO_TEST_DEVICE')]
if 'TEPO_TEST_DEVICE' not in os.environ:  # halves the time to compile
  os.environ['JAX_DISABLE_MOST_OPTIMIZATIONS'] = '1'
os.environ['XLA_FLAGS'] = (
    os.environ.get('XLA_FLAGS', '')
    + ' --xla_force_host_platform_device_count=4 ' + runs.QUICK_FUSIONS
    # Devices must wait for each other if the cores are busy.
    + ' --xla_cpu_collective_call_terminate_timeout_seconds=600')


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by mark
def pytest_collection_modifyitems(items):
  """Marks cases as long, the long ones of whole runs as nightly, and what is
  nightly as long; runs the longest files first, so that parallel workers end
  together."""
  seen = set()
  for item in items:
    if item.get_closest_marker('long_after_first'):
      test = item.path, item.originalname
      if test in seen:
        item.add_marker(pytest.mark.long)
      seen.add(test)
  long = ('test_every_row.py', 'test_programs.py', 'test_layouts.py',
          'test_kill.py', 'test_replay.py', 'test_real_model.py',
          'test_own_reward.py', 'test_lora_run.py',
          'test_schedule.py', 'test_step.py', 'test_bad_input.py',
          'test_buckets.py', 'test_slice.py', 'test_run.py', 'test_fork.py')
  nightly = ('test_layouts.py', 'test_kill.py', 'test_lora_run.py',
             'test_step.py', 'test_buckets.py', 'test_slice.py',
             'test_fork.py')
  for item in items:
    if item.path.name in nightly and item.get_closest_marker('long'):
      item.add_marker(pytest.mark.nightly)
    if item.get_closest_marker('nightly'):
      item.add_marker(pytest.mark.long)
  items.sort(key=lambda item: long.index(item.path.name)
             if item.path.name in long else len(long))


@pytest.fixture(scope='module')
def optimized():
  """Compiles as users do: for tests of what a compiler makes, and of whole
  programs, at least once."""
  import jax  # after the environment is set
  jax.config.update('jax_disable_most_optimizations', False)
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv('JAX_DISABLE_MOST_OPTIMIZATIONS', '0')
    yield
  jax.config.update(
      'jax_disable_most_optimizations', 'TEPO_TEST_DEVICE' not in os.environ)


@pytest.fixture(scope='session')
def shared_folder(tmp_path_factory) -> pathlib.Path:
  """A folder of this session, the same for all parallel workers."""
  folder = tmp_path_factory.getbasetemp()
  if 'PYTEST_XDIST_WORKER' in os.environ:
    folder = folder.parent
  return folder


@pytest.fixture(scope='session', autouse=True)
def compile_once(shared_folder):
  """Lets the programs that tests run share their compiled functions."""
  os.environ['JAX_COMPILATION_CACHE_DIR'] = str(shared_folder / 'compiled')
  os.environ['JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'] = '0'
  # A limit makes JAX lock the folder: no worker reads what is half written.
  os.environ['JAX_COMPILATION_CACHE_MAX_SIZE'] = str(2**34)


@pytest.fixture(scope='session', autouse=True)
def compiled_here(tmp_path_factory):
  """Keeps what this process compiles, in a folder of its own, which needs no
  lock: many tests make the same functions again."""
  import jax  # after the environment is set
  for name, value in (('dir', str(tmp_path_factory.mktemp('compiled'))),
                      ('max_size', -1)):
    jax.config.update(f'jax_compilation_cache_{name}', value)
  for name in ('compile_time_secs', 'entry_size_bytes'):
    jax.config.update(f'jax_persistent_cache_min_{name}', 0)


@pytest.fixture(scope='session')
def untrained_model(shared_folder) -> pathlib.Path:
  """The model folder of `runs.UNTRAINED`, made once for all workers."""
  folder = shared_folder / 'untrained'
  with filelock.FileLock(shared_folder / 'untrained.lock'):
    if not folder.exists():
      made = shared_folder / 'untrained.partial'
      shutil.rmtree(made, ignore_errors=True)  # another worker failed
      runs.make_model(made)
      made.rename(folder)
  return folder


@pytest.fixture(scope='module')
def programs():
  """Runs the programs in forks of one process."""
  from tests import fork_server
  with fork_server.Server() as server:
    yield server


@pytest.fixture
def compilation_folder():
  """Restores the folder of compiled programs, which a run sets to its own."""
  import jax
  from jax.experimental.compilation_cache import compilation_cache
  before = jax.config.jax_compilation_cache_dir
  yield
  jax.config.update('jax_compilation_cache_dir', before)
  compilation_cache.reset_cache()


@pytest.fixture
def set_flags():
  """Sets a program's flags by name; several programs' tests may share the
  process, so that no command line is parsed. All are reset afterwards."""
  from absl import flags
  from absl.testing import flagsaver
  saved = flagsaver.save_flag_values()
  flags.FLAGS.mark_as_parsed()

  def set_values(**given):
    for name, value in given.items():
      flags.FLAGS[name].value = value

  yield set_values
  flagsaver.restore_flag_values(saved)


@pytest.fixture(scope='session')
def bucket_server():
  """An emulator of Google Cloud Storage; it has the bucket gs://lab."""
  from tests import buckets
  with buckets.Server() as server:
    yield server
