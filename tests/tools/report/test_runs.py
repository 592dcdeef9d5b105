"""Reading finished, running and broken runs."""

import json
import pathlib

import pytest

from tepo_jax import errors
from tepo_jax.job import fork
from tepo_jax.tools.report import runs
from tests.tools.report.records import record


def test_a_finished_and_a_running_run(make_run):
  paths = [make_run('a', [record(s) for s in range(1, 7)]),
           make_run('b', [record(s) for s in range(1, 4)], seed=1)]
  done, running = runs.read(paths)
  assert done.state == 'finished' and not done.notes
  assert running.state.startswith('at step 3 of 6, last written')
  assert done.series('reward') == {
      s: pytest.approx(0.1 * s) for s in range(1, 7)}
  assert (done.seed, running.seed) == (0, 1)


def test_broken_runs_are_read_with_notes(make_run, tmp_path):
  path = pathlib.Path(make_run('a', [
      record(1), record(2, entropy=None, skipped=3)]))
  (path / 'config.json').write_text('{"seed": ')
  with (path / 'metrics.jsonl').open('a') as file:
    file.write('[1, 2]\n{"step": 3, "reward": "high"}\n{"step": 3, "rew')
  empty = tmp_path / 'empty'
  empty.mkdir()
  broken, nothing = runs.read([str(path), str(empty)])
  assert broken.fields is None and len(broken.records) == 2
  assert broken.series('entropy') == {1: pytest.approx(0.45)}
  notes = ' | '.join(broken.notes)
  for wrong in ('config.json cannot be read', '3 lines of metrics.jsonl '
                'cannot be read, the first is line 3',
                '1 recorded values are NaN', '3 updates were skipped'):
    assert wrong in notes
  assert nothing.state == 'nothing recorded'
  assert {'no config.json', 'no metrics.jsonl'} <= set(nothing.notes)


def test_patterns_are_expanded_and_names_are_unique(make_run, tmp_path):
  for seed, name in enumerate(('x/a', 'y/a', 'y/b')):
    make_run(name, [record(1)], seed=seed)
  (tmp_path / 'runs' / 'y' / 'logs').mkdir()
  found = runs.read([str(tmp_path / 'runs' / '*' / '*')])
  assert [run.name for run in found] == ['x/a', 'y/a', 'y/b']


def test_a_folder_of_runs_stands_for_all_runs_below_it(make_run, tmp_path):
  for seed, name in enumerate(('x/a', 'y/z/b')):
    make_run(name, [record(1)], seed=seed)
  (tmp_path / 'runs' / 'logs').mkdir()
  for path in (tmp_path / 'runs', tmp_path / 'r*'):
    assert [run.name for run in runs.read([str(path)])] == ['a', 'b']


def test_a_copied_run_counts_once_and_the_longer_one(make_run, capsys):
  paths = [make_run('short', [record(1)]),
           make_run('seed 1', [record(1)], seed=1),
           make_run('long', [record(1), record(2)], steps=9)]
  found = runs.read(paths)
  assert [run.name for run in found] == ['seed 1', 'long']
  note = ('short is left out: it is the same run (config, seed, code)')
  assert found[1].notes == [note] and not found[0].notes
  assert capsys.readouterr().err == f'long: {note}\n'


def test_copies_that_were_resumed_differently_are_a_conflict(make_run, capsys):
  paths = [make_run('a', [record(1), record(2), record(3)]),
           make_run('b', [record(1), record(2, reward=0.5)])]
  [run] = runs.read(paths)
  assert run.name == 'a' and run.notes == [
      'conflict: b is left out: it has the same config, seed and code, but '
      'other results from step 2 on']
  assert 'conflict: b' in capsys.readouterr().err


