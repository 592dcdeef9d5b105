"""What a trainer counts and times belongs to one step."""

import collections
import types

from configs import tiny
from tepo_jax.job import summaries
from tepo_jax.job import trainer as trainer_lib
from tepo_jax.rollout import schedule
from tepo_jax.runtime import progress as progress_lib


def _trainer(**fields):
  return types.SimpleNamespace(
      config=tiny.get_config('tepo'), step=1, cursor=0, _prompt=None,
      session=types.SimpleNamespace(timers=progress_lib.Timers()),
      learner=types.SimpleNamespace(
          policy=dict, programs=types.SimpleNamespace(to_decode=dict, kept=None)),
      **fields)


def test_each_step_counts_for_itself(monkeypatch):
  monkeypatch.setattr(summaries, 'sampling_metrics', lambda stats, _: {
      'prefills': stats.prefills})

  def select(*_):
    sampler.counts.update(timeout=2)
    sampler.stats.prefills += 3

  sampler = types.SimpleNamespace(
      select=select, counts=collections.Counter(), stats=schedule.Stats())
  trainer = _trainer(sampler=sampler)
  for step in (1, 2):
    _, scalars = trainer_lib.Trainer._collect(trainer, step)
    assert scalars['grading/timeout'] == 2 and scalars['prefills'] == 3


def test_an_evaluations_time_is_not_that_of_the_next_step():
  def run(*_):
    with trainer.session.timers('rollout'):
      return None, {'avg@8': 0.5}

  trainer = _trainer(evaluations=[types.SimpleNamespace(run=run, name='sums')])
  scalars = trainer_lib.Trainer.evaluate(trainer)
  assert scalars['eval/sums/avg@8'] == 0.5 and scalars['seconds/eval'] > 0
  assert trainer.session.timers.pop() == {}


def test_a_step_that_was_stopped_before_its_record_gets_one():
  """The last step was saved when its evaluation was stopped."""
  recorded = []
  trainer = _trainer(
      evaluations=[], unrecorded={'reward': 1.0}, records=types.SimpleNamespace(
          checkpointer=types.SimpleNamespace(latest=lambda: 40)),
      _record=lambda: recorded.append(trainer.step))
  trainer.step = trainer.config.steps = 40
  trainer_lib.Trainer.run(
      trainer, types.SimpleNamespace(defer_interrupts=None, check=None))
  assert recorded == [40]
