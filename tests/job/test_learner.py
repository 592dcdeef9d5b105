"""Behaviour weights in updates; when non-finite updates stop a run."""

import dataclasses
import types

import jax
from jax import numpy as jnp
import numpy as np
import pytest

from configs import tiny
from tepo_jax import errors
from tepo_jax.job import learner as learner_lib
from tepo_jax.job import programs as programs_lib
from tepo_jax.learning import behaviour
from tepo_jax.policy import transformer
from tepo_jax.rollout import groups as groups_lib
from tepo_jax.runtime import host
from tepo_jax.runtime import mesh as mesh_lib
from tepo_jax.runtime import progress as progress_lib
from tepo_jax.data import problem as problem_lib

pytestmark = pytest.mark.usefixtures('quick_compile')

MODEL = transformer.ModelConfig(
    vocab_size=32, d_model=16, num_layers=1, num_heads=2, num_kv_heads=1,
    head_dim=8, d_ff=16, max_position=32, tie_embeddings=True)
GROUPS, SAMPLES, T = 4, 2, 6
METRICS = ('behaviour_mean', 'behaviour_capped_share',
           'behaviour_rejected_share', 'behaviour_ess', 'behaviour_kl')


@pytest.fixture(scope='module')
def learner():
  return make_learner('grpo')


def make_learner(method, remat='none'):
  """Two epochs of two updates."""
  config = tiny.get_config(method)
  config.compute.remat = remat
  config.data.max_prompt_tokens = 4
  config.rollout.update(
      prompts=GROUPS, samples=SAMPLES, max_tokens=T, logp_gap_limit=10.0)
  config.train.update(minibatch_prompts=2, row_tokens=10, microbatch_tokens=40)
  config.compute.unroll = 1
  mesh = mesh_lib.make(config.mesh, jax.devices()[:1])
  return learner_lib.Learner(config, types.SimpleNamespace(
      model=programs_lib.prepare_model(MODEL, config, mesh), mesh=mesh,
      timers=progress_lib.Timers(),
      load_params=lambda: transformer.init(MODEL, jax.random.key(0))))


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


def groups_of(logp_BT):
  """One right and one wrong completion a group, with the sampler's logp."""
  rng = np.random.default_rng(0)
  length_NG = rng.integers(1, T + 1, (GROUPS, SAMPLES), np.int32)
  mask_NGT = np.arange(T) < length_NG[..., None]
  token_NGT = rng.integers(0, 32, mask_NGT.shape, np.int32) * mask_NGT
  logp_NGT = np.where(mask_NGT, logp_BT.reshape(mask_NGT.shape), 0)
  problem = problem_lib.Problem('0', '?', ('1',), 'test')
  return [groups_lib.Group(
      groups_lib.Prompt(problem, (1 + n, 2), n), token_NGT[n],
      logp_NGT[n].astype(np.float32), length_NG[n], np.ones(SAMPLES, bool),
      ('', ''), np.array([1, 0], np.float32)) for n in range(GROUPS)]


@pytest.fixture(scope='module')
def old_logp_BT(learner):
  """ℓ° of the groups' tokens."""
  start(learner)
  return scored_plan(
      learner, groups_of(np.full((GROUPS * SAMPLES, T), -3.0))
  ).batch.old_logp_BT


def scored_plan(learner, groups):
  plan = learner.plan_updates(1, groups)
  learner.fetch_scores(plan)
  return plan


def first_update(learner, groups):
  """(plan, metrics of the first update)."""
  plan = scored_plan(learner, groups)
  return plan, jax.device_get(learner.make_update(plan, 0))


def test_an_exact_kl_with_few_mixed_groups():
  """dynamic_sampling=drop: minibatches of filler alone are left out, and later
  epochs mix filler rows with others."""
  learner = make_learner('tepo')
  for count in range(1, GROUPS + 1):
    start(learner)
    groups = groups_of(np.full((GROUPS * SAMPLES, T), -3.0))[:count]
    assert np.isfinite(learner.learn(1, groups)['loss'])


