"""Completions that are carried over rollout steps, without a model.

Axes: Q prompts · G samples · T tokens of a completion.
"""

import dataclasses
import json

import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest

from tepo_jax.job import summaries
from tepo_jax.rollout import carry
from tepo_jax.rollout import groups as groups_lib
from tepo_jax.rollout import rectangle
from tepo_jax.rollout import sampler as sampler_lib
from tepo_jax.rollout import schedule
from tepo_jax.rollout import shapes as shapes_lib
from tests.rollout import test_selection
from tests.rollout import toy
from tests.rollout.rewards import reward_functions

RIGHT, WRONG, MIXED = (1, 1), (0, 0), (0, 1)


class World(test_selection.World):
  """The same where completions are carried. born: of each slot that was live,
  (prompt, sample, step that began it). decoded: the live prompts of each chunk.
  graded: the texts that were graded.
  """

  def __init__(self, verdicts, lengths=((1, 1),), *, slots=4, chunk=3):
    super().__init__(verdicts, lengths)
    programs, self.born = toy.programs(self.length), set()
    self.decoded, self.graded = [], []

    def decode(_, cache, slots, *rest):
      self.born |= set(zip(*(x[slots.live].tolist() for x in (
          slots.prompt_id, slots.sample, slots.born))))
      self.decoded.append(slots.prompt_id[slots.live].tolist())
      return programs.decode(_, cache, slots, *rest)

    self.schedule = schedule.Schedule(
        dataclasses.replace(programs, decode=decode), shapes_lib.make(
            slots=slots, work=10**6, prompt_tokens=9,
            max_tokens=max(map(max, lengths)), chunk=chunk, shards=1,
            carries=True))

  def grade(self, items):
    self.graded += [text for text, _ in items]
    return super().grade(items)

  def steps(self, count, mode='refill', *, wanted, max_versions, cursor=0,
            max_batches=99, rewards=reward_functions(), **settings):
    """Yields (step, its rollout) as a run would make them."""
    carried = ()
    for step in range(1, count + 1):
      rollout = self.sampler.select(
          None, self.prompt, carry.Selection(
              step=step, max_versions=max_versions, carried=carried,
              cursor=cursor, wanted=wanted, group_size=self.size, mode=mode,
              max_batches=max_batches, **settings), None, rewards)
      yield step, rollout
      cursor = rollout.cursor
      # As a checkpoint would hold it.
      carried = carry.from_json(json.loads(json.dumps(carry.to_json(
          rollout.carried))))
      _assert_equal(carried, rollout.carried)


def _assert_equal(carried, others):
  assert len(carried) == len(others)
  for one, other in zip(carried, others):
    assert (one.prompt_id, one.born) == (other.prompt_id, other.born)
    for drawn, same in zip(one.samples, other.samples, strict=True):
      for mine, theirs in zip(dataclasses.astuple(drawn),
                              dataclasses.astuple(same)):
        np.testing.assert_array_equal(mine, theirs)
        assert getattr(mine, 'dtype', 0) == getattr(theirs, 'dtype', 0)


def _check_group(world, group, step, max_versions):
  """The group is whole, as the programs draw it, and not too old."""
  prompt_id = group.prompt.prompt_id
  for j, length in enumerate(group.length_G):
    assert length == world.length(prompt_id, j) and group.ended_G[j]
    token_T = toy.token(prompt_id, j, np.arange(length))
    np.testing.assert_array_equal(group.token_GT[j, :length], token_T)
    np.testing.assert_array_equal(
        group.logp_GT[j, :length], -token_T.astype(np.float32) / 7)
    version_T = group.version_GT[j, :length]
    assert np.all(np.diff(version_T) >= 0) and version_T[-1] <= step
    assert version_T[0] >= step - max_versions


worlds = st.integers(2, 4).flatmap(lambda size: st.tuples(
    st.lists(st.lists(st.booleans(), min_size=size, max_size=size).map(tuple),
             min_size=1, max_size=12).filter(lambda rows: any(
                 len(set(row)) > 1 for row in rows)),
    st.lists(st.lists(st.integers(1, 40), min_size=size,
                      max_size=size).map(tuple), min_size=1, max_size=12)))


@hypothesis.settings(deadline=None, max_examples=40)
@hypothesis.given(
    world=worlds, slots=st.integers(1, 40), chunk=st.integers(1, 9),
    wanted=st.integers(1, 5), cursor=st.integers(0, 99),
    mode=st.sampled_from(['refill', 'drop', 'off']),
    max_versions=st.integers(1, 3))
