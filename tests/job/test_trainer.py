"""What a trainer times belongs to one step; every step is recorded."""

import types

from configs import tiny
from tepo_jax.job import trainer as trainer_lib
from tepo_jax.runtime import progress as progress_lib


def _trainer(**fields):
  return types.SimpleNamespace(
      config=tiny.get_config('tepo'), step=1, cursor=0, _prompt=None,
      session=types.SimpleNamespace(timers=progress_lib.Timers()),
      learner=types.SimpleNamespace(
          policy=dict, programs=types.SimpleNamespace(to_decode=dict, kept=None)),
      **fields)


def test_an_evaluations_time_is_not_that_of_the_next_step():
  def run(*_):
    with trainer.session.timers('rollout'):
      return None, {'avg@8': 0.5}

  trainer = _trainer(evaluations=[types.SimpleNamespace(run=run, name='sums')])
  scalars = trainer_lib.Trainer.evaluate(
      trainer, types.SimpleNamespace(check=None))
  assert scalars['eval/sums/avg@8'] == 0.5 and scalars['seconds/eval'] > 0
  assert trainer.session.timers.pop() == {}


def test_a_step_that_was_stopped_before_its_record_gets_one():
  """The last step was saved when its evaluation was stopped."""
  recorded = []
  trainer = _trainer(
      evaluations=[], unrecorded={'reward': 1.0}, records=types.SimpleNamespace(
          checkpointer=types.SimpleNamespace(latest=lambda: 40)),
      _record=lambda stop: recorded.append(trainer.step))
  trainer.step = trainer.config.steps = 40
  trainer_lib.Trainer.run(trainer, None)
  assert recorded == [40]
