"""What an evaluation and a run's prompts take from the config and folders."""

import json
import subprocess
import sys

import pytest

from configs import tiny
from tepo_jax.data import embedded
from tepo_jax.job import run_folder
from tepo_jax.job import session
from tepo_jax.job import training
from tepo_jax.policy import transformer
from tepo_jax.policy.huggingface import families
from tepo_jax.runtime import lock as lock_lib
from tests import runs

# Reads the clock, and has an argument.
_TEMPLATE = ('{{ strftime_now("%d") }}{% if thinking %}Start{% endif %}'
             '{{ messages[0]["content"] }}')

# Its own process: its flags are also those of other programs.
_EVALUATE = """
import datetime, json, pathlib, sys, types
from absl import flags
from configs import tiny
from tepo_jax import errors, evaluate
from tepo_jax.job import evaluation, restore, results, run_folder, sample_file
from tepo_jax.job import session as session_lib
from tepo_jax.policy import transformer
from tepo_jax.policy.huggingface import weights
from tepo_jax.runtime import lock as lock_lib
from tepo_jax.runtime import mesh as mesh_lib

folder, data, out = map(pathlib.Path, sys.argv[1:])
flags.FLAGS.mark_as_parsed()

def make():
  config = tiny.get_config()
  config.model, config.eval.sets = str(folder), (str(data),)
  config.data.template_args = 'thinking=True'
  config.data.max_prompt_tokens = config.rollout.max_tokens = 32
  config.eval.max_tokens = 8
  return config

class Opened(Exception):
  pass

def open_folder(config, _):
  raise Opened(evaluate._identity(config, folder, None))

def identity(day, out=out):
  '''Of an evaluation that is started on a day.'''
  class Date(datetime.date):
    @classmethod
    def today(cls):
      return cls.fromisoformat(day)

  session_lib.datetime = types.SimpleNamespace(date=Date)
  try:
    evaluate.evaluate(make(), out)
  except Opened as found:
    return found.args[0]

session_lib.open_folder = open_folder
first = identity('2024-02-29')
assert first['data.date'] == '2024-02-29', first
assert first['data.template_args'] == 'thinking=True', first
out.mkdir()
(out / sample_file.IDENTITY).write_text(json.dumps(first))
assert identity('2024-03-01') == first

# The date of a run, of which there is no evaluation yet.
run, saved = out.parent / 'run', make()
saved.data.date, saved.data.system = '2024-02-28', ''
with lock_lib.FolderLock(run) as lock:
  run_folder.claim(saved, run, lock)
(run / 'checkpoints').mkdir()
flags.FLAGS.checkpoint = str(run)
restore.restore_params = lambda *_: (folder, {})
assert identity('2024-03-01', out.parent / 'other')['data.date'] == '2024-02-28'
(run / 'checkpoints').rmdir()
(run / 'checkpoints').touch()
try:
  raise AssertionError(identity('2024-03-01', out.parent / 'other'))
except errors.InputError as error:
  assert 'checkpoints is a file, not a folder' in str(error)

config = make()
config.data.date = first['data.date']
tokenizer = weights.load_tokenizer(folder)
model = transformer.ModelConfig(
    vocab_size=len(tokenizer), d_model=16, num_layers=1, num_heads=2,
    num_kv_heads=2, head_dim=8, d_ff=16, max_position=64)
with session_lib._open(config, mesh_lib.make(config.mesh), str(folder), model,
                       tokenizer, (tokenizer.eos_token_id,)) as session:
  item, _ = evaluation.prepare(session)  # the other is greedy
lines = [dict(id=prompt.problem.id, sample=k, completion='', correct=True,
              tokens=1, truncated=False)
         for prompt in item.prompts for k in range(item.samples)]
found = evaluate._results([item], types.SimpleNamespace(
    finish=lambda _: {item.name: lines}))
found = json.loads(json.dumps(found))  # results.json
assert found['sets'][item.name]['problems'] == 2, found
assert found['sets'][item.name]['too_long'] == 1, found
assert '2 of 3' in results.table(found)
"""


_MECHANISM = """
import json, pathlib, sys
from absl import flags
from configs import tiny
from tepo_jax import mechanism
from tepo_jax.job import session as session_lib

folder, out = map(pathlib.Path, sys.argv[1:])
flags.FLAGS['config'].value = tiny.get_config()
flags.FLAGS['config'].value.model = str(folder)
flags.FLAGS.out = str(out)
mechanism.cli.overridden = tuple
flags.FLAGS.mark_as_parsed()

class Opened(Exception):
  pass

def open_folder(config, _):
  raise Opened(config.data.date)

def date():
  flags.FLAGS['config'].value.data.date = None
  try:
    mechanism.main()
  except Opened as found:
    return found.args[0]

session_lib.open_folder = open_folder
assert date()
out.mkdir()
(out / 'mechanism.json').write_text(json.dumps(
    {'setup': {'config': {'data.date': '2024-02-29'}}}))
assert date() == '2024-02-29', date()
"""


