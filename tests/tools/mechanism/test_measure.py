"""Gradients by prompt, and the whole measurement, of an untrained model."""

import functools
import json
import pathlib

import jax
import numpy as np
import pytest

from tepo_jax import errors
from tepo_jax.job import programs as programs_lib
from tepo_jax.learning import update
from tepo_jax.policy import scoring
from tepo_jax.runtime import lock as lock_lib
from tepo_jax.tools.mechanism import measure
from tepo_jax.tools.mechanism import observe
from tepo_jax.tools.mechanism import progression
from tepo_jax.tools.mechanism import tables

pytestmark = pytest.mark.long


@pytest.fixture(scope='module', name='moved')
def _moved(lab):
  """θ_0's samples, and the weights after two updates."""
  [(_, params, _)] = lab.updates(lab.config.method, lab.rollout(), (2,))
  return observe.Observed(lab, lab.sample(lab.start, 0)), params


def test_the_prompts_gradients_add_up_to_the_batch_s(lab, moved):
  """Against `update.loss_and_gradient` of the whole batch, by the objective."""
  (held_out, params), programs = moved, lab.learner.programs
  batch, given = held_out.batch, held_out.tokens(params)
  losses = measure.estimators(float(batch.mask_BT.sum(1).mean()))
  found_END = measure.vectors(
      lab, params, batch, given, list(losses.values()), 6.0)
  assert found_END[0].any(1).sum() > 8  # of 12 halves
  for name in ('prefix', 'token .2/.28', 'sequence 3e-4/4e-4'):
    _, gradient, _ = programs_lib.compiled(
        programs.mesh, functools.partial(
            update.loss_and_gradient, programs.scorer, losses[name].partial),
        programs.model.dtype, static_argnums=3)(
            params, lab.learner.on_devices(batch),
            losses[name].statistics(given), None)
    want_D = np.concatenate(list(map(np.ravel, jax.tree.leaves(gradient))))
    found_D = found_END[list(losses).index(name)].sum(0) / len(lab.prompts)
    assert np.abs(found_D - want_D).max() <= 1e-6 * np.abs(want_D).max()


def test_scores_are_those_of_scoring(lab, moved):
  (held_out, params), batch = moved, moved[0].batch
  given = held_out.tokens(params)
  want = scoring.score(
      lab.learner.programs.model, params, batch.token_BS, batch.position_BS,
      num_targets=batch.mask_BT.shape[1], old_params=lab.start)
  for name in ('logp_BT', 'entropy_BT', 'kl_BT'):
    np.testing.assert_allclose(getattr(given, name), np.where(
        batch.mask_BT > 0, getattr(want, name), 0), atol=2e-5)
  assert given.kl_BT.max() > 1e-2
  # The on-policy slope needs no scores.
  loss, zeros_BT = measure.estimators(6.0)['none'], np.zeros_like(batch.mask_BT)
  np.testing.assert_array_equal(
      measure.slopes(loss, given).logp_BT,
      measure.slopes(loss, observe.tokens(
          batch, scoring.Scores(zeros_BT, zeros_BT))).logp_BT)


def test_drift(lab, moved):
  held_out, params = moved
  zero, found = 3 * [0.0], measure.drift(held_out.tokens(lab.start), 4)
  assert found['abs_d'] == found['kl'] == found['region'] == zero
  assert found['kl_region'] is None  # M is empty
  assert all(x == dict(outside=zero, clipped=zero)
             for x in found['weights'].values())
  found = measure.drift(held_out.tokens(params), 4)
  assert found['kl'][0] > 0 and 0 < found['region'][0] < 1
  assert found['weights']['token']['outside'][0] > (
      found['weights']['sequence']['outside'][0])


def test_a_rollout_of_the_default_size_is_named():
  """The config of the results lacks what equals the defaults."""
  saved = json.loads(pathlib.Path('launch/study/mechanism.json').read_text())
  assert '## 128 prompts from' in tables.markdown(saved)
  del saved['setup']['config']['rollout.prompts']
  assert '## 64 prompts from' in tables.markdown(saved)


@pytest.mark.nightly
def test_a_measurement_resumes_and_its_tables_need_only_the_file(
    lab, tmp_path, monkeypatch):
  monkeypatch.setattr(measure, 'COUNTS', (1, 2))
  monkeypatch.setattr(measure, 'BETAS', (1.0,))
  out, setup = tmp_path / 'out', progression.setup(lab)
  with lock_lib.FolderLock(out) as lock:
    results = progression.start(out, lock, setup)
    progression.run(lab, results, out)
  saved = json.loads((out / progression.RESULTS).read_text())
  assert list(saved['levels']) == ['0', '1', '2']
  assert list(saved['levels']['0']['gradients']) == ['token']
  assert len(saved['levels']['2']['gradients']) == 7
  assert [list(x) for x in saved['methods'].values()] == 4 * [['1', '2']]
  grpo = saved['methods']['grpo']
  assert saved['levels']['2']['fresh'] == grpo['2']['fresh']
  assert grpo['1']['kl'] != grpo['2']['kl']
  text = tables.markdown(saved)
  assert '| 2 | sequence 3e-4/4e-4 | ' in text and '| 0 | any | ' in text
  assert '| tepo, β = 1 | 2 | ' in text and 'None' not in text
  assert lab.config.model not in text + json.dumps(saved)

  wanted = saved['methods'].pop('tepo, β = 1')
  grpo['1'] = saved['levels']['1'] = 'kept'
  progression.write(saved, out)
  with lock_lib.FolderLock(out) as lock:
    resumed = progression.start(out, lock, setup)
    progression.run(lab, resumed, out)
    assert resumed['levels']['1'] == resumed['methods']['grpo']['1'] == 'kept'
    assert resumed['methods']['tepo, β = 1']['2']['kl'] == pytest.approx(
        wanted['2']['kl'], rel=1e-5)
    with pytest.raises(errors.InputError, match='measurement: seed differ'):
      progression.start(out, lock, setup | dict(seed=7))
