"""Comparisons of hand-written evaluations."""

import json

import pytest

from tepo_jax import errors
from tepo_jax.job import results
from tepo_jax.job import sample_file
from tepo_jax.tools.report import comparison
from tepo_jax.tools.report import paper_tables
from tepo_jax.tools.report import tables
from tests.job.test_results import boxes
from tests.job.test_results import lines_of


def _single(verdicts, name='toy', first=0):
  return [line for i, correct in enumerate(verdicts, first)
          for line in lines_of(name, f'p{i}', boxes('1'), (correct,))]


def _evaluation(lines):
  """What `read` returns; 'SET/greedy' only accompanies 'SET'."""
  names = dict.fromkeys(line['set'] for line in lines)
  return {'first_decodings': [n for n in names if '/greedy' not in n]}, lines


def _compare(first, second):
  return comparison.compare(_evaluation(first), _evaluation(second))


def test_comparison():
  first = _single([0, 0, 0, 1, 1]) + _single([1], 'more')
  second = _single([1, 1, 1, 1, 0])[::-1] + _single([0], 'more')
  toy, more, everything = _compare(first, second)
  assert (toy['set'], toy['first'], toy['second']) == ('toy', 2 / 5, 4 / 5)
  assert toy['difference'] == pytest.approx(2 / 5)
  assert toy['mcnemar'] == {'only_first': 1, 'only_second': 3, 'p': .625}
  assert more['difference'] == -1
  assert everything['set'] == 'avg_micro'
  assert everything['difference'] == pytest.approx(1 / 6)
  assert 'toy: 40.00% → 80.00%, difference +40.00%' in (
      tables.of_comparison([toy], 'markdown'))


def test_settings_that_differ_are_named(tmp_path, capsys):
  settings = {'checkpoint': 'a', 'step': 3, 'eval.max_tokens': 48,
              'eval.temperature': 1.0, 'the data set toy': 'x'}
  for name, changed in (('a', {}), ('b', {
      'checkpoint': 'b', 'step': None, 'eval.max_tokens': 20})):
    _write_evaluation(tmp_path / name, {'toy': _single([1, 0])})
    (tmp_path / name / sample_file.IDENTITY).write_text(
        json.dumps(settings | changed))
  paper_tables.comparison([tmp_path / 'a', tmp_path / 'b'], 'markdown')
  assert capsys.readouterr().err == (
      'note: the evaluations differ in eval.max_tokens (48, 20)\n')
  paper_tables.comparison([tmp_path / 'a', tmp_path / 'a'], 'markdown')
  assert not capsys.readouterr().err


def _write_evaluation(folder, decodings):
  """The files as `evaluate` writes them; `decodings`: {name: lines}."""
  folder.mkdir()
  main = [name for name in decodings if '/greedy' not in name]
  found = {
      'sets': {name: results.summarize(lines, 'boxed')
               for name, lines in decodings.items()},
      'first_decodings': main,
      **results.averages([decodings[name] for name in main])}
  (folder / results.RESULTS).write_text(json.dumps(found))
  (folder / results.SAMPLES).write_text(''.join(
      json.dumps(line) + '\n' for lines in decodings.values()
      for line in lines))
  return found


def test_evaluate_and_compare_report_the_same_avg_micro(tmp_path):
  """Greedy decodings beyond a set's first one are not pooled in."""
  correct = {'toy': (1, 0, 1, 0), 'toy/greedy': (1,), 'other': (0,)}
  decodings = {name: lines_of(name, 'p', boxes(*'1234'), verdicts)
               for name, verdicts in correct.items()}
  found = _write_evaluation(tmp_path / 'a', decodings)
  assert found['avg_micro'] == pytest.approx(2 / 5)
  printed = paper_tables.comparison(
      [tmp_path / 'a', tmp_path / 'a'], 'markdown')
  assert [line.partition(',')[0] for line in printed.splitlines()] == [
      'toy: 50.00% → 50.00%', 'toy/greedy: 100.00% → 100.00%',
      'other: 0.00% → 0.00%', 'avg_micro: 40.00% → 40.00%']
  assert results.table(found).splitlines()[-2].split()[:2] == [
      'avg_micro', '40.0%']


def test_sets_of_other_weights_have_no_average(capsys):
  """Twice the samples in one set, as many in the other."""
  more = _single([1, 0], 'more')
  one, two = (lines_of('toy', 'p', boxes(*answers), [1] * len(answers))
              for answers in ('1', '11'))
  assert [row['set'] for row in _compare(one + more, two + more)] == [
      'toy', 'more']
  assert 'no average over the sets' in capsys.readouterr().err
  double = _single([1, 0], 'more') * 2
  assert _compare(one + more, two + double)[-1]['set'] == 'avg_micro'
  assert not capsys.readouterr().err


def test_an_average_over_fewer_sets_has_another_name(tmp_path):
  lines = _single([1, 0]) + _single([1], 'more')
  rows = _compare(lines + _single([0], 'third'), lines)
  assert rows[-1]['set'] == 'avg_micro of the shared sets'
  assert rows[-1]['first'] == pytest.approx(2 / 3)


def test_the_average_is_over_sets_that_both_decode_first():
  lines = _single([1, 0]) + _single([1], 'more') + _single([0], 'third')
  both = ({'first_decodings': ['toy', 'more', 'third']}, lines), (
      {'first_decodings': ['toy', 'more']}, lines)
  for pair in (both, both[::-1]):
    *_, average = comparison.compare(*pair)
    assert average['set'] == 'avg_micro of the shared sets'
    assert average['first'] == pytest.approx(2 / 3)


def test_what_cannot_be_compared_is_refused(tmp_path):
  with pytest.raises(errors.InputError, match='different problems'):
    _compare(_single([1]), _single([1], first=1))
  with pytest.raises(errors.InputError, match='share no set'):
    _compare(_single([1]), _single([1], 'more'))
  with pytest.raises(errors.InputError, match='no finished evaluation'):
    comparison.read(tmp_path)
  (tmp_path / results.RESULTS).write_text('{')
  (tmp_path / results.SAMPLES).write_text('')
  with pytest.raises(errors.InputError, match='results.json: '):
    comparison.read(tmp_path)
  good = {'set': 'a', 'id': '1', 'sample': 0, 'correct': True}
  for other in ({'id': [1]}, {'set': 3}, {'sample': '0'}, {'correct': 'no'}):
    (tmp_path / results.SAMPLES).write_text(json.dumps(good | other) + '\n')
    with pytest.raises(errors.InputError, match='l: not written by evaluate'):
      comparison.read(tmp_path)
  (tmp_path / results.SAMPLES).write_text(json.dumps(good) + '\n')
  (tmp_path / results.RESULTS).write_text('{"first_decodings": 3}')
  with pytest.raises(errors.InputError, match='n: not written by evaluate'):
    comparison.read(tmp_path)