@pytest.mark.parametrize('method', ['tepo', 'grpo'])
def test_remat_auto_compiles_the_update_once(method):
  """Before a run, for the arguments that the run then passes."""
  learner, compiled = make_learner(method, 'auto'), []
  start(learner)
  with host.compilations_shown(compiled.append, lambda: None):
    learner.fit()
    assert learner.programs.model.remat == 'none'  # it is small
    state = mesh_lib.device_bytes(learner.state)
    assert state < learner.update_bytes < 100 * state
    learner.learn(1, groups_of(np.full((GROUPS * SAMPLES, T), -3.0)))
  assert [name.split()[0] for name in compiled].count('train_step') == 1


def test_off_adds_metrics_and_no_array(learner, old_logp_BT):
  start(learner)
  plan = scored_plan(learner, groups_of(old_logp_BT))
  assert plan.batch.behaviour_BT is None and len(plan.order) == 4
  for index in range(4):
    assert learner.minibatch(plan, index)[0].behaviour_BT is None
  # The sampler's log-probabilities are ℓ°.
  assert [plan.scalars[name] for name in METRICS] == [1, 0, 0, 1, 0]


@pytest.mark.parametrize('weight', ['token', 'sequence'])
def test_every_minibatch_has_its_weights(learner, old_logp_BT, weight):
  start(learner, weight=weight)
  noise_BT = np.random.default_rng(1).normal(0, 0.5, old_logp_BT.shape)
  plan = scored_plan(learner, groups_of(old_logp_BT + noise_BT))
  batch = plan.batch
  want_BT = behaviour.weights(
      batch.old_logp_BT, batch.sampler_logp_BT, batch.mask_BT,
      **learner.config.train.behaviour)
  assert want_BT.std() > 0.1
  for index, rows in enumerate(plan.order):
    np.testing.assert_array_equal(
        learner.minibatch(plan, index)[0].behaviour_BT, want_BT[rows])
  assert plan.scalars['behaviour_ess'] < 1 and plan.scalars['behaviour_kl'] > 0
  assert learner.programs.score._cache_size() == 1


def test_updates_are_queued_before_the_host_waits_for_scores(
    learner, old_logp_BT, monkeypatch):
  start(learner)
  learner.learn(1, groups_of(old_logp_BT))  # compiles
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
  learner.learn(1, groups_of(old_logp_BT))
  # Later epochs are packed with the scores, so the host waits once.
  assert len(slow) == 3 and pending == [True, True, False, False]


def test_the_noise_floor_compares_completions_with_themselves(
    learner, old_logp_BT, monkeypatch):
  """The second scoring of some completions, packed anew, against the first."""
  start(learner)
  programs, scored = learner.programs, []

  def score(params, minibatch):
    logp_BT, entropy_BT = programs.score(params, minibatch)
    if not scored:  # that of completions in the order of a later epoch
      entropy_BT = entropy_BT + np.float32(0.25)
    scored.append(minibatch)
    return logp_BT, entropy_BT

  monkeypatch.setattr(learner, 'programs', dataclasses.replace(
      programs, score=score))
  plan = scored_plan(learner, groups_of(old_logp_BT))
  assert len(scored) == 3
  assert plan.scalars['noise_floor'] == pytest.approx(0.25, abs=1e-5)


@pytest.mark.long
def test_the_loss_is_weighted(learner, old_logp_BT):
  """The sampler drew every token 1.5 times less often than the trainer."""
  rarer = groups_of(old_logp_BT - np.log(1.5))
  start(learner)
  _, plain = first_update(learner, rarer)
  start(learner, weight='token')
  plan, weighted = first_update(learner, rarer)
  assert plan.scalars['behaviour_mean'] == pytest.approx(1.5, rel=1e-6)
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
    metrics = learner.learn(1, groups_of(old_logp_BT))
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
