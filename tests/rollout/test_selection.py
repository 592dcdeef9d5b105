"""Dynamic sampling as a stream: the groups of whole batches, with less work."""

import dataclasses
import itertools
import time
from unittest import mock

import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest

from tepo_jax import errors
from tepo_jax.data import problem as problem_lib
from tepo_jax.rollout import groups as groups_lib
from tepo_jax.rollout import sampler as sampler_lib
from tepo_jax.rollout import schedule
from tepo_jax.rollout import selection as selection_lib
from tepo_jax.rollout import shapes as shapes_lib
from tepo_jax.runtime import progress as progress_lib
from tests.rollout import toy
from tests.rollout.rewards import reward_functions

RIGHT, WRONG, MIXED = (1, 1), (0, 0), (0, 1)


class World:
  """Prompts 0, 1, 2, …: verdict and length of each completion by a table.

  verdicts, lengths: [Q][G]; prompt i is that of row i % Q.
  """

  def __init__(self, verdicts, lengths=((1, 1),), *, slots=4, chunk=3,
               delay=lambda: 0.0):
    self.verdicts, self.lengths, self.delay = verdicts, lengths, delay
    self.size = len(verdicts[0])
    longest = max(map(max, lengths))
    self.stats = []  # of the runs of `schedule`
    self.schedule = schedule.Schedule(
        toy.programs(self.length), shapes_lib.make(
            slots=slots, work=10**6, prompt_tokens=9, max_tokens=longest,
            chunk=chunk, shards=1))
    self.sampler = sampler_lib.GroupSampler(
        schedule=lambda: self, group_size=self.size, max_tokens=longest,
        grader=self, tokenizer=self, timers=progress_lib.Timers())

  def run(self, weights, requests, key, stats):
    self.stats.append(stats)
    return self.schedule.run(weights, requests, key, stats)

  def length(self, prompt, sample):
    return self.lengths[prompt % len(self.lengths)][sample]

  def batch_decode(self, rows, skip_special_tokens):
    """Decodes to 'PROMPT SAMPLE'."""
    del skip_special_tokens
    return [f'{row[0] // 10_000} {row[0] // 1_000 % 10}' for row in rows]

  def grade(self, items):
    time.sleep(self.delay())
    parts = [map(int, text.split()) for text, _ in items]
    return [bool(self.verdicts[prompt % len(self.verdicts)][sample])
            for prompt, sample in parts], {}

  def prompt(self, prompt_id):
    problem = problem_lib.Problem(
        id=str(prompt_id), problem='?', answers=('1',), source='test')
    return groups_lib.Prompt(
        problem, (1,) * (1 + prompt_id * 5 % 9), prompt_id)

  def select(self, mode, *, cursor=0, wanted, max_batches=10,
             rewards=reward_functions(), **settings):
    return self.sampler.select(None, self.prompt, selection_lib.Selection(
        cursor=cursor, wanted=wanted, group_size=self.size, mode=mode,
        max_batches=max_batches, **settings), None, rewards)

  def select_in_batches(self, *, cursor=0, wanted, max_batches=10):
    """The groups that whole batches of `wanted` prompts find; None if none."""
    kept = []
    for _ in range(max_batches):
      prompts = [self.prompt(cursor + i) for i in range(wanted)]
      groups = {g.prompt.prompt_id: g
                for some, _ in self.sampler.stream(None, prompts, None)
                for g in some}
      kept += [groups[p.prompt_id] for p in prompts
               if groups_lib.differ(groups[p.prompt_id].accuracy_G)]
      cursor += wanted
      if len(kept) >= wanted:
        return kept[:wanted]
    return None


def _prompt_ids(groups):
  return [g.prompt.prompt_id for g in groups]


def _assert_equal(groups, others):
  assert _prompt_ids(groups) == _prompt_ids(others)
  for group, other in zip(groups, others):
    assert group.text_G == other.text_G
    for name in ('token_GT', 'logp_GT', 'length_G', 'ended_G', 'accuracy_G'):
      np.testing.assert_array_equal(getattr(group, name), getattr(other, name))


