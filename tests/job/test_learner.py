"""The updates of a step: their minibatches, π_old, behaviour weights, and when
updates that are not finite stop a run."""

import dataclasses
import types

import jax
from jax import numpy as jnp
import numpy as np
import pytest
import torch

from tepo_jax import errors
from tepo_jax.job import learner as learner_lib
from tepo_jax.job import memory as memory_lib
from tepo_jax.job import programs as programs_lib
from tepo_jax.learning import behaviour
from tepo_jax.learning import packing as packing_lib
from tepo_jax.learning import update
from tepo_jax.policy import transformer
from tepo_jax.runtime import checkpoint
from tepo_jax.runtime import host
from tepo_jax.runtime import mesh as mesh_lib
from tests.job.learners import GROUPS
from tests.job.learners import groups_of
from tests.job.learners import make_learner
from tests.job.learners import rewards_of
from tests.job.learners import sampled
from tests.job.learners import SAMPLES
from tests.job.learners import T

METRICS = ('behaviour_mean', 'behaviour_capped_share',
           'behaviour_rejected_share', 'behaviour_ess', 'behaviour_kl')


@pytest.fixture(scope='module')
def learner():
  return make_learner('grpo')


def test_a_model_that_does_not_fit_is_refused(learner, monkeypatch):
  monkeypatch.setattr(mesh_lib, 'memory_limit', lambda mesh: 1)
  with pytest.raises(errors.InputError, match='would have to hold'):
    learner_lib.Learner(learner.config, types.SimpleNamespace(
        model=learner.programs.model, mesh=learner.programs.mesh,
        timers=None))


def start(learner, **settings):
  """Sets the first state and `config.train.behaviour`."""
  learner.state = learner.first_state()
  learner.config.train.behaviour.update(dict(
      weight='off', cap=2.0, reject_below=0.0, reject_above=float('inf'))
      | settings)


@pytest.fixture(scope='module')
def old_logp_BT(learner):
  """ℓ° of the groups' tokens."""
  start(learner)
  return pack_and_score(learner, sampled()).old_logp_BT()


def learn(learner, groups):
  return learner.learn(1, groups, rewards_of(groups))


def pack_and_score(learner, groups):
  return learner.pack_and_score(1, groups, rewards_of(groups))


def first_update(learner, groups):
  """(the step, metrics of its first update)."""
  step = pack_and_score(learner, groups)
  return step, jax.device_get(learner.make_update(step, 0))


@pytest.mark.long
def test_an_exact_kl_with_few_mixed_groups():
  """dynamic_sampling=drop: minibatches of filler alone are left out."""
  learner = make_learner('tepo')
  for count in range(1, GROUPS + 1):
    start(learner)
    groups = sampled()[:count]
    step = pack_and_score(learner, groups)
    assert step.updates == 2 * len(step.minibatches) == (
        2 if count <= 2 else 4)
    assert np.isfinite(learn(learner, groups)['loss'])


@pytest.mark.long_after_first
@pytest.mark.parametrize('method', ['tepo', 'grpo'])
def test_until_weights_move_the_policy_is_the_old_one_exactly(method):
  """In all updates where none moves a weight, else in the first."""
  learner = make_learner(method, learning_rate=1e-30)
  start(learner)
  metrics = learn(learner, sampled())
  learner = make_learner(method, learning_rate=1e-2)
  start(learner)
  step, first = first_update(learner, sampled())
  for found in metrics, first:
    assert found['weight_min'] == found['weight_max'] == 1
    assert found['entropy_unchanged_share'] == 1 and found['grad_norm'] > 0
    assert found.get('kl_full', 0) == 0
    for name in ('kl_k1', 'kl_k3', 'region_share', 'clip_fraction_low',
                 'clip_fraction_high', 'skipped'):
      assert found[name] == 0, name
  for index in (1, 2, 3):
    later = jax.device_get(learner.make_update(step, index))
    assert later['entropy_unchanged_share'] < 0.1 and later['kl_k3'] > 0
  again = pack_and_score(learner, sampled())
  assert {int(minibatch.scored_at) for minibatch in again.minibatches} == {
      int(learner.state.step)} == {4}


