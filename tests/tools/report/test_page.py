"""The report in a real browser: drawn without errors, correct, and safe."""

import functools
import json
import pathlib
import re

import numpy as np
import pytest

from tepo_jax.runtime import progress
from tepo_jax.tools.report import figures
from tepo_jax.tools.report import inspector
from tepo_jax.tools.report import page
from tepo_jax.tools.report import runs
from tepo_jax.tools.report import study
from tests.tools.report.records import make_run as make_run_in
from tests.tools.report.records import record

SCORE = 'reward/own_reward:' + 'a_long_name_' * 8
HOSTILE = '</script><img src=x onerror="window.hacked=1"><b>bold</b>'


def dumped(cursor, verdicts, text='ok'):
  """Records of one group, one for each verdict; tokens 0, 1, 2, …"""
  return [{
      'cursor': cursor, 'sample': j, 'set': 'made', 'id': f'p{cursor}',
      'problem': f'Problem {cursor} {text}', 'answers': [text],
      'completion': text, 'extracted': text, 'correct': correct,
      'reward': correct + 0.03125 * j, SCORE: 0.125 * j if j else None,
      f'reward/{HOSTILE}': 1 / 3, 'tokens': 3 + j, 'truncated': False,
      'trained': len(set(verdicts)) > 1, 'token_ids': list(range(3 + j)),
      'prompt_ids': [0], 'sampler_logp': [-0.5] * (3 + j)}
      for j, correct in enumerate(verdicts)]


RECORDS = (dumped(0, [True, True]) + dumped(1, [True, False], HOSTILE)
           + dumped(2, [False, False]) + dumped(3, [False, True]))
WORDS = [HOSTILE, '\n', ' a', '4', '']


def test_control_characters_are_visible_in_a_page():
  hostile = 'a\x1b[2J\u202eb\x00'
  shown = page.render(
      hostile, page.Html(''), [('x', page.text(hostile))],
      {'words': [hostile, {'y': (hostile, 'é\n')}]})
  assert not set('\x1b\u202e\x00') & set(shown)
  assert shown.count('\\x1b[2J') == 5 and 'é' in shown


def arrays():
  generator = np.random.default_rng(0)
  found = {q.key: generator.normal(size=(len(RECORDS), 5)).astype(np.float32)
           for q in inspector.QUANTITIES}
  found['region'] = (found['region'] > 0).astype(int)
  found['sampler_gap'][:] = 0.01
  found['kl'][:] = np.float32(-1.0772692e-7)  # shown as a power of ten
  found['sampler_gap'][7, 1] = -9  # group 3 has the largest gap
  return found


@pytest.fixture(name='drawn_files', scope='module')
def _drawn_files():
  """Keeps the report from drawing files, which takes seconds; their names."""
  names = []
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(figures, 'draw', lambda panel, *_: names.append(panel.name))
    patch.setattr(figures, 'draw_differences', lambda panel, curves, *_:
                  names.append(f'difference_{panel.name}'))
    yield names


@pytest.fixture(name='report', scope='module')
def _report(tmp_path_factory, drawn_files):
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


WIDTHS = (360, 420, 768, 1400, 2560)


def test_the_page_is_drawn_without_errors(report, browser):
  for settings in ({}, {'dark': True}, *({'width': w} for w in WIDTHS)):
    browser.open(report, **settings)
    assert browser.complaints == [] and browser.requests == [
        report.absolute().as_uri()]
    for panel in figures.PANELS:
      drawn = f'document.querySelectorAll("#panel-{panel.name} .mean").length'
      assert browser.run(drawn) == 2, panel
    for opened in (False, True):  # what is folded has to fit too
      browser.run('document.querySelectorAll("details").forEach('
                  f'd => d.open = {str(opened).lower()})')
      assert browser.run('document.documentElement.scrollWidth') <= (
          settings.get('width', 1200))
    # Dark text on light, light text on dark.
    text, ground = (sum(map(int, re.findall(r'\d+', browser.run(
        f'getComputedStyle(document.body).{name}'))[:3]))
        for name in ('color', 'backgroundColor'))
    assert (text > ground) == settings.get('dark', False)


def test_every_figure_has_its_file(noisy, drawn_files):
  names = {panel.name for panel in figures.PANELS} | {'eval_set_avg_8'}
  assert set(drawn_files) == names | {f'difference_{name}' for name in (
      'eval_set_avg_8', 'figure2a_clip_ratio', 'figure3b_grad_norm', 'accuracy',
      'entropy')}


