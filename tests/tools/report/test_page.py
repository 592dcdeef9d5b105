"""The report in a real browser: drawn without errors, correct, and safe."""

import functools
import json
import pathlib
import re

import numpy as np
import pytest

from tepo_jax.tools.report import figures
from tepo_jax.tools.report import inspector
from tepo_jax.tools.report import runs
from tepo_jax.tools.report import study
from tests.tools.report.records import make_run as make_run_in
from tests.tools.report.records import record

HOSTILE = '</script><img src=x onerror="window.hacked=1"><b>bold</b>'


def dumped(cursor, verdicts, text='ok'):
  """Records of one group, one for each verdict; tokens 0, 1, 2, …"""
  return [{
      'cursor': cursor, 'sample': j, 'set': 'made', 'id': f'p{cursor}',
      'problem': f'Problem {cursor} {text}', 'answers': [text],
      'completion': text, 'extracted': text, 'correct': correct,
      'reward': float(correct), 'tokens': 3 + j, 'truncated': False,
      'trained': len(set(verdicts)) > 1, 'token_ids': list(range(3 + j))}
      for j, correct in enumerate(verdicts)]


RECORDS = (dumped(0, [True, True]) + dumped(1, [True, False], HOSTILE)
           + dumped(2, [False, False]) + dumped(3, [False, True]))
WORDS = [HOSTILE, '\n', ' a', '4', '']


def arrays():
  generator = np.random.default_rng(0)
  found = {q.key: generator.normal(size=(len(RECORDS), 5)).astype(np.float32)
           for q in inspector.QUANTITIES}
  found['region'] = (found['region'] > 0).astype(int)
  found['sampler_gap'][:] = 0.01
  found['sampler_gap'][7, 1] = -9  # group 3 has the largest gap
  return found


@pytest.fixture(name='report', scope='module')
def _report(tmp_path_factory):
  """Two methods of two seeds, one broken run, and an inspector."""
  tmp_path = tmp_path_factory.mktemp('report')
  make_run = functools.partial(make_run_in, tmp_path / 'runs')
  for seed in (0, 1):
    for name, high in (('grpo', 0.3), ('tepo', 0.1)):
      make_run(f'{name}_{seed}', [
          record(s, clip_fraction_high=high + 0.1 * seed)
          for s in range(1, 7)], seed=seed, method_name=name)
  broken = pathlib.Path(make_run('broken', [record(1)], method_name=HOSTILE))
  (broken / 'metrics.jsonl').write_text('{"step": 1')
  read = runs.read([str(broken.parent / '*')])
  payload = inspector.payload(RECORDS, WORDS.__getitem__, arrays(),
                              title='made up', about=HOSTILE)
  return study.write(tmp_path, read, {'A': ('tepo', HOSTILE)}, [payload],
                     [('More', '<p id="more">more</p>')])


def test_the_page_is_drawn_without_errors(report, browser):
  for settings in ({}, {'dark': True}, {'width': 390, 'height': 844}):
    browser.open(report, **settings)
    assert browser.complaints == []
    for panel in figures.PANELS:
      drawn = f'document.querySelectorAll("#panel-{panel.name} .mean").length'
      assert browser.run(drawn) == 2, panel
    assert browser.run('document.documentElement.scrollWidth') <= (
        settings.get('width', 1200))
    # Dark text on light, light text on dark.
    text, ground = (sum(map(int, re.findall(r'\d+', browser.run(
        f'getComputedStyle(document.body).{name}'))[:3]))
        for name in ('color', 'backgroundColor'))
    assert (text > ground) == settings.get('dark', False)


def test_the_page_loads_nothing_else(report):
  page = report.read_text()
  assert not re.search(r'(?:src|href)="(?!#)', page)
  assert "default-src 'none'" in page


@pytest.mark.parametrize('name, expected', [
    # low + high, mean of the two seeds, per cent.
    ('figure2a_clip_ratio', [[36] * 6, [16] * 6]),
    # Reward is 10 % times the step; smoothed over 5 steps, fewer at the ends.
    ('figure3a_reward', [[20, 25, 30, 40, 45, 50]] * 2)])
def test_lines_are_drawn_at_their_values(name, expected, report, browser):
  """Reads the drawn points by the labels of the axis."""
  browser.open(report)
  paths = browser.run(f'[...document.querySelectorAll("#panel-{name} .mean")]'
                      '.map(p => p.getAttribute("d"))')
  labels = browser.run(
      f'[...document.querySelectorAll("#panel-{name} text")]'
      '.filter(t => t.getAttribute("text-anchor") === "end")'
      '.map(t => [Number(t.textContent), Number(t.getAttribute("y")) - 4])')
  (v0, y0), *_, (v1, y1) = labels
  for path, values in zip(paths, expected, strict=True):
    points = [tuple(map(float, point)) for point in re.findall(
        r'[ML]([\d.]+),([\d.]+)', path)]
    drawn = [v0 + (y - y0) / (y1 - y0) * (v1 - v0) for _, y in points]
    assert drawn == pytest.approx(values, abs=0.3)
    steps_apart = np.diff([x for x, _ in points])
    assert steps_apart == pytest.approx([steps_apart[0]] * 5, abs=0.2)