def hidden_states(programs, old, minibatch):
  """Of the scored columns [N, D], in the order of the rows."""
  of = programs_lib.compiled(
      programs.mesh, lambda old, m: old.of_microbatch(m)[0],
      programs.model.dtype)
  used = int(minibatch.used)
  hidden_MRSD = np.stack([of(old, m) for m in range(used)])
  return hidden_MRSD[np.asarray(minibatch.rows.scored_RS)[:used]]


@pytest.mark.long_after_first
@pytest.mark.parametrize('packing, shape', [
    ('segments', (1, 1, 1)), ('shared', (1, 2, 1)), pytest.param(
        'segments', (1, 2, 2), marks=pytest.mark.nightly)])
def test_every_update_has_the_old_policy_of_the_step_s_start(packing, shape):
  """After the updates, against its forward over the same minibatch: to the bit,
  whether its hidden states are kept or computed anew."""
  learner = make_learner('tepo', packing, shape, scale=4.0, learning_rate=1e-2,
                         microbatch_tokens=20)
  programs, groups = learner.programs, sampled()
  for fits in True, False:
    start(learner)
    params = jax.tree.map(jnp.copy, learner.state.params)
    step = pack_and_score(learner, groups)
    if not fits:
      rows, _, *rest = programs.old_states.shape
      used = sum(int(m.used) for m in step.minibatches)
      learner.programs = dataclasses.replace(
          programs, old_states=programs.old_states.update(
              shape=(rows, used - 1, *rest)))
      step = pack_and_score(learner, groups)
    assert bool(step.old) == fits == (step.old_params is None)
    assert step.minibatches[0].used > 1
    for index in range(4):
      assert not jax.device_get(learner.make_update(step, index))['skipped']
    for index in range(4):
      minibatch = step.minibatches[index % 2]
      got, want = (
          hidden_states(programs, old, minibatch) for old in (
              learner.old_policy(step, index),
              programs.old_policy(params, minibatch)))
      assert len(got) == np.asarray(minibatch.mask_BT).sum()
      # Only the states that predict first tokens are equal within a group.
      assert len(np.unique(want.round(3), axis=0)) == len(want) - 2
      np.testing.assert_array_equal(got, want)


def test_as_many_states_as_fit(learner):
  """Of one minibatch in any case, of all if a fifth of what is free holds
  them."""
  programs = programs_lib.make(
      make_learner('tepo', microbatch_tokens=20).config,
      learner.programs.model, learner.programs.mesh)
  rows, least, *rest = programs.old_states.shape
  each = rows * np.prod(rest) * 4
  held = sum(memory_lib.held(programs).values())
  assert memory_lib.held(programs)['hidden states of π_old'] == least * each
  for free, count in ((0, least), (5 * each - 5, least), (5 * each, least + 1),
                      (10 * each, least + 2), (10**9, 3 * least)):
    states = memory_lib.keeping(programs, 3, held + free).old_states
    assert states.shape == (rows, count, *rest)
    assert states.sharding == programs.old_states.sharding
  no_kl = dataclasses.replace(programs, old_states=None)
  assert memory_lib.keeping(no_kl, 3, held) is no_kl


def test_states_of_a_width_that_tensor_does_not_divide_are_whole():
  config = make_learner('tepo').config
  mesh = mesh_lib.make(dict(data=1, fsdp=1, tensor=3), jax.devices()[:3])
  model = transformer.ModelConfig(
      vocab_size=48, d_model=64, num_layers=1, num_heads=6, num_kv_heads=3,
      head_dim=8, d_ff=48, max_position=64)
  programs = programs_lib.make(
      config, programs_lib.prepare_model(model, config, mesh), mesh)
  assert memory_lib.held(programs)['hidden states of π_old'] == (
      np.prod(programs.old_states.shape) * 4)


@pytest.mark.long_after_first
@pytest.mark.parametrize('packing, shape, rank', [
    ('segments', (1, 1, 1), 0), ('segments', (1, 2, 2), 2), *(
        pytest.param(*case, marks=pytest.mark.nightly) for case in (
            ('shared', (1, 2, 1), 0), ('shared', (1, 1, 1), 2)))])
