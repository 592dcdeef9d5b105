"""Curves: means, bands, differences, files."""

import pathlib
import re

import numpy as np
import pytest

from tepo_jax.job import fork
from tepo_jax.tools.report import drawing
from tepo_jax.tools.report import figures
from tepo_jax.tools.report import runs
from tepo_jax.tools.report import significance
from tests.tools.report.records import record


def panel(name):
  [found] = [p for p in figures.PANELS if p.name == name]
  return found


def test_the_interval_of_three_seeds_and_the_range_of_two():
  # t(0.975, 2) = 4.30265 (any table); std of 1, 2, 3 is 1.
  assert significance.over_seeds([1, 2, 3]) == pytest.approx(
      (2, 2 - 4.30265 / 3 ** 0.5, 2 + 4.30265 / 3 ** 0.5), abs=1e-4)
  assert significance.over_seeds([1, 4]) == (2.5, 1, 4)
  assert significance.over_seeds([7]) == (7, 7, 7)


def test_the_trailing_mean_sees_no_later_step_and_no_missing_one():
  assert figures.trailing_mean([1, 2, 3, 4, 5], [1, 2, 6, 4, 10], 3) == (
      pytest.approx([1, 1.5, 3, 4, 20 / 3]))
  assert figures.trailing_mean([1, 2, 9], [3, 1, 5], 3) == [3, 2, 5]
  assert figures.trailing_mean([1, 2], [3, 1], 1) == [3, 1]


def test_curves_over_seeds_of_different_length(make_run):
  values = {'a': [1.0, 2.0, 3.0], 'b': [3.0, 4.0]}
  groups = runs.group(runs.read([
      make_run(name, [record(s + 1, grad_norm=v) for s, v in enumerate(some)],
               seed=seed)
      for seed, (name, some) in enumerate(values.items())]))
  plain = figures.Panel('x', 'X', 'grad_norm', scale=10)
  [curve] = figures.curves(groups, plain)
  assert curve.step == [1, 2, 3] and curve.count == [2, 2, 1]
  assert curve.mean == [20, 30, 30]
  assert curve.low == [10, 20, 30] and curve.high == [30, 40, 30]
  assert curve.seeds == {'a': {1: 10, 2: 20, 3: 30}, 'b': {1: 30, 2: 40}}


def test_differences_are_paired_by_seed(make_run):
  groups = runs.group(runs.read([
      make_run(f'{name}_{seed}', [record(s, grad_norm=10 * seed + change)
                                  for s in range(1, 4 + seed)],
               seed=seed, method_name=name)
      for name, change in (('grpo', 0), ('tepo', 0.5)) for seed in (0, 1, 2)
      if (name, seed) != ('grpo', 2)]))
  [curve] = figures.differences(
      groups, groups[0], panel('figure3b_grad_norm'))
  assert curve.label == 'tepo' and curve.step == [1, 2, 3, 4]
  assert curve.mean == curve.low == curve.high == [0.5] * 4
  assert curve.count == [2, 2, 2, 1]  # seed 2 has no partner


def test_the_clip_ratio_counts_both_bounds_and_clip_cov(make_run):
  groups = runs.group(runs.read([make_run('a', [
      record(1, clip_fraction_covariance=0.04),
      record(2, clip_fraction_low=None)])]))
  [curve] = figures.curves(groups, panel('figure2a_clip_ratio'))
  assert curve.step == [1] and curve.mean == pytest.approx([7])  # per cent


def test_evaluations_have_panels_without_a_mean(make_run):
  read = runs.read([make_run('a', [
      record(1, **{'eval/set/avg@8': 0.25, 'eval/set/pass@8': 1.0}),
      record(2, **{'eval/set/avg@8': 0.5})])])
  first = figures.panels(read)[0]
  assert first.title == 'Evaluation: set/avg@8'
  [curve] = figures.curves(runs.group(read), first)
  assert curve.mean == [25, 50]
  assert figures.caption(first, runs.group(read)) == 'As measured.'


def test_texts_have_panels_in_nats(make_run):
  read = runs.read([make_run('a', [
      record(1, **{'eval/set/avg@8': 0.25,
                   'eval/prose/nats_per_token': 3.5})])])
  second = figures.panels(read)[1]
  assert second.title == 'Text: prose/nats_per_token'
  [curve] = figures.curves(runs.group(read), second)
  assert curve.mean == [3.5] and second.unit == 'nats'


