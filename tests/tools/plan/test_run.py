"""Hours of a whole run, against counts by hand."""

import types

import pytest

from tepo_jax import cli
from tepo_jax.tools.plan import chips
from tepo_jax.tools.plan import published
from tepo_jax.tools.plan import run
from tepo_jax.tools.plan import step

_EFFICIENCY = published.Efficiency(0.4, 0.5, 0.8, '')
_CHIP = chips.Chip('', 1, 1, 1, 1)


def _plan(hosts=2, state_bytes=1e9):
  """A step of 30 s of rollout and 10 s of updates at the roofline, on eight
  chips; a rollout returns to the host 1,000 times."""
  devices = [types.SimpleNamespace(process_index=i % hosts) for i in range(8)]

  def estimate(name, phase, roofline, syncs=0):
    return step.Estimate(name, phase, 1, 1, 0.0, '', _EFFICIENCY, syncs,
                         roofline=roofline, compile_seconds=60)

  return step.StepPlan(
      chips.Slice('', _CHIP, devices), {}, {}, 1, 1,
      [estimate('decode', 'rollout', 30, 1000),
       estimate('update', 'update', 10)], state_bytes=int(state_bytes))


def _workload(share=0.6):
  return types.SimpleNamespace(prompts=64, samples=8, mixed_share=share)


def test_a_step_s_bounds():
  plan = _plan()
  assert plan.seconds('low') == {
      'reshard': 0, 'rollout': 30 / 0.8 + 0.5, 'score': 0, 'update': 10 / 0.8}
  assert plan.total('mid') == 40 / 0.5 + 1
  assert plan.total('high') == 40 / 0.4 + 5
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
  assert found.steps['mid'] == 80 * 81
  assert found.compilation == 120 and not found.unknown
  config.eval.period = 0
  assert run.of(config, _workload(), _plan()).completions == 0


def test_a_set_of_unknown_size_is_named():
  config = cli.load_config('configs/qwen2_5_7b.py:tepo')
  config.eval.sets, config.eval.samples = ('mine.jsonl', 'math500:copy'), 2
  config.eval.temperature = 1.0
  found = run.of(config, _workload(), _plan())
  assert found.unknown == ['mine.jsonl']
  assert found.completions == 5 * 500 * 2
  config.eval.limit = 10
  assert run.of(config, _workload(), _plan()).completions == 5 * 2 * 10 * 2


def test_saves_wait_for_the_disk_only_if_it_is_slow():
  """16 saves, every 5 of 80 steps of 81 s; a host has 4 chips' state."""
  config = cli.load_config('configs/qwen2_5_7b.py:tepo')
  found = run.of(config, _workload(), _plan(state_bytes=10e9))
  assert found.saves['mid'] == pytest.approx(16 * 4 + 40)
  found = run.of(config, _workload(), _plan(state_bytes=1000e9))
  assert found.saves['mid'] == pytest.approx(
      16 * 400 + 15 * (4000 - 5 * 81) + 4000)
