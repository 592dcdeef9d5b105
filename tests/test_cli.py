"""cli: a program's command line and its error messages."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

pytestmark = pytest.mark.long

ROOT = pathlib.Path(__file__).resolve().parents[1]

_PROGRAM = '''"""Prints its config.

  python -m program --config=FILE --workdir=DIR
"""
import errno
import json
from absl import flags
from tepo_jax import cli
from tepo_jax import errors
from tepo_jax.job import run_folder
from tepo_jax.runtime import interrupts
from tepo_jax.runtime import lock

_CONFIG = cli.DEFINE_config()
_WORKDIR = flags.DEFINE_string('workdir', None, 'Where.', required=True)
_STEP = flags.DEFINE_integer('step', 3, 'Which step.')


def main():
  if _STEP.value == 25:
    print('not written')
    raise errors.InputError('step 25')
  if _STEP.value == 13:
    raise errors.InputError('step 13\\nis unlucky')
  if _STEP.value == 14:
    raise ZeroDivisionError
  if _STEP.value == 15:
    raise OSError(errno.ENOSPC, 'No space left on device', 'w/metrics.jsonl')
  if _STEP.value == 16:
    raise RuntimeError('RESOURCE_EXHAUSTED: Out of memory\\nallocating 9 bytes')
  if _STEP.value == 19:
    raise RuntimeError('RESOURCE_EXHAUSTED: Error writing "w/checkpoints/x": '
                       'No space left on device [OS error 28: ENOSPC]')
  if _STEP.value == 20:
    raise MemoryError
  if _STEP.value == 21:
    raise errors.InputError(
        'row \\x1b]0;mine\\x07 of \\x1b[31mred\\udc00\\n\\u202e')
  if _STEP.value == 24:
    open('.').close()
  if _STEP.value == 17:
    interrupts.happened = lambda: True  # a library swallowed the exception
  if _STEP.value == 18:
    print('long\\n' * 100_000)
  if _STEP.value == 22:
    raise RuntimeError("Unable to initialize backend 'tpu': open(/dev/vfio/0): "
                       'Device or resource busy')
  if _STEP.value == 23:
    raise errors.Interrupted('stopped; the same command resumes')
  with lock.FolderLock(_WORKDIR.value) as lock_:
    run_folder.claim(_CONFIG.value, _WORKDIR.value, lock_)
  print(json.dumps(_CONFIG.value.to_dict()))


if __name__ == '__main__':
  cli.run(main)
'''

_CONFIG = '''
import ml_collections
from ml_collections import config_dict


def get_config(method='tepo'):
  if method not in ('grpo', 'tepo'):
    raise ValueError(f'unknown method {method!r}; one of: grpo, tepo')
  c = ml_collections.ConfigDict()
  c.seed = 0
  c.steps = 3
  c.name = method
  c.model = config_dict.placeholder(str)
  c.limit = config_dict.placeholder(int)
  c.optimizer = ml_collections.ConfigDict()
  c.optimizer.learning_rate = 1e-3
  c.pretrain = ml_collections.ConfigDict()
  c.pretrain.learning_rate = 1e-2
  c.compute = ml_collections.ConfigDict()
  c.compute.remat = False
  c.eval = ml_collections.ConfigDict()
  c.eval.sets = ('a', 'b')
  return c
'''


@pytest.fixture(name='run')
def _run(tmp_path):
  (tmp_path / 'program.py').write_text(_PROGRAM)
  (tmp_path / 'config.py').write_text(_CONFIG)

  def run(*arguments, module='program'):
    return subprocess.run(
        [sys.executable, '-m', module, *arguments], cwd=tmp_path,
        capture_output=True, text=True, timeout=60,
        env=os.environ | {'PYTHONPATH': str(ROOT)})

  run.path = tmp_path
  return run


def test_overrides_are_typed_and_saved(run):
  done = run('--config=config.py:grpo', '--workdir=w', '--config.seed=2',
             '--config.optimizer.learning_rate=1', '--config.model=/m',
             '--config.compute.remat=true', "--config.eval.sets=('c',)",
             '--config.limit=7')
  assert done.returncode == 0 and not done.stderr
  assert json.loads(done.stdout) == {
      'seed': 2, 'steps': 3, 'name': 'grpo', 'model': '/m', 'limit': 7,
      'optimizer': {'learning_rate': 1.0},
      'pretrain': {'learning_rate': 0.01}, 'compute': {'remat': True},
      'eval': {'sets': ['c']}}
  saved = run.path / 'w' / 'config.json'
  assert json.loads(saved.read_text()) == json.loads(done.stdout)
  assert [f.name for f in saved.parent.iterdir()] == ['config.json']


@pytest.mark.parametrize('arguments, said', [
    ((), '--workdir is required'),
    (('--workdir=w',), '--config is required'),
    (('--config=config.py',), '--workdir is required'),
    (('--config', 'config.py', '--workdir=w', '--config.sed=1'),
     'unknown field --config.sed; did you mean --config.seed?'),
    (('--config=config.py', '--workdir=w', '--config.actor.optim.lr=1'),
     'unknown field --config.actor.optim.lr; did you mean '
     '--config.optimizer.learning_rate?'),
    (('--config=config.py', '--workdir=w', '--config.warmup_ratio=1'),
     'unknown field --config.warmup_ratio; the warm-up is a number of'),
    (('--config=config.py', '--workdir=w', '--config.learning_rate=1'),
     'did you mean --config.optimizer.learning_rate or '
     '--config.pretrain.learning_rate?'),
    (('--config=config.py', '--workdir=w', '--config.optimizer.larning_rate=1'),
     'did you mean --config.optimizer.learning_rate?'),
    (('--config=config.py', '--workdir=w', '--config.eval=1'),
     '--config.eval is a section, not a field; its fields: eval.sets'),
    (('--config=config.py', '--workdir=w', '--config.seed=1.5'),
     '--config.seed=1.5: expected an integer'),
    (('--config=config.py', '--workdir=w', '--config.limit=all'),
     '--config.limit=all: expected an integer'),
    (('--config=config.py', '--workdir=w', '--config.compute.remat=maybe'),
     'expected true or false'),
    (('--config=config.py', '--workdir=w',
      '--config.optimizer.learning_rate=high'), 'expected a number'),
    (('--config=config.py:tpeo', '--workdir=w'),
     "unknown method 'tpeo'; one of: grpo, tepo"),
    (('--config=confg.py', '--workdir=w'),
     'no file confg.py; did you mean ./config.py?'),
    (('--config=broken.py', '--workdir=w'), 'line 3: ZeroDivisionError'),
    (('--config=syntax.py', '--workdir=w'), 'SyntaxError'),
    (('--config=empty.py', '--workdir=w'), 'get_config'),
    (('--config=config.py', '--workdir=w', '--stp=1'),
     'unknown flag --stp; did you mean --step?'),
    (('--config=config.py', '--workdir=w', 'more'),
     "unexpected argument 'more'"),
    (('--config=config.py', '--workdir=w', '--step=x'), '--step=x: invalid'),
    (('--config=config.py', '--workdir'), 'Missing value for flag --workdir'),
    (('--config.seed=1', '--config=config.py', '--workdir=w'),
     'before a value for --config'),
    (('--config=config.py', '--workdir=program.py'), 'File exists'),
    (('--config=config.py', '--workdir=w', '--step=24'), '.: Is a directory'),
    (('--config=config.py', '--workdir=w', '--step=13'),
     'error: step 13 is unlucky'),
])
def test_bad_input_is_one_line_and_status_2(run, programs, arguments, said):
  (run.path / 'broken.py').write_text('def get_config():\n  x = 0\n  1 / x\n')
  (run.path / 'syntax.py').write_text('def get_config(:\n')
  (run.path / 'empty.py').write_text('')
  done = programs.run('program', *arguments, folder=run.path)
  assert done.returncode == 2, done.stderr
  assert said in done.stderr
  assert done.stderr.startswith('program: error: ')
  assert done.stderr.count('\n') == 1
  assert not done.stdout and not (run.path / 'w').exists()


def test_control_characters_reach_no_terminal(run):
  done = run('--config=config.py', '--workdir=w', '--step=21')
  assert done.stderr == ('program: error: row \\x1b]0;mine\\x07 of \\x1b[31m'
                         'red\\udc00 \\u202e\n')


def test_a_bug_keeps_its_traceback(run):
  done = run('--config=config.py', '--workdir=w', '--step=14')
  assert done.returncode == 1
  assert 'ZeroDivisionError' in done.stderr


def test_a_limit_of_the_address_space_is_one_line(tmp_path):
  done = subprocess.run(
      ['bash', '-c', 'ulimit -v 2000000; exec "$@"', 'bash', sys.executable,
       '-m', 'tepo_jax.train', '--config=configs/tiny.py:tepo',
       f'--workdir={tmp_path}/run'],
      cwd=ROOT, capture_output=True, text=True, check=False)
  assert (done.returncode, done.stderr) == (
      2, 'tepo_jax.train: error: this process may have 2.0 GB of address space '
      '(ulimit -v); jax reserves 3 GB and more, which is more than it uses\n')


@pytest.mark.parametrize('step, said', [
    (15, 'w/metrics.jsonl: No space left on device'),
    (16, 'out of device memory: RESOURCE_EXHAUSTED: Out of memory allocating'),
    (19, 'RESOURCE_EXHAUSTED: Error writing "w/checkpoints/x": No space left'),
    (20, 'out of host memory; a limit of the address space (ulimit -v)')])
def test_errors_of_the_machine_are_one_line(run, programs, step, said):
  done = programs.run('program', '--config=config.py', '--workdir=w',
                      f'--step={step}', folder=run.path)
  assert done.returncode == 1
  [line] = done.stderr.splitlines()
  assert line.startswith(f'program: error: {said}')
  assert ('rollout.slots' in line) == (step == 16)
  assert line.endswith(' MB free)') == (step in (15, 19))


def test_a_swallowed_interrupt_ends_with_status_130(run):
  done = run('--config=config.py', '--workdir=w', '--step=17')
  assert done.returncode == 130
  assert done.stderr == 'program: interrupted\n'


@pytest.mark.parametrize('step, status, said', [
    (22, 3, "program: error: Unable to initialize backend 'tpu': "
     'open(/dev/vfio/0): Device or resource busy\n'),
    (23, 42, 'program: stopped; the same command resumes\n')])
def test_what_a_restart_may_help_has_its_own_status(run, step, status, said):
  done = run('--config=config.py', '--workdir=w', f'--step={step}')
  assert done.returncode == status and done.stderr.endswith(said)
  assert done.stderr.count('\n') == 1



def test_a_reader_that_goes_away_ends_the_program_quietly(run):
  done = subprocess.run(
      f'set -o pipefail; {sys.executable} -m program --config=config.py '
      '--workdir=w --step=18 | head -1', shell=True, executable='/bin/bash',
      cwd=run.path, capture_output=True, text=True, timeout=60,
      env=os.environ | {'PYTHONPATH': str(ROOT)})
  assert (done.returncode, done.stdout, done.stderr) == (141, 'long\n', '')


def test_output_that_is_closed_is_no_error(run):
  done = subprocess.run(
      f'{sys.executable} -m program --config=config.py --workdir=w --step=18 '
      '>&-', shell=True, cwd=run.path, stderr=subprocess.PIPE, text=True,
      timeout=60, env=os.environ | {'PYTHONPATH': str(ROOT)})
  assert (done.returncode, done.stderr) == (0, '')


@pytest.mark.parametrize('argument, is_unbuffered', [
    ('--help', ''), ('--step=18', ''), ('--step=25', ''), ('--step=25', '1')])
def test_a_full_disk_below_stdout_is_one_line(run, argument, is_unbuffered):
  with open('/dev/full', 'w', encoding='utf-8') as full:
    done = subprocess.run(
        [sys.executable, '-m', 'program', '--config=config.py', '--workdir=w',
         argument], cwd=run.path, stdout=full, stderr=subprocess.PIPE,
        text=True, timeout=60, env=os.environ | {
            'PYTHONPATH': str(ROOT), 'PYTHONUNBUFFERED': is_unbuffered})
  fails_first = argument == '--step=25' and not is_unbuffered
  said = 'step 25' if fails_first else 'No space left on device'
  assert done.returncode == (2 if fails_first else 1)
  assert done.stderr.count('\n') == 1
  assert done.stderr.startswith(f'program: error: {said}')


def test_only_programs_that_join_a_job_run_in_one(run, monkeypatch):
  monkeypatch.setenv('TEPO_MULTIHOST', '1')
  done = run('--config=config.py', '--workdir=w')
  assert done.returncode == 2 and done.stderr.count('\n') == 1
  assert 'TEPO_MULTIHOST=1: this program runs as one process' in done.stderr
  assert not (run.path / 'w').exists()
  (run.path / 'program.py').write_text(
      _PROGRAM.replace('cli.run(main)', 'cli.run(main, joins_job=True)'))
  assert run('--config=config.py', '--workdir=w').returncode == 0


_BARS = """
from tepo_jax import cli
import datasets, huggingface_hub, transformers
cli.quiet()
assert datasets.utils.are_progress_bars_disabled()
assert huggingface_hub.utils.are_progress_bars_disabled()
assert not transformers.utils.logging.is_progress_bar_enabled()
"""


def test_libraries_show_no_progress_bars():
  done = subprocess.run([sys.executable, '-c', _BARS], check=False, text=True,
                        capture_output=True,
                        env=os.environ | {'PYTHONPATH': str(ROOT)})
  assert (done.returncode, done.stderr) == (0, '')


_LOGS = """
import logging
from tepo_jax import cli
cli.quiet()
logging.warning('a library says, which calls basicConfig')
logging.getLogger('tepo_jax.data').info('3 problems')
"""


def test_our_log_lines_appear_once():
  done = subprocess.run([sys.executable, '-c', _LOGS], check=False, text=True,
                        capture_output=True,
                        env=os.environ | {'PYTHONPATH': str(ROOT)})
  assert (done.returncode, done.stderr) == (0, '3 problems\n')


def test_help_is_the_docstring_the_program_s_flags_and_the_fields(run):
  done = run('--help')
  assert done.returncode == 0 and not done.stderr
  assert done.stdout.startswith('Prints its config.')
  for own in ('--config: ', '--workdir: ', '--step: ', '(default: 3)'):
    assert own in done.stdout
  assert 'verbosity' not in done.stdout
  assert '\n  rollout.samples=8: ★ G, the group size' in done.stdout


def test_a_misspelt_flag_of_train_is_refused_before_jax_is_imported():
  done = subprocess.run(
      [sys.executable, '-X', 'importtime', '-m', 'tepo_jax.train', '--stps=3'],
      cwd=ROOT, check=False, text=True, capture_output=True)
  assert done.returncode == 2
  assert 'error: unknown flag --stps' in done.stderr
  assert not re.search(r'\| +(jax|transformers)$', done.stderr, re.M)


def test_quiet_programs_do_not_import_jax(run):
  # So that --help and a misspelt flag answer at once.
  code = 'import sys, tepo_jax.cli; sys.exit("jax" in sys.modules)'
  assert subprocess.run([sys.executable, '-c', code], check=False,
                        env=os.environ | {'PYTHONPATH': str(ROOT)}
                        ).returncode == 0
