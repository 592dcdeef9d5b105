"""Columns of every set are read; bad rows are refused by number."""

import csv
import dataclasses
import gzip
import json
import os
import pathlib
import subprocess
import sys
import types

import pyarrow
from pyarrow import parquet
import pytest

from tepo_jax import errors
from tepo_jax import grading
from tepo_jax.data import datasets
from tepo_jax.data import embedded
from tepo_jax.data import problem as problem_lib
from tepo_jax.data import references

_SHARED = pathlib.Path(__file__).parents[2].parent / 'shared' / 'benchmarks'


def _write(path, rows):
  path.write_text(''.join(json.dumps(row) + '\n' for row in rows))
  return path


# One row of each hub set in its own columns, and the expected Problem fields.
HUB_ROWS = {
    'dapo_math': (
        {'data_source': 'math_dapo',
         'prompt': [{'role': 'user', 'content':
                     'Solve the following math problem step by step. The last '
                     'line of your response should be of the form Answer: '
                     '$Answer (without quotes) where $Answer is the answer to '
                     'the problem.\n\nWhat is $1+1$?\n\nRemember to put your '
                     'answer on its own line after "Answer:".'}],
         'reward_model': {'ground_truth': '2', 'style': 'rule'}},
        ('What is $1+1$?', ('2',), None, None)),
    'gsm8k': (
        {'question': 'How many?',
         'answer': 'Add <<1000+80=1080>>.\n#### 1,080'},
        ('How many?', ('1080',), None, None)),
    'math500': (
        {'problem': 'Find $x$.', 'solution': '...', 'answer': '\\frac{1}{2}',
         'subject': 'Algebra', 'level': 3, 'unique_id': 'test/algebra/1.json'},
        ('Find $x$.', ('\\frac{1}{2}',), '3', 'Algebra')),
    'aime24': (
        {'ID': '2024-I-1', 'Problem': 'Find it.', 'Solution': '',
         'Answer': 73}, ('Find it.', ('73',), None, None)),
    'aime25': (
        {'problem': 'Find it.', 'answer': '070', 'id': '0'},
        ('Find it.', ('070',), None, None)),
    'amc': (
        {'id': 0, 'problem': 'Find it.', 'answer': 142.0, 'url': 'there'},
        ('Find it.', ('142',), None, None)),
    'omni_math': (
        {'domain': ['Mathematics -> Algebra'], 'difficulty': 8.0,
         'problem': 'Find it.', 'solution': '',
         'answer': '\\[\n\\boxed{\\frac{n+1}{2}}\n\\]', 'source': 'imo'},
        ('Find it.', ('\\frac{n+1}{2}',), '8', 'Mathematics -> Algebra')),
    'olympiadbench': (
        {'id': 1606, 'question': 'Find it.', 'solution': ['...'],
         'final_answer': ['$2^{1009}$'], 'is_multiple_answer': False,
         'unit': 'km', 'error': '1e-1', 'subfield': 'Algebra'},
        ('Find it.', ('$2^{1009}$',), None, 'Algebra')),
    'minerva': (
        {'question': 'How hot?', 'answer': '8.7e8'},
        ('How hot?', ('8.7e8',), None, None)),
}


@pytest.mark.parametrize('name', HUB_ROWS)
@pytest.mark.parametrize('suffix', ['jsonl', 'parquet'])
def test_hub_columns(name, suffix, tmp_path):
  row, expected = HUB_ROWS[name]
  path = tmp_path / f'rows.{suffix}'
  if suffix == 'jsonl':
    _write(path, [row])
  else:
    parquet.write_table(pyarrow.Table.from_pylist([row]), path)
  (problem,) = datasets.load(f'{name}:{path}')
  assert problem.source == name
  assert (problem.problem, problem.answers, problem.level,
          problem.subject) == expected
  # Without the name, the columns determine how to read the file.
  (same,) = datasets.load(str(path))
  assert (same.problem, same.answers) == (problem.problem, problem.answers)


def test_olympiad_unit_and_tolerance(tmp_path):
  path = _write(tmp_path / 'a.jsonl', [HUB_ROWS['olympiadbench'][0]])
  (problem,) = datasets.load(f'olympiadbench:{path}')
  assert (problem.id, problem.unit, problem.abs_error) == ('1606', 'km', 0.1)


def test_of_two_columns_for_one_field_the_first_that_is_filled_counts(tmp_path):
  path = _write(tmp_path / 'a.jsonl', [
      {'problem': '1?', 'answer': '1', 'level': 3, 'difficulty': 8},
      {'problem': '2?', 'answer': '2', 'level': '', 'difficulty': 8}])
  assert [p.level for p in datasets.load(str(path))] == ['3', '8']


def test_plain_form(tmp_path):
  path = _write(tmp_path / 'mine.jsonl', [
      {'problem': '1+1?', 'answer': 2},
      {'problem': '2+2?', 'answer': '4', 'id': 'b', 'source': 's'}])
  assert datasets.load(str(path)) == [
      problem_lib.Problem('mine/1', '1+1?', ('2',), 'mine'),
      problem_lib.Problem('b', '2+2?', ('4',), 's')]
  path = _write(tmp_path / 'mine.jsonl',
                [{'problem': '1+1?', 'answers': ['2', 'two', 2.5]}])
  assert datasets.load(str(path))[0].answers == ('2', 'two', '2.5')


def test_a_problem_keeps_its_whole_row(tmp_path):
  rows = [{'problem': '1+1?', 'answer': 2, 'numbers': [1, 1], 'target': None},
          {'problem': '2+2?', 'answer': 4, 'more': {'a': 'b'}}]
  first, second = datasets.load(str(_write(tmp_path / 'mine.jsonl', rows)))
  assert [first.row, second.row] == rows
  assert first == dataclasses.replace(first, row=None)
  assert hash(first) == hash(dataclasses.replace(first, row=None))
  assert datasets.load('arithmetic', limit=1)[0].row is None


