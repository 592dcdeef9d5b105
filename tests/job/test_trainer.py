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


@pytest.mark.parametrize('steps, fitting, begun, said', [
    (40, 'dots', ['dots'], False), (40, 'mlp', ['dots'], True),
    (3, 'full', [], False)])
def test_a_resumed_run_begins_with_its_own_choice(
    capsys, monkeypatch, steps, fitting, begun, said):
  """What recomputes an update, unless it does not fit any more; a run that has
  made its steps compiles no update."""
  found = []
  trainer = object.__new__(trainer_lib.Trainer)
  trainer.config = tiny.get_config('tepo')
  trainer.config.compute.remat, trainer.config.steps = 'auto', steps
  trainer.learner = types.SimpleNamespace(
      load_base=lambda: None, stands_on=dict, state=None,
      programs=types.SimpleNamespace(
          model=types.SimpleNamespace(remat=fitting)),
      fit=lambda begin: found.append(begin))
  trainer.records = types.SimpleNamespace(
      workdir='run', writer=types.SimpleNamespace(truncate=lambda _: None),
      checkpointer=types.SimpleNamespace(restore_last_good=lambda *_: (
          3, 'state', {'cursor': 8, 'unrecorded': None, 'remat': 'dots',
                       'skipped_in_a_row': 0})))
  monkeypatch.setattr(programs_lib, 'restorable', lambda _: ())
  trainer._restore()
  assert found == begun and trainer.step == 3
  assert ('dots, as until now, does not fit' in capsys.readouterr().err) == said
