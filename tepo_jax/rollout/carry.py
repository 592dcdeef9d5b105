"""Carried completions: a rollout step that does not wait for its longest ones.

Partial rollouts (Kimi k1.5, 2501.12599, §2.6.2; AReaL, 2505.24298; APRIL,
2509.18521): a step ends as soon as R groups to train on are complete. The other
groups are carried: their tokens, the log-probabilities of these and the policy
that drew each, its version, stay, and the next step continues them first. A
version is the rollout step in which a token was drawn. A group is trained on
when all of its samples are complete, so that its tokens may be of several
policies; behaviour weights (`learning.behaviour`) correct for that, with the
log-probabilities of the policies that drew them.

No token is trained on more than V = rollout.carry.max_versions steps after the
step that drew it. So a step

  admits prompts only while at most (V + 1) R groups are in hand, and
  ends only if those that it leaves can be trained on in time, R in each later
  step: the i-th oldest of them (i = 0, 1, …) was begun in step
  s + 1 + ⌊i / R⌋ − V or later, s being the step that ends.

With V = 1, for example, a step completes all groups that were carried to it.
Where all groups in hand are complete the second condition is met, by induction:
a step takes the oldest R, and of V R or fewer new ones each has time.

A step trains on the oldest R complete groups: with 'refill', on those that are
mixed; with 'drop' and 'off', these are its groups. With 'refill', groups that
are complete and not mixed are left out, as always. Complete groups that are not
needed yet are carried like the others: as no group is lost for its length,
short and long ones are trained on alike. Their verdicts are kept; reward
functions, which each step calls for its complete groups, are called again. A
step that finds fewer than R mixed groups leaves nothing in flight.

Axes: G samples of a prompt · T tokens of a completion.
"""

import base64
from collections.abc import Callable, Collection, Mapping, Sequence
import dataclasses
from typing import Any
import zlib

import numpy as np

from tepo_jax.rollout import groups as groups_lib
from tepo_jax.rollout import selection as selection_lib

_NOTHING = groups_lib.Drawn(
    np.zeros(0, np.int32), np.zeros(0, np.float32), np.zeros(0, np.int32))
_ARRAYS = {'token_T': np.int32, 'logp_T': np.float32, 'version_T': np.int32}


@dataclasses.dataclass(frozen=True)
class Carried:
  """A group that a step leaves to the next.

  born: the rollout step that began it. samples: of each of its G completions.
  """
  prompt_id: int
  born: int
  samples: tuple[groups_lib.Drawn, ...]

  def requests(self, prompt: groups_lib.Prompt, max_tokens: int
               ) -> list[groups_lib.Request]:
    """Requests of what is missing: one of the samples without a token, which
    share their prompt, and one of each other."""
    def request(drawn, members):
      tokens = () if drawn is None else drawn.token_T.tolist()
      limits = [0] * len(self.samples)
      for j in members:
        limits[j] = max_tokens - len(tokens)
      return groups_lib.Request(
          (*prompt.token_ids, *tokens), self.prompt_id, limits, drawn,
          self.born)

    unfinished = [j for j, drawn in enumerate(self.samples)
                  if drawn.ended is None]
    new = [j for j in unfinished if not len(self.samples[j].token_T)]
    return [*([request(None, new)] if new else []), *(
        request(self.samples[j], [j]) for j in unfinished if j not in new)]

  def completions(self, prompt: groups_lib.Prompt
                  ) -> list[groups_lib.Completion]:
    """Those of its samples that are complete."""
    return [groups_lib.Completion(
        groups_lib.Request(prompt.token_ids, self.prompt_id, [], drawn,
                           self.born),
        j, drawn.token_T, drawn.logp_T, drawn.ended)
            for j, drawn in enumerate(self.samples) if drawn.ended is not None]

  def verdicts(self) -> list[bool | None]:
    """The grader's on `completions`; a plan has none."""
    return [drawn.verdict for drawn in self.samples if drawn.ended is not None]