def test_every_group_is_whole_in_time_and_nowhere_twice(
    world, slots, chunk, wanted, cursor, mode, max_versions):
  """Over random steps: each group that was begun is sampled in one step or
  still carried, its tokens are those of one completion, none is too old, and a
  step trains on as many groups as it should, the oldest that are complete."""
  world, seen, begun = World(*world, slots=slots, chunk=chunk), [], {}
  for step, rollout in world.steps(
      6, mode, wanted=wanted, max_versions=max_versions, cursor=cursor):
    for group in rollout.completed:
      _check_group(world, group, step, max_versions)
    ids = [g.prompt.prompt_id for g in rollout.completed]
    assert rollout.sampled == rollout.completed and ids == sorted(ids)
    seen += ids
    left = [each.prompt_id for each in rollout.carried]
    assert left == sorted(left) and len(left) <= max_versions * wanted
    assert sorted(seen + left) == list(range(cursor, rollout.cursor))
    if mode == 'refill':
      assert len(rollout.trained) == wanted
    else:
      assert len(ids) == wanted
    complete = [each for each in rollout.carried if all(
        drawn.ended is not None for drawn in each.samples)]
    last = rollout.groups[-1].prompt.prompt_id if rollout.groups else -1
    if mode != 'drop':
      assert all(each.prompt_id > last for each in complete)
    for each in rollout.carried:
      assert begun.setdefault(each.prompt_id, each.born) == each.born <= step
      for j, drawn in enumerate(each.samples):
        np.testing.assert_array_equal(
            drawn.token_T, toy.token(
                each.prompt_id, j, np.arange(len(drawn.token_T))))
  assert all(begun.get(prompt_id, born) == born
             for prompt_id, _, born in world.born)


def _ids(groups):
  return [group.prompt.prompt_id for group in groups]


def _parts(rollout):
  """{prompt: [(tokens, ended)]} of what is carried."""
  return {each.prompt_id: [(len(drawn.token_T), drawn.ended)
                           for drawn in each.samples]
          for each in rollout.carried}


def test_a_step_does_not_wait_for_its_longest_completion():
  """By hand: chunks of 5 steps, a slot for each sample of the four prompts that
  may be in hand. 1 and 2 end in the first chunk; their verdicts come in while
  the second is decoded, and end the step."""
  world = World([MIXED], [(30, 2), (5, 5), (5, 5), (12, 12)], slots=8, chunk=5)
  (_, first), (_, second) = world.steps(2, 'off', wanted=2, max_versions=1)
  assert _ids(first.groups) == [1, 2] and first.stats.steps == 10
  assert _parts(first) == {0: [(10, None), (2, True)],
                           3: [(10, None), (10, None)]}
  # The second step completes what it was given, as V is 1.
  assert _ids(second.groups) == [0, 3]
  np.testing.assert_array_equal(
      second.groups[0].version_GT[0], [1] * 10 + [2] * 20)
  np.testing.assert_array_equal(
      second.groups[1].version_GT[1][:12], [1] * 10 + [2] * 2)
  assert {each.born for each in second.carried} == {2}


def test_a_complete_group_that_is_not_needed_yet_is_the_next_steps():
  """Four groups end at once: no step but the first decodes anything for two."""
  world = World([MIXED], [(4, 4)], slots=8, chunk=4)
  (_, first), (_, second) = world.steps(2, wanted=2, max_versions=1)
  assert _ids(first.groups) == [0, 1]
  assert _parts(first) == {prompt: 2 * [(4, True)] for prompt in (2, 3)}
  assert _ids(second.groups) == [2, 3] and second.stats.tokens == 0
  assert np.all(second.groups[0].version_GT == 1)
  assert len(world.graded) == len(set(world.graded)) == 8
  assert summaries.sampling_metrics(second)['sampling/slot_share'] == 0


def test_a_step_without_enough_groups_leaves_nothing_in_flight():
  world = World([MIXED, WRONG], [(9, 2)])
  with pytest.raises(sampler_lib.StarvedError) as caught:
    list(world.steps(1, wanted=4, max_versions=2, max_batches=1))
  assert caught.value.rollout.carried == ()
  assert caught.value.rollout.cursor == 4
  assert _ids(caught.value.rollout.completed) == [0, 1, 2, 3]


def test_no_more_than_may_be_in_hand_is_begun():
  """(V + 1) R groups, although slots are free."""
  for max_versions in 1, 2:
    world = World([MIXED], [(50, 50)], slots=64, chunk=7)
    (_, first), = world.steps(1, 'drop', wanted=3, max_versions=max_versions)
    assert first.cursor == 3 * (max_versions + 1)


def test_groups_that_are_not_mixed_make_place_for_others():
  """Of four prompts one is mixed: two groups need eight, and four may be in
  hand."""
  world = World([MIXED, WRONG, WRONG, RIGHT], slots=8)
  (_, first), (_, second) = world.steps(2, wanted=2, max_versions=1)
  assert _ids(first.groups) == [0, 4] and _ids(second.groups) == [8, 12]


