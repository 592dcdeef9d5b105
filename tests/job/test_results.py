"""Results of hand-written samples."""

import json

import pytest

from tepo_jax.job import results


def lines_of(name, problem, texts, correct, **fields):
  return [{'set': name, 'id': problem, 'problem': '?', 'answers': ['1'],
           'sample': i, 'completion': text, 'correct': bool(c), 'tokens': 3 + i,
           'truncated': False, **fields}
          for i, (text, c) in enumerate(zip(texts, correct))]


def boxes(*texts):
  return [f'so \\boxed{{{text}}}' for text in texts]


LINES = (
    lines_of('toy', 'a', boxes('1/2', '0.5', '3', r'\frac12'), (1, 1, 0, 1),
             level='1', subject='x')
    + lines_of('toy', 'b', boxes('4', '4', '5') + ['?'], (0, 0, 1, 0),
               level='2')
    + lines_of('toy', 'c', ['', '', '', ''], (0, 0, 0, 0), level='2'))


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
  found = results.summarize(lines_of('toy', 'a', boxes('1'), (1,)), 'boxed')
  assert found['avg@1'] == found['pass@1'] == 1
  assert not [name for name in found if name[:3] in ('maj', 'by_')]


def test_a_truncated_answer_does_not_vote():
  lines = lines_of('toy', 'a', boxes('1', '1', '2'), (0, 0, 1))
  for line in lines[:2]:
    line['truncated'] = True
  found = results.summarize(lines, 'boxed')
  assert found['maj@3'] == 1 and found['no_answer'] == 2 / 3


def test_averages():
  other = lines_of('other', 'x', boxes('1'), (1,))
  found = results.averages([LINES, other])
  assert found['avg_micro'] == pytest.approx(5 / 13)
  assert found['avg_macro'] == pytest.approx((1 / 3 + 1) / 2)
  low, high = found['avg_micro_interval']
  assert 0 <= low < 5 / 13 < high < 1


def test_the_table_of_an_evaluation():
  text = results.table(json.loads(json.dumps({
      'sets': {'toy': results.summarize(LINES, 'boxed')},
      **results.averages([LINES])})))
  [_, toy, micro, macro] = text.splitlines()
  assert toy.split()[:3] == ['toy', 'avg@4', '33.3%']
  assert micro.split()[:2] == ['avg_micro', '33.3%']
  assert macro.startswith('avg_macro')
