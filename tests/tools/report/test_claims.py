"""The paper's claims on runs whose differences are known."""

import pytest

from tepo_jax.tools.report import claims
from tepo_jax.tools.report import runs
from tests.tools.report.records import record


def contrasts_of(make_run, seeds, tepo, grpo, steps=6):
  """tepo, grpo: (step, seed) -> changed fields."""
  for seed in range(seeds):
    for name, change in (('grpo', grpo), ('tepo', tepo)):
      make_run(f'{name}_{seed}',
               [record(s, **change(s, seed)) for s in range(1, steps + 1)],
               seed=seed, method_name=name)
  folder = make_run('other', [record(1)], method_name='zz').rsplit('/', 1)[0]
  found = claims.contrasts(runs.group(runs.read([folder + '/*'])))
  return {c.measure.title: c for c in found if c.label == 'tepo'}


def test_pairing_by_seed_cancels_effects_of_the_seed(make_run):
  found = contrasts_of(
      make_run, 3,
      lambda s, seed: dict(grad_norm=100.0 * seed + 2 + 0.1 * seed),
      lambda s, seed: dict(grad_norm=100.0 * seed + 1))
  row = found['Gradient norm, mean']
  assert len(row.pairs) == 3 and row.verdict == 'supported'
  # Differences 1, 1.1, 1.2: std 0.1, t = 4.30265.
  assert row.difference == pytest.approx(
      (1.1, 1.1 - 4.30265 * 0.1 / 3 ** 0.5, 1.1 + 4.30265 * 0.1 / 3 ** 0.5),
      abs=1e-4)
  assert row.own[0] == pytest.approx(102.1)
  assert row.base[0] == pytest.approx(101)


@pytest.mark.parametrize('seeds, difference, verdict', [
    (3, (-0.2, -0.21, -0.22), 'supported'),
    (3, (0.2, 0.21, 0.22), 'contradicted'),
    (3, (-0.2, 0.3, 0.01), 'not resolved at ±62'),
    (2, (-0.2, -0.21), 'too few seeds')])
def test_verdicts_on_the_clip_ratio(make_run, seeds, difference, verdict):
  found = contrasts_of(
      make_run, seeds,
      lambda s, seed: dict(clip_fraction_low=0.5 + difference[seed]),
      lambda s, seed: dict(clip_fraction_low=0.5))
  assert found['Clip ratio, mean'].verdict == verdict


def test_steps_to_the_baselines_accuracy(make_run):
  """grpo ends at 50 %, so the target is 47.5 %; no later step counts."""
  found = contrasts_of(
      make_run, 3, lambda s, seed: dict(accuracy=1.0 if s > 7 else 0.0),
      lambda s, seed: dict(accuracy=0.5 if s > 10 else 0.0), steps=20)
  [row] = [r for title, r in found.items() if title.startswith('Steps to')]
  assert row.measure.title == 'Steps to 47.5 % accuracy'
  assert row.own[0] == 8 and row.base[0] == 11
  assert row.verdict == 'supported' and not row.note


def test_runs_that_miss_the_target_are_counted_and_noted(make_run):
  found = contrasts_of(
      make_run, 3, lambda s, seed: dict(accuracy=0.0),
      lambda s, seed: dict(accuracy=0.5), steps=6)
  [row] = [r for title, r in found.items() if title.startswith('Steps to')]
  assert row.own[0] == 7 and row.note.startswith('not reached by 3 runs')


def test_a_run_without_accuracies_says_nothing_of_the_steps_to_one(make_run):
  found = contrasts_of(
      make_run, 3, lambda s, seed: dict(
          accuracy=None if seed == 2 else float(s > 3)),
      lambda s, seed: dict(accuracy=0.5), steps=6)
  [row] = [r for title, r in found.items() if title.startswith('Steps to')]
  assert len(row.pairs) == 2 and row.own[0] == 4 and not row.note


def test_only_shared_steps_count(make_run):
  paths = [make_run('g', [record(s, reward=1.0) for s in (1, 2)]),
           make_run('t', [record(s, reward=float(s)) for s in (1, 2, 30)],
                    method_name='tepo')]
  found = claims.contrasts(runs.group(runs.read(paths)))
  [row] = [r for r in found if r.measure.title.startswith('Reward')]
  assert row.own[0] == 150 and row.base[0] == 100


def test_a_single_method_has_no_contrasts(make_run):
  groups = runs.group(runs.read([make_run('a', [record(1)])]))
  assert claims.contrasts(groups) == []


def test_unsteadiness():
  assert claims.unsteadiness([1.0, 3.0, 2.0]) == pytest.approx(1.5)
  assert claims.unsteadiness([1.0]) is None


def test_claims_of_a_method_are_corrected_together(make_run):
  """The gradient norm alone has p = 0.03; for eight claims it is too much."""
  change = (0.2, 1.1, 0.8, 1.3)  # t = 3.6
  found = contrasts_of(
      make_run, 4, lambda s, seed: dict(grad_norm=1 + change[seed]),
      lambda s, seed: dict(grad_norm=1.0))
  row = found['Gradient norm, mean']
  assert row.difference[1] > 0 and row.verdict.startswith('not resolved at ±')


@pytest.mark.parametrize('change, verdict', [
    ((0.01, -0.01, 0.005, -0.005), 'equal within ±2'),
    ((0.03, -0.01, 0.02, -0.02), 'not resolved at ±3.8'),
    ((0.009, 0.01, 0.011, 0.01), 'supported')])
def test_equal_within_the_smallest_difference_of_interest(
    make_run, change, verdict):
  """By two one-sided tests with a bound of 2 points, p is 0.01 and 0.15."""
  found = contrasts_of(
      make_run, 4, lambda s, seed: dict(accuracy=0.5 + change[seed]),
      lambda s, seed: dict(accuracy=0.5))
  assert found['Final accuracy'].verdict == verdict


def test_power_of_the_differences_of_accuracy(make_run):
  change = (0.01, -0.01, 0.02, -0.02)  # spread of 1.83 points
  found = contrasts_of(
      make_run, 4, lambda s, seed: dict(accuracy=0.5 + change[seed]),
      lambda s, seed: dict(accuracy=0.5))
  # In 60,000 simulated studies of these sizes, 80.4, 81.6 and 82.1 % see it.
  (points, seeds), = claims.power(list(found.values())).values()
  assert seeds == [107, 29, 9]
  # Four pairs find 2.128 standard deviations, see test_significance.
  assert points == pytest.approx(3.885, abs=1e-3)