def test_data_sets_have_panels_of_their_own(make_run):
  read = runs.read([make_run('a', [record(1, **{
      'data/x/accuracy': 0.25, 'data/x/response_length_mean': 9.0,
      'data/x/groups_trained': 3, 'data/y/accuracy': 0.5})])])
  found = figures.panels(read)[len(figures.panels(runs.read(
      [make_run('b', [record(1)])]))):]
  assert [panel.title for panel in found] == [
      'x: response length', 'x: accuracy of the samples',
      'y: accuracy of the samples']
  [curve] = figures.curves(runs.group(read), found[1])
  assert curve.mean == [25]


def test_what_varies_in_a_run_has_a_panel(make_run):
  """A KL to a reference policy; a rate that is the same in every step, or in
  every step of each of two runs, has none."""
  lines = [record(step, kl_reference=step / 10, **{
      'optimizer/learning_rate': 1e-6}) for step in (1, 2)]
  others = [record(step, **{'optimizer/learning_rate': 2e-6})
            for step in (1, 2)]
  read = runs.read([make_run('a', lines), make_run('b', others, seed=1)])
  names = [panel.name for panel in figures.panels(read)]
  assert 'kl_reference' in names and 'learning_rate' not in names
  found = figures.panels(read)[names.index('kl_reference')]
  mine, = runs.group(read[:1])
  assert figures.curves([mine], found)[0].mean == [0.1, 0.2]


def test_a_run_that_carries_completions_shows_the_age_of_its_tokens(make_run):
  plain = [record(step) for step in (1, 2)]
  carries = [record(1, **{'carry/age_mean': 0.0, 'carry/age_max': 0}),
             record(2, **{'carry/age_mean': 0.5, 'carry/age_max': 2})]
  read = runs.read([make_run('a', plain), make_run('b', carries, seed=1)])
  assert not any('carry' in panel.name for panel in figures.panels(read[:1]))
  mean, oldest = (panel for panel in figures.panels(read)
                  if 'carry' in panel.name)
  [curve] = figures.curves(runs.group(read[1:]), mean)
  assert curve.mean == [0, 0.5] and mean.unit == 'rollout steps'
  [curve] = figures.curves(runs.group(read[1:]), oldest)
  assert curve.mean == [0, 2]


def test_captions_state_the_lines_and_the_band(make_run):
  some = [record(1)]
  paths = [make_run(str(seed), some, seed=seed) for seed in range(3)]
  for count, band in ((1, ''), (2, 'range of the two'), (3, '95% interval')):
    text = figures.caption(panel('entropy'),
                           runs.group(runs.read(paths[:count])))
    assert 'Faint: as measured' in text and 'last 5 steps' in text
    assert band in text
    assert ('Band' in text) == (count > 1)


@pytest.mark.long
def test_files_hold_the_curves(make_run, tmp_path):
  groups = runs.group(runs.read([
      make_run('a', [record(s) for s in range(1, 5)]),
      make_run('b', [record(1, entropy=None)], method_name='tepo')]))
  drawn = figures.curves(groups, panel('entropy'))
  assert drawn[1].step == []
  png, svg = figures.draw(panel('entropy'), drawn, 'a caption', tmp_path)
  assert png.read_bytes().startswith(b'\x89PNG')
  assert svg.read_text().lstrip().startswith('<?xml')


@pytest.mark.long
@pytest.mark.filterwarnings('error')
def test_matplotlib_has_no_warning_for_any_label(tmp_path):
  """Leading '_', formulas, missing glyphs, and labels wider than the axes."""
  labels = ['_a', r'a$\q$', '数学', 'x' * 300,
            *(f'tepo (optimizer.learning_rate={i}e-5, method.coef={i})'
              for i in range(20))]
  drawn = [figures.Curve(label, [1, 2], [1, 2], [1, 2], [1, 2], [1, 1], {})
           for label in labels]
  wide = figures.Panel('wide', 'Evaluation: ' + '/path' * 80, 'metric')
  _, svg = figures.draw(wide, drawn, 'a caption', tmp_path)
  for shown in '_a', r'a$\q$', '??':
    assert f'<!-- {shown} -->' in svg.read_text()
  figures.draw_differences(wide, drawn[:7], labels[3], tmp_path)
  drawing.draw_heat_map(labels, np.eye(len(labels)), 'made up', tmp_path / 'h')
  drawing.draw_intervals(
      dict.fromkeys(labels[:4], [
          drawing.Interval(label, (0, 0, 0), [0], True) for label in labels]),
      labels[3], labels[3], tmp_path / 'i')