ROWS = [{'frage': '1+1?', 'antwort': '2', 'level': '1'},
        {'frage': 'a\n"b", c?', 'antwort': '1,000', 'level': '2'}]
COLUMNS = {'problem': 'frage', 'answer': 'antwort'}


def _write_csv(path, rows):
  with path.open('w', encoding='utf-8-sig', newline='') as file:
    writer = csv.DictWriter(file, rows[0])
    writer.writeheader()
    writer.writerows(rows)


WRITERS = {
    'a.jsonl': _write,
    'a.json': lambda path, rows: path.write_text(json.dumps(rows, indent=1)),
    'lines.json': _write,
    'a.csv': _write_csv,
    'a.parquet': lambda path, rows: parquet.write_table(
        pyarrow.Table.from_pylist(rows), path)}


@pytest.mark.parametrize('file', WRITERS)
def test_any_columns_of_any_file(tmp_path, file):
  path = tmp_path / file
  WRITERS[file](path, ROWS)
  problems = datasets.load(str(path), columns=COLUMNS)
  assert [(p.id, p.problem, p.answers, p.level, p.row) for p in problems] == [
      (f'{path.stem}/{number}', row['frage'], (row['antwort'],), row['level'],
       row) for number, row in enumerate(ROWS, 1)]
  with pytest.raises(errors.InputError) as error:
    datasets.load(str(path), columns={'problem': 'frage', 'answer': 'reply'})
  assert str(error.value) == (
      f"{path}: row 1: no column 'reply', which is data.columns.answer; has "
      'columns frage, antwort, level')
  with pytest.raises(errors.InputError) as error:
    datasets.load(str(path))
  assert str(error.value).startswith(
      f'{path}: row 1: has columns frage, antwort, level; '
      'needs problem+answers')
  assert str(error.value).endswith(
      'columns named by data.columns.problem and data.columns.answer')


def test_one_column_is_named_and_the_other_found(tmp_path):
  path = _write(tmp_path / 'a.jsonl', [
      {'problem': '1+1?', 'answer': 'so 2', 'short': 2}])
  for columns in ({'answer': 'short'}, {'answer': 'short', 'problem': None}):
    assert datasets.load(str(path), columns=columns)[0].answers == ('2',)
  path = _write(tmp_path / 'a.jsonl', [{'q': '1+1?', 'solution': '2'}])
  assert datasets.load(str(path), columns={'problem': 'q'})[0].problem == '1+1?'


def test_problem_and_answer_are_different_columns(tmp_path):
  path = _write(tmp_path / 'a.jsonl', [{'problem': '1+1?', 'answer': '2'}])
  with pytest.raises(errors.InputError, match="are the same column, 'answer'"):
    datasets.load(str(path), columns={'problem': 'answer', 'answer': 'answer'})
  path = _write(tmp_path / 'b.jsonl', [{'answer': '1+1?', 'solution': '2'}])
  (problem,) = datasets.load(str(path), columns={'problem': 'answer'})
  assert (problem.problem, problem.answers) == ('1+1?', ('2',))


def test_named_sets_keep_their_own_columns(tmp_path):
  path = _write(tmp_path / 'a.jsonl', [HUB_ROWS['aime25'][0]])
  assert len(datasets.load(f'aime25:{path}', columns=COLUMNS)) == 1
  assert datasets.is_named(f'aime25:{path}') and datasets.is_named('arithmetic')
  assert not datasets.is_named(str(path))


ZIPPED = gzip.compress(b'{}', mtime=0)


@pytest.mark.parametrize('file, data, wrong', [
    ('a.csv', b'problem,answer\n1+1?,2\n2+2?\n',
     'row 2: 1 cells, but the header has 2 columns'),
    ('a.csv', b'problem,answer\n1+1?,2,3\n', 'row 1: 3 cells'),
    ('a.csv', b'problem,answer,answer\n1+1?,2,3\n',
     "'answer' is the name of two columns"),
    ('a.csv', b'problem,answer\n1+1?,\n', "row 1: 'answer' is empty"),
    ('a.csv', b'problem,answer\n"1+1?,2\n', 'after line 2: not CSV'),
    ('a.csv', b'problem,answer\n1+1?,2\n\xff,2\n', 'not CSV in UTF-8'),
    ('a.csv', 'problem,answer\n'.encode('utf-16'), 'in UTF-16: save it as UTF'),
    ('a.jsonl', ZIPPED, 'row 1: not JSON'),
    ('a.jsonl', ZIPPED, '; it is compressed: unpack it'),
    ('a.jsonl.gz', ZIPPED, '; it is compressed: unpack it'),
    ('a.jsonl', b'[\n {"problem": "?", "answer": 1}]', 'call it .json'),
    ('a.JSONL', b'', '; call it .jsonl'),
    ('a.jsonl', b'<!DOCTYPE html>\n', '; it is a web page'),
    ('a.parquet', b'version https://git-lfs.github.com/spec/v1\n',
     '; it is a pointer of Git LFS: run `git lfs pull`'),
    ('a.csv', b'', 'no problems'),
    ('a.csv', b'problem;answer\n1+1?;2\n', 'row 1: has columns problem;answer'),
    ('a.csv', b'problem, answer\n1+1?,2\n', "has columns problem, ' answer'"),
    ('a.json', b'[{"problem": "1+1?"', 'not JSON'),
    ('a.json', b'[{"problem": "?", "answer": 1}, 3]', 'row 2: not an object'),
    ('a.json', b'{\n "problem": "1+1?"}', 'row 1: not JSON'),
    ('a.tsv', b'problem\tanswer', 'not a .jsonl or .json or .csv or .parquet'),
])
def test_bad_csv_and_json_files(tmp_path, file, data, wrong):
  (tmp_path / file).write_bytes(data)
  with pytest.raises(errors.InputError) as error:
    datasets.load(str(tmp_path / file))
  assert str(error.value).startswith(f'{tmp_path / file}: ')
  assert wrong in str(error.value) and '\n' not in str(error.value)