@pytest.fixture(name='folder')
def _folder(tmp_path):
  embedded.build_tokenizer('arithmetic', tmp_path / 'model')
  path = tmp_path / 'model' / 'tokenizer_config.json'
  path.write_text(json.dumps(
      json.loads(path.read_text()) | {'chat_template': _TEMPLATE}))
  return path.parent


@pytest.mark.long
def test_an_evaluation_keeps_its_date_and_counts_long_prompts(folder, tmp_path):
  """Also the arguments of the chat template are part of its identity. That of a
  run takes the run's date, says what else differs in the prompts, and is
  refused if its checkpoints are a file."""
  (tmp_path / 'a.jsonl').write_text(''.join(json.dumps(
      {'problem': text, 'answer': '1'}) + '\n' for text in (
          'Start with 1.', '123456789 ' * 9, 'Start with 2.')))
  done = subprocess.run(
      [sys.executable, '-c', _EVALUATE, folder, tmp_path / 'a.jsonl',
       tmp_path / 'out'], capture_output=True, text=True, cwd=runs.ROOT,
      env=runs.environment())
  assert done.returncode == 0, done.stderr
  notes = [line for line in done.stderr.splitlines() if 'note' in line]
  assert set(notes) == {
      f'note: {tmp_path / "run"} was trained with data.system=\'\', and is '
      'evaluated with None; --config.data.system sets it'}


@pytest.mark.long
def test_a_measurement_of_gradients_resumes_with_its_date(folder, tmp_path):
  done = subprocess.run(
      [sys.executable, '-c', _MECHANISM, folder, tmp_path / 'out'],
      capture_output=True, text=True, cwd=runs.ROOT, env=runs.environment())
  assert done.returncode == 0, done.stderr


def test_a_run_resumes_with_the_date_and_arguments_in_its_config(
    folder, tmp_path, monkeypatch):
  config = tiny.get_config()
  config.model, config.data.date = str(folder), '2024-02-29'
  config.data.template_args = 'thinking=True'
  with lock_lib.FolderLock(tmp_path / 'run') as lock:
    run_folder.claim(config, tmp_path / 'run', lock)
  saved = run_folder.read_config(tmp_path / 'run')
  assert saved.data.template_args == 'thinking=True'
  monkeypatch.setattr(session, 'open_folder', lambda config, _: config)
  for workdir, is_kept in (('run', True), ('new', False)):
    config.data.date = None
    opened, _ = training._open(config, tmp_path / workdir, None)
    assert (opened.data.date == '2024-02-29') == is_kept
    assert opened.data.date


@pytest.mark.long
def test_show_prompts_shows_the_arguments_of_the_chat_template(folder):
  done = subprocess.run(
      runs.command('show_prompts', '--config=configs/tiny.py:tepo',
                   f'--config.model={folder}', '--count=1',
                   '--config.data.template_args=thinking=True',
                   '--config.data.limit=3', '--config.eval.period=0'),
      capture_output=True, text=True, cwd=runs.ROOT, env=runs.environment())
  assert done.returncode == 0, done.stderr
  first = done.stdout.splitlines()[0]
  assert first.endswith('; data.template_args=thinking=True')
  assert 'Start' in done.stdout.partition('reference answer')[2]


@pytest.mark.long
def test_show_prompts_refuses_a_prompt_that_the_embedding_lacks(folder):
  (folder / 'config.json').write_text(json.dumps(families.to_json(
      transformer.ModelConfig(
          vocab_size=3, d_model=16, num_layers=1, num_heads=2, num_kv_heads=2,
          head_dim=8, d_ff=16, max_position=64), 'float32', None)))
  done = subprocess.run(
      runs.command('show_prompts', '--config=configs/tiny.py:tepo',
                   f'--config.model={folder}', '--config.data.limit=3'),
      capture_output=True, text=True, cwd=runs.ROOT, env=runs.environment())
  assert done.returncode == 2, done.stderr
  assert done.stderr.count('\n') == 1
  assert 'but the embedding 3 rows; in arithmetic, the prompt of' in done.stderr
