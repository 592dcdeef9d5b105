"""Samples groups of completions, grades and rewards them meanwhile.

Axes: B completions · N groups · G samples of a prompt.
"""

import collections
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
import dataclasses
from typing import Any

import jax
import numpy as np
import transformers

from tepo_jax import errors
from tepo_jax import grading
from tepo_jax.rollout import carry
from tepo_jax.rollout import groups as groups_lib
from tepo_jax.rollout import reward as reward_lib
from tepo_jax.rollout import schedule as schedule_lib
from tepo_jax.rollout import selection as selection_lib
from tepo_jax.runtime import processes
from tepo_jax.runtime import progress as progress_lib


@dataclasses.dataclass(frozen=True)
class Rollout:
  """The groups of a rollout step, and the work that they took.

  completed: N groups, in data order. trained: the indices of those to train on.
  mixed: whether each group counts as mixed.
  count: of the groups up to the last one to train on. The others are surplus:
    the next step samples their prompts again.
  cursor: the index in the data order from which the next step takes prompts.
  rewards: of all completed groups.
  stats: the schedule's. grading: the grader's counts no_answer, timeout, died.
  carried: the groups that the next step continues; `completed` has none of
    them.
  """
  completed: list[groups_lib.Group]
  mixed: list[bool]
  trained: list[int]
  count: int
  cursor: int
  rewards: reward_lib.Rewards
  stats: schedule_lib.Stats
  grading: Mapping[str, int]
  carried: tuple[carry.Carried, ...] = ()

  @property
  def groups(self) -> list[groups_lib.Group]:
    """Those to train on."""
    return [self.completed[n] for n in self.trained]

  @property
  def reward_B(self) -> np.ndarray:
    """Rewards of the completions to train on."""
    return self.rewards.reward_NG[self.trained].reshape(-1)

  @property
  def sampled(self) -> list[groups_lib.Group]:
    """All groups but the surplus."""
    return self.completed[:self.count]


class StarvedError(errors.RunError):
  """A selection found too few groups to train on.

  rollout: all that was sampled; it trains on no group, and its cursor is that
    of the step after it.
  """

  def __init__(self, message: str, rollout: Rollout):
    super().__init__(message)
    self.rollout = rollout


@dataclasses.dataclass(frozen=True)
class GroupSampler:
  """Samples G completions of each prompt, and grades them meanwhile.

  Attributes:
    schedule: makes the schedule; called with the weights on the devices, as the
      number of slots may depend on the free memory.
    group_size, max_tokens: G and T.
  """
  schedule: Callable[[], schedule_lib.Schedule]
  group_size: int
  max_tokens: int
  grader: grading.Grader
  tokenizer: transformers.PreTrainedTokenizerBase
  timers: progress_lib.Timers

  def stream(self, weights: Any, prompts: Sequence[groups_lib.Prompt],
             key: jax.Array, check: Callable[[], None] = lambda: None
             ) -> Iterator[tuple[list[groups_lib.Group], dict[str, int]]]:
    """Yields groups as they become complete, in any order, and the grader's
    counts (no_answer, timeout, died) since the last.

    check: called after every chunk of decoding; it may raise to stop sampling.
    """
    with _Grading(self) as graded:
      queue = groups_lib.Queue([graded.request(p) for p in prompts])
      for completions in self._completions(
          weights, queue, key, schedule_lib.Stats(), check):
        # Several processes may differ in what they have graded by now: they
        # wait for all but this chunk's completions.
        for _, groups, counts in graded.batches(wait=jax.process_count() > 1):
          yield groups, counts
        graded.submit(completions)
      for _, groups, counts in graded.batches():
        yield groups, counts

  def select(self, weights: Any, prompt: Callable[[int], groups_lib.Prompt],
             selection: selection_lib.Selection, key: jax.Array,
             rewards: reward_lib.RewardFunctions,
             check: Callable[[], None] = lambda: None) -> Rollout:
    """Samples what a selection asks for; returns what it selects.

    prompt: returns the prompt at an index in the data order. rewards: called as
    groups become complete. check: as for `stream`.

    Raises:
      StarvedError: the selection found too few groups.
    """
    stats = schedule_lib.Stats()
    with _Grading(self, selection.step) as graded:
      requests = (_SelectedPrompts if selection.step is None
                  else _CarriedPrompts)(prompt, selection, graded, rewards)
      for completions in self._completions(
          weights, requests, key, stats, check):
        requests.submit(completions)
    for started in requests.started:
      with self.timers('reward'):
        started.result()
    completed = sorted(
        (group for group in requests.groups
         if selection.leaves(group.prompt.prompt_id)),
        key=lambda group: group.prompt.prompt_id)
    found = rewards.rewards(completed, requests.started)
    mixed = list(map(selection.is_mixed, completed, found.reward_NG))
    trained = selection.choose(mixed)
    cursor = selection.end([completed[n] for n in trained])
    rollout = Rollout(
        completed, mixed, trained,
        sum(group.prompt.prompt_id < cursor for group in completed), cursor,
        found, stats, requests.counts, requests.carried(completed))
    if shortage := selection.shortage(len(trained), completed):
      raise StarvedError(shortage, dataclasses.replace(rollout, trained=[]))
    return rollout

  def _completions(self, weights, requests, key, stats, check):
    """Yields lists of completions as they end; times the sampling."""
    run = self.schedule().run(weights, requests, key, stats)
    while True:
      with self.timers('rollout'):
        completions = next(run, None)
      if completions is None:
        return
      check()
      yield completions