def test_runs_of_two_commits_are_not_copies(make_run):
  paths = [make_run('a', [record(1)]), make_run('b', [record(1)])]
  for commit, path in zip('12', paths):
    (pathlib.Path(path) / 'environment.jsonl').write_text(json.dumps(
        {'step': 0, 'commit': commit}) + '\n')
  read = runs.read([*paths, make_run('c', [record(1)], seed=1)])
  assert len(read) == 3
  groups = runs.group(read)  # the same seed twice is not two seeds
  assert [[run.name for run in group.runs] for group in groups] == [
      ['a', 'c'], ['b']]
  assert [group.label for group in groups] == ['grpo (a)', 'grpo (b)']


@pytest.mark.parametrize('path', ['nowhere', 'no*where'])
def test_a_path_without_a_run_is_refused(path, tmp_path):
  with pytest.raises(errors.InputError, match='where'):
    runs.read([str(tmp_path / path)])


def test_runs_without_a_record_are_refused(make_run):
  with pytest.raises(errors.InputError, match='no metrics.jsonl with a record'):
    runs.read([make_run('a', [])])


def test_seeds_form_one_group_and_other_fields_separate_groups(make_run):
  some = [record(1)]
  read = runs.read([
      make_run('a', some), make_run('b', some, seed=1, steps=9),
      make_run('c', some, optimizer__learning_rate=2e-5),
      make_run('d', some, method_name='tepo', method__weight='sequence')])
  groups = runs.group(read)
  assert [[run.name for run in group.runs] for group in groups] == [
      ['a', 'b'], ['c'], ['d']]
  assert [group.label for group in groups] == [
      'grpo (optimizer.learning_rate=1e-05)',
      'grpo (optimizer.learning_rate=2e-05)', 'tepo']
  assert runs.differing([group.runs[0] for group in groups]) == [
      'method.weight', 'method_name', 'optimizer.learning_rate']


@pytest.mark.parametrize('paths, labels', [
    (('/data/long/a.jsonl', '/data/long/b.jsonl'), ('a.jsonl', 'b.jsonl')),
    (('/one/a.jsonl', '/two/a.jsonl'), ('/one/a.jsonl', '/two/a.jsonl'))])
def test_labels_have_the_names_of_files_unless_these_are_the_same(
    make_run, paths, labels):
  groups = runs.group(runs.read([
      make_run(name, [record(1)], data={'name': path})
      for name, path in zip('ab', paths)]))
  assert [group.label for group in groups] == [
      f'grpo (data.name={label})' for label in labels]


def test_runs_that_differ_in_many_fields_are_labelled_by_their_folders(
    make_run):
  groups = runs.group(runs.read([
      make_run(name, [record(1)], **{
          f'field{i}': name for i in range(9)}) for name in 'ab']))
  assert [group.label for group in groups] == ['grpo (a)', 'grpo (b)']


def test_forks_of_each_other_s_replaced_folders_are_read(make_run):
  paths = [make_run(name, [record(1)], seed=seed)
           for seed, name in enumerate('ab')]
  for path, parent in zip(paths, paths[::-1]):
    fork.write(fork.Parent(parent, 1, True, 'abc'), pathlib.Path(path))
  one, other = runs.read(paths)
  assert one.branch.name == 'b' and other.branch.name == 'a'
  assert one.joint('reward') == {1: pytest.approx(0.1)}


def test_the_environment_is_read(make_run):
  path = pathlib.Path(make_run('a', [record(1)]))
  (path / 'environment.jsonl').write_text(json.dumps(
      {'step': 0, 'jax': '1'}) + '\n')
  [run] = runs.read([str(path)])
  assert run.starts == [{'step': 0, 'jax': '1'}]


@pytest.mark.parametrize('field, value', [
    ('steps', 'many'), ('steps', [3]), ('method_name', 3), ('seed', None)])
def test_an_edited_config_of_a_wrong_type_is_noted(make_run, field, value):
  [run] = runs.read([make_run('a', [record(1)], **{field: value})])
  assert run.fields is None
  assert [f'config.json cannot be read: {field} is {value!r}'] == run.notes
