"""A replayed step equals the original, on a run of two steps."""

import dataclasses
import json
import pathlib
import types

import jax
import numpy as np
import pytest

from configs import methods
from configs import tiny
from tepo_jax import errors
from tepo_jax.job import base_model
from tepo_jax.job import programs as programs_lib
from tepo_jax.job import run_folder
from tepo_jax.job import session as session_lib
from tepo_jax.job import trainer as trainer_lib
from tepo_jax.learning import objective
from tepo_jax.rollout import dump
from tepo_jax.runtime import lock as lock_lib
from tepo_jax.runtime import processes
from tepo_jax.tools.report import replay
from tepo_jax.tools.report import runs as runs_lib
from tepo_jax.tools.report import sections
from tests.job import learners

pytestmark = pytest.mark.long

STEP = 2
METHODS = ('grpo', 'tepo', 'clip_cov', 'gpg')
CHECKED = METHODS[1:]  # against train_step, which compiles for each


def small_config():
  """An untrained model is never correct; the overlong penalty mixes rewards."""
  config = tiny.get_config('tepo')
  config.steps = 2
  config.data.limit = 16
  config.rollout.update(
      prompts=4, samples=4, max_tokens=12, dynamic_sampling='off',
      overlong_buffer=11)
  config.train.minibatch_prompts = 2
  config.optimizer.learning_rate = 2e-3
  config.eval.period = 0
  config.checkpoint.update(period=1, keep=3)
  config.pretrain.update(
      worked_steps=1, demonstrations=32, num_layers=1, num_heads=2,
      num_kv_heads=1, d_model=32, head_dim=16, d_ff=32)
  return config


@pytest.fixture(scope='module')
def workdir(tmp_path_factory):
  folder = tmp_path_factory.mktemp('replay') / 'run'
  config = small_config()
  untrained = tmp_path_factory.mktemp('model') / 'base'
  base_model.make(config, untrained)
  config.model = str(untrained)
  with (session_lib.open_folder(config, untrained) as session,
        lock_lib.FolderLock(folder) as lock):
    trainer = trainer_lib.Trainer(config, session)
    run_folder.claim(config, folder, lock)
    trainer.open(folder)
    trainer.run(processes.StopRequest())
    trainer.close()
  return folder


@pytest.fixture(scope='module')
def replayed(workdir):
  """Comparisons, `_train_steps`, view, the final state, `_small_step`."""
  chosen = {name: methods.methods(1e-3)[name] for name in METHODS}
  with replay.open_step(workdir, STEP) as step:
    last = step.scored.updates - 1
    start = jax.device_get(step.learner.state)
    small = _small_step(step, chosen['grpo'])
    comparisons = step.compare(chosen)
    end = jax.device_get(step.learner.state)
    view = step.view(chosen['tepo'])
    trained = _train_steps(step, start, chosen, last)
    yield comparisons, trained, view, end, small


def _small_step(step, method):
  """The outcome for a hundredth of the optimiser's change."""
  def move(*arguments):
    return jax.tree.map(
        lambda x: x / 100, step.programs.move(*arguments))

  minibatch = step.scored.minibatches[0]
  return replay.evaluate(
      dataclasses.replace(step.programs, move=move),
      {'method': objective.make_policy_loss(method)}, step.learner.state,
      {'method': minibatch}, step.scored.rng(0),
      step.old_policy(minibatch))['method']


def _train_steps(step, start, chosen, last):
  """Metrics of `train_step` of each method at the first and last update."""
  learner, scored = step.learner, step.scored
  mesh = learner.session.mesh
  learner.state = jax.device_put(start, learner.programs.state_sharding)
  for before in range(last):
    step._update(before)
  states = {0: start, last: jax.device_get(learner.state)}
  found = [{}, {}]
  for name in CHECKED:
    config = learner.config.copy_and_resolve_references()
    with config.unlocked():
      config.method = chosen[name]
    programs = programs_lib.make(config, learner.session.model, mesh)
    advantage_B = learner.to_batch(
        step.trained, step.reward_B,
        programs.policy_loss.method.estimator).advantage_B
    for outcomes, (index, state) in zip(found, states.items()):
      mine = scored.minibatch_index(index)
      minibatch = scored.minibatches[mine]
      _, metrics = programs.train_step(
          jax.device_put(state, programs.state_sharding),
          minibatch.replace(advantage_B=advantage_B[scored.members[mine]]),
          scored.rng(index), step.old_policy(minibatch)
          if programs.policy_loss.needs_kl else None)
      outcomes[name] = jax.device_get(metrics)
  return found


