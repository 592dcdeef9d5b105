"""Curves: smoothing, bands, files."""

import numpy as np
import pytest

from tepo_jax.tasks import statistics
from tepo_jax.tools.report import figures
from tepo_jax.tools.report import runs
from tests.tools.report.records import record


def panel(name):
  [found] = [p for p in figures.PANELS if p.name == name]
  return found


def test_the_interval_of_three_seeds_and_the_range_of_two():
  # t(0.975, 2) = 4.30265 (any table); std of 1, 2, 3 is 1.
  assert statistics.over_seeds([1, 2, 3]) == pytest.approx(
      (2, 2 - 4.30265 / 3 ** 0.5, 2 + 4.30265 / 3 ** 0.5), abs=1e-4)
  assert statistics.over_seeds([1, 4]) == (2.5, 1, 4)
  assert statistics.over_seeds([7]) == (7, 7, 7)


def test_smoothing_is_a_centred_mean_of_fewer_values_at_the_ends():
  assert figures.smooth([1, 2, 6, 4, 10], 3) == pytest.approx(
      [1.5, 3, 4, 20 / 3, 7])
  assert figures.smooth([3, 1], 1) == [3, 1]


def test_curves_over_seeds_of_different_length(make_run):
  values = {'a': [1.0, 2.0, 3.0], 'b': [3.0, 4.0]}
  groups = runs.group(runs.read([
      make_run(name, [record(s + 1, grad_norm=v) for s, v in enumerate(some)],
               seed=seed)
      for seed, (name, some) in enumerate(values.items())]))
  plain = figures.Panel('x', 'X', 'grad_norm', scale=10, smoothing=1)
  [curve] = figures.curves(groups, plain)
  assert curve.step == [1, 2, 3] and curve.count == [2, 2, 1]
  assert curve.mean == [20, 30, 30]
  assert curve.low == [10, 20, 30] and curve.high == [30, 40, 30]
  assert curve.seeds == {'a': {1: 10, 2: 20, 3: 30}, 'b': {1: 30, 2: 40}}
  [curve] = figures.curves(groups, panel('figure3b_grad_norm'))
  assert curve.seeds['a'] == {1: 2, 2: 2, 3: 2}  # means of all three


def test_the_clip_ratio_counts_both_bounds_and_clip_cov(make_run):
  groups = runs.group(runs.read([make_run('a', [
      record(1, clip_fraction_covariance=0.04),
      record(2, clip_fraction_low=None)])]))
  [curve] = figures.curves(groups, panel('figure2a_clip_ratio'))
  assert curve.step == [1] and curve.mean == pytest.approx([7])  # per cent


def test_evaluations_have_panels_and_are_not_smoothed(make_run):
  read = runs.read([make_run('a', [
      record(1, **{'eval/set/avg@8': 0.25, 'eval/set/pass@8': 1.0}),
      record(2, **{'eval/set/avg@8': 0.5})])])
  first = figures.panels(read)[0]
  assert first.title == 'Evaluation: set/avg@8'
  [curve] = figures.curves(runs.group(read), first)
  assert curve.mean == [25, 50]
  assert figures.caption(first, runs.group(read)) == 'Not smoothed.'


def test_captions_state_smoothing_and_band(make_run):
  some = [record(1)]
  paths = [make_run(str(seed), some, seed=seed) for seed in range(3)]
  for count, band in ((1, ''), (2, 'range of the two'), (3, '95% interval')):
    text = figures.caption(panel('entropy'),
                           runs.group(runs.read(paths[:count])))
    assert 'moving mean of 5 steps' in text and band in text
    assert ('Band' in text) == (count > 1)


def test_files_hold_the_curves(make_run, tmp_path):
  groups = runs.group(runs.read([
      make_run('a', [record(s) for s in range(1, 5)]),
      make_run('b', [record(1, entropy=None)], method_name='tepo')]))
  drawn = figures.curves(groups, panel('entropy'))
  assert drawn[1].step == []
  png, svg = figures.draw(panel('entropy'), drawn, 'a caption', tmp_path)
  assert png.read_bytes().startswith(b'\x89PNG')
  assert svg.read_text().lstrip().startswith('<?xml')


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
  figures.draw_heat_map(labels, np.eye(len(labels)), 'made up', tmp_path / 'h')
