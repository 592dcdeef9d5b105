"""What a trainer times belongs to one step; every step is recorded."""

import types

import pytest

from configs import tiny
from tepo_jax.job import programs as programs_lib
from tepo_jax.job import trainer as trainer_lib
from tepo_jax.runtime import progress as progress_lib


def _trainer(**fields):
  return types.SimpleNamespace(
      config=tiny.get_config('tepo'), step=1, cursor=0, _prompt=None,
      session=types.SimpleNamespace(timers=progress_lib.Timers()),
      learner=types.SimpleNamespace(
          policy=dict, update_bytes=None,
          programs=types.SimpleNamespace(to_decode=dict, kept=None)),
      **fields)


def test_an_evaluations_time_is_not_that_of_the_next_step():
  def run(*_):
    with trainer.session.timers('rollout'):
      return None, {'avg@8': 0.5}

  trainer = _trainer(
      evaluations=[types.SimpleNamespace(run=run, name='sums')],
      texts=[types.SimpleNamespace(
          name='prose', nats_per_token=lambda params: 2.5)])
  scalars = trainer_lib.Trainer.evaluate(
      trainer, types.SimpleNamespace(check=None))
  assert scalars['eval/sums/avg@8'] == 0.5 and scalars['seconds/eval'] > 0
  assert scalars['eval/prose/nats_per_token'] == 2.5
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


def test_a_resumed_run_begins_with_its_own_choice(capsys):
  """What recomputes an update, unless it does not fit any more."""
  for fitting, said in ('dots', False), ('mlp', True):
    begun = []
    learner = types.SimpleNamespace(
        load_base=lambda: None, stands_on=dict, state=None,
        programs=types.SimpleNamespace(
            model=types.SimpleNamespace(remat=fitting)),
        fit=lambda begin: begun.append(begin))
    trainer = types.SimpleNamespace(
        config=tiny.get_config('tepo'), learner=learner, _check_saved=None,
        records=types.SimpleNamespace(
            workdir='run', writer=types.SimpleNamespace(truncate=lambda _: None),
            checkpointer=types.SimpleNamespace(restore_last_good=lambda *_: (
                3, 'state', {'cursor': 8, 'unrecorded': None, 'remat': 'dots',
                             'skipped_in_a_row': 0}))))
    trainer.config.compute.remat = 'auto'
    with pytest.MonkeyPatch.context() as patch:
      patch.setattr(programs_lib, 'restorable', lambda _: ())
      trainer_lib.Trainer._restore(trainer)
    assert begun == ['dots'] and trainer.step == 3
    assert ('dots, as until now, does not fit' in capsys.readouterr().err
            ) == said
