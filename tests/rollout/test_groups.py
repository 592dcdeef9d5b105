"""Groups and their rewards, written by hand."""

import dataclasses

import numpy as np

from tepo_jax.job import minibatches as minibatches_lib
from tepo_jax.rollout import groups as groups_lib
from tepo_jax.rollout import requests
from tepo_jax.data import problem as problem_lib


def _prompt(cursor, token_ids=(1,)):
  problem = problem_lib.Problem(id=str(cursor), problem='?', answers=('1',),
                             source='test')
  return groups_lib.Prompt(problem, tuple(token_ids), cursor)


def _group(prompt, accuracy, *, length=None, slots=3):
  accuracy_G = np.array(accuracy, np.float32)
  size = len(accuracy)
  length_G = np.array(length or [slots] * size, np.int32)
  return groups_lib.Group(
      prompt=prompt, token_GT=np.zeros((size, slots), np.int32),
      logp_GT=np.zeros((size, slots), np.float32), length_G=length_G,
      ended_G=np.ones(size, bool), text_G=('',) * size, accuracy_G=accuracy_G)


def test_data_order():
  """Every epoch and every seed has its own permutation; an entry depends on
  (seed, cursor) only, not on earlier reads."""
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
  return requests.Completion(
      requests.Request((1,), 0, [9]), 0, np.array(token_T, np.int32), logp_T, ended), text, verdict


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


def test_rewards():
  groups = [_group(_prompt(0), (1, 0, 1), length=(6, 8, 10), slots=10),
            _group(_prompt(1), (0, 1, 0), length=(7, 2, 9), slots=10)]
  np.testing.assert_array_equal(minibatches_lib.rewards(
      groups, {'accuracy': 1.0}, 10, 0, 1.0),
                                [1, 0, 1, 0, 1, 0])
  # Free up to 10 − 4 tokens, then half a point at the limit.
  np.testing.assert_allclose(
      minibatches_lib.rewards(groups, {'accuracy': 1.0}, 10, 4, 0.5),
      [1, -.25, 1 - .5, -.125, 1, -.375], rtol=1e-6)


def test_rewards_are_weighted_sums_of_functions():
  """A function that failed counts as 0."""
  group = dataclasses.replace(
      _group(_prompt(0), (1, 0, 1)), scores={
          'style': np.float32([.5, np.nan, 1]), 'other': np.float32([9, 9, 9])})
  np.testing.assert_allclose(minibatches_lib.rewards(
      [group], {'accuracy': 2.0, 'style': -1.0}, 10, 0, 1.0), [1.5, 0, 1])
  np.testing.assert_array_equal(
      minibatches_lib.rewards([group], {'other': 0.5}, 10, 0, 1.0), [4.5] * 3)


def test_the_penalty_does_not_make_a_group_mixed():
  group = _group(_prompt(0), (0, 0), length=(1, 10), slots=10)
  assert len(set(minibatches_lib.rewards(
      [group], {'accuracy': 1.0}, 10, 4, 1.0))) == 2
  assert not groups_lib.is_mixed(group)
