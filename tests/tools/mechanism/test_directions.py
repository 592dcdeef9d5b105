"""Groups' gradients of every method against jax.grad of the whole loss."""

import functools

import jax
import numpy as np
import pytest

from configs import methods
from tepo_jax.learning import advantage
from tepo_jax.learning import objective
from tepo_jax.policy import scoring
from tepo_jax.tools.mechanism import directions
from tepo_jax.tools.mechanism import observe
from tepo_jax.tools.mechanism import sketch

pytestmark = pytest.mark.long

ROWS = methods.methods(directions.BETA)
KINDS = {name: ROWS[name] for name in ('tepo', *directions.METHODS)} | {
    'strong': methods.methods(10.0)['tepo']}
KEY = jax.random.key(3)


@pytest.fixture(scope='module', name='data')
def _data(lab):
  """Two groups of θ_0's with their rewards, and the weights after 3 updates."""
  [(_, params)] = lab.updates(lab.rollout(), (3,))
  groups = lab.select(lab.start, 4, 2, 'off').groups
  reward_NG = lab.session.rewards.of(groups).reward_NG
  return observe.Observed(lab, groups), reward_NG, params


def inputs(observed, reward_NG, params):
  """The tokens, and by estimator the advantages [B, T]."""
  x = observed.tokens(params)
  return x, {name: np.where(x.mask_BT, np.asarray(advantage.group_advantage(
      reward_NG.reshape(-1), 4, name))[:, None], 0)
             for name in ('grpo', 'gpg')}


@pytest.fixture(scope='module', name='exact')
def _exact(lab, data):
  """(method, params, advantages, group) -> the gradient, a tree.

  By scoring whole sequences, π_old's also, and by the loss of both groups: the
  gradient through the scores of one, twice (the mean is the update).
  """
  batch, model = data[0].batch, lab.learner.programs.model
  score = functools.partial(
      scoring.score, model, token_BS=batch.token_BS,
      position_BS=batch.position_BS, num_targets=batch.mask_BT.shape[1])
  old = jax.jit(score)(lab.start)

  def total(params, loss, advantage_BT, group):
    mine_B1 = np.arange(8)[:, None] // 4 == group
    scores = jax.tree.map(
        lambda y_BT: jax.numpy.where(
            mine_B1, y_BT, jax.lax.stop_gradient(y_BT)),
        score(params, old_params=lab.start))
    return 2 * loss(objective.Tokens(
        old_logp_BT=old.logp_BT, old_entropy_BT=old.entropy_BT,
        mask_BT=batch.mask_BT, advantage_BT=advantage_BT, **vars(scores)),
                    KEY)[0]

  losses = {name: objective.make_policy_loss(KINDS[name]) for name in KINDS}
  gradient = jax.jit(jax.grad(total), static_argnums=1)  # a compilation each

  def run(name, params, advantages, group):
    loss = losses[name]
    return gradient(params, loss, advantages[loss.method.estimator], group)

  return run


@pytest.mark.parametrize('moved', [False, True])
def test_gradients_are_those_of_the_methods_losses(lab, data, exact, moved):
  observed, reward_NG, params = data
  params = params if moved else lab.start
  x, advantages = inputs(observed, reward_NG, params)
  found = directions.PullBack(lab)(params, observed.batch, directions.slopes(
      x, advantages, KEY, {}))
  vectors = dict(zip(directions.names({}), directions.by_group(found)))
  vectors['tepo'] = vectors['tepo_no_kl'] + directions.BETA * vectors[
      directions.KL]
  vectors['strong'] = vectors['tepo_no_kl'] + 10 * vectors[directions.KL]
  for name in KINDS:
    for group in range(2):
      tree = exact(name, params, advantages, group)
      want_C = np.asarray(sketch.sketch(tree))
      have_C = vectors[name][group]
      assert np.abs(have_C - want_C).max() <= 2e-4 * np.abs(want_C).max(), name
  distance = np.linalg.norm(vectors['strong'] - vectors['tepo_no_kl'])
  assert moved == (distance > 1e-3 * np.linalg.norm(vectors['tepo_no_kl']))


def test_the_kl_is_masked_by_the_estimator_of_tepo(lab, data):
  observed, reward_NG, params = data
  x, advantages = inputs(observed, reward_NG, params)
  want, have = (directions.slopes(y, advantages, KEY, {})[directions.KL]
                for y in (x, x.replace(advantage_BT=-x.advantage_BT)))
  assert want.kl_BT.any()
  np.testing.assert_array_equal(want.kl_BT, have.kl_BT)


def test_the_squares_are_exact_and_shared_slopes_cost_one_pullback(
    lab, data, exact):
  observed, reward_NG, _ = data
  x, advantages = inputs(observed, reward_NG, lab.start)
  slopes = directions.slopes(x, advantages, KEY, {})
  one = {name: slopes[name] for name in ('grpo', 'cispo', 'tepo_no_kl')}
  found = directions.PullBack(lab)(lab.start, observed.batch, one)
  assert found.coef_GEK.shape == (2, 3, 1)  # at π_old, one gradient
  for group in range(2):
    tree = exact('grpo', lab.start, advantages, group)
    want = sum(np.sum(np.square(leaf, dtype=float))
               for leaf in jax.tree.leaves(tree))
    have = found.square_GK[group, 0] * found.coef_GEK[group, 1, 0]**2
    assert have == pytest.approx(want, rel=1e-4)


def test_parts_add_up(lab, data):
  observed, reward_NG, params = data
  x, advantages = inputs(observed, reward_NG, params)
  by_class = directions.classes(x, np.quantile(
      x.old_entropy_BT[x.mask_BT], (0.25, 0.5, 0.75)))
  found = directions.PullBack(lab)(params, observed.batch, directions.slopes(
      x, advantages, KEY, by_class))
  names = directions.names(by_class)
  vectors = dict(zip(names, directions.by_group(found)))
  for name, mean_JC in zip(names, directions.combined([found, found])):
    np.testing.assert_allclose(
        mean_JC, 2 * [(vectors[name][0] + vectors[name][1]) / 2], rtol=1e-5)
  for division, classes in directions.CLASSES.items():
    total = sum(vectors[division, name] for name in classes)
    np.testing.assert_allclose(
        total, vectors['tepo_no_kl'],
        atol=1e-5 * np.abs(vectors['tepo_no_kl']).max())
  for division, sizes in (('position', 4), ('entropy', 4), ('advantage', 2)):
    assert {*by_class[division][x.mask_BT]} - {-1} == {*range(sizes)}
    assert (by_class[division][~x.mask_BT] == -1).all()
  assert ((by_class['advantage'] == -1) == (x.advantage_BT == 0)).all()
  first_half = np.isin(by_class['position'], (0, 1))
  assert (np.argmax(~first_half, 1) == np.ceil(x.mask_BT.sum(1) / 2))[
      x.mask_BT.sum(1) > 1].all()