def test_the_reference_is_the_policy_of_step_0_or_of_its_period(
    tmp_path, packing, shape, rank):
  """ℓ of the reference is that of its weights, whatever updates do to the
  policy; a restored state has it to the bit."""
  learner = make_learner('grpo_original', packing, shape, learning_rate=1e-2,
                         rank=rank, period=2)
  learner.load_base()
  learner.state = learner.first_state()
  groups = sampled()
  for step in 1, 2, 3, 4:
    learner.renew_reference(step)
    scored = pack_and_score(learner, groups)
    minibatch = scored.minibatches[1]
    if step in (1, 3):
      want = minibatch.old_logp_BT
      np.testing.assert_array_equal(scored.reference_gap_BT(), 0)
    else:
      assert np.abs(scored.reference_gap_BT()).max() > 1e-3
    np.testing.assert_array_equal(minibatch.reference_logp_BT, want)
    metrics = [jax.device_get(learner.make_update(scored, index))
               for index in range(4)]
    assert (metrics[0]['kl_reference'] == 0) == (step in (1, 3))
    assert metrics[3]['kl_reference'] > 0 and not metrics[3]['skipped']
  keep = checkpoint.Checkpointer(tmp_path, 1, 0)
  keep.save(4, learner.state, {}, None,
            programs_lib.restorable(learner.programs)[1])
  keep.close()
  restored, _ = checkpoint.Checkpointer(tmp_path, read_only=True).restore(
      4, *programs_lib.restorable(learner.programs), lambda *_: None)
  jax.tree.map(np.testing.assert_array_equal, *map(
      jax.device_get, (restored, learner.state)))


def test_the_last_reference_is_freed_before_the_next_is_made():
  """A second one is 15 GB of a model of 7B."""
  run = types.SimpleNamespace(state=update.TrainState(0, 'policy', None, 'old'))

  def copied(params):
    assert run.state.reference is None
    return f'copy of {params}'

  run.programs = types.SimpleNamespace(
      to_old_policy=copied, policy_loss=types.SimpleNamespace(
          method=types.SimpleNamespace(
              reference=types.SimpleNamespace(period=2))))
  for step, want in (2, 'old'), (3, 'copy of policy'):
    learner_lib.Learner.renew_reference(run, step)
    assert run.state.reference == want


def test_the_kl_in_the_reward_is_that_of_old_policy_and_reference():
  """RLOO as TRL computes it (rloo_trainer.py, f2cd577): the rewards less beta
  times the sum of ℓ° − ℓ_ref, then the mean of the others as baseline; by torch
  from the log-probabilities of both policies."""
  learner = make_learner('rloo_original')
  start(learner)
  learner.state = learner.state.replace(
      reference=jax.tree.map(lambda x: 1.5 * x, learner.state.reference))
  scored = pack_and_score(learner, sampled())
  gap = torch.tensor(scored.old_logp_BT(), dtype=torch.float64) - torch.tensor(
      np.concatenate([m.reference_logp_BT for m in scored.minibatches]))
  mask = torch.tensor(scored.batch.mask_BT)
  reward = torch.tensor(rewards_of(sampled()), dtype=torch.float64)
  reward = (reward - 0.03 * (gap * mask).sum(1)).reshape(GROUPS, SAMPLES)
  want = (reward - (reward.sum(1, keepdim=True) - reward) / (SAMPLES - 1))
  got = np.concatenate([m.advantage_B for m in scored.minibatches])
  assert np.abs(np.abs(got) - 1).max() > 1e-4
  np.testing.assert_allclose(got, want.numpy().ravel(), rtol=0, atol=1e-6)
  np.testing.assert_array_equal(scored.batch.advantage_B, got)


@pytest.mark.long
def test_each_token_has_its_own_advantage():
  """REINFORCE++: the update compiles for it, and whitening is over the step."""
  learner = make_learner('reinforce_pp', learning_rate=1e-2)
  start(learner)
  learn(learner, sampled())
  scored = pack_and_score(learner, sampled())
  advantage_BT = np.concatenate([m.advantage_B for m in scored.minibatches])
  kept = scored.batch.mask_BT > 0
  assert advantage_BT.shape == kept.shape and not advantage_BT[~kept].any()
  assert learner.programs.minibatch.advantage_B.shape == (4, T)
  assert advantage_BT[kept].mean() == pytest.approx(0, abs=1e-6)
  assert advantage_BT[kept].std(ddof=1) == pytest.approx(1, rel=1e-5)
  assert np.ptp(advantage_BT[0][kept[0]]) > 0
  outcome = jax.device_get(learner.make_update(scored, 0))
  assert outcome['grad_norm'] > 0 and outcome['kl_reference'] != 0


