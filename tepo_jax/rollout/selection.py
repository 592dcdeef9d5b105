"""Dynamic sampling: which prompts are sampled, which groups are trained on.

A group whose rewards all agree has no gradient (DAPO §3.2); with the default
reward, that is one whose verdicts agree. What differs in a *mixed* group, its
verdicts or its rewards, is `rollout.mixed`. 'refill' samples prompts in the
data's order until it has R mixed groups, and trains on the first R of that
order: which groups these are depends neither on the speed of a completion nor
on the number of slots. Prompts are admitted while others are still decoded, as
many as the results so far make necessary; those that can no longer be among the
first R are stopped.

Axes: G samples of a prompt · R groups to train on.
"""

from collections.abc import Sequence

import numpy as np

from tepo_jax import errors
from tepo_jax.rollout import groups as groups_lib

MODES = ('refill', 'drop', 'off')

# The share of mixed groups is estimated as if this many had been seen before,
# half of them mixed. A low estimate costs tokens, which free slots draw at
# little cost; a high one costs time: a prompt that is admitted late may need
# as many steps again as all others together.
_PRIOR_SHARE, _PRIOR_GROUPS = 0.5, 8
_ESTIMATES = 8  # iterations; the estimate need not be exact
# R is reached in spite of a deviation of this many standard deviations.
_MARGIN = 2.0


