"""Hours of a whole run, against counts by hand."""

import dataclasses
import types

import pytest

from tepo_jax import cli
from tepo_jax.tools.plan import chips
from tepo_jax.tools.plan import published
from tepo_jax.tools.plan import run
from tepo_jax.tools.plan import step

_DECODE = published.Efficiency(0.4, 0.5, 0.8, '')
_UPDATE = published.Efficiency(0.2, 0.25, 0.5, '')
_CHIP = chips.Chip('', 1, 1, 1, 1)


def _plan(hosts=2, state_bytes=1e9, data=1):
  """A step of 30 s of rollout and 10 s of updates at the roofline, on eight
  chips; a rollout returns to the host 1,000 times."""
  devices = [types.SimpleNamespace(process_index=i % hosts) for i in range(8)]

  def estimate(name, phase, efficiency, roofline, syncs=0):
    return step.Estimate(
        name=name, phase=phase, runs=1, equivalent=1, efficiency=efficiency,
        syncs=syncs, roofline=roofline, compile_seconds=60)

  return step.StepPlan(
      chips.Slice('', _CHIP, devices), {'data': data}, {}, 1, 1,
      [estimate('decode', 'rollout', _DECODE, 30, 1000),
       estimate('update', 'update', _UPDATE, 10)], state_bytes=int(state_bytes))


def _workload(share=0.6):
  return types.SimpleNamespace(prompts=64, samples=8, mixed_share=share)


def test_a_step_s_bounds():
  plan = _plan()
  assert plan.seconds('low') == {
      'reshard': 0, 'rollout': 30 / 0.8 + 0.5, 'score': 0, 'update': 10 / 0.5}
  assert plan.total('mid') == 30 / 0.5 + 10 / 0.25 + 1
  assert plan.total('high') == 30 / 0.4 + 10 / 0.2 + 5
  assert plan.roofline == 40


def test_evaluations_of_the_paper_s_7b():
  """Before training and every 20 of 80 steps: 30 and 83 problems of 32 samples,
  and 500. A step's rollout samples 512 / 0.6 completions."""
  config = cli.load_config('configs/qwen2_5_7b.py:tepo')
  found = run.of(config, _workload(), _plan())
  assert found.completions == 5 * (32 * (30 + 83) + 500)
  rollout = 30 / 0.5 + 1
  assert found.evaluations['mid'] == pytest.approx(
      rollout * found.completions / (512 / 0.6))
  assert found.steps['mid'] == 80 * 101
  assert found.compilation == 120 and not found.uncounted
  config.eval.max_tokens *= 2  # longer than in training
  longer = run.of(config, _workload(), _plan())
  assert longer.evaluations['mid'] == 2 * found.evaluations['mid']
  config.eval.before = False
  assert run.of(config, _workload(), _plan()).completions == (
      4 * found.completions / 5)
  config.eval.period = 0
  assert run.of(config, _workload(), _plan()).completions == 0


@pytest.mark.parametrize('fields, named', [
    ({'eval.sets': ('mine.jsonl', 'math500'), 'eval.samples': 2,
      'eval.temperature': 1.0}, 'evaluations of mine.jsonl,'),
    ({'eval.texts': ('a.txt',)}, 'config.eval.texts'),
    ({'checkpoint.minutes': 30.0}, 'config.checkpoint.minutes')])
def test_what_is_not_counted_is_named(fields, named):
  config = cli.load_config('configs/qwen2_5_7b.py:tepo')
  config.update_from_flattened_dict(fields)
  found, = run.of(config, _workload(), _plan()).uncounted
  assert named in found


def test_evaluations_carry_no_completions():
  """Without, a rollout decodes half as much again."""
  config, plan = cli.load_config('configs/qwen2_5_7b.py:tepo'), _plan()
  decode, update = plan.estimates
  carried = dataclasses.replace(plan, estimates=[
      dataclasses.replace(decode, equivalent=2, uncarried=3), update])
  without, found = (run.of(config, _workload(), p) for p in (plan, carried))
  for bound in step.BOUNDS:
    assert found.steps[bound] == without.steps[bound]
    assert found.evaluations[bound] == pytest.approx(
        1.5 * without.evaluations[bound])


def test_a_set_of_unknown_size_is_left_out():
  config = cli.load_config('configs/qwen2_5_7b.py:tepo')
  config.eval.sets, config.eval.samples = ('mine.jsonl', 'math500:copy'), 2
  config.eval.temperature = 1.0
  found = run.of(config, _workload(), _plan())
  assert found.completions == 5 * 500 * 2
  config.eval.limit = 10
  assert run.of(config, _workload(), _plan()).completions == 5 * 2 * 10 * 2


def test_saves_wait_for_the_disk_only_if_it_is_slow():
  """16 saves, every 5 of 80 steps of 101 s; a host has 4 chips' state."""
  config = cli.load_config('configs/qwen2_5_7b.py:tepo')
  found = run.of(config, _workload(), _plan(state_bytes=10e9))
  assert found.saves['mid'] == pytest.approx(16 * 4 + 40)
  found = run.of(config, _workload(), _plan(state_bytes=1000e9))
  assert found.saves['mid'] == pytest.approx(
      16 * 400 + 15 * (4000 - 5 * 101) + 4000)


def test_a_save_has_one_replica():
  config = cli.load_config('configs/qwen2_5_7b.py:tepo')
  one, two = (run.of(config, _workload(), _plan(data=n)) for n in (1, 2))
  assert two.saves['mid'] == one.saves['mid'] / 2


@pytest.mark.parametrize('name, phase', [
    ('update', 'update'), ('score', 'score'), ('score by reference', 'score'),
    ('old states', 'score'), ('prefill 8x2048', 'prefill'),
    ('decode 512x2048', 'decode'), ('reshard', 'decode'),
    ('old policy', 'decode')])
def test_programs_have_the_efficiency_of_their_phase(name, phase):
  assert step.phase_of(name) == phase
