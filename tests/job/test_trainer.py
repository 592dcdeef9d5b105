"""What a trainer times belongs to one step; every step is recorded."""

import contextlib
import dataclasses
import pathlib
import types
from unittest import mock

from jax import numpy as jnp
import numpy as np
import pytest

from configs import tiny
from tepo_jax import errors
from tepo_jax.data import problem as problem_lib
from tepo_jax.job import programs as programs_lib
from tepo_jax.job import trainer as trainer_lib
from tepo_jax.rollout import dump
from tepo_jax.rollout import groups as groups_lib
from tepo_jax.rollout import reward as reward_lib
from tepo_jax.rollout import sampler as sampler_lib
from tepo_jax.runtime import progress as progress_lib


def _trainer(**fields):
  return types.SimpleNamespace(
      config=tiny.get_config('tepo'), step=1, cursor=0, left_out_in_a_row=0,
      carried=(), sizes=None,
      prompts=groups_lib.Mixture({'made': [None]}, [1], seed=0),
      session=types.SimpleNamespace(timers=progress_lib.Timers()),
      learner=types.SimpleNamespace(
          policy=dict, update_bytes=None,
          programs=types.SimpleNamespace(
              to_decode=dict, to_evaluate=dict, old_states=None)),
      **fields)


def test_a_run_prefills_what_all_its_prompts_begin_with_once(tmp_path):
  asked, trainer = {}, _trainer(_restore=lambda parent: None)
  trainer.session.sampler = lambda **arguments: asked.update(arguments)
  trainer.session.parameters = lambda: 7
  trainer.prompts = groups_lib.Mixture({'made': [
      groups_lib.Prompt(None, (*range(32), 40 + n), n) for n in range(3)]},
                                       [1], seed=0)
  trainer_lib.Trainer.open(trainer, tmp_path)
  assert asked['prefix'] == tuple(range(32))


def test_an_evaluations_time_is_not_that_of_the_next_step():
  def run(*_):
    with trainer.session.timers('rollout'):
      return None, {'avg@8': 0.5}

  trainer = _trainer(
      evaluations=[types.SimpleNamespace(run=run, name='sums')],
      texts=[types.SimpleNamespace(
          name='prose', nats_per_token=lambda params: 2.5)],
      progress=types.SimpleNamespace(evaluating=contextlib.nullcontext))
  scalars = trainer_lib.Trainer.evaluate(
      trainer, types.SimpleNamespace(check=None))
  assert scalars['eval/sums/avg@8'] == 0.5 and scalars['seconds/eval'] > 0
  assert scalars['eval/prose/nats_per_token'] == 2.5
  assert trainer.session.timers.pop() == {}


@pytest.mark.parametrize('before', [True, False])
def test_the_model_is_evaluated_before_training_unless_asked_not_to(before):
  written = {}
  trainer = _trainer(
      evaluations=['sums'], texts=[], unrecorded=None,
      evaluate=lambda stop: {'eval/sums/avg@8': 0.5},
      progress=types.SimpleNamespace(note=print),
      writer=types.SimpleNamespace(write=written.__setitem__))
  trainer.step = trainer.config.steps = 0
  trainer.config.eval.before = before
  trainer_lib.Trainer.run(trainer, stop=None)
  assert written == ({0: {'eval/sums/avg@8': 0.5}} if before else {})


def test_a_step_that_was_stopped_before_its_record_gets_one():
  """The last step was saved when its evaluation was stopped."""
  recorded = []
  trainer = _trainer(
      evaluations=[], unrecorded={'reward': 1.0},
      checkpointer=types.SimpleNamespace(latest=lambda: 40),
      _record=lambda stop: recorded.append(trainer.step))
  trainer.step = trainer.config.steps = 40
  trainer_lib.Trainer.run(trainer, None)
  assert recorded == [40]


@pytest.mark.parametrize('backend, waits', [('cpu', True), ('tpu', False)])
def test_a_save_is_waited_for_where_updates_use_the_same_memory(
    monkeypatch, backend, waits):
  monkeypatch.setattr(trainer_lib.jax, 'default_backend', lambda: backend)
  monkeypatch.setattr(
      trainer_lib.programs_lib, 'restorable', lambda _: (None, None))
  checkpointer = mock.Mock()
  trainer = _trainer(
      unrecorded=None, began={}, stands_on={}, checkpointer=checkpointer)
  trainer.learner.state, trainer.learner.skipped_in_a_row = 'state', 0
  trainer.learner.programs.model = types.SimpleNamespace(remat='none')
  trainer_lib.Trainer._save(trainer, None)
  assert [call[0] for call in checkpointer.method_calls] == (
      ['save', 'wait'] if waits else ['save'])
  assert trainer.session.timers.pop()['save'] > 0


def _starved():
  group = groups_lib.Group(
      prompt=groups_lib.Prompt(problem_lib.Problem(
          id='p', problem='?', answers=('1',), source='made'), (1,), 0),
      token_GT=np.zeros((2, 3), np.int32), logp_GT=np.zeros((2, 3), np.float32),
      length_G=np.array([3, 3]), ended_G=np.array([True, True]),
      text_G=('yes', 'no'), accuracy_G=np.zeros(2, np.float32))
  return sampler_lib.StarvedError('too few', sampler_lib.Rollout(
      [group], [False], [], 1, 4, reward_lib.Rewards(
          np.array([[.5, .1]], np.float32), {}, {}), None, {}))