@pytest.mark.parametrize('name', CHECKED)
@pytest.mark.parametrize('place', [0, 1])
def test_an_outcome_is_that_of_train_step(name, place, replayed):
  comparisons, trained = replayed[:2]
  mine, theirs = comparisons[place].outcomes[name], trained[place][name]
  assert mine.loss == pytest.approx(float(theirs['loss']), rel=1e-4, abs=1e-6)
  assert mine.grad_norm == pytest.approx(float(theirs['grad_norm']), rel=1e-4)
  assert mine.region_share == pytest.approx(float(theirs['region_share']))
  assert mine.clip_fraction == pytest.approx(float(sum(
      theirs[f'clip_fraction_{part}'] for part in (
          'low', 'high', 'covariance'))))


def test_the_replayed_updates_give_the_saved_checkpoint(workdir, replayed):
  with replay.open_step(workdir, STEP) as step:
    saved = replay._state(step.learner, workdir, STEP)
  jax.tree.map(np.testing.assert_array_equal, replayed[3],
               jax.device_get(saved))


def test_at_the_first_update_the_policy_equals_the_old_one(replayed):
  first, last = replayed[0]
  assert first.outcomes['tepo'].region_share == 0
  assert first.outcomes['grpo'].clip_fraction == 0
  assert last.outcomes['tepo'].region_share > 0
  assert first.where == 'update 1 of 4' and last.where == 'update 4 of 4'


def test_cosines(replayed):
  first, last = (comparison.outcomes for comparison in replayed[0])
  cosine = dict(zip(METHODS, replay.cosines(list(first.values()))[0]))
  assert cosine['tepo'] == pytest.approx(1, abs=1e-5)  # both are REINFORCE
  late = replay.cosines(list(last.values()))
  assert np.diag(late) == pytest.approx(np.ones(len(METHODS)))
  assert late == pytest.approx(late.T) and late[0, 1] < 0.9999


def test_the_entropy_change_is_first_order(replayed):
  """It predicts a hundredth of the change, and the sign of the whole."""
  small, whole = replayed[4], replayed[0][0].outcomes['grpo']
  assert abs(small.entropy_measured) > 1e-5
  assert small.entropy_predicted == pytest.approx(
      small.entropy_measured, rel=0.03)
  assert small.entropy_predicted == pytest.approx(
      whole.entropy_predicted / 100, rel=1e-3)
  assert whole.entropy_predicted * whole.entropy_measured > 0


def test_the_view_has_every_sampled_token(workdir, replayed):
  view = replayed[2]
  records = dump.read(workdir / 'rollouts', STEP)
  assert view.batch.mask_BT.sum(1).tolist() == [
      record['tokens'] for record in records]
  mask_BT = view.batch.mask_BT > 0
  # π_old is the policy that sampled the step.
  assert np.abs(view.batch.sampler_logp_BT - view.batch.old_logp_BT)[
      mask_BT].max() < 1e-4
  moved_BT = view.entropy_BT - view.batch.old_entropy_BT
  expected_BT = mask_BT & (moved_BT < 0) & (
      view.batch.advantage_B[:, None] > 0)
  np.testing.assert_array_equal(view.selection['region_BT'], expected_BT)
  assert expected_BT.any() and (view.kl_BT[mask_BT] > -1e-6).all()
  weight_B = np.exp((np.where(mask_BT, view.logp_BT - view.batch.old_logp_BT,
                              0)).sum(1) / mask_BT.sum(1))
  np.testing.assert_allclose(
      view.selection['weight_BT'][:, 0], weight_B, rtol=1e-5)


def test_a_step_without_its_checkpoint_is_refused(workdir):
  with pytest.raises(errors.InputError, match='the steps with both: 1, 2'):
    with replay.open_step(workdir, 5):
      pass


def test_inspected_tokens_are_those_of_the_file(workdir, tmp_path):
  read = runs_lib.read([str(workdir)])
  [brief] = sections.inspectors(read, None, tmp_path)
  assert [q['key'] for q in brief['quantities']] == ['surprise']
  [payload] = sections.inspectors(read, STEP, tmp_path)
  lines = [json.loads(line) for line in
           (tmp_path / f'inspect_run_{STEP}.jsonl').open()]
  completions = [c for g in payload['groups'] for c in g['completions']]
  assert len(lines) == len(completions) == 16
  for line, completion in zip(lines, completions):
    assert line['token_ids'] == completion['tokens']
    for key, values in completion['values'].items():
      assert line[key] == values and len(values) == len(completion['tokens'])
  assert payload['summary'] and len(payload['quantities']) == 11
  with pytest.raises(errors.InputError, match='no run of --runs'):
    sections.inspectors(read, 9, tmp_path)


