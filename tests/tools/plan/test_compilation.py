"""Programs are compiled once, and the compiler is the one that plans know."""

import dataclasses
from importlib import metadata
import time

import jax
import jax.numpy as jnp
import pytest

from tepo_jax import errors
from tepo_jax.tools.plan import chips
from tepo_jax.tools.plan import compilation

pytest.importorskip('libtpu')
pytestmark = pytest.mark.usefixtures('optimized')


@pytest.fixture(name='slice_', scope='module')
def _slice():
  return chips.topology('v5e:1x1')


def _lowered(slice_, function, options=None):
  x = jax.ShapeDtypeStruct(
      (256, 256), jnp.bfloat16,
      sharding=jax.sharding.SingleDeviceSharding(slice_.devices[0]))
  return jax.jit(function, compiler_options=options).lower(x)


def _compiled(slice_, function, options=None):
  return compilation.compiled(
      'product', _lowered(slice_, function, options), slice_)


def test_a_program_is_compiled_once(slice_, monkeypatch, tmp_path, capfd):
  monkeypatch.setattr(compilation, 'folder', lambda: tmp_path)
  first = _compiled(slice_, lambda x: x @ x)
  assert 'product: compiled in' in capfd.readouterr().err
  monkeypatch.setattr(compilation, '_compile', lambda *_: pytest.fail('again'))
  assert _compiled(slice_, lambda x: x @ x) == first
  assert 'product: compiled before' in capfd.readouterr().err
  assert first.memory.arguments == 2 * 256 ** 2 and 'convolution' in first.text


@pytest.fixture(name='kept')
def _kept(slice_, monkeypatch, tmp_path):
  """Counts the files after a program of these changes was asked for."""
  monkeypatch.setattr(compilation, 'folder', lambda: tmp_path)
  monkeypatch.setattr(compilation, '_compile',
                      lambda *_: compilation.Compiled())

  def count(function=lambda x: x @ x, options=None, **changes):
    _compiled(dataclasses.replace(slice_, **changes), function, options)
    return len(list(tmp_path.iterdir()))

  return count


def test_another_program_option_or_target_is_compiled(kept):
  assert kept() == kept() == 1
  assert kept(lambda x: x + x) == 2
  assert kept(options={'xla_allow_excess_precision': False}) == 3
  assert kept(target='clock_rate_ghz: 2') == 4


def test_another_environment_is_compiled(kept, monkeypatch):
  assert kept() == 1
  for number, name in enumerate(('XLA_FLAGS', 'LIBTPU_INIT_ARGS'), 2):
    monkeypatch.setenv(name, '--xla_dump_to=/x')
    assert kept() == number


def test_only_the_platform_s_compiler_counts(kept, monkeypatch):
  """Planning for GPUs puts their compiler on the path."""
  versions = {}
  monkeypatch.setattr(metadata, 'version', lambda name: versions.get(name, '1'))
  assert kept() == 1
  versions['jax-cuda12-pjrt'] = '2'
  assert kept() == 1
  versions['libtpu'] = '2'
  assert kept() == 2


def test_a_damaged_file_is_compiled_again(slice_, monkeypatch, tmp_path):
  monkeypatch.setattr(compilation, 'folder', lambda: tmp_path)
  _compiled(slice_, lambda x: x @ x)
  file, = tmp_path.iterdir()
  file.write_bytes(file.read_bytes()[:-9])
  assert _compiled(slice_, lambda x: x @ x).memory.arguments == 2 * 256 ** 2


def test_a_long_compilation_says_that_it_goes_on(monkeypatch, capfd):
  monkeypatch.setattr(compilation, '_EVERY', 0.01)
  end = time.monotonic() + 10
  with compilation._reporting('update'):
    while 'update: compiling, 0 s' not in capfd.readouterr().err:
      assert time.monotonic() < end


def test_another_libtpu_is_refused(monkeypatch):
  monkeypatch.setattr(metadata, 'version', lambda _: '0.0.52')
  with pytest.raises(errors.InputError, match='libtpu 0.0.52 is installed'):
    chips.topology('v5e:1x1')


def test_the_version_is_the_one_that_is_installed():
  assert metadata.version('libtpu') == chips.LIBTPU
