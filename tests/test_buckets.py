"""The programs on gs:// paths, against an emulator of Google Cloud Storage."""

import csv
import json
import signal
import subprocess
import sys
import time

import pyarrow
from pyarrow import parquet
import pytest

from tepo_jax import errors
from tepo_jax.data import datasets
from tepo_jax.job import exits
from tepo_jax.job import run_folder
from tepo_jax.runtime import buckets
from tepo_jax.runtime import checkpoint
from tepo_jax.runtime import files
from tests import fork_server
from tests import runs

TINY = ('--config=configs/tiny.py:tepo', *runs.SMALL, '--config.steps=2',
        '--config.checkpoint.keep=1')


@pytest.fixture(scope='module')
def programs(bucket_server):
  with fork_server.Server() as server:
    yield server


@pytest.fixture(scope='module')
def model(programs, tmp_path_factory):
  out = tmp_path_factory.mktemp('model') / 'base'
  _ended(programs.run('pretrain', TINY[0], f'--out={out}', *runs.UNTRAINED))
  return out


def _ended(done, status=0):
  assert done.returncode == status, done.stderr[-3000:]
  return done


def _lines(workdir):
  """What a run has recorded: metrics without times, rollouts."""
  rollouts = sorted((workdir / 'rollouts').iterdir())
  return (list(map(runs.untimed, runs.records(workdir))),
          [(file.name, file.read_bytes()) for file in rollouts])


@pytest.mark.long
def test_a_run_in_a_bucket(programs, bucket_server, model, tmp_path):
  """Trained, killed while it saved; resumed, exported and evaluated while a
  twentieth of the requests fail: all as on a disk."""
  disk, bucket = tmp_path / 'run', files.path('gs://lab/story')
  arguments = (*TINY, f'--config.model={model}')
  _ended(programs.run('train', *arguments, f'--workdir={disk}'))

  bucket_server.held = 'story/checkpoints/2/'
  bucket_server.waiting = False
  killed = subprocess.Popen(
      runs.command('train', *arguments, f'--workdir={bucket}'), cwd=runs.ROOT,
      env=runs.environment(), stdout=subprocess.DEVNULL,
      stderr=subprocess.DEVNULL)
  deadline = time.monotonic() + 300
  while not bucket_server.waiting:
    assert killed.poll() is None and time.monotonic() < deadline
    time.sleep(0.05)
  second = _ended(programs.run('train', *arguments, f'--workdir={bucket}'), 2)
  assert f'in use by process {killed.pid} on host' in second.stderr
  killed.send_signal(signal.SIGKILL)
  killed.wait()
  bucket_server.held = ''
  assert checkpoint.steps(bucket / 'checkpoints') == [1]

  bucket_server.failing, bucket_server.stalling = 0.05, 0.01
  try:
    resumed = _ended(programs.run('train', *arguments, f'--workdir={bucket}'))
    assert f'continuing {bucket} after step 1\n' in resumed.stdout
    assert 'warning' not in resumed.stderr
    _ended(programs.run('export', f'--workdir={bucket}', '--out=gs://lab/hf'))
    _ended(programs.run('evaluate', *TINY, '--checkpoint=gs://lab/hf',
                        '--out=gs://lab/evaluation'))
  finally:
    bucket_server.failing = bucket_server.stalling = 0.0
  _ended(programs.run('report', '--runs=gs://lab/st*',
                      '--out=gs://lab/report'))

  assert _lines(bucket) == _lines(disk)
  assert sorted(entry.name for entry in bucket.iterdir()) == [
      'checkpoints', 'config.json', 'environment.jsonl', 'metrics.jsonl',
      'rollouts', 'tensorboard']
  assert checkpoint.steps(bucket / 'checkpoints') == [2]
  assert len(list((bucket / 'checkpoints').iterdir())) == 1
  _ended(programs.run('export', f'--workdir={disk}',
                      f'--out={tmp_path / "hf"}'))
  assert {file.name: file.read_bytes() for file in (
      tmp_path / 'hf').iterdir()} == {
          file.name: file.read_bytes() for file in
          files.path('gs://lab/hf').iterdir()}
  _ended(programs.run('evaluate', *TINY, f'--checkpoint={disk}',
                      f'--out={tmp_path / "evaluation"}'))
  for name in ('samples.jsonl', 'results.json'):
    assert files.path(f'gs://lab/evaluation/{name}').read_bytes() == (
        tmp_path / 'evaluation' / name).read_bytes()
  page = files.path('gs://lab/report/report.html').read_text()
  assert '<a href="../story">' in page
  assert files.path('gs://lab/report/entropy.png').exists()


