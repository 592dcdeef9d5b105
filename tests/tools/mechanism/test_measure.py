"""Gradients by prompt, and the whole measurement, of an untrained model."""

import functools
import json

import jax
import numpy as np
import pytest

from configs import tiny
from tepo_jax import errors
from tepo_jax import mechanism
from tepo_jax.job import base_model
from tepo_jax.job import programs as programs_lib
from tepo_jax.job import session as session_lib
from tepo_jax.learning import update
from tepo_jax.policy import scoring
from tepo_jax.tools.mechanism import measure
from tepo_jax.tools.mechanism import observe
from tepo_jax.tools.mechanism import tables

pytestmark = [pytest.mark.long, pytest.mark.usefixtures('quick_compile')]

COUNTS = (1, 2)


def small_config():
  """An untrained model is never correct; the overlong penalty mixes rewards."""
  config = tiny.get_config('grpo')
  config.data.limit = 16
  config.eval.limit = 6
  config.rollout.update(
      prompts=4, samples=4, max_tokens=12, dynamic_sampling='off',
      overlong_buffer=11)
  config.train.update(
      minibatch_prompts=4, epochs=2, row_tokens=36, microbatch_tokens=144)
  config.optimizer.learning_rate = 2e-2
  config.compute.unroll = 1
  config.pretrain.update(
      worked_steps=1, demonstrations=32, num_layers=1, num_heads=2,
      num_kv_heads=1, d_model=16, head_dim=8, d_ff=16)
  return config


@pytest.fixture(scope='module', name='lab')
def _lab(tmp_path_factory):
  config, folder = small_config(), tmp_path_factory.mktemp('model') / 'base'
  base_model.make(config, folder, trained=False)
  config.model = str(folder)
  with session_lib.open_folder(config, folder) as session:
    yield observe.Lab(config, session)


@pytest.fixture(scope='module', name='moved')
def _moved(lab):
  """θ_0's samples, and the weights after the last update."""
  *_, (count, params, metrics) = lab.updates(
      lab.config.method, lab.rollout(), COUNTS)
  assert count == COUNTS[-1] and metrics['skipped'] == 0
  return observe.Observed(lab, lab.sample(lab.start, 0)), params


def test_the_prompts_gradients_add_up_to_the_batch_s(lab, moved):
  """Against `update.loss_and_gradient` of the whole batch, by the objective."""
  held_out, params = moved
  batch, given = held_out.batch, held_out.tokens(params)
  losses = measure.estimators(float(batch.mask_BT.sum(1).mean()))
  found_END = measure.vectors(
      lab, params, batch, given, list(losses.values()), 6.0)
  assert found_END.shape[:2] == (7, 12) and (found_END != 0).any(2).sum(1).max(
      ) == (found_END[0] != 0).any(1).sum() > 8
  programs = lab.learner.programs
  minibatch = lab.learner.on_devices(batch)
  for name in ('prefix', 'token .2/.28', 'sequence 3e-4/4e-4'):
    loss, vector_ND = losses[name], found_END[list(losses).index(name)]
    whole = programs_lib.compiled(
        programs.mesh, functools.partial(
            update.loss_and_gradient, programs.scorer, loss.partial),
        programs.model.dtype, static_argnums=3)
    gradient = whole(params, minibatch, loss.statistics(given), None)[1]
    want = np.concatenate([x.ravel() for x in jax.tree.leaves(gradient)])
    got = vector_ND.sum(0) / len(lab.prompts)
    assert np.abs(got - want).max() <= 1e-6 * np.abs(want).max()


def test_estimators_differ_off_policy(lab, moved):
  held_out, params = moved
  given = held_out.tokens(params)
  slopes = [measure.slope(loss, given)
            for loss in measure.estimators(6.0).values()]
  assert all((a != b).any() for i, a in enumerate(slopes) for b in slopes[:i])
  zeros_BT = np.zeros_like(given.logp_BT)
  np.testing.assert_array_equal(slopes[3], measure.slope(
      measure.estimators(6.0)['none'], observe.tokens(
          held_out.batch, scoring.Scores(zeros_BT, zeros_BT))))