def test_a_file_shows_what_was_measured_and_the_mean(make_run, tmp_path):
  """Reads the lines' points from the SVG."""
  values = [10.0, 0.0, 5.0, 5.0, 0.0, 40.0]
  groups = runs.group(runs.read([make_run('a', [
      record(s, entropy=v) for s, v in enumerate(values, 1)])]))
  drawn = figures.curves(groups, panel('entropy'))
  _, svg = figures.draw(panel('entropy'), drawn, '', tmp_path)
  lines = [np.array(re.findall(r'[ML] ([-\d.]+) ([-\d.]+)', points), float)
           for points in re.findall(
               r'<path d="([^"]*)" clip-path="[^"]*" style="fill: none', (
                   svg.read_text())) if points.count('L') == 5]
  raw, bold = (line[:, 1] for line in lines)
  scale = (raw[5] - raw[1]) / 40
  np.testing.assert_allclose((raw - raw[1]) / scale, values, atol=1e-3)
  np.testing.assert_allclose((bold - raw[1]) / scale,
                             [10, 5, 5, 5, 4, 10], atol=1e-3)
  assert 'fill: #ffffff' not in svg.read_text()  # no white panel


def test_intervals_are_drawn_at_their_values(tmp_path):
  """Reads the places of the marks from the SVG."""
  panels = {'first': [
      drawing.Interval('a', (1, -1, 3), [-2, 4], True),
      drawing.Interval('b', (2, 1, 3), [2, 2], False)],
            'second': [drawing.Interval('b', (5, 4, 6), [5], False)]}
  _, svg = drawing.draw_intervals(panels, 'made up', 'a note', tmp_path / 'i')
  text = svg.read_text()
  marks = np.array(re.findall(
      r'<use xlink:href="#[^"]*" x="([^"]*)" y="([^"]*)" style="fill: '
      rf'(?:{drawing.HIGHLIGHT}|{drawing.OTHERS})', text), float)
  # Of each line its points, then its mean.
  x, y = marks.T
  unit = (x[1] - x[0]) / 6
  np.testing.assert_allclose((x[:6] - x[0]) / unit - 2, [-2, 4, 1, 2, 2, 2],
                             atol=1e-3)
  assert y[0] == y[1] == y[2] < y[3] == y[4] == y[5] == y[6] == y[7]
  assert text.count('<!-- a -->') == text.count('<!-- b -->') == 1


def test_a_clip_ratio_of_zero_has_no_negative_axis(make_run, tmp_path):
  groups = runs.group(runs.read([make_run('a', [
      record(s, clip_fraction_low=0, clip_fraction_high=0)
      for s in range(1, 5)])]))
  chosen = panel('figure2a_clip_ratio')
  _, svg = figures.draw(chosen, figures.curves(groups, chosen), '', tmp_path)
  assert '<!-- −' not in svg.read_text()


def test_a_fork_branches_off_its_parents_curve(make_run):
  """From the parent's last value up to the fork's step, of each seed; with
  nothing changed it is no copy of the parent, and no other seed."""
  paths = []
  for seed in (0, 1):
    parent = make_run(f'parent_{seed}', [
        record(s, grad_norm=10.0 * s + seed) for s in (1, 2, 4, 5)], seed=seed)
    child = make_run(f'fork_{seed}', [
        record(s, grad_norm=-s) for s in (4, 5, 6)], seed=seed)
    fork.write(fork.Parent(parent, 3, True, 'abc'), pathlib.Path(child))
    paths += [child, parent]
  groups = runs.group(runs.read(paths))
  assert {group.label: [run.name for run in group.runs]
          for group in groups} == {
              'grpo (from step 3)': ['fork_0', 'fork_1'],
              'grpo': ['parent_0', 'parent_1']}
  plain = figures.Panel('x', 'X', 'grad_norm')
  forked, parents = figures.curves(groups, plain)
  assert forked.step == [2, 4, 5, 6] and forked.mean == [20.5, -4, -5, -6]
  assert parents.step == [1, 2, 4, 5] and parents.mean[1] == forked.mean[0]
  assert groups[0].runs[0].series('grad_norm') == {4: -4, 5: -5, 6: -6}
  [alone] = runs.read(paths[:1])
  assert figures.curves(runs.group([alone]), plain)[0].step == [4, 5, 6]
  assert alone.notes == [f'a fork of {paths[1]} after step 3']