class Selection:
  """The prompts of one rollout step, and what is known of their groups.

  `take` names prompts to sample, `add` learns a verdict or `settle` a group's
  rewards, `wanted` says whether a prompt's samples are still needed, `choose`
  selects the groups.

  Attributes:
    needs_rewards: rewards decide which prompts are sampled: call `settle`
      instead of `add`.
    size: G.
    step: the rollout step, where completions are carried (`carry`); else None.
  """

  step: int | None = None

  def __init__(self, *, cursor: int, wanted: int, group_size: int, mode: str,
               max_batches: int, mixed: str = 'verdicts',
               truncated: str = 'count'):
    """Makes the selection of a step.

    Args:
      cursor: the first prompt's index in the data order.
      wanted: R, and the number of prompts that 'drop' and 'off' sample.
      group_size: G.
      mode: 'refill': R mixed groups. 'drop': the mixed groups of R prompts.
        'off': the groups of R prompts.
      max_batches: 'refill' samples at most R times this many prompts.
      mixed: 'verdicts' or 'reward', which must differ. truncated: 'exclude':
        among the completions that ended; else among all.
    """
    self._by_reward, self._ended_only = (
        mixed == 'reward', truncated == 'exclude')
    self.needs_rewards = self._by_reward and mode == 'refill'
    self._mode, self._max_batches = mode, max_batches
    self._first, self.size, self._goal = cursor, group_size, wanted
    most = wanted * max_batches if mode == 'refill' else wanted
    # By prompt, from the cursor on: its samples whose verdicts are known, and
    # those of them that are right and wrong.
    self._seen, self._right, self._wrong = np.zeros((3, most), int)
    self._taken = 0
    self._end = most
    self._share = _PRIOR_SHARE

  def take(self, samples: int) -> range:
    """The prompt_id of the next prompts: as many as have `samples` samples in
    all, but no more than are needed by what is known so far."""
    most = min(len(self._seen), self._taken + -(-samples // self.size))
    if self._mode == 'refill':
      self._end = self._find_end()
      most = min(most, self._needed(), self._end)
    taken, self._taken = self._taken, max(self._taken, most)
    return range(self._first + taken, self._first + self._taken)

  def add(self, prompt_id: int, correct: bool, ended: bool = True) -> None:
    """Notes the verdict on one sample of a prompt."""
    prompt = prompt_id - self._first
    self._seen[prompt] += 1
    if ended or not self._ended_only:
      self._right[prompt] += correct
      self._wrong[prompt] += not correct

  def settle(self, group: groups_lib.Group, reward_G: np.ndarray) -> None:
    """Notes the rewards of a group."""
    prompt, mixed = group.prompt.prompt_id - self._first, self.is_mixed(
        group, reward_G)
    self._seen[prompt] = self.size
    self._right[prompt] = self._wrong[prompt] = mixed

  def is_mixed(self, group: groups_lib.Group, reward_G: np.ndarray) -> bool:
    """Whether the completions that count differ in what must differ."""
    value_G = reward_G if self._by_reward else group.accuracy_G
    return groups_lib.differ(
        value_G[group.ended_G] if self._ended_only else value_G)

  def wanted(self, prompt_id: int) -> bool:
    """Whether, at the last `take`, the prompt's group could still be among
    those to train on, or decide which they are."""
    return prompt_id - self._first < self._end

  def leaves(self, prompt_id: int) -> bool:
    """Whether a complete group is the step's, and is not carried."""
    del prompt_id
    return True

  def choose(self, mixed: Sequence[bool]) -> list[int]:
    """The indices of the groups to train on: R, with 'drop' and 'refill' of
    mixed ones, and with 'drop' at most R.

    mixed: `is_mixed` of each group that was completed, in data order.
    """
    return [n for n, is_mixed in enumerate(mixed)
            if self._mode == 'off' or is_mixed][:self._goal]

  def end(self, chosen: Sequence[groups_lib.Group]) -> int:
    """The next step's cursor if these groups were chosen."""
    if self._mode == 'refill' and len(chosen) == self._goal:
      return chosen[-1].prompt.prompt_id + 1
    return self._first + len(self._seen)

  def shortage(self, found: int, groups: Sequence[groups_lib.Group]
               ) -> str | None:
    """Says so, with the pass rate, if 'refill' found too few mixed groups among
    `groups`; else None."""
    if self._mode != 'refill' or found == self._goal:
      return None
    rate = np.mean([g.accuracy_G.mean() for g in groups])
    solved = sum(g.accuracy_G.all() for g in groups)
    failed = sum(not g.accuracy_G.any() for g in groups)
    return (
        f'dynamic sampling found {found} of {self._goal} mixed groups in '
        f'max_generation_batches={self._max_batches} batches: pass rate '
        f'{rate:.1%}, {solved} of {errors.counted(len(groups), "group")} '
        f'all correct, {failed} all wrong')

  def _mixed(self):
    """Whether each prompt has a right and a wrong sample: no other sample can
    change that."""
    return (0 < self._right) & (0 < self._wrong)

  def _find_end(self):
    """Prompts from this one on cannot be among the first R mixed ones."""
    mixed = np.flatnonzero(self._mixed()[:self._taken])
    if len(mixed) >= self._goal:
      return int(mixed[self._goal - 1]) + 1
    return len(self._seen)

  def _needed(self):
    """The number of prompts that will probably yield R mixed groups."""
    chance = self._chances()
    expected, variance = chance.sum(), (chance * (1 - chance)).sum()
    count, share = self._taken, self._share
    while expected - _MARGIN * variance**0.5 < self._goal:
      if count == len(self._seen):
        break
      count += 1
      expected, variance = expected + share, variance + share * (1 - share)
    return count

  def _chances(self):
    """The chance of each prompt taken that its group is mixed.

    Of a mixed group, the first k of G verdicts agree with a chance of at most
    1 − k / G: that of its one exception being among the others. By Bayes' rule
    a group with k equal verdicts is mixed with a chance of p (1 − k / G) /
    (p (1 − k / G) + 1 − p), where the share p is the mean of these chances.
    """
    agree = 1 - self._seen[:self._taken] / self.size
    mixed = self._mixed()[:self._taken]
    for _ in range(_ESTIMATES):
      share = self._share
      chance = np.where(
          mixed, 1.0, share * agree / np.maximum(share * agree + 1 - share,
                                                 1e-9))
      self._share = (chance.sum() + _PRIOR_SHARE * _PRIOR_GROUPS) / (
          len(chance) + _PRIOR_GROUPS)
    return chance