def test_a_pipe_is_refused(tmp_path):
  """It would be waited for, and could not be read twice."""
  os.mkfifo(tmp_path / 'a.jsonl')
  with pytest.raises(errors.InputError, match='a.jsonl: a pipe or device'):
    datasets.load(str(tmp_path / 'a.jsonl'))


def test_a_bad_row_of_a_csv_file_can_be_skipped(tmp_path):
  (tmp_path / 'a.csv').write_text('problem,answer\nx\n\n1+1?,2\n')
  loaded = datasets.read(str(tmp_path / 'a.csv'), skip_bad=1)
  assert [p.id for p in loaded.problems] == ['a/2'] and loaded.rows == 2
  assert loaded.bad == [f'{tmp_path}/a.csv: row 1: 1 cells, but the header has '
                        '2 columns']


def test_what_was_omitted_is_listed_by_row(tmp_path):
  path = _write(tmp_path / 'a.jsonl', [
      {'prompt': text, 'solution': solution} for text, solution in [
          ('a?', '1'), ('b?', '1'), ('a?', '1'), ('b?', '2')]])
  loaded = datasets.read(f'dapo_math:{path}')
  assert loaded.omitted == {'repeated': [3], 'contradictory': [2, 4]}
  assert loaded.rows == 4 and len(loaded.problems) == 1


@pytest.mark.parametrize('spec, expected', [
    ('own/set', ('own/set', None, 'train')),
    ('own/set-1.5@test', ('own/set-1.5', None, 'test')),
    ('own/set:main@train[:9]', ('own/set', 'main', 'train[:9]')),
    ('math500:own/copy@test', ('own/copy', None, 'test')),
    ('math500', ('HuggingFaceH4/MATH-500', None, 'test')),
])
def test_hub_ids(spec, expected, monkeypatch):
  import datasets as library
  calls = []

  def load_dataset(path, subset, split):
    calls.append((path, subset, split))
    return [{'problem': '1+1?', 'answer': '2'}]

  monkeypatch.setattr(library, 'load_dataset', load_dataset)
  (problem,) = datasets.load(spec)
  assert calls == [expected]
  named = spec.startswith('math500')
  assert problem.id == f'{"math500" if named else expected[0][4:]}/1'


def test_what_the_hub_lacks_is_refused_by_name(monkeypatch):
  import datasets as library

  def load_dataset(*_, **__):
    raise ConnectionError('no network\nat all')

  monkeypatch.setattr(library, 'load_dataset', load_dataset)
  with pytest.raises(errors.InputError) as error:
    datasets.load('data/train')
  assert str(error.value) == (
      'data/train: no such file or folder; as a hub id, data/train (train): '
      'cannot be loaded: no network at all')

  def load_busy(*_, **__):
    answer = OSError('503')
    answer.response = types.SimpleNamespace(status_code=503)
    raise ConnectionError('busy') from answer

  monkeypatch.setattr(library, 'load_dataset', load_busy)
  assert not errors.is_unanswered(error.value)
  with pytest.raises(errors.InputError, match='data/train .*busy') as error:
    datasets.load('data/train')
  assert errors.is_unanswered(error.value)
  for spec in ('data/train.csv', './data/train', '/data/train', 'a/b/c'):
    with pytest.raises(errors.InputError, match='no such file, folder or set'):
      datasets.load(spec)


def test_the_split_of_a_folder(tmp_path):
  _write(tmp_path / 'train.jsonl', [GOOD])
  _write(tmp_path / 'test.jsonl', [GOOD, GOOD | {'answer': '3'}])
  assert len(datasets.load(str(tmp_path))) == 1
  assert len(datasets.load(f'{tmp_path}@test')) == 2
  with pytest.raises(errors.InputError, match='is a file, which has no splits'):
    datasets.load(f'{tmp_path / "test.jsonl"}@test')


def test_folder(tmp_path):
  _write(tmp_path / 'train.jsonl', [{'problem': f'{i}?', 'answer': str(i)}
                                    for i in range(5)])
  problems = datasets.load(str(tmp_path), limit=3)
  assert [p.answers for p in problems] == [('0',), ('1',), ('2',)]
  with pytest.raises(errors.InputError, match='cannot be loaded'):
    datasets.load(str(tmp_path), split='nonsense')


def test_repeated_ids_become_unique(tmp_path):
  path = _write(tmp_path / 'a.jsonl', [
      {'id': 'x', 'problem': f'{i}?', 'answer': 1} for i in range(3)])
  assert [p.id for p in datasets.load(str(path))] == ['x', 'x/row2', 'x/row3']


GOOD = {'problem': '1+1?', 'answer': '2'}


