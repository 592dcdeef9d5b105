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


def test_identical_updates_are_found_by_gradient_and_numbers():
  assert replay.identical(FIRST.outcomes) == [
      ['gspo', 'grpo', 'gpg'], ['tepo']]  # 1e-6 is rounding; M differs
  assert replay.identical(LAST.outcomes) == [
      ['gspo'], ['grpo'], ['tepo'], ['gpg']]


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
  assert [row[0] for row in rows] == ['gspo, grpo, gpg', 'tepo']
  assert rows[0][2] == '0.50000'  # the baseline's own values
  assert rows[1][5] == '25.00 (+25.00)'
  rows = _rows(sections._section(LAST))
  assert [row[0] for row in rows] == ['grpo', 'gspo', 'tepo', 'gpg']
  found = {row[0]: row for row in rows}
  assert found['tepo'][2] == '0.60000 (+0.10000)'
  assert found['gspo'][4] == '0.00 (-1.00)'
  assert found['gpg'][3] == '2.0000 (+1.0000)'
  assert found['gspo'][1] == f'{1 / 1.01 ** 0.5:.3f}'  # cosine with grpo
  assert '4 methods make 4 different updates' in sections._section(LAST)
  assert '4 methods make 2 different updates' in sections._section(FIRST)