def test_refill_finds_the_first_mixed_groups_of_the_data_order():
  world = World([MIXED, RIGHT, MIXED, MIXED, WRONG, MIXED])
  rollout = world.select('refill', wanted=3)
  assert _prompt_ids(rollout.groups) == [0, 2, 3]
  assert _prompt_ids(rollout.sampled) == [0, 1, 2, 3]
  assert rollout.cursor == 4  # right behind the last group
  assert _prompt_ids(world.select('refill', cursor=4, wanted=3).groups) == [
      5, 6, 8]


def test_the_surplus_is_what_was_completed_behind_the_last_group():
  """Prompt 0 takes long; more than enough are completed meanwhile."""
  world = World([MIXED], [(90, 90)] + [(1, 2)] * 20, slots=8)
  rollout = world.select('refill', wanted=3)
  assert _prompt_ids(rollout.groups) == [0, 1, 2] and rollout.cursor == 3
  assert rollout.count == 3 < len(rollout.completed)
  assert _prompt_ids(rollout.completed) == list(range(len(rollout.completed)))


def test_a_slow_wrong_group_does_not_let_a_later_one_overtake_it():
  """The groups do not depend on how long their completions are."""
  lengths = [(60, 1), (1, 1), (1, 1), (1, 1), (1, 1)]
  for verdicts in [MIXED, MIXED], [WRONG, MIXED]:
    rollout = World(verdicts, lengths, slots=2).select('refill', wanted=2)
    first = 0 if verdicts[0] == MIXED else 1
    assert _prompt_ids(rollout.groups)[0] == first


def test_refill_ends_in_its_last_batch_or_with_an_error():
  world = World([MIXED, RIGHT, WRONG, RIGHT])
  rollout = world.select('refill', wanted=2, max_batches=3)
  assert _prompt_ids(rollout.groups) == [0, 4]
  with pytest.raises(errors.RunError) as caught:
    world.select('refill', wanted=2, max_batches=2)
  message = str(caught.value)
  assert '\n' not in message
  # 0: mixed, 1 and 3: correct, 2: wrong; 5 of 8 completions are correct.
  for part in ('1 of 2', 'max_generation_batches=2', 'pass rate 62.5%',
               '2 of 4 groups all correct', '1 all wrong'):
    assert part in message


def test_what_a_starved_step_sampled_is_kept_for_its_record():
  with pytest.raises(sampler_lib.StarvedError) as caught:
    World([MIXED, WRONG, WRONG]).select('refill', wanted=2, max_batches=1)
  rollout = caught.value.rollout
  assert _prompt_ids(rollout.sampled) == [0, 1] and not rollout.groups
  assert rollout.rewards.reward_NG.tolist() == [[0, 1], [0, 0]]


def test_hopeless_pass_rate_is_named():
  with pytest.raises(errors.RunError, match=r'pass rate 0\.0%.*4 all wrong'):
    World([WRONG]).select('refill', wanted=2, max_batches=2)


def test_drop_samples_once_and_keeps_what_is_mixed():
  rollout = World([MIXED, RIGHT, WRONG]).select('drop', wanted=4)
  assert rollout.cursor == rollout.count == len(rollout.completed) == 4
  assert _prompt_ids(rollout.groups) == [0, 3]
  assert _prompt_ids(rollout.sampled) == [0, 1, 2, 3]
  nothing = World([WRONG]).select('drop', wanted=4)
  assert nothing.groups == [] and len(nothing.sampled) == 4


def test_off_keeps_everything():
  rollout = World([MIXED, RIGHT, WRONG]).select('off', cursor=2, wanted=4)
  assert rollout.cursor == 6
  assert _prompt_ids(rollout.groups) == [2, 3, 4, 5]


def test_the_truncated_count_as_wrong():
  """Sample 1 is right but does not end: not mixed until a third is right."""
  world = World([(0, 1, 0), (0, 0, 1)], [(2, 30, 2)])
  world.sampler = dataclasses.replace(world.sampler, max_tokens=9)
  assert _prompt_ids(world.select('refill', wanted=1).groups) == [1]