def test_samples_that_are_put_back_keep_what_they_had(monkeypatch):
  """Three of one prompt, with other tokens each, all at once."""
  world, calls = World([(1,) * 3], [(20, 20, 20)], slots=4), []

  def lacking(_, slots):
    calls.append(slots.live.sum())
    return np.flatnonzero(slots.live).tolist() if len(calls) == 3 else []

  monkeypatch.setattr(rectangle.Rectangle, 'lacking', lacking)
  def drawn(j, count):
    token_T = toy.token(7, j, np.arange(count))
    return groups_lib.Drawn(token_T, -token_T / 7, np.full(count, 1))

  requests = carry.Carried(7, 1, (drawn(0, 0), drawn(1, 5), drawn(2, 9))
                           ).requests(world.prompt(7), 20)
  stats = schedule.Stats()
  done = [c for some in world.schedule.run(
      None, groups_lib.Queue(requests), None, stats) for c in some]
  assert stats.put_back == 3 == len(done)
  for c in done:
    np.testing.assert_array_equal(
        c.token_T, toy.token(7, c.sample, np.arange(20)))


class _Pool:
  """Rewards completions by their length, and notes the prompts."""

  def __init__(self):
    self.prompts = []

  def ask(self, questions):
    self.prompts += [int(q[1][0].split()[0]) for q in questions]
    return {q: (list(map(float, q[3])), False) for q in questions}, 0


@pytest.mark.parametrize('mode, mixed, wanted', [
    ('off', 'verdicts', [[0, 1], [2, 3], [4, 5]]),
    ('refill', 'reward', [[0, 2], [4, 6], [8, 10]])])
def test_rewards_are_those_of_the_step_that_trains_on_a_group(
    monkeypatch, mode, mixed, wanted):
  """More groups end in a step than it trains on. With 'refill' only those of
  even prompts have rewards that differ."""
  rewards, pool = reward_functions({'accuracy': 1.0, 'lengths': 0.5}), _Pool()
  monkeypatch.setattr(rewards, '_pool', pool)
  world = World([RIGHT], [(4, 2), (3, 3)], slots=16, chunk=4)
  surplus = 0
  for (_, rollout), ids in zip(world.steps(
      3, mode, wanted=2, max_versions=2, rewards=rewards, mixed=mixed), wanted):
    assert _ids(rollout.groups) == ids
    surplus += len(rollout.carried)
    for n, group in enumerate(rollout.completed):
      np.testing.assert_array_equal(
          rollout.rewards.reward_NG[n], 1 + group.length_G / 2)
  assert surplus > 0 and set(pool.prompts) >= set(sum(wanted, []))


def _schedule(decoded, stop=None, **sizes):
  """A schedule of completions of 20 tokens; notes the live prompts."""
  programs = toy.programs(lambda *_: 20)

  def decode(_, cache, slots, *rest):
    decoded.append(slots.prompt_id[slots.live].tolist())
    return programs.decode(_, cache, slots, *rest)

  return schedule.Schedule(
      dataclasses.replace(programs, decode=decode), shapes_lib.make(
          work=10**6, max_tokens=20, chunk=4, shards=1, carries=True, **sizes),
      stop)


def test_what_is_carried_comes_before_wider_prompts_of_the_step():
  decoded = []
  requests = [groups_lib.Request((1,) * width, prompt_id, [20], None, born)
              for prompt_id, width, born in ((3, 5, 1), (7, 60, 2))]
  for _ in _schedule(decoded, slots=1, prompt_tokens=64).run(
      None, groups_lib.Queue(requests), None):
    pass
  assert decoded == 5 * [[3]] + 5 * [[7]]


def test_a_step_begins_with_what_was_carried_to_it():
  """A group has both slots; the next has begun when the verdicts end a step."""
  world, before = World([MIXED], [(9, 9)], slots=2, chunk=2), 0
  for step, rollout in world.steps(3, 'off', wanted=1, max_versions=1):
    assert world.decoded[before] == 2 * [step - 1]
    assert _ids(rollout.completed) == [step - 1]
    assert [each.prompt_id for each in rollout.carried] == [step]
    before = len(world.decoded)


def test_a_stop_sees_the_tokens_of_earlier_steps():
  """It stops after twelve tokens, nine of which were there."""
  def stop():
    count = 0

    def feed(token_T):
      nonlocal count
      before, count = count, count + len(token_T)
      return 12 - before if count >= 12 else None

    return feed

  token_T = toy.token(3, 0, np.arange(9))
  request, = carry.Carried(3, 1, (groups_lib.Drawn(
      token_T, -token_T / 7, np.full(9, 1)),)).requests(
          groups_lib.Prompt(None, (1, 2), 3), 20)
  done, = (c for some in _schedule([], stop, slots=1, prompt_tokens=9).run(
      None, groups_lib.Queue([request]), None) for c in some)
  np.testing.assert_array_equal(done.token_T, toy.token(3, 0, np.arange(12)))
  assert done.ended