def test_replay_writes_numbers_and_heat_maps(workdir, tmp_path, capsys):
  read = runs_lib.read([str(workdir)])
  [(heading, content)] = sections.replays(
      read, 1, tmp_path, lambda beta: {'grpo': methods.methods(beta)['grpo']})
  assert heading == 'Replay: run, step 1' and 'this run' in content
  saved = json.loads((tmp_path / 'replay_run_1.json').read_text())
  assert [c['where'] for c in saved['comparisons']] == [
      'update 1 of 4', 'update 4 of 4']
  assert set(saved['comparisons'][0]['rows']) == {'grpo', 'this run'}
  assert (tmp_path / 'replay_run_1_0.png').exists()
  assert pathlib.Path(workdir / 'environment.jsonl').exists()
  assert 'replay of run: update 1 of 4, method 1 of 2: grpo' in (
      capsys.readouterr().err)


def test_a_selection_has_the_tokens_that_metrics_count():
  tokens = objective.Tokens(
      logp_BT=np.log([[0.5, 0.9], [0.5, 0.5]]), entropy_BT=np.ones((2, 2)),
      old_logp_BT=np.log([[0.5, 0.5], [0.5, 0.9]]),
      old_entropy_BT=np.array([[2.0, 0.5], [2.0, 0.5]]),
      advantage_BT=np.array([[1.0, 1.0], [-1.0, -1.0]]),
      mask_BT=np.ones((2, 2)), kl_BT=np.zeros((2, 2)))
  loss = objective.make_policy_loss(
      methods.methods(1e-3)['tepo'] | dict(weight='token'))
  found = loss.selection(tokens, loss.statistics(tokens))
  np.testing.assert_array_equal(found['high_BT'], [[0, 1], [0, 0]])
  np.testing.assert_array_equal(found['low_BT'], [[0, 0], [0, 1]])
  np.testing.assert_array_equal(found['region_BT'], [[1, 0], [0, 0]])


def _step(number, method, stale=1.5, truncated=False):
  """A step of a small learner, whose reference is `stale` times its weights
  until the period of 2 ends."""
  learner = learners.make_learner(method, period=2)
  learner.state = learner.first_state()
  learner.state = learner.state.replace(reference=jax.tree.map(
      lambda x: stale * x, learner.state.reference))
  learner.config.rollout.truncated = 'mask'
  groups = [dataclasses.replace(group, ended_G=~np.repeat(truncated, 2))
            for group in learners.sampled()]
  rollout = types.SimpleNamespace(
      completed=groups, trained=[0, 2, 3], rewards=types.SimpleNamespace(
          reward_NG=learners.rewards_of(groups).reshape(-1, 2), parts={}))
  return replay.Step(
      learner, number, dump.records(number, rollout, str, 'boxed'))


@pytest.mark.parametrize('number, renewed', [(2, False), (3, True)])
def test_a_replay_renews_the_reference_as_the_run_does(number, renewed):
  gap_BT = _step(number, 'grpo_original').scored.reference_gap_BT()
  assert (gap_BT == 0).all() == renewed


def test_a_step_whose_completions_are_all_masked_is_refused():
  with pytest.raises(errors.InputError, match='step 1 made no update: all'):
    _step(1, 'grpo_original', truncated=True)


@pytest.mark.parametrize('name, plain', [
    ('rloo_original', 'rloo'), ('reinforce_pp', 'grpo')])
def test_each_method_has_the_advantages_of_its_own_run(
    monkeypatch, name, plain):
  """With the KL in the reward if it takes one, whitened over the groups that
  were trained on; so has the view, and 0 in other groups."""
  step, given = _step(2, name), []
  monkeypatch.setattr(replay, 'evaluate', lambda _, losses, state, batches,
                      *rest: given.append(batches))
  rows = methods.methods(1e-3)
  step._compare({each: objective.make_policy_loss(rows[each])
                 for each in (name, plain)}, 0, print)
  own = np.asarray(step.scored.minibatches[0].advantage_B)
  np.testing.assert_array_equal(given[0][name].advantage_B, own)
  np.testing.assert_allclose(given[0][plain].advantage_B, np.tile(
      {'rloo': [1, -1], 'grpo': [2**-.5, -2**-.5]}[plain], 2), rtol=1e-5)
  assert np.abs(np.abs(own) - 1).max() > 1e-3

  def shown(loss, batch, members):
    given.append(batch)
    raise InterruptedError

  monkeypatch.setattr(step, '_view', shown)
  with pytest.raises(InterruptedError):
    step.view(rows[name])
  whole = given[1].advantage_B
  np.testing.assert_array_equal(
      whole[[0, 1, 4, 5, 6, 7]], step.scored.batch.advantage_B[:6])
  assert not whole[2:4].any()
