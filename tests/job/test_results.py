"""Results and comparisons of hand-written samples."""

import json

import pytest

from tepo_jax import errors
from tepo_jax.job import results
from tepo_jax.tools.report import paper_tables
from tepo_jax.tools.report import tables


def _lines(name, problem, texts, correct, **fields):
  return [{'set': name, 'id': problem, 'problem': '?', 'answers': ['1'],
           'sample': i, 'completion': text, 'correct': bool(c), 'tokens': 3 + i,
           'truncated': False, **fields}
          for i, (text, c) in enumerate(zip(texts, correct))]


def _boxes(*texts):
  return [f'so \\boxed{{{text}}}' for text in texts]


LINES = (
    _lines('toy', 'a', _boxes('1/2', '0.5', '3', r'\frac12'), (1, 1, 0, 1),
           level='1', subject='x')
    + _lines('toy', 'b', _boxes('4', '4', '5') + ['?'], (0, 0, 1, 0), level='2')
    + _lines('toy', 'c', ['', '', '', ''], (0, 0, 0, 0), level='2'))


def test_summary():
  found = results.summarize(LINES, 'boxed')
  assert found['avg@4'] == pytest.approx(4 / 12)
  assert found['low'] < 4 / 12 < found['high']
  assert [found[f'pass@{k}'] for k in (1, 2, 3, 4)] == pytest.approx(
      [4 / 12, (1 + 1 / 2 + 0) / 3, (1 + 3 / 4) / 3, 2 / 3])
  # a: 3 equal votes of 4; b: two for the wrong answer, one for the right.
  assert found['maj@4'] == pytest.approx((1 + 0 + 0) / 3)
  assert found['maj@1'] == pytest.approx(4 / 12)
  assert (found['no_answer'], found['truncated']) == (5 / 12, 0)
  assert (found['mean_length'], found['problems']) == (4.5, 3)
  assert found['by_level'] == {'1': {'accuracy': 3 / 4, 'problems': 1},
                               '2': {'accuracy': 1 / 8, 'problems': 2}}
  assert found['by_subject'] == {'x': {'accuracy': 3 / 4, 'problems': 1}}
  assert set(results.brief(found)) == {
      'avg@4', 'low', 'high', 'pass@1', 'pass@2', 'pass@4', 'maj@1', 'maj@2',
      'maj@4', 'no_answer', 'truncated', 'mean_length', 'problems', 'too_long'}


def test_problems_that_were_too_long_are_counted_beside_the_accuracy():
  found = {'sets': {
      'toy': results.summarize(LINES, 'boxed', too_long=2),
      'other': results.summarize(LINES, 'boxed')},
           **results.averages([LINES])}
  assert [found['sets'][name]['too_long'] for name in found['sets']] == [2, 0]
  toy, other = results.table(found).splitlines()[1:3]
  assert toy.endswith(' 3 of 5') and other.endswith(' 3')


def test_one_sample_has_no_majority():
  found = results.summarize(_lines('toy', 'a', _boxes('1'), (1,)), 'boxed')
  assert found['avg@1'] == found['pass@1'] == 1
  assert not [name for name in found if name[:3] in ('maj', 'by_')]


def test_a_truncated_answer_does_not_vote():
  lines = _lines('toy', 'a', _boxes('1', '1', '2'), (0, 0, 1))
  for line in lines[:2]:
    line['truncated'] = True
  found = results.summarize(lines, 'boxed')
  assert found['maj@3'] == 1 and found['no_answer'] == 2 / 3


def test_averages():
  other = _lines('other', 'x', _boxes('1'), (1,))
  found = results.averages([LINES, other])
  assert found['avg_micro'] == pytest.approx(5 / 13)
  assert found['avg_macro'] == pytest.approx((1 / 3 + 1) / 2)
  low, high = found['avg_micro_interval']
  assert 0 <= low < 5 / 13 < high < 1


def _single(verdicts, name='toy', first=0):
  return [line for i, correct in enumerate(verdicts, first)
          for line in _lines(name, f'p{i}', _boxes('1'), (correct,))]


def _evaluation(lines):
  """What `read` returns; 'SET/greedy' only accompanies 'SET'."""
  names = dict.fromkeys(line['set'] for line in lines)
  return {'first_decodings': [n for n in names if '/greedy' not in n]}, lines


def _compare(first, second):
  return results.compare(_evaluation(first), _evaluation(second))


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
  decodings = {name: _lines(name, 'p', _boxes(*'1234'), verdicts)
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
    *_, average = results.compare(*pair)
    assert average['set'] == 'avg_micro of the shared sets'
    assert average['first'] == pytest.approx(2 / 3)


def test_what_cannot_be_compared_is_refused(tmp_path):
  with pytest.raises(errors.InputError, match='different problems'):
    _compare(_single([1]), _single([1], first=1))
  with pytest.raises(errors.InputError, match='share no set'):
    _compare(_single([1]), _single([1], 'more'))
  with pytest.raises(errors.InputError, match='no finished evaluation'):
    results.read(tmp_path)
  (tmp_path / results.RESULTS).write_text('{')
  (tmp_path / results.SAMPLES).write_text('')
  with pytest.raises(errors.InputError, match='results.json: '):
    results.read(tmp_path)


def test_the_table_of_an_evaluation():
  text = results.table(json.loads(json.dumps({
      'sets': {'toy': results.summarize(LINES, 'boxed')},
      **results.averages([LINES])})))
  [_, toy, micro, macro] = text.splitlines()
  assert toy.split()[:3] == ['toy', 'avg@4', '33.3%']
  assert micro.split()[:2] == ['avg_micro', '33.3%']
  assert macro.startswith('avg_macro')