class Selection(selection_lib.Selection):
  """The selection of a step that begins and ends with carried groups.

  Attributes:
    step: the rollout step. carried: the groups it begins with, in data order.
  """

  step: int

  def __init__(self, *, step: int, max_versions: int,
               carried: Sequence[Carried], cursor: int, wanted: int,
               group_size: int, mode: str, max_batches: int, **settings: Any):
    """max_versions: V. cursor: the first prompt that no step has begun. Else as
    `selection.Selection`."""
    first = min((each.prompt_id for each in carried), default=cursor)
    super().__init__(cursor=first, wanted=wanted, group_size=group_size,
                     mode=mode, max_batches=max_batches, **settings)
    self.step, self.carried = step, tuple(carried)
    self._versions, self._most_held = max_versions, (max_versions + 1) * wanted
    most = cursor - first + (
        wanted * max_batches if mode == 'refill' else self._most_held)
    self._seen, self._right, self._wrong = np.zeros((3, most), int)
    self._taken, self._is_over = cursor - first, False
    # By prompt, from the oldest on: whether it is in hand, and since when.
    self._held, self._born = np.zeros(most, bool), np.full(most, step)
    for each in carried:
      self._held[each.prompt_id - first] = True
      self._born[each.prompt_id - first] = each.born

  def take(self, samples: int) -> range:
    """The prompt_id of the next prompts, for `samples` samples in all, but no
    more than may be in hand; none once the step is over."""
    self._is_over = self._is_over or self._can_end()
    free = self._most_held - np.sum(self._held & ~self._left_out())
    count = 0 if self._is_over else max(0, min(
        -(-samples // self.size), free, len(self._seen) - self._taken))
    taken, self._taken = self._taken, self._taken + int(count)
    self._held[taken:self._taken] = True
    return range(self._first + taken, self._first + self._taken)

  def wanted(self, prompt_id: int) -> bool:
    """Whether, at the last `take`, the step was not over."""
    del prompt_id
    return not self._is_over

  def leaves(self, prompt_id: int) -> bool:
    """See `selection.Selection`."""
    prompt = prompt_id - self._first
    return bool(self._left_out()[prompt]) or prompt in self._chosen()

  def end(self, chosen: Sequence[groups_lib.Group]) -> int:
    """The first prompt that no step has begun."""
    del chosen
    return self._first + self._taken

  def _complete(self):
    return self._held & (self._seen == self.size)

  def _left_out(self):
    """Complete groups that are not trained on and not carried."""
    return (self._complete() & ~self._mixed() if self._mode == 'refill'
            else np.zeros_like(self._held))

  def _chosen(self):
    """The oldest complete groups, R of them if there are."""
    return np.flatnonzero(self._complete() & ~self._left_out())[:self._goal]

  def _can_end(self):
    """Whether there are groups for this step, and time for the others."""
    chosen, left = self._chosen(), self._held & ~self._left_out()
    left[chosen] = False
    born = self._born[left]
    return len(chosen) == self._goal and bool(np.all(
        born + self._versions
        >= self.step + 1 + np.arange(len(born)) // self._goal))


class InFlight:
  """What there is of the groups in hand of a step.

  Attributes:
    first: requests of the carried groups, until they are taken.
  """

  def __init__(self, selection: Selection):
    self.first: list[groups_lib.Request] = []
    self._step, self._size = selection.step, selection.size
    self._born = {each.prompt_id: each.born for each in selection.carried}
    self._samples = {(each.prompt_id, j): drawn for each in selection.carried
                     for j, drawn in enumerate(each.samples)}

  def take(self, samples: int,
           new: Callable[[int], list[groups_lib.Request]]
           ) -> list[groups_lib.Request]:
    """The requests for `samples` samples: those of the carried groups and then,
    for the samples that are missing, those of `new`, which begin groups."""
    first, self.first = self.first, []
    waiting = sum(limit > 0 for request in first for limit in request.limits)
    requests = new(max(0, samples - waiting))
    for request in requests:
      self._born[request.prompt_id] = self._step
    return first + requests

  def note(self, completion: groups_lib.Completion, ended: bool | None) -> None:
    """Takes the state of a sample; `ended` is None if it is unfinished."""
    self._samples[completion.request.prompt_id, completion.sample] = (
        groups_lib.Drawn(completion.token_T, completion.logp_T,
                         completion.version_T(self._step), ended))

  def judge(self, completion: groups_lib.Completion, verdict: bool) -> None:
    """Takes the grader's verdict on a complete sample."""
    key = completion.request.prompt_id, completion.sample
    self._samples[key] = dataclasses.replace(
        self._samples[key], verdict=bool(verdict))

  def carried(self, leaving: Collection[int]) -> tuple[Carried, ...]:
    """The groups but those that leave, by their prompt_id; in data order."""
    return tuple(
        Carried(prompt_id, self._born[prompt_id], tuple(
            self._samples[prompt_id, j]
            if (prompt_id, j) in self._samples else _NOTHING
            for j in range(self._size)))
        for prompt_id in sorted(self._born.keys() - set(leaving)))


def to_json(carried: Sequence[Carried]) -> dict[str, Any]:
  """Carried groups as a JSON object, to the bit."""
  samples = [drawn for each in carried for drawn in each.samples]
  return {
      'prompt_id': [each.prompt_id for each in carried],
      'born': [each.born for each in carried],
      'samples': len(samples) // max(1, len(carried)),
      'length': [len(drawn.token_T) for drawn in samples],
      'ended': [drawn.ended for drawn in samples],
      'verdict': [drawn.verdict for drawn in samples]} | {
          name: base64.b64encode(zlib.compress(np.concatenate([
              np.zeros(0, dtype), *(getattr(drawn, name) for drawn in samples)
          ]).astype(dtype).tobytes(), level=1)).decode()
          for name, dtype in _ARRAYS.items()}


def from_json(saved: Mapping[str, Any]) -> tuple[Carried, ...]:
  """The inverse of `to_json`."""
  ends = np.cumsum(saved['length'], dtype=int)[:-1]
  parts = [np.split(np.frombuffer(
      zlib.decompress(base64.b64decode(saved[name])), dtype), ends)
           for name, dtype in _ARRAYS.items()]
  drawn = [groups_lib.Drawn(*fields) for fields in zip(
      *parts, saved['ended'], saved['verdict'])]
  size = saved['samples']
  return tuple(
      Carried(prompt_id, born, tuple(drawn[n * size:(n + 1) * size]))
      for n, (prompt_id, born) in enumerate(
          zip(saved['prompt_id'], saved['born'])))
