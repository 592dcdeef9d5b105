"""Groups, written by hand."""

import numpy as np
import pytest

from tepo_jax.data import problem as problem_lib
from tepo_jax.rollout import groups as groups_lib


def _prompt(prompt_id, token_ids=(1,)):
  problem = problem_lib.Problem(
      id=str(prompt_id), problem='?', answers=('1',), source='test')
  return groups_lib.Prompt(problem, tuple(token_ids), prompt_id)


@pytest.mark.parametrize('ends, size', [
    ([1, 30], 48), ([0, 20], 40), ([0, 0], 40), ([1, 60, 40], 48),
    ([1, 2, 900], 48), ([1, 60, 60], 0), ([1], 0), ([], 0)])
def test_a_shared_prefix(ends, size):
  """48 tokens that all begin with, and so many others: by hand. One is left to
  each prompt, and 48 are less than half of the median of 49, 108 and 108."""
  ids = [[*range(48), *range(100 * n, 100 * n + end)]
         for n, end in enumerate(ends, 1)]
  sets = {'one': [_prompt(0, x) for x in ids[:1]],
          'other': [_prompt(1, x) for x in ids[1:]]}
  shared = groups_lib.shared_prefix([*sets['one'], *sets['other']])
  assert shared == tuple(range(size))
  if all(sets.values()):
    mixture = groups_lib.Mixture(sets, [1, 1], seed=0)
    assert mixture.shared_prefix() == shared


def test_fewer_than_32_tokens_are_no_shared_prefix():
  assert groups_lib.shared_prefix(
      [_prompt(n, (*range(31), 50 + n)) for n in range(2)]) == ()
  assert groups_lib.shared_prefix(
      [_prompt(n, (*range(39), 50 + n)) for n in range(2)]) == tuple(range(32))


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


def test_one_set_is_in_the_order_of_its_permutations():
  """By numpy alone, so that runs of one set stay what they were."""
  prompts = [_prompt(n) for n in range(5)]
  mixture = groups_lib.Mixture({'a': prompts}, [7], seed=3)
  expected = np.concatenate([np.random.default_rng(
      (3, 1, epoch)).permutation(5) for epoch in range(3)])
  found = [mixture.prompt(n) for n in range(15)]
  assert [prompt.problem.id for prompt in found] == list(map(str, expected))
  assert [prompt.prompt_id for prompt in found] == list(range(15))
  assert {mixture.name(n) for n in range(15)} == {'a'}


@pytest.mark.parametrize('weights, period', [
    ((3, 1), [0, 0, 1, 0]), ((300, 100), [0, 0, 1, 0]),
    ((1, 1, 2), [2, 0, 1, 2])])
def test_sets_alternate_evenly(weights, period):
  assert groups_lib.interleaving(weights) == period


def test_any_window_has_each_set_by_its_weight():
  """From any cursor, whatever was read before; each set goes through its own
  prompts before it repeats one, each time in another order."""
  sets = {'a': [_prompt(n) for n in range(4)],
          'b': [_prompt(n) for n in range(100, 107)]}
  mixture = groups_lib.Mixture(sets, [3, 2], seed=1)
  names = [mixture.name(n) for n in range(60)]
  for start in range(50):
    assert names[start:start + 10].count('a') == 6
  ids = {name: [mixture.prompt(n).problem.id for n in range(60)
                if names[n] == name] for name in sets}
  for name, prompts in sets.items():
    size = len(prompts)
    rounds = [ids[name][i:i + size] for i in range(0, 21, size)][:3]
    assert all(sorted(each) == sorted(p.problem.id for p in prompts)
               for each in rounds) and rounds[0] != rounds[1]
  late = groups_lib.Mixture(sets, [3, 2], seed=1)
  assert [late.prompt(n) for n in (59, 7, 31)] == [
      mixture.prompt(n) for n in (59, 7, 31)]


@pytest.mark.parametrize('sizes, weights', [
    ((5,), (7,)), ((4, 7), (3, 2)), ((9, 2), (1, 1)), ((6, 4), (3, 2))])
def test_distinct_is_where_a_prompt_repeats(sizes, weights):
  sets = {str(n): [_prompt(100 * n + i) for i in range(size)]
          for n, size in enumerate(sizes)}
  mixture = groups_lib.Mixture(sets, weights, seed=1)
  ids = [mixture.prompt(n).problem.id for n in range(40)]
  first = next(n for n in range(40) if ids[n] in ids[:n])
  assert mixture.distinct() == first


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


def test_a_group_whose_correct_completion_is_truncated_has_two_verdicts():
  assert groups_lib.differ(groups_lib.to_group(_prompt(0), [
      _sample([1], True, '', True), _sample([1], False, '', True)],
                                               1).accuracy_G)
  assert not groups_lib.differ(np.array([]))
