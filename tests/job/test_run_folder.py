"""run_folder: claims, refusals, saved configs."""

import json
import math
import os

import ml_collections
import pytest

from configs import tiny
from tepo_jax import errors
from tepo_jax.job import run_folder
from tepo_jax.runtime import lock as lock_lib


def _config(**changes):
  config = ml_collections.ConfigDict({
      'seed': 0, 'steps': 3, 'eval': {'sets': ('a', 'b'), 'period': 2},
      'rollout': {'slots': 16}})
  config.update_from_flattened_dict(changes)
  return config


def _claim(config, folder):
  with lock_lib.FolderLock(folder) as lock:
    run_folder.claim(config, folder, lock)


def _trained(folder):
  """Makes the folder that of a run with a finished step."""
  (folder / 'metrics.jsonl').write_text('{"step": 0}\n{"step": 1}\n')


def _contents(folder):
  return {p.name: p.read_bytes() for p in folder.iterdir()}


def test_workdir_of_another_config_is_left_alone(tmp_path):
  _claim(_config(), tmp_path / 'run')
  _trained(tmp_path / 'run')
  before = _contents(tmp_path / 'run')
  other = _config(**{'seed': 1, 'eval.sets': ('a',)})
  with pytest.raises(errors.InputError) as error:
    _claim(other, tmp_path / 'run')
  assert "eval.sets (was ('a', 'b'), now ('a',))" in str(error.value)
  assert 'seed (was 0, now 1)' in str(error.value)
  assert 'period' not in str(error.value)
  assert _contents(tmp_path / 'run') == before


def test_until_something_is_trained_any_config_is_taken(tmp_path, capsys):
  """A first step that failed, as for want of mixed groups, locks nothing."""
  _claim(_config(), tmp_path)
  (tmp_path / 'metrics.jsonl').write_text('{"step": 0}\n')  # an evaluation
  _claim(_config(**{'eval.period': 3}), tmp_path)
  assert capsys.readouterr().err == (
      f'{tmp_path}: nothing has been trained yet, so it takes the new config: '
      'eval.period (was 2, now 3)\n')
  assert run_folder.read_config(tmp_path).eval.period == 3
  (tmp_path / 'base_model').mkdir()
  with pytest.raises(errors.InputError, match='now 7., which made its base'):
    _claim(_config(**{'eval.period': 3, 'seed': 7}), tmp_path)
  (tmp_path / 'checkpoints' / '1').mkdir(parents=True)
  with pytest.raises(errors.InputError, match='config: .*; a fork can'):
    _claim(_config(), tmp_path)
  (tmp_path / 'checkpoints' / '1').rmdir()
  (tmp_path / 'metrics.jsonl').write_text('{"step": 1}\n')
  with pytest.raises(errors.InputError, match='another config') as it:
    _claim(_config(), tmp_path)
  assert 'fork' not in str(it.value)  # there is nothing to begin with


def test_a_line_that_is_no_record_is_refused_before_a_new_config(tmp_path):
  _claim(_config(), tmp_path)
  (tmp_path / 'metrics.jsonl').write_text('[3]\n')
  with pytest.raises(errors.InputError, match='metrics.jsonl: line 1 is not'):
    _claim(_config(seed=7), tmp_path)


def test_a_model_folder_is_no_workdir_that_has_not_been_trained(tmp_path):
  (tmp_path / 'config.json').write_text('{"architectures": ["X"]}')
  before = _contents(tmp_path)
  with pytest.raises(errors.InputError, match='belongs to another config'):
    _claim(_config(), tmp_path)
  assert _contents(tmp_path) == before


def test_only_steps_may_change(tmp_path):
  _claim(_config(), tmp_path)
  _claim(_config(), tmp_path)
  _claim(_config(steps=9), tmp_path)
  longer = _config(steps=9)
  assert run_folder.read_config(tmp_path).to_dict() == longer.to_dict()
  assert run_folder.digest(_config()) == run_folder.digest(longer)
  assert run_folder.digest(_config()) == run_folder.digest(
      run_folder.read_config(tmp_path))
  assert run_folder.digest(_config()) != run_folder.digest(_config(seed=1))