def test_a_step_without_enough_groups_says_why_and_leaves_its_rollout(tmp_path):
  trainer = object.__new__(trainer_lib.Trainer)
  vars(trainer).update(vars(_trainer(
      background=types.SimpleNamespace(shutdown=lambda: None),
      sampler=types.SimpleNamespace(select=mock.Mock(side_effect=_starved())),
      workdir=tmp_path, checkpointer=types.SimpleNamespace(
          describe_latest=lambda: 'no checkpoint'))))
  trainer.session.rewards = None
  trainer.session.template = types.SimpleNamespace(style='boxed')
  trainer.config.dump.period = 0
  with pytest.raises(errors.RunError) as caught:
    trainer._collect(3, types.SimpleNamespace(check=None))
  assert str(caught.value) == (
      'too few; no completion had an answer that could be read '
      f"(data.template={trainer.config.data.template}), for example: 'yes'; "
      "the step's completions are in rollouts/, no checkpoint")
  assert [line['completion'] for line in dump.read(
      tmp_path / 'rollouts', 3)] == ['yes', 'no']


def test_steps_without_enough_groups_are_left_out_up_to_a_number(monkeypatch):
  """They are counted, a step that is trained on resets the count, and the
  next one begins behind what was sampled."""
  found = types.SimpleNamespace(name='found')
  starved = _starved()
  trainer = object.__new__(trainer_lib.Trainer)
  vars(trainer).update(vars(_trainer(
      sampler=types.SimpleNamespace(select=mock.Mock(side_effect=[
          starved, starved, found, starved, starved, starved])),
      _failed=lambda step, rollout, message: errors.RunError(message))))
  trainer.config.rollout.max_left_out = 2
  trainer.session.rewards = None
  trainer.session.template = types.SimpleNamespace(style='boxed')
  counts = []
  for want in starved.rollout, starved.rollout, found, *2 * [starved.rollout]:
    rollout, _ = trainer._collect(3, types.SimpleNamespace(check=None))
    assert rollout is want
    counts.append(trainer.left_out_in_a_row)
  assert counts == [1, 2, 0, 1, 2] and starved.rollout.cursor == 4
  with pytest.raises(errors.RunError, match='too few'):
    trainer._collect(3, types.SimpleNamespace(check=None))


def test_a_fork_of_a_run_that_left_out_more_steps_is_not_without_limit():
  trainer = object.__new__(trainer_lib.Trainer)
  vars(trainer).update(vars(_trainer(
      sampler=types.SimpleNamespace(select=mock.Mock(side_effect=_starved())),
      _failed=lambda step, rollout, message: errors.RunError(message))))
  trainer.session.rewards = None
  trainer.session.template = types.SimpleNamespace(style='boxed')
  trainer.config.rollout.max_left_out, trainer.left_out_in_a_row = 2, 3
  with pytest.raises(errors.RunError, match='too few'):
    trainer._collect(3, types.SimpleNamespace(check=None))


def test_a_failed_reward_is_why_no_group_was_mixed():
  starved = _starved()
  failed = dataclasses.replace(
      starved.rollout.rewards, parts={'f': np.array([[np.nan, 0]])},
      reasons={0: 'f: problem p: no such column'})
  starved.rollout = dataclasses.replace(starved.rollout, rewards=failed)
  assert trainer_lib.Trainer._why(_trainer(), starved) == (
      'reward f: problem p: no such column (1 of 1 group)')


@pytest.mark.parametrize('step, updates', [(0, 0), (20, 80)])
def test_a_run_without_an_update_is_not_done(step, updates):
  """Whether it began at step 0 or as a fork."""
  trainer = object.__new__(trainer_lib.Trainer)
  trainer.config = tiny.get_config('tepo')
  trainer.learner = types.SimpleNamespace(
      state=types.SimpleNamespace(step=jnp.int32(updates)))
  trainer.began = {'step': step, 'updates': updates}
  with pytest.raises(errors.RunError, match=f'none of the {40 - step} steps'):
    trainer.check_trained()
  trainer.learner.state.step += 1
  trainer.check_trained()


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
  trainer.prompts = types.SimpleNamespace(sets={})
  trainer.evaluations = trainer.texts = ()
  trainer.workdir = pathlib.Path('run')
  trainer.writer = types.SimpleNamespace(truncate=lambda _: None)
  trainer.checkpointer = types.SimpleNamespace(restore_last_good=lambda *_: (
      3, 'state', {'cursor': 8, 'unrecorded': None, 'remat': 'dots',
                   'skipped_in_a_row': 0, 'left_out_in_a_row': 2,
                   'began': {'step': 1, 'updates': 4}}))
  monkeypatch.setattr(programs_lib, 'restorable', lambda _: ())
  trainer._restore()
  assert found == begun and trainer.step == 3
  assert trainer.left_out_in_a_row == 2 and trainer.began['updates'] == 4
  assert ('dots, as until now, does not fit' in capsys.readouterr().err) == said