@pytest.mark.parametrize('bad, wrong', [
    ({'problem': '1+1?'}, "row 3: missing column 'answer'"),
    ({'answer': '2'}, "row 3: missing column 'problem'"),
    ({'problem': '1+1?', 'answer': ''}, "row 3: 'answer' is empty"),
    ({'problem': '1+1?', 'answer': '  '}, "row 3: 'answer' is empty"),
    ({'problem': '1+1?', 'answer': []}, "row 3: 'answer' is empty"),
    ({'problem': '1+1?', 'answer': None}, "row 3: 'answer' is null"),
    ({'problem': '1+1?', 'answer': True}, "row 3: 'answer' is bool"),
    ({'problem': '1+1?', 'answer': {'a': 1}}, "row 3: 'answer' is dict"),
    ({'problem': '1+1?', 'answer': float('nan')}, "row 3: 'answer' is nan"),
    ({'problem': '1+1?', 'answer': float('inf')}, "row 3: 'answer' is inf"),
    ({'problem': 7, 'answer': '2'}, "row 3: 'problem' is int, not text"),
    ({'problem': ' ', 'answer': '2'}, "row 3: 'problem' is empty"),
    ({'problem': '?', 'answer': '2', 'abs_error': 'x'},
     "row 3: tolerance 'x'"),
    (['1+1?', '2'], 'row 3: not an object but list'),
    ({'problem': '?', 'answer': '1' * 10**6},
     "row 3: 'answer' has 1000000 characters, "),
    ({'problem': '?', 'answer': '7' * 5000}, "row 3: 'answer' has 5000 "),
    ({'problem': '?', 'answer': 'so ' * 4000}, "row 3: 'answer' has 11999 "),
    ({'problem': '?', 'answer': 10**4000}, "row 3: 'answer' has 4001 "),
    ({'problem': '?', 'answers': ['2', '7' * 5000]}, "row 3: missing column"),
    ({'problem': 'a\ud800b', 'answer': '2'}, "row 3: 'problem' has a lone sur"),
    ({'problem': '?', 'answer': '\u200b'}, "row 3: 'answer' is empty"),
    ({'problem': '?', 'answer': '$$'}, "row 3: 'answer' is empty"),
    ({'problem': '?', 'answer': '\udc00'}, "row 3: 'answer' has a lone surrog"),
    ({'problem': '?', 'answer': '2', 'abs_error': 'nan'},
     "row 3: tolerance 'nan'"),
    ({'problem': '?', 'answer': '2', 'abs_error': 'inf'},
     "row 3: tolerance 'inf'"),
    ({'problem': '?', 'answer': '2', 'abs_error': -1},
     "row 3: tolerance -1 is "),
    ({'problem': '?', 'answer': '2', 'abs_error': '-1e-9'},
     "row 3: tolerance '-1"),
    ({'problem': '?', 'answer': '["5"'}, "row 3: 'answer' is text that looks"),
    ({'problem': '?', 'answer': '["\\frac12"]'}, "row 3: 'answer' is text tha"),
    ({'problem': '?', 'answer': '["5", 6]'}, "row 3: 'answer' is text that lo"),
    ({'problem': '?', 'answer': "['5' '6']"}, "row 3: 'answer' is text that l"),
    ({'problem': '?', 'answer': 'We see that the sum of all of these is two.'},
     "row 3: 'answer' is a text of 11 words without an answer in \\boxed{}"),
    ({'problem': "[{'content': 'Solve it.', 'role': 'user'}]", 'answer': '2'},
     "row 3: 'problem' is the text of a list or an object; use the parquet"),
    ({'problem': 'array([{"content": "Solve it."}])', 'answer': '2'},
     "row 3: 'problem' is the text of a list or an object; use the parquet"),
    ({'problem': '?', 'answer': "{'ground_truth': '2', 'style': 'rule'}"},
     "row 3: 'answer' is the text of a list or an object; use the parquet"),
    ({'problem': "({'role': 'user', 'content': '?'},)", 'answer': '2'},
     "row 3: 'problem' is the text of a list or an object; use the parquet"),
    ({'problem': "[array({'content': '?'}, dtype=object)]", 'answer': '2'},
     "row 3: 'problem' is the text of a list or an object; use the parquet"),
    ({'problem': "['What is 1+1?']", 'answer': '2'},
     "row 3: 'problem' is the text of a list or an object; use the parquet"),
    ({'problem': '["What is 1+1?",\n "Why?"]', 'answer': '2'},
     "row 3: 'problem' is the text of a list or an object; use the parquet"),
    ({'problem': "('What is 1+1?',)", 'answer': '2'},
     "row 3: 'problem' is the text of a list or an object; use the parquet"),
    ({'problem': "array(['What is 1+1?'], dtype=object)", 'answer': '2'},
     "row 3: 'problem' is the text of a list or an object; use the parquet"),
    ({'problem': [{'role': 'user', 'content': "['What is 1+1?']"},
                  {'role': 'assistant', 'content': '2'},
                  {'role': 'user', 'content': '2+2?'}], 'answer': '4'},
     "row 3: 'problem' is the text of a list or an object; use the parquet"),
    ({'problem': [{'role': 'system', 'content': "[{'type': 'text'}]"},
                  {'role': 'user', 'content': '2+2?'}], 'answer': '4'},
     "row 3: 'problem' is the text of a list or an object; use the parquet"),
    ({'problem': '?', 'answer': '{"final answer": "2"}'},
     "row 3: 'answer' is the text of a list or an object; use the parquet"),
    ({'problem': '?', 'answer': ['2', '\x1b[31m3']},
     "row 3: 'answer' has the control character '\\x1b'"),
    ({'problem': '?', 'answer': '\f{1}{2}'},
     "row 3: 'answer' has the control character '\\x0c'"),
    ({'problem': [{'role': 'user', 'content': '?'},
                  {'role': 'assistant', 'content': '2'}], 'answer': '2'},
     "row 3: 'problem' must end with a user turn, which is the problem; its "
     'turns: user, assistant'),
    ({'problem': [], 'answer': '2'}, "row 3: 'problem' must end with a user"),
    ({'problem': [{'role': 'tool', 'content': '?'}], 'answer': '2'},
     "row 3: 'problem': role 'tool' is not one of system, user, assistant"),
    ({'problem': [{'role': 'user', 'content': [1]}], 'answer': '2'},
     "row 3: 'problem': the content of a user turn is list, not text"),
    ({'problem': [{'role': 'user'}], 'answer': '2'},
     "row 3: 'problem': a turn must have role and content"),
])
def test_bad_rows_are_refused_with_file_and_row(bad, wrong, tmp_path):
  path = _write(tmp_path / 'a.jsonl', [GOOD, GOOD, bad, GOOD])
  with pytest.raises(errors.InputError) as caught:
    datasets.load(str(path))
  assert str(caught.value).startswith(f'{path}: {wrong}')
  assert '\n' not in str(caught.value)