def test_the_excluded_do_not_make_a_group_mixed():
  """Prompts 0 and 1 have one verdict among the completions that ended, 2 has
  none that ended, 3 has both."""
  verdicts = [(1, 1, 0), (0, 0, 1), (0, 1, 0), (1, 0, 1)]
  world = World(verdicts, [(2, 2, 30), (2, 2, 30), (30, 30, 30), (2, 2, 30)])
  world.sampler = dataclasses.replace(world.sampler, max_tokens=9)
  for mode in 'refill', 'drop':
    rollout = world.select(mode, wanted=1 if mode == 'refill' else 4,
                           truncated='exclude')
    assert _prompt_ids(rollout.groups) == [3] and rollout.cursor == 4
    assert rollout.mixed[:4] == [False, False, False, True]


class _Parity:
  """Rewards the completions of every third prompt by their length."""

  def ask(self, questions):
    return {q: ([float(n if int(q[1][0].split()[0]) % 3 == 2 else 1)
                 for n in q[3]], False) for q in questions}, 0


@pytest.mark.parametrize('slots', [1, 7, 64])
def test_groups_are_mixed_by_their_reward(monkeypatch, slots):
  """The groups are those of whole batches under verl's criterion, that the
  metric's np.std is not 0 (filter_groups.metric of its recipe/dapo, whose
  metric is then the reward); verdicts do not matter."""
  rewards = reward_functions({'lengths': 1.0})
  monkeypatch.setattr(rewards, '_pool', _Parity())
  lengths = [(4, 2), (1, 1), (3, 3), (5, 1), (2, 2)]
  world = World([RIGHT, MIXED], lengths, slots=slots)
  want = [i for i in range(99) if np.std(
      lengths[i % 5] if i % 3 == 2 else (1, 1)) > 0][:4]
  rollout = world.select('refill', wanted=4, rewards=rewards, mixed='reward')
  assert _prompt_ids(rollout.groups) == want
  assert rollout.cursor == want[-1] + 1 == rollout.count
  assert [n for n, mixed in enumerate(rollout.mixed) if mixed][:4] == want
  assert _prompt_ids(world.select(
      'drop', wanted=want[1] + 1, rewards=rewards, mixed='reward'
      ).groups) == want[:2]


@pytest.mark.parametrize('mode, waits', [('refill', True), ('drop', False)])
def test_decoding_waits_for_rewards_only_if_they_choose_prompts(
    monkeypatch, mode, waits):
  """And the wait is time of the reward, not of sampling."""
  class Slow(_Parity):

    def ask(self, questions):
      time.sleep(0.02)
      return super().ask(questions)

  rewards = reward_functions({'lengths': 1.0})
  monkeypatch.setattr(rewards, '_pool', Slow())
  asked = mock.Mock(wraps=rewards.rewards)
  monkeypatch.setattr(rewards, 'rewards', asked)
  world = World([RIGHT], [(4, 2), (9, 3), (12, 1)])
  world.select(mode, wanted=2 if waits else 6, rewards=rewards, mixed='reward')
  assert (asked.call_count > 1) == waits
  if waits:
    assert world.sampler.timers.pop()['reward'] > 0.015 * (
        asked.call_count - 1)


def test_a_step_that_is_left_out_ends_behind_all_that_it_sampled():
  with pytest.raises(sampler_lib.StarvedError) as caught:
    World([WRONG]).select('refill', cursor=3, wanted=2, max_batches=3)
  assert caught.value.rollout.cursor == 3 + 2 * 3


def test_what_is_out_of_reach_is_stopped_at_once():
  """Prompts behind the last group of the step draw no further tokens."""
  world = World([MIXED], [(2, 2)] * 4 + [(500, 500)] * 30, slots=20, chunk=2)
  stats = world.select('refill', wanted=4).stats
  # 16 tokens are needed. The verdicts on them are known two chunks later.
  assert stats.tokens <= 16 + 12 * 6
  assert stats.steps <= 6


def test_free_slots_take_prompts_further_on_in_the_order():
  """One long completion; its neighbours' slots look for more mixed groups."""
  lengths, verdicts = [(40, 1)] + [(4, 4)] * 50, [MIXED] + [WRONG] * 9
  world = World(verdicts, lengths, slots=8, chunk=2)
  rollout = world.select('refill', wanted=3)
  _assert_equal(rollout.groups, world.select_in_batches(wanted=3))
  assert world.stats[0] is rollout.stats
  assert rollout.stats.steps < 50 < sum(s.steps for s in world.stats[1:])