REFUSED = {
    'train': ('--workdir={}/run', '--config.model={model}'),
    'train model': ('--workdir={tmp}/run', '--config.model={}/model'),
    'train data': ('--workdir={tmp}/run', '--config.model={model}',
                   '--config.data.name={}/train.jsonl'),
    'evaluate': ('--checkpoint={model}', '--out={}/evaluation'),
    'evaluate checkpoint': ('--checkpoint={}/run', '--out={tmp}/out'),
    'pretrain': ('--out={}/model', *runs.UNTRAINED),
    'export': ('--workdir={}/run', '--out={tmp}/out'),
    'report': ('--runs={}/run', '--out={tmp}/out')}


@pytest.mark.long_after_first
@pytest.mark.parametrize('case', REFUSED)
@pytest.mark.parametrize('bucket', ['gs://none', 'gs://closed'])
def test_a_bucket_that_cannot_be_used_is_one_line(
    programs, model, tmp_path, bucket, case):
  program = case.split()[0]
  config = () if program in ('export', 'report') else TINY
  done = _ended(programs.run(program, *config, *(
      argument.format(bucket, model=model, tmp=tmp_path)
      for argument in REFUSED[case])), 2)
  lines = [line for line in done.stderr.splitlines()
           if not line.endswith(' ...') and line]
  assert len(lines) == 1, done.stderr
  assert lines[0].startswith(f'tepo_jax.{program}: error: ')
  assert bucket in lines[0]
  if bucket == 'gs://closed':
    assert 'no permission' in lines[0]


ROWS = [{'problem': f'{i} + {i}', 'answer': str(2 * i)} for i in range(3)]


def _write(folder, form):
  if form == '.parquet':
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), folder / 'a.parquet')
  elif form == '.csv':
    with (folder / 'a.csv').open('w', newline='') as file:
      writer = csv.DictWriter(file, ('problem', 'answer'))
      writer.writeheader()
      writer.writerows(ROWS)
  elif form == '.json':
    (folder / 'a.json').write_text(json.dumps(ROWS))
  else:
    (folder / 'a.jsonl').write_text(''.join(
        json.dumps(row) + '\n' for row in ROWS))


@pytest.mark.parametrize('form', [
    '.jsonl', '.json', '.csv', '.parquet', 'folder'])
def test_problems_in_a_bucket(bucket_server, tmp_path, form, monkeypatch):
  monkeypatch.setenv('HF_HOME', str(tmp_path / 'cache'))
  folder = files.path(f'gs://lab/{tmp_path.name}')
  with files.local_folder(folder) as local:
    _write(local, form)
  place = folder if form == 'folder' else folder / f'a{form}'
  found = datasets.load(str(place))
  assert [(p.problem, p.answers) for p in found] == [
      (row['problem'], (row['answer'],)) for row in ROWS]


def test_the_sizes_of_files(bucket_server, tmp_path):
  for folder in (tmp_path / 'a', files.path(f'gs://lab/{tmp_path.name}')):
    folder.mkdir()
    (folder / 'one').write_text('1')
    (folder / 'three').write_text('333')
    assert files.sizes(folder) == {'one': 1, 'three': 3}


def test_an_error_that_a_silent_bucket_caused_keeps_its_status(
    bucket_server, monkeypatch):
  def silent(*_, **__):
    raise buckets.SilentBucketError('gs://lab/x: no answer')

  monkeypatch.setattr(files, 'reserve', silent)
  with pytest.raises(errors.InputError, match='--out=gs://lab/x: ') as error:
    run_folder.check_out('gs://lab/x')
  assert exits.outcome(error.value)[0] == errors.LOST


def test_a_bad_row_is_named_by_its_object(bucket_server):
  path = files.path('gs://lab/bad.jsonl')
  path.write_text('{"problem": "1 + 1", "answer": "2"}\nnonsense\n')
  with pytest.raises(errors.InputError, match='^gs://lab/bad.jsonl: row 2: '):
    datasets.load(str(path))


_COMPILE = """
import sys, jax
from configs import tiny
from tepo_jax.job import session
config = tiny.get_config()
config.compute.cache = sys.argv[1]
session.cache_compilations(config)
jax.config.update('jax_persistent_cache_min_compile_time_secs', 0)
events = []
jax.monitoring.register_event_listener(lambda name, **_: events.append(name))
jax.jit(lambda x: x * 3)(1.0).block_until_ready()
print(events.count('/jax/compilation_cache/cache_hits'))
"""


def test_compiled_programs_are_kept_in_a_bucket(bucket_server):
  hits = [int(subprocess.run(
      [sys.executable, '-c', _COMPILE, 'gs://lab/compiled'], check=True,
      capture_output=True, text=True, cwd=runs.ROOT,
      # With a bound, JAX would make a local folder of this name for its lock.
      env=runs.environment() | {'JAX_COMPILATION_CACHE_MAX_SIZE': '-1'}
      ).stdout) for _ in range(2)]
  assert hits[0] == 0 < hits[1]
