"""Whatever is written to a full or read-only disk fails by name."""

import errno
import os
import subprocess
import sys

import numpy as np
import pytest

from tepo_jax.job import exits
from tepo_jax.policy.huggingface import tensor_files
from tepo_jax.runtime import disk
from tests import runs

pytestmark = pytest.mark.long

_MOUNT = ('mount -t tmpfs -o size=1m none "$1" '
          '&& mkdir "$1/rollouts" "$1/report" '
          '&& touch "$1/metrics.jsonl" '
          '&& { [ "$2" = full ] || mount -o remount,ro "$1"; } '
          '&& exec "${@:3}"')

# Writes by every writer; prints the failure of each.
_WRITE = """
import pathlib, sys
from matplotlib import pyplot
import numpy as np
from tepo_jax.job import sample_file
from tepo_jax.policy import lora
from tepo_jax.policy.huggingface import adapters, tensor_files
from tepo_jax.rollout import dump
from tepo_jax.runtime import disk, files, lock, metrics
from tepo_jax.tools.report import drawing

here = pathlib.Path(sys.argv[1])
line = {name: 'x' for name in dump.FIELDS} | {
    'step': 1, 'cursor': 0, 'sample': 0, 'answers': ['x' * 9999], 'tokens': 1,
    'correct': True, 'truncated': False, 'trained': True, 'reward': 1.0,
    'prompt_ids': [1] * 9999, 'token_ids': [1], 'sampler_logp': [0.0]}
def report(out):
  with files.local_folder(out) as folder:
    (folder / 'report.html').write_text('x' * 9999)
drawn = pyplot.figure()
def card_of_adapters():
  adapters._write = lambda *_: None  # the card alone
  adapters.save(here / 'adapters', lora.Lora(1, 1.0, ()), {'layers': {}},
                'base', 'x' * 9999)
samples = sample_file.SampleFile(here, {'seed': 0})
samples._groups = {'s': {}}
writers = {
    'metrics.jsonl': lambda: metrics.Writer(here).write(
        1, {str(i): 0.0 for i in range(999)}),
    'step_000001.jsonl': lambda: dump.write(
        here / 'rollouts', 1, [line], 'jsonl'),
    'step_000001.parquet': lambda: dump.write(
        here / 'rollouts', 1, [line], 'parquet'),
    'model.safetensors': lambda: tensor_files.create(
        here, [('a', np.dtype('float32'), (9999,))])['a'].__setitem__(..., 1.0),
    'config.json': lambda: tensor_files.write_json(
        here / 'config.json', {'a': 'x' * 9999}),
    'samples.jsonl': lambda: samples.add([{'set': 's', 'id': 'x' * 9999}]),
    'results.json': lambda: files.replace_text(
        here / 'results.json', 'x' * 9999),
    'report': lambda: report(here / 'report'),
    'panel.png': lambda: drawing.save(drawn, here / 'report' / 'panel'),
    'run.lock': lock.FolderLock(here).acquire,
    '.adapters.partial': card_of_adapters}
try:
  with open(here / 'filler', 'wb', buffering=0) as file:
    while file.write(bytes(4096)):
      pass
except OSError:
  pass
for name, write in writers.items():
  try:
    write()
    print(name, 'was written')
  except Exception as error:
    print(name, repr(error) if disk.failure(error) is None
          else disk.failure(error))
"""

WRITERS = (
    'metrics.jsonl', 'rollouts/step_000001.jsonl',
    'rollouts/step_000001.parquet', 'model.safetensors', 'config.json',
    'samples.jsonl', 'results.json', 'report', 'report/panel.png', 'run.lock',
    '.adapters.partial')


@pytest.mark.parametrize('kind, said', [
    ('full', 'No space left on device (0 MB free)'),
    ('read-only', 'Read-only file system')])
def test_every_writer_names_its_file(tmp_path, kind, said):
  mount = ['unshare', '--mount', 'bash', '-c', _MOUNT, 'bash', tmp_path, kind]
  if subprocess.run([*mount, 'true'], capture_output=True).returncode:
    pytest.skip('no permission to mount a file system')
  done = subprocess.run(
      [*mount, sys.executable, '-c', _WRITE, tmp_path], capture_output=True,
      text=True, cwd=runs.ROOT, env=runs.environment())
  assert done.returncode == 0, done.stderr  # not ended by SIGBUS
  lines = done.stdout.splitlines()
  assert len(lines) == len(WRITERS)
  for line, name in zip(lines, WRITERS):
    where = f'{os.path.basename(name)} {tmp_path}/{name}'
    assert line.startswith(where) and line.endswith(f': {said}'), line


def test_the_space_of_an_export_is_taken_before_it_is_written(tmp_path):
  tensor_files.create(tmp_path, [('a', np.dtype('float32'), (9999,))])
  stat = (tmp_path / 'model.safetensors').stat()
  assert stat.st_blocks * 512 >= stat.st_size > 4 * 9999


def test_an_error_that_names_no_path_is_no_path_of_the_user():
  error = PermissionError(errno.EACCES, 'Permission denied', 'folder')
  assert exits.outcome(error) == (2, 'error: folder: Permission denied')
  error.filename = None
  assert exits.outcome(error) is None  # a traceback, which says where


@pytest.mark.parametrize('error, said', [
    (OSError(errno.EDQUOT, 'Disk quota exceeded', '/nowhere/a'),
     '/nowhere/a: Disk quota exceeded ('),
    (RuntimeError('RESOURCE_EXHAUSTED: x: ENOSPC'), 'RESOURCE_EXHAUSTED: x'),
    (RuntimeError('a\nDisk quota exceeded'), 'a Disk quota exceeded'),
    (RuntimeError('RESOURCE_EXHAUSTED: Out of memory'), None),
    (FileNotFoundError(errno.ENOENT, 'No such file', 'x'), None)])
def test_what_is_a_failure_of_the_disk(error, said):
  found = disk.failure(error)
  assert found is None if said is None else found.startswith(said)