@pytest.mark.parametrize('problem', [
    '[1, 2, 3]', '(1, 2]', '[0, 1) and (2, 3]', '["a", "b"] has how many?',
    "['a', 'b'] or ['c']?", '[x, y] = "xy - yx"', '("A") is (B)?'])
def test_intervals_and_lists_of_mathematics_are_problems(tmp_path, problem):
  path = _write(tmp_path / 'a.jsonl', [{'problem': problem, 'answer': '2'}])
  assert datasets.load(str(path))[0].problem == problem


def test_an_earlier_answer_may_be_json(tmp_path):
  path = _write(tmp_path / 'a.jsonl', [{'answer': '2', 'problem': [
      {'role': 'user', 'content': 'Two letters, as JSON?'},
      {'role': 'assistant', 'content': '["a", "b"]'},
      {'role': 'user', 'content': 'How many?'}]}])
  assert datasets.load(str(path))[0].turns[1] == ('assistant', '["a", "b"]')


def test_white_space_around_a_problem_is_removed(tmp_path):
  """As configs/README.md says."""
  path = _write(tmp_path / 'a.jsonl', [
      {'problem': ' 1+1?\n', 'answer': '2'},
      {'problem': [{'role': 'user', 'content': '\n1+1?\r\n'}], 'answer': '2'}])
  assert [p.problem for p in datasets.load(str(path))] == ['1+1?', '1+1?']


_SENTENCE = 'We see that the sum of all of these is two.'


@pytest.mark.parametrize('name', sorted(datasets.SETS))
def test_a_sentence_is_an_answer_only_in_sets_that_document_it(
    tmp_path, name):
  path = _write(tmp_path / 'a.jsonl', [
      {'question': '?', 'answer': 'It is 2 pens. #### 2'},
      {'question': '?', 'answer': _SENTENCE}])
  if name in ('omni_math', 'olympiadbench'):
    assert datasets.load(f'{name}:{path}')[1].answers == (_SENTENCE,)
    return
  with pytest.raises(errors.InputError) as caught:
    datasets.load(f'{name}:{path}')
  assert str(caught.value) == (
      f"{path}: row 2: 'answer' is a text of 11 words without an answer in "
      '\\boxed{} or after ####; if another column has the answers, set '
      'data.columns.answer, and give the file without the name of a set')


@pytest.mark.parametrize('solution, answer', [
    (r'So 2. The answer is $\boxed 2$.', '2'),
    (r'The sum of all of these numbers is $\boxed12$.', '12'),
    (r'$\fbox 3,400$', '3,400'),
    (r'\boxed \pi', r'\pi'),
    (r'\boxed\frac{1}{2}', r'\frac{1}{2}'),
    (r'\boxed{2}, that is \boxed{2 }', '2'),
    (r'$x = \boxed{1}$ or $x = \boxed{2}$', r'\{1, 2\}'),
    (r'\boxed 1 and \fbox{234}', r'\{1, 234\}'),
    (r'\boxed{\boxed{2}}', '2'),
    (r'\fbox{$\boxed{1}$ and \boxed 2} but \boxed{3', r'\{1, 2\}'),
    (r'\boxed{\{1,2\}}', r'\{1,2\}'),
    (r'A row\\\boxed{2}', '2'),
    (r'Never \boxedtext or \boxed, all of us say. #### 7', '7'),
    ('It costs that. #### $1,234,080', '$1234080'),
    ('So x and y are\n#### (1, 2)\n', '(1, 2)'),
    ('#### 3,5', '3,5'),
    ('#### Final Answer\nThe pair is $\\boxed{(1, 2)}$.', '(1, 2)'),
    ('So \\boxed{5}.\n#### Check\nIt is right, as one sees.', '5'),
    (r'$f(x) = x \text{ for all } x$', r'$f(x) = x \text{ for all } x$'),
    ('the incenter of it', 'the incenter of it'),
])
def test_a_solution_s_answer_is_in_its_boxes(tmp_path, solution, answer):
  path = _write(tmp_path / 'a.jsonl', [{'problem': '?', 'answer': solution}])
  assert datasets.load(str(path))[0].answers == (answer,)


@pytest.mark.parametrize('found, meant', [
    ('\frac{7}{12}', r'\frac{7}{12}'), ('\beta', r'\beta'), ('\to', r'\to'),
    ('7 \times 2023', r'7 \times 2023'), ('\arctan 2', r'\arctan 2'),
    ('63 \text{ seconds}', r'63 \text{ seconds}'),
    ('\varnothing', r'\varnothing'),
    ('\\left(\rho, \theta\right)', r'\left(\rho, \theta\right)')])
def test_commands_that_json_has_read_as_control_characters(
    tmp_path, found, meant):
  path = _write(tmp_path / 'a.jsonl', [{'problem': '?', 'answer': found}])
  assert datasets.load(str(path))[0].answers == (meant,)


def test_tabs_and_returns_between_words_are_no_commands(tmp_path):
  path = _write(tmp_path / 'a.jsonl', [
      {'problem': '?', 'answer': 'two\ttoes\rhope'}])
  assert datasets.load(str(path))[0].answers == ('two\ttoes\rhope',)


def test_half_of_an_answer_of_two_boxes_is_wrong(tmp_path):
  path = _write(tmp_path / 'a.jsonl', [
      {'problem': '?', 'answer': r'\boxed{1} or \boxed{234}'}])
  (problem,) = datasets.load(str(path))
  verdicts = {answer: grading.grade(rf'\boxed{{{answer}}}', problem.references)
              for answer in ('1, 234', '234, 1', '234', '1', '1234')}
  assert verdicts == {
      '1, 234': True, '234, 1': True, '234': False, '1': False, '1234': False}


