"""Dynamic sampling: which prompts are sampled, which groups are trained on.

With the default reward, a group whose verdicts all agree has no gradient (DAPO
§3.2). 'refill' samples prompts in the data's order until it has R mixed groups,
and trains on the first R of that order: which groups these are depends neither
on the speed of a completion nor on the number of slots. Prompts are admitted
while others are still decoded, as many as the verdicts so far make necessary;
those that can no longer be among the first R are stopped.

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

  `take` names prompts to sample, `add` learns a verdict, `wanted` says whether
  a prompt's samples are still needed, `choose` selects the groups.
  """

  def __init__(self, *, cursor: int, wanted: int, group_size: int, mode: str,
               max_batches: int):
    """Makes the selection of a step.

    Args:
      cursor: the first prompt's index in the data order.
      wanted: R, and the number of prompts that 'drop' and 'off' sample.
      group_size: G.
      mode: 'refill': R mixed groups. 'drop': the mixed groups of R prompts.
        'off': the groups of R prompts.
      max_batches: 'refill' samples at most R times this many prompts.
    """
    self._mode, self._max_batches = mode, max_batches
    self._first, self._size, self._goal = cursor, group_size, wanted
    most = wanted * max_batches if mode == 'refill' else wanted
    # By prompt, from the cursor on: its verdicts so far.
    self._seen = np.zeros(most, int)
    self._right = np.zeros(most, int)
    self._taken = 0
    self._end = most
    self._share = _PRIOR_SHARE

  def take(self, samples: int) -> range:
    """The prompt_id of the next prompts: as many as have `samples` samples in
    all, but no more than are needed by what is known so far."""
    most = min(len(self._seen), self._taken + -(-samples // self._size))
    if self._mode == 'refill':
      self._end = self._find_end()
      most = min(most, self._needed(), self._end)
    taken, self._taken = self._taken, max(self._taken, most)
    return range(self._first + taken, self._first + self._taken)

  def add(self, prompt_id: int, correct: bool) -> None:
    """Notes the verdict on one sample of a prompt."""
    self._seen[prompt_id - self._first] += 1
    self._right[prompt_id - self._first] += correct

  def wanted(self, prompt_id: int) -> bool:
    """Whether, at the last `take`, the prompt's group could still be among
    those to train on, or decide which they are."""
    return prompt_id - self._first < self._end

  def choose(self, groups: Sequence[groups_lib.Group]
             ) -> tuple[list[int], int, int]:
    """Selects from all groups that were completed, in data order.

    Returns:
      The indices of the groups to train on: R, with 'drop' at most R. How many
      groups there are up to the last of these. The next step's cursor.

    Raises:
      errors.RunError: 'refill' found too few mixed groups; names the pass rate.
    """
    chosen = [n for n, group in enumerate(groups)
              if self._mode == 'off' or groups_lib.is_mixed(group)]
    chosen = chosen[:self._goal]
    end = self._first + len(self._seen)
    if self._mode == 'refill':
      if len(chosen) < self._goal:
        raise errors.RunError(self._starved(len(chosen), groups))
      end = groups[chosen[-1]].prompt.prompt_id + 1
    return chosen, sum(g.prompt.prompt_id < end for g in groups), end

  def _mixed(self):
    """Whether each prompt has a right and a wrong sample: no other sample can
    change that."""
    return (0 < self._right) & (self._right < self._seen)

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
    agree = 1 - self._seen[:self._taken] / self._size
    mixed = self._mixed()[:self._taken]
    for _ in range(_ESTIMATES):
      share = self._share
      chance = np.where(
          mixed, 1.0, share * agree / np.maximum(share * agree + 1 - share,
                                                 1e-9))
      self._share = (chance.sum() + _PRIOR_SHARE * _PRIOR_GROUPS) / (
          len(chance) + _PRIOR_GROUPS)
    return chance

  def _starved(self, found, groups):
    rate = np.mean([g.accuracy_G.mean() for g in groups])
    solved = sum(g.accuracy_G.all() for g in groups)
    failed = sum(not g.accuracy_G.any() for g in groups)
    return (
        f'dynamic sampling found {found} of {self._goal} mixed groups in '
        f'max_generation_batches={self._max_batches} batches: pass rate '
        f'{rate:.1%}, {solved} of {errors.counted(len(groups), "group")} '
        f'all correct, {failed} '
        'all wrong')