def test_scores_are_those_of_scoring(lab, moved):
  held_out, params = moved
  given, batch = held_out.tokens(params), held_out.batch
  want = scoring.score(
      lab.learner.programs.model, params, batch.token_BS, batch.position_BS,
      num_targets=batch.mask_BT.shape[1], old_params=lab.start)
  for name in ('logp_BT', 'entropy_BT', 'kl_BT'):
    np.testing.assert_allclose(getattr(given, name), np.where(
        batch.mask_BT > 0, getattr(want, name), 0), atol=2e-5)
  assert given.kl_BT.max() > 1e-2


def test_at_the_start_nothing_has_moved(lab, moved):
  found = measure.drift(lab, moved[0], lab.start)
  zero = [0.0, 0.0, 0.0]
  assert found['abs_d'] == found['kl'] == found['region'] == zero
  assert found['kl_region'] is None  # M is empty
  assert all(x == dict(outside=zero, clipped=zero)
             for x in found['weights'].values())
  moved_on = measure.drift(lab, *moved)
  assert moved_on['kl'][0] > 0 and 0 < moved_on['region'][0] < 1
  assert moved_on['weights']['token']['outside'][0] > (
      moved_on['weights']['sequence']['outside'][0])


@pytest.fixture(scope='module', name='results')
def _results(lab, tmp_path_factory):
  """The results in memory, and their folder."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(measure, 'COUNTS', COUNTS)
    patch.setattr(measure, 'BETAS', (1.0,))
    out = tmp_path_factory.mktemp('out')
    results = dict(setup=mechanism._setup(lab), levels={}, methods={})
    mechanism.run(lab, results, out)
    yield results, out


def test_every_policy_is_measured(results):
  found, out = results
  assert list(found['levels']) == ['0', '1', '2']
  assert list(found['methods']) == [
      'grpo', 'sequence .2/.28', 'sequence 3e-4/4e-4', 'tepo, β = 1']
  assert all(list(x) == ['1', '2'] for x in found['methods'].values())
  assert list(found['levels']['0']['gradients']) == ['token']
  assert len(found['levels']['2']['gradients']) == 7
  saved = json.loads((out / mechanism.RESULTS).read_text())
  assert saved['methods']['grpo']['2']['kl'] == pytest.approx(
      found['methods']['grpo']['2']['kl'], rel=1e-5)
  # The config's method makes the policies of the levels.
  assert found['levels']['2']['fresh'] == found['methods']['grpo']['2']['fresh']
  assert found['methods']['grpo']['1'] != found['methods']['grpo']['2']


def test_tables_come_from_the_file_alone(results, lab):
  found, out = results
  text = tables.markdown(json.loads((out / mechanism.RESULTS).read_text()))
  assert '| 2 | sequence 3e-4/4e-4 | ' in text and '| 0 | any | ' in text
  assert '| tepo, β = 1 | 2 | ' in text
  assert 'None' not in text and 'nan' not in text
  assert lab.config.model not in text + json.dumps(found)


def test_it_resumes(results, lab):
  """What is complete is not measured again; the rest comes out the same."""
  found, out = results
  saved = json.loads((out / mechanism.RESULTS).read_text())
  want = saved['methods'].pop('tepo, β = 1')
  saved['methods']['grpo']['1'] = saved['levels']['1'] = 'kept'
  mechanism.run(lab, saved, out)
  assert saved['methods']['grpo']['1'] == saved['levels']['1'] == 'kept'
  assert saved['methods']['tepo, β = 1']['2']['kl'] == pytest.approx(
      want['2']['kl'], rel=1e-5)


def test_another_measurement_s_folder_is_refused(results):
  found, out = results
  lock = type('Lock', (), {'acquire': lambda self: None})()
  with pytest.raises(errors.InputError, match='another measurement: seed diff'):
    mechanism._start(out, lock, found['setup'] | dict(seed=7))
  kept = mechanism._start(out, lock, found['setup'] | dict(versions={}))
  assert kept['levels']