def test_boxes_that_are_never_closed_are_read_in_linear_time():
  text = r'\boxed{' * 100_000
  assert references.read(text + '####2', '', False) == ('2',)


@pytest.mark.parametrize('name, column, tolerance', [
    ('', 'error', None), ('', 'abs_error', 1.0),
    ('math500:', 'error', None), ('math500:', 'abs_error', None),
    ('olympiadbench:', 'error', 1.0), ('', 'abs_err', None)])
def test_a_tolerance_is_read_where_it_is_documented(
    tmp_path, name, column, tolerance):
  path = _write(tmp_path / 'a.jsonl', [
      {'problem': 'What is 6*7?', 'answer': '42', column: 1.0, 'unit': 'm'}])
  (problem,) = datasets.load(f'{name}{path}')
  assert problem.abs_error == tolerance
  assert problem.unit == (None if name == 'math500:' else 'm')
  assert grading.grade(r'\boxed{43}', problem.references) == (
      tolerance is not None)


@pytest.mark.parametrize('value', [
    float('nan'), {}, {'a': 1}, True, [None], '\udc00', 1e400, [[1]]])
def test_columns_that_no_run_needs_do_not_refuse_a_file(tmp_path, value):
  row = {'problem': '?', 'answer': '2'}
  optional = ('id', 'source', 'level', 'difficulty', 'subject', 'domain')
  path = _write(tmp_path / 'a.jsonl', [
      row | dict.fromkeys(optional, value),
      row | dict.fromkeys(optional, value) | {'difficulty': 8.0}])
  first, second = datasets.load(str(path))
  assert first == problem_lib.Problem('a/1', '?', ('2',), 'a')
  assert second.level == '8'


@pytest.mark.parametrize('value', [{}, {'a': 1}, True, ['m'], '\udc00'])
def test_a_unit_is_needed_only_where_it_is_documented(tmp_path, value):
  path = _write(tmp_path / 'a.jsonl', [
      {'problem': '?', 'answer': '2', 'unit': value},
      {'problem': '?', 'answer': '2', 'unit': 'm'}])
  assert [p.unit for p in datasets.load(str(path))] == [None, 'm']
  if value != {}:
    with pytest.raises(errors.InputError, match="row 1: 'unit' "):
      datasets.load(f'olympiadbench:{path}')


def test_a_missing_number_of_pandas_is_no_tolerance(tmp_path):
  path = _write(tmp_path / 'a.jsonl', [
      {'problem': '?', 'answer': '2', 'abs_error': float('nan'),
       'unit': float('nan')}])
  assert datasets.load(str(path)) == [
      problem_lib.Problem('a/1', '?', ('2',), 'a')]


def test_all_turns_of_a_conversation_are_kept(tmp_path):
  turns = [('system', 'Be brief.'), ('user', 'What is 1+1?'),
           ('assistant', '2'), ('user', 'And 2+2?')]
  row = {'answer': '4', 'prompt': [
      {'role': role, 'content': text} for role, text in turns]}
  path = tmp_path / 'a.parquet'
  parquet.write_table(pyarrow.Table.from_pylist(
      [row, row | {'prompt': row['prompt'][-1:]}]), path)
  first, second = datasets.load(
      str(path), columns={'problem': 'prompt', 'answer': 'answer'})
  assert (first.turns, first.problem) == (tuple(turns[:3]), 'And 2+2?')
  assert (second.turns, second.problem) == ((), 'And 2+2?')
  assert (first.number, second.number) == (1, 2)
  assert datasets.overlap([first], [second]) == 0


@pytest.mark.parametrize('split', [None, 'train'])
def test_a_folder_of_save_to_disk(tmp_path, split):
  import datasets as library
  rows = [GOOD, GOOD | {'answer': '3'}]
  saved = library.Dataset.from_list(rows, split=split)
  saved.save_to_disk(tmp_path / 'one')
  assert [p.answers for p in datasets.load(str(tmp_path / 'one'))] == [
      ('2',), ('3',)]
  with pytest.raises(errors.InputError, match='one data set, without splits'):
    datasets.load(f'{tmp_path / "one"}@test')
  library.DatasetDict(test=saved).save_to_disk(tmp_path / 'dict')
  assert len(datasets.load(f'{tmp_path / "dict"}@test')) == 2


def test_answers_listed_as_text(tmp_path):
  path = _write(tmp_path / 'a.jsonl', [
      {'problem': '?', 'answer': text}
      for text in ('["5"]', "['5', '6']", '[5,6]', r'["\\frac12"]')])
  assert [p.answers for p in datasets.load(str(path))] == [
      ('5',), ('5', '6'), ('[5,6]',), (r'\frac12',)]


def test_bad_files_are_refused(tmp_path):
  path = tmp_path / 'a.jsonl'
  path.write_text('{"problem": "1+1?", "answer": ' + '7' * 5000 + '}\n')
  with pytest.raises(errors.InputError, match='a.jsonl: row 1: not JSON'):
    datasets.load(str(path))
  path.write_text('{"problem": "1+1?", "answer": "2"}\n{"problem": "1\n')
  with pytest.raises(errors.InputError, match='a.jsonl: row 2: not JSON'):
    datasets.load(str(path))
  path.write_bytes(b'{"problem": "\xff", "answer": "2"}\n')
  with pytest.raises(errors.InputError, match='a.jsonl: row 1: not JSON'):
    datasets.load(str(path))
  path.write_text('\n')
  with pytest.raises(errors.InputError, match='a.jsonl: no problems'):
    datasets.load(str(path))
  _write(path, [{'frage': '1+1?', 'antwort': '2'}])
  with pytest.raises(errors.InputError, match='row 1: has columns frage, '):
    datasets.load(str(path))
  (tmp_path / 'a.parquet').write_text('no parquet')
  with pytest.raises(errors.InputError, match='not a parquet file'):
    datasets.load(str(tmp_path / 'a.parquet'))
  for missing in ('gsm9k', str(tmp_path / 'b.jsonl'), 'gsm8k:'):
    with pytest.raises(errors.InputError):
      datasets.load(missing)
  with pytest.raises(errors.InputError, match='no split'):
    datasets.load('arithmetic', 'validation')