def test_keys_read_a_figure_and_the_legend_hides_curves(report, browser):
  browser.open(report)
  card = '#panel-figure2a_clip_ratio'
  browser.run(f'document.querySelector("{card} svg").focus()')
  browser.press('ArrowLeft')
  readout = browser.run(
      f'document.querySelector("{card} .readout").textContent')
  assert readout == 'step 5grpo 36 [31, 41] n=2tepo 16 [11, 21] n=2'
  browser.run('[...document.querySelectorAll("#legend button")]'
              '.find(b => b.textContent === "grpo").click()')
  assert browser.run(
      f'document.querySelectorAll("{card} .mean").length') == 1
  browser.run('[...document.querySelectorAll("#legend button")]'
              '.find(b => b.textContent === "each seed").click()')
  assert browser.run(
      f'document.querySelectorAll("{card} .seed").length') == 2


def choose(browser, name, value):
  browser.run(f'(() => {{ const s = document.getElementById("{name}");'
              f's.value = "{value}"; s.dispatchEvent(new Event("change")); }})'
              '()')


def shown(browser):
  return browser.run('document.querySelector("#group .problem").textContent')


def values_shown(browser):
  return dict(browser.run(
      '[...document.querySelectorAll("#tip td[data-key]")].map('
      'td => [td.dataset.key, Number(td.textContent)])'))


def test_hover_shows_the_arrays_exactly(report, browser):
  browser.open(report)
  choose(browser, 'sort', 'gap')
  assert shown(browser).startswith('Problem 3')
  browser.move_to('.token[data-c="1"][data-t="3"]')
  assert values_shown(browser) == {
      key: float(str(value_BT[7, 3])) for key, value_BT in arrays().items()}


def test_filters_and_orders(report, browser):
  browser.open(report)
  for name, expected in {'all': 4, 'mixed': 2, 'trained': 2, 'right': 1,
                         'wrong': 1}.items():
    choose(browser, 'filter', name)
    assert browser.run('document.getElementById("count").textContent') == (
        f'group 1 of {expected}')
  choose(browser, 'filter', 'all')
  found = arrays()
  for name, order in {
      'gap': lambda i: np.abs(found['sampler_gap'][i]).max(),
      'entropy': lambda i: np.abs(found['entropy_change'][i]).mean(),
      'masked': lambda i: found['region'][i].mean()}.items():
    choose(browser, 'sort', name)
    by_group = {row['cursor']: [] for row in RECORDS}
    for index, row in enumerate(RECORDS):
      by_group[row['cursor']] += [(index, t) for t in range(row['tokens'])]
    best = max(by_group, key=lambda g: order(tuple(zip(*by_group[g]))))
    assert shown(browser).startswith(f'Problem {best}'), name


def test_keys_move_between_tokens_completions_and_groups(report, browser):
  browser.open(report)
  browser.run('document.getElementById("inspector").focus()')
  first = shown(browser)
  for key in ('ArrowRight', 'ArrowRight', 'ArrowDown'):
    browser.press(key)
  place = ('(e => [e.dataset.c, e.dataset.t])'
           '(document.querySelector(".token.shown"))')
  assert browser.run(place) == ['1', '1']
  browser.press('q')
  assert browser.run('document.getElementById("quantity").value') == 'kl'
  browser.press('n')
  assert shown(browser) != first
  browser.press('p')
  assert shown(browser) == first
  browser.press('Escape')
  assert browser.run('document.getElementById("tip").hidden')


def test_html_in_text_is_shown_and_not_executed(report, browser):
  browser.open(report)
  choose(browser, 'filter', 'mixed')
  assert HOSTILE in shown(browser)
  browser.move_to('.token[data-c="0"][data-t="0"]')
  assert browser.run('document.querySelector(".token").textContent') == HOSTILE
  tip = browser.run('document.getElementById("tip").textContent')
  assert json.dumps(HOSTILE) in tip
  assert HOSTILE in browser.run('document.body.innerText')
  assert browser.run('typeof window.hacked') == 'undefined'
  assert browser.run('document.images.length') == 0


def test_the_summary_counts_the_tokens_in_m(report, browser):
  browser.open(report)
  cells = browser.run('[...document.querySelectorAll("#masked tr")].map('
                      'tr => [...tr.cells].map(td => td.textContent))')
  region_BT = arrays()['region']
  trained = [i for i, row in enumerate(RECORDS) if row['trained']]
  for _, token, masked, count, share in cells:
    inside = [region_BT[i, int(token)] for i in trained
              if int(token) < RECORDS[i]['tokens']]
    assert (int(masked), int(count)) == (sum(inside), len(inside))
    assert share == f'{100 * np.mean(inside):.1f} %'
  counts = [int(row[2]) for row in cells]
  assert counts and counts == sorted(counts, reverse=True)


def test_a_large_rollout_is_truncated_to_whole_groups(monkeypatch):
  monkeypatch.setattr(inspector, 'MOST_TOKENS', 15)
  cut = inspector.payload(RECORDS, WORDS.__getitem__, arrays())
  assert [g['cursor'] for g in cut['groups']] == [1, 3]  # trained on first
  assert cut['left_out'] == 2
