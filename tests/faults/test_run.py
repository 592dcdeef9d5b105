"""A run whose environment fails: a warning, or a clear end.

The tests share one run, which each resumes.
"""

import os
import shutil
import subprocess
import sys
import types

import pytest
from safetensors import numpy as safetensors_numpy

from tests import runs

pytestmark = pytest.mark.long

SECRET = 'do-not-tell-4711'

# Replaces the package: writes its arguments to a file, then fails.
_WANDB = """
import json, pathlib
def init(dir, config, **given):
  (pathlib.Path(dir) / 'wandb.json').write_text(json.dumps([config, given]))
  return Run()
class Run:
  def log(self, *_, **__):
    raise ConnectionError('no server')
  finish = log
"""


def train(place, steps, start=('-m', 'tepo_jax.train')):
  """Starts or resumes the run of a place, in its folder, with its home."""
  environment = runs.environment() | {
      'HOME': str(place.home), 'TMPDIR': str(place.temporary),
      'PYTHONPATH': f'{runs.ROOT}:{place.packages}',
      'PYTHONDONTWRITEBYTECODE': '1', 'WANDB_API_KEY': SECRET,
      'HF_TOKEN': SECRET}
  for name in ('JAX_COMPILATION_CACHE_DIR', 'XDG_CACHE_HOME', 'HF_HOME'):
    environment.pop(name, None)
  arguments = [
      argument.replace('configs/', f'{runs.ROOT}/configs/')
      for argument in runs.train_arguments(place.model, place.workdir)
      if not argument.startswith('--config.eval.')]
  return subprocess.run(
      [sys.executable, *start, *arguments, '--config.eval.period=0',
       f'--config.steps={steps}', '--config.wandb_project=mine'],
      cwd=place.here, env=environment, capture_output=True, text=True)


def recorded(place):
  return [record['step'] for record in runs.records(place.workdir)]


@pytest.fixture(name='place', scope='module')
def _place(tmp_path_factory):
  """The folders of a run that has made a step, and its output."""
  root = tmp_path_factory.mktemp('place')
  place = types.SimpleNamespace(**{
      name: root / name for name in (
          'home', 'temporary', 'here', 'packages', 'model', 'runs')})
  for folder in (place.home, place.temporary, place.here, place.packages):
    folder.mkdir()
  (place.packages / 'wandb.py').write_text(_WANDB)
  place.workdir = place.runs / 'run'
  runs.make_model(place.model)
  place.done = train(place, 1)
  assert place.done.returncode == 0, place.done.stderr
  assert recorded(place) == [1]
  return place


def test_files_are_written_in_the_workdir_only(place):
  assert [path.name for path in (place.home / '.cache').iterdir()] == [
      'tepo_jax']
  for folder in (place.temporary, place.here):
    assert not list(folder.iterdir())
  assert {path.name for path in place.packages.iterdir()} == {'wandb.py'}
  assert {path.name for path in place.runs.iterdir()} == {'run'}


def test_secrets_are_written_nowhere(place):
  assert SECRET not in place.done.stdout + place.done.stderr
  files = [path for path in place.runs.rglob('*') if path.is_file()]
  assert place.workdir / 'wandb.json' in files
  assert [path for path in files if SECRET.encode() in path.read_bytes()] == []


def test_a_dead_wandb_costs_a_warning(place):
  assert [line for line in place.done.stderr.splitlines()
          if 'warning' in line] == [
              'warning: Weights & Biases disabled: no server']


def test_a_dead_tensorboard_costs_a_warning(place):
  shutil.rmtree(place.workdir / 'tensorboard')
  (place.workdir / 'tensorboard').write_text('in the way')
  done = train(place, 2)
  assert done.returncode == 0, done.stderr
  assert done.stderr.count('warning: TensorBoard events disabled: ') == 1
  assert recorded(place) == [1, 2]


def test_a_checkpoint_of_another_config_is_refused(place):
  folder = place.workdir.parent / 'other'
  shutil.copytree(place.workdir, folder)
  config = folder / 'config.json'
  config.write_text(config.read_text().replace('"seed": 0', '"seed": 1'))
  other = types.SimpleNamespace(**vars(place) | {'workdir': folder})
  before = runs.records(folder)
  start = ('-c', 'import runpy, sys\nsys.argv.append("--config.seed=1")\n'
           'runpy.run_module("tepo_jax.train", run_name="__main__", '
           'alter_sys=True)')
  done = train(other, 3, start)
  assert done.returncode == 2
  assert f'{folder}/checkpoints' in done.stderr.splitlines()[-1]
  assert 'another config' in done.stderr.splitlines()[-1]
  assert runs.records(folder) == before


_FULL = """
import runpy
from jax import numpy as jnp
from tepo_jax.job import learner
learner.Learner.make_update = lambda *_: jnp.zeros(1 << 50)
runpy.run_module('tepo_jax.train', run_name='__main__', alter_sys=True)
"""


def test_full_device_memory_is_reported_with_its_numbers(place):
  """XLA's own error, for an array of 4 PB."""
  done = train(place, 4, ('-c', _FULL))
  assert done.returncode == 1 and 'Traceback' not in done.stderr
  line = done.stderr.splitlines()[-1]
  assert 'error: out of device memory: RESOURCE_EXHAUSTED: Out of mem' in line
  size = 4e-9 * sum(array.size for array in safetensors_numpy.load_file(
      place.model / 'model.safetensors').values())  # GB in fp32
  for said in (f'gradient {size:.4g} GB', f'for decoding {size:.4g} GB',
               'a device holds weights and moments ', 'up to 16 slots',
               'config.rollout.slots', 'config.train.microbatch_tokens',
               'config.train.chunk_size', 'config.compute.remat'):
    assert said in line


def test_files_are_private_under_a_private_umask(place):
  before = os.umask(0o077)
  try:
    private = types.SimpleNamespace(**vars(place) | {
        'workdir': place.here.parent / 'private' / 'run'})
    done = train(private, 2)
  finally:
    os.umask(before)
  assert done.returncode == 0, done.stderr
  paths = [path for path in private.workdir.rglob('*')]
  assert len(paths) > 20
  assert [path for path in paths if path.stat().st_mode & 0o077] == []


# Runs a command with a workdir on a file system of 1 MB.
_SMALL = 'mount -t tmpfs -o size=1m none "$1" && shift && exec "$@"'


def _on_a_small_file_system(folder, *command, **options):
  return subprocess.run(
      ['unshare', '--mount', 'bash', '-c', _SMALL, 'bash', folder, *command],
      capture_output=True, text=True, **options)


def test_a_full_file_system_gives_our_lines_alone(place):
  """The first save does not fit, and neither does any later one."""
  full = place.here.parent / 'full'
  full.mkdir()
  if _on_a_small_file_system(full, 'true').returncode:
    pytest.skip('no permission to mount a file system')
  command = runs.command(
      'train', *runs.train_arguments(place.model, full / 'run'),
      f'--config.compute.cache={place.here.parent / "cache"}')
  done = _on_a_small_file_system(
      full, *command, cwd=runs.ROOT, env=runs.environment())
  lines = done.stderr.splitlines()
  assert done.returncode == 1, done.stderr
  strange = [line for line in lines if not line.startswith((
      'warning: checkpoint ', 'warning: TensorBoard ', 'step ', 'compil',
      'exact KL: ',
      'tepo_jax.train: error: ')) and not line.endswith(' ...')]
  assert not strange
  assert any('No space left on device' in line for line in lines)
  assert 'Event loop' not in done.stderr and 'Traceback' not in done.stderr