def test_a_value_of_a_parquet_file_that_python_has_not(tmp_path):
  path = tmp_path / 'a.parquet'
  parquet.write_table(pyarrow.table({
      'problem': ['?'], 'answer': ['2'],
      'made': pyarrow.array([10**14], pyarrow.timestamp('s'))}), path)
  for spec in (path, tmp_path):
    with pytest.raises(errors.InputError, match='cannot be read from row 1 on'):
      datasets.load(str(spec))


def test_two_columns_of_one_name_are_refused(tmp_path):
  path = tmp_path / 'a.parquet'
  parquet.write_table(pyarrow.Table.from_arrays(
      [pyarrow.array(['?']), pyarrow.array(['2']), pyarrow.array(['3'])],
      names=['problem', 'answer', 'answer']), path)
  with pytest.raises(errors.InputError, match="'answer' is the name of two"):
    datasets.load(str(path))
  path = tmp_path / 'a.jsonl'
  path.write_text('{"problem": "?", "answer": "2", "answer": "3"}')
  with pytest.raises(errors.InputError, match='row 1: .*two values of one nam'):
    datasets.load(str(path))


def test_columns_without_a_name_may_be_several(tmp_path):
  path = tmp_path / 'a.csv'
  path.write_text('problem,answer,,\n1+1?,2,,\n')
  assert datasets.load(str(path)) == [
      problem_lib.Problem('a/1', '1+1?', ('2',), 'a')]


def test_a_cell_of_a_csv_file_may_be_long(tmp_path):
  path = tmp_path / 'a.csv'
  path.write_text(f'problem,answer\n{"x " * 10**5},2\n')
  assert len(datasets.load(str(path))[0].problem) == 199_999


def test_omitted_rows_are_counted(tmp_path, caplog):
  rows = [{'prompt': text, 'solution': solution} for text, solution in [
      ('a  a?', '1'), ('a\na?\n', '1'), ('b?', str(2**53)),
      ('c?', str(2**53 + 1)), ('d?', str(-2**53 - 1)), ('e?', '-3'),
      ('f?', '1'), ('f? ', '2'), ('f?', '1')]]
  path = _write(tmp_path / 'a.jsonl', rows)
  with caplog.at_level('INFO', logger='tepo_jax'):
    problems = datasets.load(f'dapo_math:{path}')
  assert [p.problem for p in problems] == ['a  a?', 'b?', 'e?']
  assert 'omitted 1 problems that repeat an earlier one, up to' in caplog.text
  assert 'omitted 2 integer answers above 2^53' in caplog.text
  assert 'omitted 3 problems that come with different answers' in caplog.text
  assert '9 rows, expected 17398 or' in caplog.text
  assert len(datasets.load(str(path))) == 9  # Unnamed sets omit nothing.


def test_omni_math_may_lack_answers(tmp_path, caplog):
  path = _write(tmp_path / 'a.jsonl', [GOOD, {'problem': '?', 'answer': ''}])
  with caplog.at_level('INFO', logger='tepo_jax'):
    assert len(datasets.load(f'omni_math:{path}')) == 1
  assert 'omitted 1 rows without an answer' in caplog.text
  rows = [{'problem': '1+1?', 'answer': answer} for answer in ('2', '')]
  for rows in (rows, rows[::-1]):
    path = _write(tmp_path / 'a.jsonl', rows)
    (problem,) = datasets.load(f'omni_math:{path}')
    assert problem.answers == ('2',)


def test_overlap():
  """Formulas count, not spaces or the punctuation of sentences."""
  one, same, other = (problem_lib.Problem('', text, ('1',), '') for text in (
      'Let $x_1 = 2$. Find it.', r'let \(x_1=2\); find IT', 'Let x_1 = 3.'))
  assert datasets.overlap([one, other], [same, same]) == 1
  assert datasets.overlap([one, same], [same]) == 2
  assert datasets.overlap([one], []) == 0
  sums = [problem_lib.Problem('', f'What is 12 {sign} 3?', ('1',), '')
          for sign in '+-×÷']
  for problem in sums:
    assert datasets.overlap([problem], sums) == 1
    assert datasets.overlap(
        [problem], [other for other in sums if other is not problem]) == 0
  hyphen, minus = (problem_lib.Problem('', text, ('1',), '') for text in (
      'A two-digit number, 3 \N{MINUS SIGN} 1', 'A two digit number: 3 - 1'))
  assert datasets.overlap([hyphen], [minus]) == 1


