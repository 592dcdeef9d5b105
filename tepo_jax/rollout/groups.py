"""Prompts, requests to sample from them, completions, and graded groups.

Axes: G samples of a prompt · T tokens of a completion.
"""

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import itertools
import math
import os
from typing import Protocol

import numpy as np

from tepo_jax import errors
from tepo_jax.data import problem as problem_lib

_DATA_ORDER = 1  # seeds the generator


@dataclasses.dataclass(frozen=True)
class Prompt:
  """A problem with its token ids. prompt_id: its index in the run's data order,
  or in an evaluation set."""
  problem: problem_lib.Problem
  token_ids: tuple[int, ...]
  prompt_id: int


def shared_prefix(prompts: Iterable[Prompt]) -> tuple[int, ...]:
  """The tokens with which all prompts begin, such as worked examples; a
  rollout step or an evaluation prefills them once.

  They are fewer than any prompt has, as a prompt's last token is no part of its
  prefill, and a multiple of 8, so that prompts that happen to share some more
  need no other programs. (), if they are less than 32, or than half of the
  median prompt: that would gain little.
  """
  ids = [prompt.token_ids for prompt in prompts]
  if len(ids) < 2:
    return ()
  lengths = [len(tokens) for tokens in ids]
  shared = os.path.commonprefix([min(ids), max(ids)])
  size = min(len(shared), min(lengths) - 1) // 8 * 8
  return tuple(shared[:size]) if size >= max(32, np.median(lengths) / 2) else ()


@dataclasses.dataclass(frozen=True)
class Drawn:
  """What is there of a completion that several rollout steps may continue.

  token_T: int32. logp_T: float32, of the policy that drew the token. version_T:
    int32, that policy: the rollout step.
  ended: as of `Completion`; None while it is unfinished.
  verdict: the grader's; None until it is known.
  """
  token_T: np.ndarray
  logp_T: np.ndarray
  version_T: np.ndarray
  ended: bool | None = None
  verdict: bool | None = None


@dataclasses.dataclass(frozen=True)
class Request:
  """What a schedule samples from.

  token_ids: of the prompt, and of what the completion has so far.
  prompt_id: selects the random numbers. limits: for each sample, the most
    tokens that it may still have; 0: this request is not for that sample.
  drawn: what its only sample has so far; None: nothing. born: where completions
    are carried, the rollout step that began the group, which selects the random
    numbers too.
  """
  token_ids: Sequence[int]
  prompt_id: int
  limits: Sequence[int]
  drawn: Drawn | None = None
  born: int = 0


class Requests(Protocol):
  """Gives a schedule its requests, while it decodes."""

  def take(self, samples: int) -> list[Request]:
    """The next requests, with about that many samples in all; none if empty.

    It is called before every chunk of decoding, also with 0 samples. When it is
    called, the caller of `Schedule.run` has seen all completions except those
    that ended in the last chunk.
    """
    ...

  def wanted(self, prompt_id: int) -> bool:
    """Whether the samples of a request that it gave are still needed."""
    ...

  def stopped(self, completion: 'Completion') -> None:
    """Takes what there is of a sample that is not needed any more; it is called
    only where completions are carried."""
    ...


class Queue:
  """Gives all its requests at once."""

  def __init__(self, requests: Sequence[Request]):
    self._requests = list(requests)

  def take(self, samples: int) -> list[Request]:
    """All the requests; none later."""
    del samples
    requests, self._requests = self._requests, []
    return requests

  def wanted(self, prompt_id: int) -> bool:
    """Always."""
    del prompt_id
    return True

  def stopped(self, completion: 'Completion') -> None:
    """Never called: all are wanted."""
    raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Completion:
  """Sample number `sample` of a request.

  token_T int32 with EOS, logp_T float32 (see `draw.draw`); no padding; those
  that the request had already come first.
  ended: False if the completion was truncated.
  """
  request: Request
  sample: int
  token_T: np.ndarray
  logp_T: np.ndarray
  ended: bool

  def version_T(self, step: int) -> np.ndarray:
    """The rollout step that drew each token, int32; `step`: the last one."""
    before = self.request.drawn
    old_T = np.zeros(0, np.int32) if before is None else before.version_T
    return np.append(old_T, np.full(
        len(self.token_T) - len(old_T), step, np.int32))


class NonFiniteError(errors.RunError):
  """The model computed NaN or an infinite logit for a prompt.

  prompt_id: see `Prompt`.
  """

  def __init__(self, prompt_id: int):
    super().__init__(f'prompt {prompt_id}: the model\'s logits are not finite')
    self.prompt_id = prompt_id


@dataclasses.dataclass(frozen=True)
class Group:
  """A prompt with its G completions; arrays are numpy.

  token_GT: int32, EOS included, then 0.
  logp_GT: float32, log-probability of each token under the distribution that
    it was drawn from (`draw.draw`), nats, then 0.
  length_G: int32, tokens with EOS; no token id marks the end.
  ended_G: bool; False if the completion was truncated.
  text_G: decoded completions. accuracy_G: 0/1 verdicts, truncated is 0.
  version_GT: int32, the rollout step that drew each token, then 0; None unless
    completions are carried.
  """
  prompt: Prompt
  token_GT: np.ndarray
  logp_GT: np.ndarray
  length_G: np.ndarray
  ended_G: np.ndarray
  text_G: tuple[str, ...]
  accuracy_G: np.ndarray
  version_GT: np.ndarray | None = None