class _Grading:
  """Completions that are being graded in a thread, and groups not complete."""

  def __init__(self, sampler, step=None):
    self._sampler, self.timers, self._step = sampler, sampler.timers, step
    self._thread = futures.ThreadPoolExecutor(1)
    self._pending = collections.deque()  # of (completions, future), in order
    self._prompts = {}  # by prompt_id
    self._members = collections.defaultdict(dict)  # by prompt_id, then sample

  def __enter__(self):
    return self

  def __exit__(self, *exception):
    self._thread.shutdown(cancel_futures=True)

  def request(self, prompt):
    """The request for a prompt's G samples; remembers the prompt."""
    self._prompts[prompt.prompt_id] = prompt
    return groups_lib.Request(
        prompt.token_ids, prompt.prompt_id,
        [self._sampler.max_tokens] * self._sampler.group_size,
        born=self._step or 0)

  def resume(self, groups):
    """Takes carried groups, with their prompts: the complete samples and their
    verdicts; returns the requests of the others."""
    completions, verdicts, requests = [], [], []
    for carried, prompt in groups:
      self._prompts[prompt.prompt_id] = prompt
      completions += carried.completions(prompt)
      verdicts += carried.verdicts()
      requests += carried.requests(prompt, self._sampler.max_tokens)
    if completions:
      self._start(completions, self._graded_before, verdicts)
    return requests

  def submit(self, completions):
    """Starts to grade them."""
    if completions:
      self._start(completions, self._grade)

  def _start(self, completions, grade, *arguments):
    self._pending.append(
        (completions, self._thread.submit(grade, completions, *arguments)))

  def _grade(self, completions):
    """(texts, verdicts and counts of this process's share)."""
    texts = self._texts(completions)
    answers = [self._prompts[c.request.prompt_id].problem.references
               for c in completions]
    return texts, *self._sampler.grader.grade(
        processes.mine(list(zip(texts, answers))))

  def _graded_before(self, completions, verdicts):
    """The same of verdicts that an earlier step has counted."""
    _, nothing = self._sampler.grader.grade([])
    return self._texts(completions), processes.mine(verdicts), nothing

  def _texts(self, completions):
    return self._sampler.tokenizer.batch_decode(
        [c.token_T for c in completions], skip_special_tokens=True)

  def batches(self, wait=True):
    """Yields what was graded, in the order of submission: (completion, verdict)
    pairs, the groups that they complete, and the grader's counts.

    wait: for all that were submitted; all processes must call it alike.
    """
    while self._pending and (wait or self._pending[0][1].done()):
      completions, future = self._pending.popleft()
      with self.timers('grade'):
        texts, verdicts, counts = future.result()
      verdicts = processes.whole(verdicts, len(completions))
      totals = processes.total(np.array(list(counts.values())))
      yield (list(zip(completions, verdicts)),
             list(self._complete(zip(completions, texts, verdicts))),
             dict(zip(counts, map(int, totals))))

  def _complete(self, samples):
    """Adds samples to their groups; yields the groups that become complete."""
    for completion, text, verdict in samples:
      prompt_id = completion.request.prompt_id
      group = self._members[prompt_id]
      group[completion.sample] = completion, text, verdict
      if len(group) == self._sampler.group_size:
        del self._members[prompt_id]
        yield groups_lib.to_group(
            self._prompts[prompt_id], [group[j] for j in range(len(group))],
            self._sampler.max_tokens, self._step)