def test_the_reference_is_counted():
  """By a run's checks and by a plan, which also scores by it."""
  programs = make_learner('grpo_original').programs
  held, state = memory_lib.held(programs), programs_lib.abstract_state(programs)
  assert held['reference policy'] == mesh_lib.device_bytes(state.params) > 0
  without = make_learner('grpo').programs
  assert memory_lib.held(without)['reference policy'] == 0
  assert held['weights and moments'] == (
      memory_lib.held(without)['weights and moments'])


def test_minibatches_hold_whole_groups_in_the_datas_order(learner):
  start(learner)
  step = pack_and_score(learner, sampled())
  for index, rows in enumerate(step.members):
    np.testing.assert_array_equal(rows, np.arange(4) + 4 * index)
    np.testing.assert_array_equal(
        step.minibatches[index].mask_BT, step.batch.mask_BT[rows])


@pytest.mark.parametrize('method', ['tepo', 'grpo'])
def test_remat_auto_compiles_the_update_once(method):
  """Before a run, for the arguments that the run then passes; of grpo here
  with a schedule, which the first step has a quarter of the rate of."""
  warmup_steps = 3 if method == 'grpo' else 0
  learner, compiled = make_learner(
      method, remat='auto', warmup_steps=warmup_steps), []
  start(learner)
  with host.compilations_shown(compiled.append, lambda: None):
    learner.fit()
    assert learner.programs.model.remat == 'none'  # it is small
    state = mesh_lib.device_bytes(learner.state)
    assert state < learner.update_bytes < 100 * state
    before = jax.device_get(learner.state.params)
    metrics = learn(learner, sampled())
  assert [name.split()[0] for name in compiled].count('train_step') == 1
  rate = metrics['optimizer/learning_rate']
  assert rate == 3e-5 / (warmup_steps + 1)
  # The largest change by Adam's first updates is the sum of their rates.
  moved = max(np.abs(x).max() for x in jax.tree.leaves(jax.tree.map(
      np.subtract, jax.device_get(learner.state.params), before)))
  assert 2 * rate < moved < 4.01 * rate


def test_off_adds_metrics_and_no_array(learner, old_logp_BT):
  start(learner)
  step = pack_and_score(learner, groups_of(old_logp_BT))
  assert len(step.minibatches) == 2 and step.updates == 4
  assert all(m.behaviour_BT is None for m in step.minibatches)
  # The sampler's log-probabilities are ℓ°.
  scalars = learn(learner, groups_of(old_logp_BT))
  assert [scalars[name] for name in METRICS] == [1, 0, 0, 1, 0]


@pytest.mark.parametrize('weight', ['token', 'sequence'])
def test_every_minibatch_has_its_weights(learner, old_logp_BT, weight):
  start(learner, weight=weight)
  noise_BT = np.random.default_rng(1).normal(0, 0.5, old_logp_BT.shape)
  groups = groups_of(old_logp_BT + noise_BT)
  step = pack_and_score(learner, groups)
  want_BT = behaviour.weights(
      step.old_logp_BT(), step.batch.sampler_logp_BT, step.batch.mask_BT,
      **learner.config.train.behaviour)
  assert want_BT.std() > 0.1
  for rows, minibatch in zip(step.members, step.minibatches):
    np.testing.assert_array_equal(minibatch.behaviour_BT, want_BT[rows])
  scalars = learn(learner, groups)
  assert scalars['behaviour_ess'] < 1 and scalars['behaviour_kl'] > 0
  assert learner.programs.score._cache_size() == 1


def test_the_gap_is_that_of_the_current_policys_tokens(learner, old_logp_BT):
  """Of carried completions, earlier policies drew tokens with a log-probability
  that is 100 nats off; behaviour weights see these too."""
  is_old_BT = np.random.default_rng(1).random(old_logp_BT.shape) < 0.5
  groups = groups_of(old_logp_BT + 100 * is_old_BT)
  versions = iter(np.where(is_old_BT, 1, 2).reshape(GROUPS, SAMPLES, -1))

  def scalars_of(version_of):
    start(learner)
    return learner.learn(2, [dataclasses.replace(
        g, version_GT=version_of(g)) for g in groups], rewards_of(groups))

  mixed = scalars_of(lambda g: next(versions))
  assert mixed['logp_gap_mean'] < 1e-4 < 1 < mixed['behaviour_kl']
  old = scalars_of(lambda g: np.ones_like(g.token_GT))
  assert 'logp_gap_mean' not in old
  assert old['behaviour_kl'] == mixed['behaviour_kl']
  for version_of in (lambda g: None, lambda g: np.full_like(g.token_GT, 2)):
    with pytest.raises(errors.RunError, match='logp_gap_limit=10'):
      scalars_of(version_of)