@pytest.mark.parametrize('first, second, equal', [
    ('12 + 3', '12 - 3', False), ('12 × 3', '12 ÷ 3', False),
    ('12 * 3', '12 / 3', False), ('x < 3', 'x > 3', False),
    ('1.5 + 2', '15 + 2', False), ('x^2', 'x_2', False),
    ('12 − 3', '12-3', True), (r'12 \times 3', '12×3', True),
    ('a two-digit number', 'A two digit number.', True),
    ('(2 + 3) * 4', '2 + (3 * 4)', False), ('5!', '5', False),
    ('20%', '20', False), ('a ⋅ b', 'a b', False), ('a ∗ b', 'a b', False),
    ('a – b', 'a b', False), (r'12 -\sqrt{3}', r'12 \sqrt{3}', False),
    ('3 : 4', '34', False), ('3 : 4', '3 4', False), ('|x|', 'x', False),
    ('(1, 2)', '(12)', False), ('x ≤ 3', 'x ≥ 3', False),
    ('AB-CD', 'ABCD', False), (r'\{5\} + 1', '5 + 1', False),
    ('a – b', 'a - b', True), ('a ⋅ b', r'a \cdot b', True),
    ('a ∗ b', 'a * b', True), ('(1, 2)', '(1,2)', True),
    ('Find $1$, $x$.', 'find 1, x', True), ('$x^{2}$', 'x^2', True),
    ('\n Find\t x. Why?', 'find x why', True),
    (r'20\% of \$5', '20% of $5', True),
    ('Say "yes", or ‘no’.', "say “Yes” or 'no'", True),
    ("Is Ann’s ``it''?", "is Ann's it", True),
    (r'\left(x\,y\right)', '(xy)', True),
    (r'\leftarrow x', 'arrow x', False),
    ('甲，乙？', '甲乙。', True), ('（1，2）', '（12）', False),
    ('2 * sin', '2 sin', False),
    ('pq*3', 'pq3', False), ('at ﬁrst', 'at first', True)])
def test_operators_tell_problems_apart(first, second, equal):
  one, other = (problem_lib.Problem('', text, ('1',), '')
                for text in (first, second))
  assert datasets.overlap([one], [other]) == equal


@pytest.mark.skipif(not _SHARED.is_dir(), reason='no real copies here')
def test_overlap_of_the_real_copies():
  training = datasets.load(f'dapo_math:{_SHARED / "dapo_math_17k"}.jsonl')
  for name, file, count in (
      ('amc', 'amc83', 14), ('omni_math', 'omni_math_rule', 191),
      ('olympiadbench', 'olympiadbench', 8), ('math500', 'math500', 7)):
    problems = datasets.load(f'{name}:{_SHARED / file}.jsonl')
    assert datasets.overlap(problems, training) == count, name


def test_references_carry_unit_and_tolerance():
  problem = problem_lib.Problem(
      '', '?', ('4.2', '4.3'), '', None, None, '%', 0.1)
  assert problem.references == tuple(
      grading.Reference(text, '%', 0.1, problem='?') for text in ('4.2', '4.3'))


def test_arithmetic_by_name():
  assert datasets.load('arithmetic', 'test', 6) == (
      embedded.problems('arithmetic', 'test', 6))
  assert len(datasets.load('arithmetic', limit=0)) == 0


@pytest.mark.skipif(not _SHARED.is_dir(), reason='no real copies here')
@pytest.mark.parametrize('name, file, count', [
    ('dapo_math', 'dapo_math_17k', 17178), ('gsm8k', 'gsm8k_train', 7473),
    ('gsm8k', 'gsm8k_test', 1319), ('math500', 'math500', 500),
    ('aime24', 'aime24', 30), ('aime25', 'aime25', 30), ('amc', 'amc83', 83),
    ('omni_math', 'omni_math_rule', 2821), ('minerva', 'minerva_math', 272),
    ('omni_math', 'omni_math_full', 4419),
    ('olympiadbench', 'olympiadbench', 675)])
def test_real_copies_load(name, file, count, caplog):
  problems = datasets.load(f'{name}:{_SHARED / file}.jsonl')
  assert len(problems) == len({p.id for p in problems}) == count
  assert 'expected' not in caplog.text


def test_data_and_grading_do_not_import_jax():
  subprocess.run(
      [sys.executable, '-c',
       'import sys\n'
       'from tepo_jax import grading\n'
       'from tepo_jax.data import arithmetic, datasets, prompts\n'
       'assert not {"jax", "flax", "transformers", "datasets", "sympy"} '
       '& set(sys.modules)'],
      cwd=pathlib.Path(__file__).parents[2], check=True)


BAD_ROWS = [b'{"problem": \n', b'[1]\n', b'{"answer": "2"}\n',
            b'{"problem": "", "answer": "2"}\n',
            b'{"problem": "x", "answer": null}\n']


@pytest.mark.parametrize('order', [1, -1])
def test_up_to_n_bad_rows_are_skipped_counted_and_named(
    tmp_path, caplog, order):
  good = [b'{"problem": "p%d", "answer": "%d"}\n' % (i, i) for i in range(4)]
  path = tmp_path / 'rows.jsonl'
  path.write_bytes(b''.join((BAD_ROWS + good)[::order]))
  caplog.set_level('INFO', datasets.__name__)
  problems = datasets.load(str(path), skip_bad=5)
  assert sorted(p.answers[0] for p in problems) == ['0', '1', '2', '3']
  skipped = [r.getMessage() for r in caplog.records if 'skipped: ' in
             r.getMessage()]
  numbers = range(1, 6) if order == 1 else range(5, 10)
  assert [text.split(': ')[2] for text in skipped] == [
      f'row {number}' for number in numbers]
  assert f'{path}: skipped 5 bad rows of 9' in caplog.text
  with pytest.raises(errors.InputError) as error:
    datasets.load(str(path), skip_bad=4)
  said = str(error.value)
  assert f'more than skip_bad=4 bad rows; the first: {path}: row ' in said
  with pytest.raises(errors.InputError) as error:
    datasets.load(str(path))
  assert str(error.value).startswith(f'{path}: row ')
  assert 'skip_bad' not in str(error.value)


def test_a_file_of_bad_rows_alone_is_refused(tmp_path):
  path = tmp_path / 'rows.jsonl'
  path.write_bytes(b''.join(BAD_ROWS))
  with pytest.raises(errors.InputError, match='no problems'):
    datasets.load(str(path), skip_bad=9)


def test_an_empty_name_is_refused():
  with pytest.raises(errors.InputError, match='empty'):
    datasets.load('')