class _SelectedPrompts:
  """Requests for what a selection asks for.

  Before each chunk of decoding it waits for the verdicts on all completions
  but those of the last chunk, which are graded while the next one is decoded.
  Where rewards decide which prompts are sampled, it also waits for the reward
  functions. So what it gives does not depend on how fast they are graded.

  Attributes:
    groups: those complete. counts: the grader's.
    started: see `RewardFunctions.start`.
  """

  def __init__(self, prompt, selection, graded, rewards):
    self._prompt, self._selection = prompt, selection
    self._graded, self._rewards = graded, rewards
    self.groups, self.started = [], []
    self.counts = collections.Counter()

  def submit(self, completions):
    """Takes completions as they end."""
    self._graded.submit(completions)

  def judged(self, completion, verdict):
    """Takes the verdict on a completion."""

  def carried(self, leaving):
    """The groups in hand but those of `leaving`, for the next step."""
    del leaving
    return ()

  def take(self, samples):
    """See `groups.Requests`."""
    self._learn()
    return [self._graded.request(self._prompt(prompt_id))
            for prompt_id in self._selection.take(samples)]

  def _learn(self):
    """Gives the selection what is known of the completions since."""
    groups = []
    for judged, complete, counts in self._graded.batches():
      for completion, verdict in judged:
        self.judged(completion, verdict)
        if not self._selection.needs_rewards:
          self._selection.add(
              completion.request.prompt_id,
              groups_lib.is_correct(completion, verdict), completion.ended)
      groups += complete
      self.counts.update(counts)
    if groups:
      self.groups += groups
      self.started += (started := self._rewards.start(groups))
      if self._selection.needs_rewards:  # decoding waits for the functions
        with self._graded.timers('reward'):
          found = self._rewards.rewards(groups, started)
        for group, reward_G in zip(groups, found.reward_NG):
          self._selection.settle(group, reward_G)

  def wanted(self, prompt_id):
    """See `groups.Requests`."""
    return self._selection.wanted(prompt_id)


class _CarriedPrompts(_SelectedPrompts):
  """The same where groups are carried: those of the step before come first."""

  def __init__(self, prompt, selection, graded, rewards):
    super().__init__(prompt, selection, graded, rewards)
    self._flight = carry.InFlight(selection)
    self._flight.first = graded.resume(
        [(each, prompt(each.prompt_id)) for each in selection.carried])

  def submit(self, completions):
    for completion in completions:
      self._flight.note(completion, completion.ended)
    super().submit(completions)

  def stopped(self, completion):
    """See `groups.Requests`."""
    self._flight.note(completion, None)

  def judged(self, completion, verdict):
    self._flight.judge(completion, verdict)

  def carried(self, leaving):
    return self._flight.carried({group.prompt.prompt_id for group in leaving})

  def take(self, samples):
    return self._flight.take(samples, super().take)