def test_updates_are_queued_before_the_host_waits_for_scores(
    learner, old_logp_BT, monkeypatch):
  start(learner)
  learn(learner, groups_of(old_logp_BT))  # compiles
  start(learner)
  programs, slow, pending = learner.programs, [], []

  @jax.jit
  def after_seconds(x):
    y = jnp.ones((2000, 2000))
    for _ in range(4):
      y = y @ y
    return x + 0 * jnp.tanh(y[0, 0])

  jax.block_until_ready(after_seconds(old_logp_BT[:4]))

  def score(*arguments):
    logp_BT, entropy_BT = programs.score(*arguments)
    slow.append(after_seconds(entropy_BT))
    return logp_BT, slow[-1]

  def train_step(*arguments):
    pending.append(not slow[-1].is_ready())
    return programs.train_step(*arguments)

  monkeypatch.setattr(learner, 'programs', dataclasses.replace(
      programs, score=score, train_step=train_step))
  learn(learner, groups_of(old_logp_BT))
  assert len(slow) == 2 and pending == 4 * [True]


@pytest.mark.long
def test_the_loss_is_weighted(learner, old_logp_BT):
  """The sampler drew every token 1.5 times less often than the trainer."""
  rarer = groups_of(old_logp_BT - np.log(1.5))
  start(learner)
  _, plain = first_update(learner, rarer)
  start(learner, weight='token')
  step, weighted = first_update(learner, rarer)
  for minibatch in step.minibatches:
    np.testing.assert_allclose(np.asarray(minibatch.behaviour_BT)[
        np.asarray(minibatch.mask_BT) > 0], 1.5, rtol=1e-6)
  assert plain['grad_norm'] > 0.01
  for name in ('loss', 'grad_norm'):
    assert weighted[name] == pytest.approx(1.5 * plain[name], rel=1e-5), name
  assert weighted['weight_min'] == weighted['weight_max'] == 1
  start(learner, weight='token', reject_above=1.4)
  _, rejected = first_update(learner, rarer)
  assert rejected['loss'] == rejected['grad_norm'] == 0


@pytest.mark.long
def test_equal_log_probabilities_change_no_bit(learner, old_logp_BT):
  """A step of four updates with weights of 1, and without weights."""
  outcomes = []
  for weight in 'off', 'token', 'sequence':
    start(learner, weight=weight)
    metrics = learn(learner, groups_of(old_logp_BT))
    outcomes.append((mesh_lib.to_host(learner.state), metrics))
  for other in outcomes[1:]:
    jax.tree.map(np.testing.assert_array_equal, other, outcomes[0])


def _count(run, skipped):
  learner_lib.Learner._count_skipped(run, {
      'skipped': float(skipped), 'loss': float('nan'), 'grad_norm': 1.0}, 5)


def test_a_finite_update_resets_the_count_of_skipped_ones():
  run = types.SimpleNamespace(skipped_in_a_row=0)
  for skipped in (True, True, False, True, True):
    _count(run, skipped)
  assert run.skipped_in_a_row == 2
  with pytest.raises(errors.RunError, match='3 updates in a row .* in step 5'):
    _count(run, True)


@pytest.mark.long_after_first
@pytest.mark.parametrize('packing', packing_lib.MODES)
def test_a_masked_completion_is_in_no_row(packing):
  """Nor does a step train whose completions are all truncated."""
  learner = make_learner('grpo', packing)
  start(learner)
  groups = sampled()
  learner.config.rollout.truncated = 'mask'
  step = pack_and_score(learner, [dataclasses.replace(
      group, ended_G=np.array([True, n > 0]))
                                  for n, group in enumerate(groups)])
  np.testing.assert_array_equal(
      step.minibatches[0].microbatch_B < 0, [False, True, False, False])
  assert learn(learner, [dataclasses.replace(
      group, ended_G=np.zeros(2, bool)) for group in groups]) == {}
