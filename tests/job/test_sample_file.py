"""SampleFile: complete groups on disk, one evaluation per folder."""

import json

import pytest

from tepo_jax import errors
from tepo_jax.job import results
from tepo_jax.job import sample_file

IDENTITY = {'seed': 0, 'eval.sets': ('toy', 'more')}
SAMPLES = {'toy': 2, 'more': 1}


def _group(name, problem, samples=2):
  return [{'set': name, 'id': problem, 'sample': i, 'completion': '½\n'}
          for i in range(samples)]


def _opened(folder, identity=IDENTITY, facts=None):
  file = sample_file.SampleFile(folder, identity)
  file.open(SAMPLES, facts or {'the data set toy': 'a digest'})
  return file


def test_groups_are_complete_or_absent(tmp_path):
  folder = tmp_path / 'out'
  file = _opened(folder)
  assert file.done('toy') == set()
  file.add(_group('toy', 'b'))
  file.add(_group('more', 'b', 1))
  whole = (folder / results.SAMPLES).read_bytes()
  text = ''.join(json.dumps(line) + '\n' for line in _group('toy', 'a'))
  for cut in range(1, len(text), 7):  # a kill at any byte of the next group
    (folder / results.SAMPLES).write_bytes(whole + text[:cut].encode())
    again = _opened(folder)
    assert (again.done('toy'), again.done('more')) == ({'b'}, {'b'})
    assert (folder / results.SAMPLES).read_bytes().count(b'\n') == 3
  (folder / results.SAMPLES).write_bytes(whole + text.encode())
  assert _opened(folder).done('toy') == {'a', 'b'}


@pytest.mark.parametrize('line', [
    '{"set": ', '3', '{"set": "toy"}', '{"set": "other", "id": "a"}',
    '{"set": [], "id": "a"}', '{"set": "toy", "id": [1]}', 9999 * '['])
def test_a_line_that_is_no_sample_is_named(tmp_path, line):
  _opened(tmp_path / 'out').add(_group('more', 'b', 1))
  path = tmp_path / 'out' / results.SAMPLES
  text = path.read_text('utf-8') + line + '\n'
  path.write_text(text, 'utf-8')
  with pytest.raises(errors.InputError) as error:
    _opened(tmp_path / 'out')
  assert str(error.value).startswith(f'{path}: line 2 is no sample of this ')
  assert str(error.value).endswith('; delete that line')
  assert path.read_text('utf-8') == text


def test_the_final_order_is_that_of_the_problems(tmp_path):
  order = {'toy': ['a', 'b'], 'more': ['x']}
  found = []
  for name, coming in (('one', 'ab'), ('two', 'ba')):
    file = _opened(tmp_path / name)
    file.add(_group('more', 'x', 1))
    for problem in coming:
      file.add(_group('toy', problem))
    lines = file.finish(order)
    assert lines == {'toy': _group('toy', 'a') + _group('toy', 'b'),
                     'more': _group('more', 'x', 1)}
    found.append((tmp_path / name / results.SAMPLES).read_bytes())
  assert found[0] == found[1]
  assert _opened(tmp_path / 'two').finish(order) == lines


def test_samples_of_other_problems_are_refused(tmp_path):
  _opened(tmp_path / 'out')
  sample_file.SampleFile(tmp_path / 'out', IDENTITY).check()
  with pytest.raises(errors.InputError, match='the data set toy differ'):
    _opened(tmp_path / 'out', facts={'the data set toy': 'another'})


def test_nothing_is_written_before_open(tmp_path):
  sample_file.SampleFile(tmp_path / 'out', IDENTITY).check()
  assert not (tmp_path / 'out').exists()


def test_other_folders_are_left_alone(tmp_path):
  _opened(tmp_path / 'out').add(_group('toy', 'a'))
  before = (tmp_path / 'out' / results.SAMPLES).read_bytes()
  with pytest.raises(errors.InputError, match='another evaluation: seed diff'):
    sample_file.SampleFile(tmp_path / 'out', IDENTITY | {'seed': 1}).check()
  assert (tmp_path / 'out' / results.SAMPLES).read_bytes() == before
  (tmp_path / 'mine').mkdir()
  (tmp_path / 'mine' / 'thesis.tex').touch()
  with pytest.raises(errors.InputError, match='not the folder of an eval'):
    sample_file.SampleFile(tmp_path / 'mine', IDENTITY).check()
  (tmp_path / 'out' / sample_file.IDENTITY).write_text('{')
  with pytest.raises(errors.InputError, match='evaluation.json'):
    sample_file.SampleFile(tmp_path / 'out', IDENTITY).check()


def test_the_date_of_an_evaluation_is_kept(tmp_path):
  assert sample_file.saved_date(tmp_path / 'none') is None
  for identity, date in (({'data.date': '2024-02-29'}, '2024-02-29'),
                         ({'seed': 0}, None)):
    (tmp_path / sample_file.IDENTITY).write_text(json.dumps(identity))
    assert sample_file.saved_date(tmp_path) == date
  (tmp_path / sample_file.IDENTITY).write_text('[1]')
  with pytest.raises(errors.InputError, match='not a JSON object'):
    sample_file.saved_date(tmp_path)
