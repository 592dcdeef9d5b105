"""Groups, batches and minibatch orders, written by hand."""

import collections

import numpy as np
import pytest

from tepo_jax.job import minibatches as minibatches_lib
from tepo_jax.rollout import groups as groups_lib
from tepo_jax.data import problem as problem_lib


def _prompt(prompt_id, token_ids=(1,)):
  problem = problem_lib.Problem(
      id=str(prompt_id), problem='?', answers=('1',), source='test')
  return groups_lib.Prompt(problem, tuple(token_ids), prompt_id)


def test_data_order():
  """Every epoch and every seed has its own permutation; an entry depends on
  (seed, index) only, not on earlier reads."""
  order = groups_lib.DataOrder(50, seed=3)
  epochs = [[order[50 * e + i] for i in range(50)] for e in range(3)]
  for epoch in epochs:
    assert sorted(epoch) == list(range(50))
  assert len({tuple(e) for e in epochs}) == 3
  assert epochs[0] != list(range(50))
  backwards = groups_lib.DataOrder(50, seed=3)
  asked = {i: backwards[i] for i in reversed(range(150))}
  assert [asked[i] for i in range(150)] == sum(epochs, [])
  other = groups_lib.DataOrder(50, seed=4)
  assert [other[i] for i in range(50)] not in epochs
  assert [groups_lib.DataOrder(1, seed=0)[i] for i in range(3)] == [0, 0, 0]


def _sample(token_T, ended, text, verdict):
  logp_T = -np.array(token_T, np.float32) / 10
  return groups_lib.Completion(
      groups_lib.Request((1,), 0, [9]), 0, np.array(token_T, np.int32), logp_T,
      ended), text, verdict


def test_to_group_pads_and_counts_the_truncated_as_wrong():
  group = groups_lib.to_group(_prompt(4), [
      _sample([5], True, 'a', True), _sample([6, 7, 8], False, 'b', True),
      _sample([9, 1], True, 'c', False)], 3)
  assert group.prompt == _prompt(4) and group.text_G == ('a', 'b', 'c')
  np.testing.assert_array_equal(
      group.token_GT, [[5, 0, 0], [6, 7, 8], [9, 1, 0]])
  np.testing.assert_allclose(group.logp_GT, -group.token_GT / 10)
  np.testing.assert_array_equal(group.length_G, [1, 3, 2])
  np.testing.assert_array_equal(group.ended_G, [True, False, True])
  np.testing.assert_array_equal(group.accuracy_G, [1, 0, 0])


def test_a_group_whose_correct_completion_is_truncated_is_mixed():
  assert groups_lib.is_mixed(groups_lib.to_group(_prompt(0), [
      _sample([1], True, '', True), _sample([1], False, '', True)], 1))


def _two_groups():
  one = groups_lib.Group(
      _prompt(8, (5, 6)), np.array([[1, 2, 3], [4, 0, 0]], np.int32),
      np.array([[-.1, -.2, -.3], [-.4, 0, 0]], np.float32),
      np.array([3, 1], np.int32), np.array([False, True]), ('', ''),
      np.array([0, 1], np.float32))
  two = groups_lib.Group(
      _prompt(9, (7,)), np.array([[0, 0, 0], [9, 8, 0]], np.int32),
      np.array([[-.5, 0, 0], [-.6, -.7, 0]], np.float32),
      np.array([1, 2], np.int32), np.array([True, True]), ('', ''),
      np.array([1, 0], np.float32))
  return [one, two]


def test_to_batch():
  """Two prompts of 2 samples and a row of filler; token 0 is a valid id."""
  batch = minibatches_lib.to_batch(
      _two_groups(), np.array([0., 1., 1., 0.]), rows=5, width=3,
      estimator='drgrpo')
  np.testing.assert_array_equal(batch.token_BS, [
      [0, 5, 6, 1, 2, 3], [0, 5, 6, 4, 0, 0], [0, 0, 7, 0, 0, 0],
      [0, 0, 7, 9, 8, 0], [0, 0, 0, 0, 0, 0]])
  np.testing.assert_array_equal(batch.position_BS, [
      [-1, 0, 1, 2, 3, 4], [-1, 0, 1, 2, -1, -1], [-1, -1, 0, 1, -1, -1],
      [-1, -1, 0, 1, 2, -1], [-1, -1, -1, -1, -1, -1]])
  np.testing.assert_array_equal(batch.mask_BT, [
      [1, 1, 1], [1, 0, 0], [1, 0, 0], [1, 1, 0], [0, 0, 0]])
  np.testing.assert_allclose(batch.advantage_B, [-.5, .5, .5, -.5, 0])
  np.testing.assert_allclose(batch.sampler_logp_BT, [
      [-.1, -.2, -.3], [-.4, 0, 0], [-.5, 0, 0], [-.6, -.7, 0], [0, 0, 0]])
  for name in ('token_BS', 'position_BS'):
    assert getattr(batch, name).dtype == np.int32
  for name in ('mask_BT', 'advantage_B', 'old_logp_BT', 'old_entropy_BT',
               'sampler_logp_BT'):
    assert getattr(batch, name).dtype == np.float32
  assert not batch.old_logp_BT.any() and not batch.old_entropy_BT.any()


@pytest.mark.parametrize('estimator, want', [
    ('grpo', [-.7071, .7071, 1.4142 / 2, -1.4142 / 2]),
    ('gpg', [-.5, .5, .5, -.5])])
def test_advantages_are_the_groups(estimator, want):
  batch = minibatches_lib.to_batch(
      _two_groups(), np.array([0., 1., 1., 0.]), rows=4, width=2,
      estimator=estimator)
  np.testing.assert_allclose(batch.advantage_B, want, atol=1e-4)


def _order(**changes):
  return list(minibatches_lib.minibatch_order(**dict(
      rows=24, group_size=2, minibatch_prompts=4, epochs=3, seed=0, step=1)
      | changes))


def test_minibatches_hold_whole_groups_and_all_of_them_each_epoch():
  updates = _order()
  assert len(updates) == 3 * 12 // 4
  for indices in updates:
    assert indices.shape == (8,)
    np.testing.assert_array_equal(indices[::2] % 2, 0)
    np.testing.assert_array_equal(indices[1::2], indices[::2] + 1)
  epochs = [np.concatenate(updates[i:i + 3]) for i in (0, 3, 6)]
  for epoch in epochs:
    np.testing.assert_array_equal(np.sort(epoch), np.arange(24))
  np.testing.assert_array_equal(epochs[0], np.arange(24))  # the data's order
  assert len({tuple(e) for e in epochs}) == 3


def test_minibatch_order_is_a_function_of_seed_and_step():
  np.testing.assert_array_equal(_order(), _order())
  for other in dict(seed=1), dict(step=2), dict(seed=1, step=0):
    assert np.not_equal(_order(), _order(**other)).any()


def test_minibatches_pair_the_groups_anew():
  """Over many seeds each group meets each other one."""
  met = collections.Counter()
  for seed in range(30):
    for indices in _order(epochs=2, seed=seed)[3:]:
      groups = sorted(set(indices // 2))
      met.update((a, b) for a in groups for b in groups if a < b)
  assert len(met) == 12 * 11 // 2