def test_an_infinite_field_is_saved_as_json_and_read_back(tmp_path):
  config = _config()
  config.clip = ml_collections.ConfigDict({
      'low': math.inf, 'high': 0.3, 'band': (-math.inf, 5.0)})
  _claim(config, tmp_path)
  _trained(tmp_path)
  _claim(config, tmp_path)
  text = (tmp_path / 'config.json').read_text()
  assert json.loads(text, parse_constant=pytest.fail)['clip']['high'] == 0.3
  assert run_folder.read_config(tmp_path).to_dict() == config.to_dict()
  config.clip.low = 0.2
  with pytest.raises(errors.InputError, match='clip.low .was inf, now 0.2'):
    _claim(config, tmp_path)


def test_execution_fields_may_change_and_are_logged(tmp_path, capsys):
  _claim(_config(**{'rollout.slots': 8}), tmp_path)
  _trained(tmp_path)
  assert not capsys.readouterr().err
  changed = _config(**{'rollout.slots': 4})
  _claim(changed, tmp_path)
  line, = capsys.readouterr().err.splitlines()
  assert 'rollout.slots (was 8, now 4)' in line and 'bit-identical' in line
  assert run_folder.read_config(tmp_path).to_dict() == changed.to_dict()
  assert run_folder.digest(changed) == run_folder.digest(
      _config(**{'rollout.slots': 8}))
  with pytest.raises(errors.InputError, match='seed') as error:
    _claim(_config(**{'rollout.slots': 2, 'seed': 1}), tmp_path)
  assert 'slots' not in str(error.value)


def test_a_folder_of_other_files_is_refused(tmp_path):
  (tmp_path / 'thesis.tex').write_text('mine')
  with pytest.raises(errors.InputError, match='holds thesis.tex but no conf'):
    _claim(_config(), tmp_path)
  assert _contents(tmp_path) == {'thesis.tex': b'mine'}


def test_an_interrupted_claim_is_repeated(tmp_path):
  (tmp_path / 'config.json.tmp').write_text('{"see')
  _claim(_config(), tmp_path)
  assert list(_contents(tmp_path)) == ['config.json']


def test_a_folder_in_use_is_left_alone(tmp_path):
  _claim(_config(), tmp_path)
  with lock_lib.FolderLock(tmp_path) as lock:
    lock.acquire()
    before = _contents(tmp_path)
    with pytest.raises(errors.InputError, match=f'in use by process '
                                                f'{os.getpid()} on host'):
      _claim(_config(steps=9), tmp_path)
    assert _contents(tmp_path) == before
  assert list(_contents(tmp_path)) == ['config.json']


@pytest.mark.parametrize('text', ['{"seed": ', '[1]', None, '{"a.b": 1}',
                                  '[' * 100_000])
def test_unreadable_saved_config(tmp_path, text):
  if text is not None:
    (tmp_path / 'config.json').write_text(text)
  with pytest.raises(errors.InputError, match='config.json'):
    run_folder.read_config(tmp_path)


@pytest.mark.parametrize('spec, folder, step', [
    ('a@3', 'a', 3), ('a@b@03', 'a@b', 3), ('a', 'a', None), ('@3', '@3', None),
    ('a@²', 'a@²', None), ('a@١', 'a@١', None), ('a@-1', 'a@-1', None),
    ('a@' + 5000 * '9', 'a@' + 5000 * '9', None)])
def test_a_step_after_a_folder(spec, folder, step):
  assert run_folder.split_step(spec) == (folder, step)


def test_a_workdir_that_cannot_be_made_is_refused(tmp_path):
  (tmp_path / 'file').touch()
  with pytest.raises(
      errors.InputError,
      match=f'^--workdir={tmp_path}/file/run: Not a directory$'):
    _claim(_config(), tmp_path / 'file' / 'run')


def test_the_date_of_a_run_is_kept(tmp_path):
  config = tiny.get_config()
  config.data.date = '2024-02-29'
  assert run_folder.saved_date(tmp_path) is None
  _claim(config, tmp_path)
  assert run_folder.saved_date(tmp_path) == '2024-02-29'
  (tmp_path / 'config.json').write_text('{"model_type": "llama"}')
  assert run_folder.saved_date(tmp_path) is None