def test_the_page_loads_nothing_else(report):
  page = report.read_text()
  # Links lead to the runs and within the page.
  assert 'src="' not in page
  assert {target.rpartition('/')[0] for target in re.findall(
      r'href="([^"]*)"', page)} == {'', 'runs'}
  assert "default-src 'none'" in page


@pytest.mark.parametrize('name, line, expected', [
    # low + high, mean of the two seeds, per cent.
    ('figure2a_clip_ratio', 'mean', [[36] * 6, [16] * 6]),
    # Reward is 10 % times the step.
    ('figure3a_reward', 'raw', [[10, 20, 30, 40, 50, 60]] * 2),
    ('figure3a_reward', 'mean', [[10, 15, 20, 25, 30, 40]] * 2)])
def test_lines_are_drawn_at_their_values(name, line, expected, report, browser):
  """Reads the drawn points by the labels of the axis."""
  browser.open(report)
  paths = browser.run(f'[...document.querySelectorAll("#panel-{name} .{line}")]'
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
  assert readout == ('step 5grpo 36 [31, 41] n=2 (mean 36)'
                     'tepo 16 [11, 21] n=2 (mean 16)')
  browser.run('[...document.querySelectorAll("#legend button")]'
              '.find(b => b.textContent === "grpo").click()')
  assert browser.run(
      f'document.querySelectorAll("{card} .mean").length') == 1
  browser.run('[...document.querySelectorAll("#legend button")]'
              '.find(b => b.textContent === "each seed").click()')
  assert browser.run(
      f'document.querySelectorAll("{card} .seed").length') == 2


@pytest.fixture(name='long_labels', scope='module')
def _long_labels(tmp_path_factory, drawn_files):
  """A report of four methods whose labels are wider than a phone."""
  folder = tmp_path_factory.mktemp('long')
  name = 'optimizer.learning_rate=3e-06, data.name=a_long_name_of_a_file.jsonl'
  for i in range(4):
    make_run_in(folder / 'runs', str(i), [record(s) for s in range(1, 7)],
                method_name=f'tepo {i} ({name})')
  return study.write(folder, runs.read([str(folder / 'runs')]), {})


# [figure's box, [box of a value, whether its text is cut], …]
_READOUT = """(() => {
  const card = document.querySelector("#panel-entropy"), box = e => {
    const b = e.getBoundingClientRect();
    return [b.left, b.top, b.right, b.bottom]; };
  return [box(card), ...[...card.querySelectorAll(".readout > span")].map(
    e => [box(e), e.scrollWidth > e.clientWidth])]; })()"""


@pytest.mark.parametrize('width', [390, 1280])
def test_hovers_stay_in_their_figure_and_move_nothing(
    long_labels, browser, width):
  browser.open(long_labels, width=width)
  top = ('document.querySelector("#panel-entropy svg")'
         '.getBoundingClientRect().top + scrollY')
  before = browser.run(top)
  browser.move_to('#panel-entropy svg')
  card, *values = browser.run(_READOUT)
  assert len(values) == 5  # the step, and a value for each method
  for (left, up, right, down), is_cut in values:
    assert card[0] <= left < right <= card[2] <= width
    assert card[1] <= up < down <= card[3] and not is_cut
  assert browser.run(top) == before


@pytest.mark.parametrize('width', [390, 1280])
def test_the_token_s_box_stays_in_the_window(report, browser, width):
  browser.open(report, width=width)
  choose(browser, 'filter', 'mixed')  # with a long word
  for place in ('[data-c="0"][data-t="0"]', ':last-of-type'):
    browser.move_to(f'.token{place}')
    left, top, right, bottom = browser.run(
        '(b => [b.left, b.top, b.right, b.bottom])'
        '(document.getElementById("tip").getBoundingClientRect())')
    assert 0 <= left < right <= width and 0 <= top < bottom <= 900


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


def test_each_reward_function_has_its_value(report, browser):
  browser.open(report)
  choose(browser, 'filter', 'wrong')
  facts = [browser.run(
      f'[...document.querySelectorAll(".facts")[{j}].children].slice(0, 4)'
      '.map(e => [e.textContent, e.title])') for j in (0, 1)]
  name = SCORE.removeprefix('reward/')
  hostile = [f'{HOSTILE} 0.333', '0.3333333333333333']
  assert facts == [
      [['✗ wrong', ''], ['reward 0', '0'], [f'{name} failed', 'null'], hostile],
      [['✗ wrong', ''], ['reward 0.0313', '0.03125'],
       [f'{name} 0.125', '0.125'], hostile]]


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


BY_REWARD = {'rollout.mixed': 'reward'}
NOT_TRUNCATED = {'rollout.truncated': 'exclude'}


@pytest.mark.parametrize('changed, fields, mixed', [
    ({}, None, False), ({}, BY_REWARD, True),
    ({'reward': 0.5}, BY_REWARD, False), ({'correct': False}, {}, True),
    ({'correct': False, 'truncated': True}, {}, True),
    ({'correct': False, 'truncated': True}, NOT_TRUNCATED, False),
    ({'truncated': True}, BY_REWARD | NOT_TRUNCATED, False)])
def test_a_group_is_mixed_as_training_counts_it(changed, fields, mixed):
  """Equal verdicts and different rewards, unless the last sample is changed."""
  first, last = dumped(0, [True, True])
  records = [first | {'reward': 0.5}, last | {'reward': 0.75} | changed]
  [group] = inspector.payload(
      records, WORDS.__getitem__, arrays(), fields)['groups']
  assert group['mixed'] is mixed


@pytest.fixture(name='noisy', scope='module')
def _noisy(tmp_path_factory, drawn_files):
  """Three runs of 40 steps with evaluations; the report, and their folders."""
  folder = tmp_path_factory.mktemp('noisy')
  generator = np.random.default_rng(0)
  for name in ('grpo', 'tepo', 'gspo'):
    lines = [record(s, reward=generator.uniform(), accuracy=generator.uniform(),
                    grad_norm=generator.uniform(), entropy=0.5,
                    clip_fraction_low=0, clip_fraction_high=0,
                    **{'seconds/step': 47.8 if s == 1 else 5.0},
                    **({} if s % 10 else {
                        'eval/set/avg@8': generator.uniform(),
                        'eval/set/low': 0.1, 'eval/set/high': 0.9}))
             for s in range(1, 41)]
    before = {'step': 0, 'eval/set/avg@8': 0.25, 'eval/set/low': 0.2,
              'eval/set/high': 0.3}
    path = pathlib.Path(make_run_in(folder / 'runs', name, [before, *lines],
                                    method_name=name, steps=40,
                                    data={'name': 'arithmetic'}))
    (path / 'environment.jsonl').write_text(json.dumps(
        {'step': 0, 'devices': '1 x cpu', 'commit': 'abc123+',
         'parameters': 212345}) + '\n')
  read = runs.read([str(folder / 'runs' / '*')])
  return study.write(folder, read, {}), folder / 'runs'


def measured(folder, name):
  """{step: value} of metrics.jsonl."""
  lines = (folder / 'metrics.jsonl').read_text().splitlines()
  return {line['step']: line[name] for line in map(json.loads, lines)
          if name in line}


def values_read(browser, panel):
  """[[label, value, mean or None], …] of a figure's read-out, and its step."""
  step, *values = browser.run(
      f'[...document.querySelectorAll("#panel-{panel} .readout > span")]'
      '.map(s => s.textContent)')
  parts = [re.fullmatch(r'(\S+) (\S+)(?: \(mean (\S+)\))?', v).groups()
           for v in values]
  return int(step.removeprefix('step ')), {
      label: (float(value), mean and float(mean))
      for label, value, mean in parts}


def test_the_page_reads_out_what_metrics_jsonl_has(noisy, browser):
  """At several steps and windows; the mean sees no later step."""
  report, folders = noisy
  browser.open(report)
  for window in (5, 1, 20):
    choose(browser, 'window', window)
    for step in (1, 2, 17, 40):
      browser.run(f'showStep({step})')
      for panel, metric, scale in (
          ('figure3a_reward', 'reward', 100), ('accuracy', 'accuracy', 100),
          ('figure2b_seconds', 'seconds/step', 1),
          ('figure3b_grad_norm', 'grad_norm', 1)):
        shown_at, found = values_read(browser, panel)
        assert shown_at == step and set(found) == {'grpo', 'gspo', 'tepo'}
        for label, (value, mean) in found.items():
          series = measured(folders / label, metric)
          assert value == pytest.approx(scale * series[step], rel=6e-4)
          if window == 1:
            assert mean is None
          else:
            recent = [series[s] for s in range(max(1, step - window + 1),
                                               step + 1)]
            assert mean == pytest.approx(scale * np.mean(recent), rel=6e-4)
  choose(browser, 'window', 20)
  for step in (0, 10, 40):
    browser.run(f'showStep({step})')
    shown_at, found = values_read(browser, 'eval_set_avg_8')
    assert shown_at == step
    for label, (value, mean) in found.items():
      assert mean is None and value == pytest.approx(
          100 * measured(folders / label, 'eval/set/avg@8')[step], rel=6e-4)
  assert browser.complaints == []


def labels_of(browser, panel, anchor):
  return browser.run(
      f'[...document.querySelectorAll("#panel-{panel} text")]'
      f'.filter(t => t.getAttribute("text-anchor") === "{anchor}")'
      '.map(t => t.textContent)')


def test_axes(noisy, browser):
  browser.open(noisy[0])
  for panel in figures.PANELS:
    values = list(map(float, labels_of(browser, panel.name, 'end')))
    assert len(values) >= 3 and min(values) >= 0, panel
    steps = labels_of(browser, panel.name, 'middle')
    assert steps[0] == '1' and '40' in steps
  # Markers are not cut off: they lie inside the figure, outside the clip.
  assert browser.run(
      '[...document.querySelectorAll("circle")].every('
      'c => c.closest("[clip-path]") === null)')


@pytest.mark.parametrize('values, texts', [
    ([0, .0005, .001, .0015], ['0', '0.0005', '0.0010', '0.0015']),
    ([.35, .4, .45], ['0.35', '0.40', '0.45']),
    ([-20, 0, 20], ['-20', '0', '20']),
    ([3.6e-7, 4e-7], ['3.6e-7', '4.0e-7']), ([0, 2e6], ['0', '2e+6'])])
def test_the_ticks_of_an_axis_have_the_same_decimals(
    report, browser, values, texts):
  browser.open(report)
  assert browser.run(f'tickTexts({values})') == texts


def test_figures_are_read_and_zoomed_together(noisy, browser):
  browser.open(noisy[0])
  browser.move_to('#panel-figure3a_reward svg')
  step, _ = values_read(browser, 'figure3a_reward')
  assert 15 < step < 25
  assert values_read(browser, 'accuracy')[0] == step
  browser.drag('#panel-accuracy svg', 0.3, 0.6)
  zoomed = labels_of(browser, 'figure3a_reward', 'middle')[:-1]
  assert int(zoomed[0]) > 5 and int(zoomed[-1]) < 30
  assert zoomed == labels_of(browser, 'entropy', 'middle')[:-1]
  address = browser.run('location.hash')
  assert f'from={zoomed[0]}' in address and f'to={zoomed[-1]}' in address
  browser.run('document.getElementById("whole").click()')
  assert labels_of(browser, 'entropy', 'middle')[0] == '1'


def test_the_address_keeps_the_view(noisy, browser):
  browser.open(noisy[0], view='window=20&hide=1&from=10&to=20')
  assert browser.run('document.getElementById("window").value') == '20'
  assert labels_of(browser, 'entropy', 'middle')[0] == '10'
  assert browser.run(
      'document.querySelectorAll("#panel-entropy .mean").length') == 2
  browser.open(noisy[0], view='window=7&hide=99&from=x&which=5&place=-1')
  assert browser.complaints == []
  assert browser.run('document.getElementById("window").value') == '5'


def test_the_legend_stays_in_view(noisy, browser):
  browser.open(noisy[0])
  browser.run('document.getElementById("panel-entropy").scrollIntoView()')
  assert browser.run('document.getElementById("legend")'
                     '.getBoundingClientRect().top') == pytest.approx(0, abs=1)


def cells(browser, table, column):
  return browser.run(
      f'[...document.querySelectorAll("table")[{table}].tBodies[0].rows]'
      f'.map(r => r.cells[{column}].textContent)')


def test_tables_are_sorted_by_their_heads(noisy, browser):
  browser.open(noisy[0])
  last = 'document.querySelector("table").tHead.rows[0].cells[4]'
  for direction in (1, -1):
    browser.run(f'{last}.querySelector("button").click()')
    values = [float(text.split()[0]) for text in cells(browser, 0, 4)]
    assert values == sorted(values, reverse=direction < 0)
  assert browser.run(f'{last}.getAttribute("aria-sort")') == 'descending'


def test_durations_are_sorted_by_their_length(noisy, browser):
  browser.open(noisy[0])
  lengths = [7260, 45, 180]
  cell = 'document.querySelectorAll("table")[1].tBodies[0].rows[{}].cells[4]'
  for row, seconds in enumerate(lengths):
    text = progress.duration(seconds)
    browser.run(f'{cell.format(row)}.textContent = "{text}"')
  button = ('document.querySelectorAll("table")[1].tHead.rows[0].cells[4]'
            '.querySelector("button")')
  assert browser.run(f'{button}.textContent') == 'duration'
  for descending in (False, True):
    browser.run(f'{button}.click()')
    assert cells(browser, 1, 4) == list(map(progress.duration, sorted(
        lengths, reverse=descending)))


def test_the_header_says_what_ran_and_what_came_of_it(noisy, browser):
  report, folders = noisy
  browser.open(report)
  facts = dict(browser.run(
      '[...document.querySelectorAll("dt")].map('
      't => [t.textContent, t.nextElementSibling.textContent])'))
  assert facts == {
      'model': 'embedded', 'parameters': '212,345', 'data': 'arithmetic',
      'steps': '40', 'seeds': '0', 'devices': '1 x cpu', 'commit': 'abc123+',
      'duration': '4m03s a run (4m03s to 4m03s)',
      'config': 'they differ in method_name'}
  rows = browser.run('[...document.querySelector("table").tBodies[0].rows].map('
                     'r => [...r.cells].map(c => c.textContent))')
  for label in ('grpo', 'gspo', 'tepo'):
    series = measured(folders / label, 'eval/set/avg@8')
    best = max(series, key=series.get)
    [row] = [r for r in rows if r[:2] == [label, 'set/avg@8']]
    assert row[2:] == [
        '1', '25.0 [20.0, 30.0] at step 0',
        f'{100 * series[40]:.1f} [10.0, 90.0] at step 40',
        f'{100 * series[best]:.1f} '
        f'[{"20.0, 30.0" if best == 0 else "10.0, 90.0"}] '
        f'at step {best}']


def test_narrow_tables_keep_their_first_column_and_whole_words(noisy, browser):
  browser.open(noisy[0], width=420)
  table = 'document.querySelector(".scroll")'
  assert browser.run(f'{table}.scrollWidth > {table}.clientWidth')
  place = f'{table}.querySelector("tbody td").getBoundingClientRect().left'
  before = browser.run(place)
  browser.run(f'{table}.scrollLeft = 150')
  assert browser.run(place) == pytest.approx(before, abs=1)
  assert browser.run(f'getComputedStyle({table}.querySelector("td"))'
                     '.overflowWrap') == 'normal'


def test_machine_panels_are_folded(noisy, browser):
  browser.open(noisy[0])
  assert browser.run('document.getElementById("machine").open') is False
  assert browser.run('document.querySelectorAll("#machine .card").length') == (
      sum(panel.is_machine for panel in figures.PANELS))


def test_an_empty_filter_says_why(report, browser):
  browser.open(report)
  browser.run('current().groups = current().groups.filter(g => g.mixed)')
  choose(browser, 'filter', 'right')
  assert 'No group of this step has only correct completions. ' in said(browser)


def said(browser):
  return browser.run('document.getElementById("group").textContent')


@pytest.mark.parametrize('fields, mixed', [
    ({}, 'both correct and wrong completions'),
    (BY_REWARD, 'completions with different rewards'),
    (BY_REWARD | NOT_TRUNCATED, 'completions with different rewards, not '
     'counting truncated ones')])
def test_an_empty_filter_says_what_a_mixed_group_has(
    tmp_path, make_run, drawn_files, browser, fields, mixed):
  records = [line | {'reward': 0.5} for line in dumped(0, [True, True])]
  payload = inspector.payload(
      records, WORDS.__getitem__, arrays(), fields, title='', about='')
  browser.open(study.write(tmp_path, runs.read([make_run('a', [record(1)])]),
                           {}, [payload]))
  choose(browser, 'filter', 'mixed')
  assert f'No group of this step has {mixed}. ' in said(browser)
  choose(browser, 'filter', 'trained')
  assert f'was trained on: none has {mixed}. ' in said(browser)
  browser.run('current().groups[0].mixed = true; draw()')  # but too few are
  assert 'No group of this step was trained on. ' in said(browser)


def test_m_has_a_key_and_values_have_three_digits(report, browser):
  browser.open(report, width=360)
  choose(browser, 'quantity', 'region')
  assert 'in M: the penalty acts' in browser.run(
      'document.getElementById("ramp").textContent')
  browser.move_to('.token[data-c="0"][data-t="0"]')
  rounded, exact = zip(*browser.run(
      '[...document.querySelectorAll("#tip tr")].map('
      'r => [Number(r.cells[1].textContent), Number(r.cells[2].textContent)])'))
  assert list(rounded) == [float(f'{x:.3g}') for x in exact]
  assert browser.run('[...document.querySelectorAll("#tip td")].every(td => '
                     'td.getBoundingClientRect().right < 360)')