def test_few_prompts_are_sampled_in_vain_where_all_groups_are_mixed():
  world = World([MIXED], [(20, 20)], slots=64, chunk=4)
  rollout = world.select('refill', wanted=32)
  assert len(rollout.completed) <= 36


class _Workers:
  """Answers by the function, the prompt and the length."""

  def ask(self, questions):
    return {(name, texts, *rest, tokens, ended): (
        [n + int(texts[0].split()[0]) for n in tokens] if name == 'first'
        else f'no {name}', False)
            for name, texts, *rest, tokens, ended in questions}, 0


def test_rewards_are_those_of_the_groups_own_completions(monkeypatch):
  rewards = reward_functions({'second': 9.0, 'accuracy': 1.0, 'first': 0.5})
  monkeypatch.setattr(rewards, '_pool', _Workers())
  world = World([MIXED, RIGHT], [(4, 2), (1, 1), (3, 3)])
  rollout = world.select('refill', wanted=2, rewards=rewards)
  assert len(rollout.completed) > 2 and rollout.trained == [0, 2]
  for n, group in enumerate(rollout.completed):
    first_G = rollout.rewards.parts['first'][n]
    np.testing.assert_array_equal(
        first_G, group.length_G + group.prompt.prompt_id)
    assert first_G.dtype == np.float32
    np.testing.assert_array_equal(
        rollout.rewards.reward_NG[n], group.accuracy_G + first_G / 2)
  assert np.isnan(rollout.rewards.parts['second']).all()
  np.testing.assert_array_equal(rollout.reward_B, [2, 2, 2.5, 3.5])
  with pytest.raises(errors.RunError, match='second: problem 0: no second'):
    rollout.rewards.check(rollout.count, 'stop')


worlds = st.integers(2, 4).flatmap(lambda size: st.tuples(
    st.lists(st.lists(st.booleans(), min_size=size, max_size=size).map(tuple),
             min_size=1, max_size=12),
    st.lists(st.lists(st.integers(1, 25), min_size=size,
                      max_size=size).map(tuple), min_size=1, max_size=12)))


@hypothesis.settings(deadline=None, max_examples=60)
@hypothesis.given(
    world=worlds, slots=st.integers(1, 64), chunk=st.integers(1, 9),
    wanted=st.integers(1, 5), cursor=st.integers(0, 99),
    prior=st.floats(0.05, 1), margin=st.floats(0, 4))
def test_the_groups_are_those_of_whole_batches(
    world, slots, chunk, wanted, cursor, prior, margin):
  """For every number of slots and every admission rule, to the bit; the cursor
  stands behind the last group, and a second run repeats the first."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(selection_lib, '_PRIOR_SHARE', prior)
    patch.setattr(selection_lib, '_MARGIN', margin)
    world = World(*world, slots=slots, chunk=chunk)
    want = world.select_in_batches(cursor=cursor, wanted=wanted, max_batches=6)
    try:
      got = world.select('refill', cursor=cursor, wanted=wanted, max_batches=6)
    except errors.RunError:
      assert want is None
      return
    _assert_equal(got.groups, want)
    assert got.cursor == got.groups[-1].prompt.prompt_id + 1
    assert _prompt_ids(got.sampled) == list(range(cursor, got.cursor))
    again = world.select('refill', cursor=cursor, wanted=wanted, max_batches=6)
    assert again.stats == got.stats
    _assert_equal(again.completed, got.completed)


def test_decisions_do_not_depend_on_the_clock():
  """A grader of another speed changes neither groups nor tokens drawn."""
  generator = np.random.default_rng(0)
  verdicts = [tuple(row) for row in generator.random((30, 4)) < 0.15]
  lengths = [tuple(row) for row in generator.geometric(0.1, (30, 4))]
  results = []
  for delays in [0.0], [0.03], [0.0, 0.05, 0.01]:
    delay = itertools.cycle(delays)
    world = World(verdicts, lengths, slots=12, delay=lambda d=delay: next(d))
    rollout = world.select('refill', wanted=4)
    results.append((_prompt_ids(rollout.completed), rollout.stats))
  assert results[0] == results[1] == results[2]