class DataOrder:
  """An endless order of n items: in each epoch a permutation by (seed, epoch,
  number), where `number` is the set's among those of a run.

  Entry i is a function of (seed, i), so one integer, the cursor, resumes it.
  """

  def __init__(self, count: int, seed: int, number: int = 0):
    self._count, self._seed, self._number = count, seed, number
    self._epoch, self._permutation = 0, self._permuted(0)

  def __getitem__(self, prompt_id: int) -> int:
    epoch, index = divmod(prompt_id, self._count)
    if epoch != self._epoch:
      self._epoch, self._permutation = epoch, self._permuted(epoch)
    return int(self._permutation[index])

  def _permuted(self, epoch):
    generator = np.random.default_rng(
        (self._seed, _DATA_ORDER, epoch, self._number))
    return generator.permutation(self._count)


def differ(value_G: np.ndarray) -> bool:
  """Whether the values of a group differ; without a value they do not."""
  return bool(np.ptp(value_G) > 0) if len(value_G) else False


def interleaving(weights: Sequence[int]) -> list[int]:
  """One period of the interleaving of sets: their numbers, set k as often as
  its weight w_k in lowest terms, evenly spread.

  Entry j of set k is at the share (j + 1/2) / w_k of the period. Repeated, any
  window of the period's length, wherever it begins, has each set w_k times.
  """
  divisor = math.gcd(*weights)
  places = [((j + 0.5) / (weight // divisor), k)
            for k, weight in enumerate(weights)
            for j in range(weight // divisor)]
  return [k for _, k in sorted(places)]


class Mixture:
  """The training prompts of a run in an endless order, from one set or more.

  The sets alternate by `interleaving`; each has a `DataOrder` of its own, so
  that a set that ends begins anew in another order. Both the set and the prompt
  at an index are functions of (seed, index).
  """

  def __init__(self, sets: Mapping[str, Sequence[Prompt]],
               weights: Sequence[int], seed: int):
    """sets: name -> prompts, at least one; weights: positive, in their order.
    """
    self.sets = dict(sets)
    self._names = list(self.sets)
    self._period = interleaving(weights)
    self._orders = [DataOrder(len(prompts), seed, number)
                    for number, prompts in enumerate(self.sets.values())]

  def distinct(self) -> int:
    """The index of the first prompt that has been there before."""
    ends = []
    for number, prompts in enumerate(self.sets.values()):
      places = [place for place, k in enumerate(self._period) if k == number]
      rounds, left = divmod(len(prompts), len(places))
      ends.append(rounds * len(self._period) + places[left])
    return min(ends)

  def shared_prefix(self) -> tuple[int, ...]:
    """`shared_prefix` of all prompts of all sets."""
    return shared_prefix(itertools.chain(*self.sets.values()))

  def name(self, prompt_id: int) -> str:
    """The set of the prompt at an index."""
    return self._names[self._period[prompt_id % len(self._period)]]

  def prompt(self, prompt_id: int) -> Prompt:
    """The prompt at an index."""
    rounds, place = divmod(prompt_id, len(self._period))
    number = self._period[place]
    index = (rounds * self._period.count(number)
             + self._period[:place].count(number))
    prompts = self.sets[self._names[number]]
    return dataclasses.replace(
        prompts[self._orders[number][index]], prompt_id=prompt_id)


def is_correct(completion: Completion, verdict: bool) -> bool:
  """Whether it counts as correct: a truncated completion never does, whatever
  its text."""
  return bool(completion.ended and verdict)


def to_group(prompt: Prompt,
             samples: Sequence[tuple[Completion, str, bool]],
             max_tokens: int, step: int | None = None) -> Group:
  """The group of a prompt's (completion, text, verdict), in sample order; step:
  where completions are carried, the rollout step."""
  completions, texts, verdicts = zip(*samples)
  token_GT = np.zeros((len(samples), max_tokens), np.int32)
  logp_GT = np.zeros((len(samples), max_tokens), np.float32)
  for row, c in enumerate(completions):
    token_GT[row, :len(c.token_T)] = c.token_T
    logp_GT[row, :len(c.token_T)] = c.logp_T
  length_G = np.array([len(c.token_T) for c in completions], np.int32)
  ended_G = np.array([c.ended for c in completions])
  version_GT = None if step is None else np.zeros_like(token_GT)
  if version_GT is not None:
    for row, c in enumerate(completions):
      version_GT[row, :len(c.token_T)] = c.version_T(step)
  return Group(prompt, token_GT, logp_GT, length_G, ended_G, texts,
               np.array(list(map(is_correct, completions, verdicts)),
                        np.float32), version_GT)
