"""The replay's section: identical rows, differences, what is folded."""

import re

import numpy as np

from tepo_jax.tools.report import replay
from tepo_jax.tools.report import sections


def outcome(gradient, loss=0.5, clip=0.0, region=0.0):
  gradient = {'w': np.asarray(gradient, np.float32)}
  return replay.Outcome(
      loss=loss, grad_norm=float(np.linalg.norm(gradient['w'])),
      clip_fraction=clip, region_share=region, entropy_predicted=-0.001,
      entropy_measured=-0.0012, gradient=gradient)


def comparison(where, **outcomes):
  return replay.Comparison(where, 1234, outcomes)


FIRST = comparison(
    'update 1 of 4', gspo=outcome([1, 0]), grpo=outcome([1, 0]),
    tepo=outcome([1, 0], region=0.25), gpg=outcome([1, 1e-6]))
LAST = comparison(
    'update 4 of 4', gspo=outcome([1, 0.1]), grpo=outcome([1, 0], clip=0.01),
    tepo=outcome([1, 0], clip=0.01, loss=0.6), gpg=outcome([2, 0]))


def test_identical_updates_are_found_by_their_gradients():
  assert replay.identical(FIRST.outcomes) == [
      ['gspo', 'grpo', 'tepo', 'gpg']]  # 1e-6 is rounding
  assert replay.identical(LAST.outcomes) == [
      ['gspo'], ['grpo', 'tepo'], ['gpg']]
  orthogonal = {'grpo': outcome([1, 0]), 'tepo': outcome([0, 1])}
  assert replay.identical(orthogonal) == [['grpo'], ['tepo']]  # of equal length


def _rows(content):
  body = content.partition('<tbody>')[2].partition('</tbody>')[0]
  return [re.findall(r'<td[^>]*>(.*?)</td>', row)
          for row in body.split('</tr>') if row]


def test_the_last_update_comes_first_and_the_rest_is_folded():
  content = sections._sections([FIRST, LAST])
  assert content.index('update 4 of 4') < content.index('update 1 of 4')
  assert '<summary>update 1 of 4</summary>' in content
  assert content.index('update 4 of 4') < content.index('<details>')
  assert 'update 1' not in sections._sections([LAST])


def test_rows_are_merged_and_show_differences_to_grpo():
  rows = _rows(sections._section(FIRST))
  assert [row[0] for row in rows] == ['gspo, grpo, tepo, gpg']
  assert rows[0][2] == '0.50000'  # the baseline's own values
  assert rows[0][5] == '0.00 … 25.00'  # M differs within the row
  rows = _rows(sections._section(LAST))
  assert [row[0] for row in rows] == ['grpo, tepo', 'gspo', 'gpg']
  found = {row[0]: row for row in rows}
  assert found['grpo, tepo'][2] == '0.50000 … 0.60000'
  assert found['gspo'][4] == '0.00 (-1.00)'
  assert found['gpg'][3] == '2.0000 (+1.0000)'
  assert found['gspo'][1] == f'{1 / 1.01 ** 0.5:.3f}'  # cosine with grpo
  assert '4 methods make 3 different updates' in sections._section(LAST)
  assert '4 methods make 1 different updates' in sections._section(FIRST)
