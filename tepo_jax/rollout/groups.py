"""Samples and grades groups of completions, and selects those to train on.

`GroupSampler` turns prompts into graded groups: it runs the schedule and grades
completions while the devices decode others. `collect` is dynamic sampling: it
takes prompts in the data's order until enough groups can be trained on.

Axes: G samples of a prompt · T tokens of a completion · R groups to train on.
"""

import collections
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
import dataclasses
from typing import Any

import jax
import numpy as np
import transformers

from tepo_jax import errors
from tepo_jax.rollout import schedule as schedule_lib
from tepo_jax.runtime import processes
from tepo_jax.runtime import progress as progress_lib
from tepo_jax.tasks import grading
from tepo_jax.tasks import problem as problem_lib

MODES = ('refill', 'drop', 'off')

_DATA_ORDER = 1  # seeds the generator; minibatch orders use another number


@dataclasses.dataclass(frozen=True)
class Prompt:
  """A problem, its token ids, and its index in the run's data order."""
  problem: problem_lib.Problem
  token_ids: tuple[int, ...]
  cursor: int


@dataclasses.dataclass(frozen=True)
class Group:
  """A prompt with its G completions; arrays are numpy.

  token_GT: int32, EOS included, then 0.
  logp_GT: float32, log-probability of each token under the policy's
    temperature-scaled softmax (`draw.draw`), nats, then 0.
  length_G: int32, tokens with EOS; no token id marks the end.
  ended_G: bool; False if the completion was truncated.
  text_G: decoded completions. accuracy_G: 0/1 verdicts, truncated is 0.
  """
  prompt: Prompt
  token_GT: np.ndarray
  logp_GT: np.ndarray
  length_G: np.ndarray
  ended_G: np.ndarray
  text_G: tuple[str, ...]
  accuracy_G: np.ndarray


@dataclasses.dataclass(frozen=True)
class Rollout:
  """The groups of a rollout step.

  groups: those to train on, in data order: R, with 'drop' at most R.
  sampled: all groups, including those left out.
  cursor: the index in the data order from which the next step takes prompts.
  """
  groups: list[Group]
  sampled: list[Group]
  cursor: int


class DataOrder:
  """An endless order of n items: in each epoch a permutation by (seed, epoch).

  Entry i is a function of (seed, i), so one integer cursor resumes it.
  """

  def __init__(self, count: int, seed: int):
    self._count, self._seed = count, seed
    self._epoch, self._permutation = None, None

  def __getitem__(self, cursor: int) -> int:
    epoch, index = divmod(cursor, self._count)
    if epoch != self._epoch:
      generator = np.random.default_rng((self._seed, _DATA_ORDER, epoch))
      self._epoch, self._permutation = epoch, generator.permutation(self._count)
    return int(self._permutation[index])


def collect(draw: Callable[[int], list[Prompt]],
            sample: Callable[[list[Prompt]], list[Group]], *, cursor: int,
            wanted: int, mode: str, max_batches: int) -> Rollout:
  """Samples groups until `wanted` of them can be trained on (DAPO §3.2).

  A group is mixed iff its verdicts are not all equal, before any shaping.
  'refill' samples until it has `wanted` mixed groups and drops the surplus;
  'drop' samples once and keeps the mixed groups; 'off' keeps all.

  Args:
    draw: returns the `wanted` prompts that start at a cursor.
    sample: returns the group of each prompt.
    cursor: the first prompt's index in the data order.
    wanted: R, and the prompts sampled at a time.
    max_batches: how often 'refill' may sample.

  Raises:
    errors.RunError: `max_batches` were not enough; names the pass rate.
  """
  kept, sampled = [], []
  for _ in range(max_batches if mode == 'refill' else 1):
    prompts = draw(cursor)
    cursor = prompts[-1].cursor + 1
    groups = sample(prompts)
    sampled += groups
    kept += [g for g in groups if mode == 'off' or is_mixed(g)]
    if len(kept) >= wanted:
      break
  else:
    if mode == 'refill':
      raise errors.RunError(_starved(kept, sampled, wanted, max_batches))
  return Rollout(kept[:wanted], sampled, cursor)


def is_mixed(group: Group) -> bool:
  """Whether the verdicts differ; if not, all advantages are 0."""
  return bool(group.accuracy_G.min() != group.accuracy_G.max())


def _starved(kept, sampled, wanted, max_batches):
  rate = np.mean([g.accuracy_G.mean() for g in sampled])
  solved = sum(g.accuracy_G.all() for g in sampled)
  failed = sum(not g.accuracy_G.any() for g in sampled)
  return (
      f'dynamic sampling found {len(kept)} of {wanted} mixed groups in '
      f'max_generation_batches={max_batches} batches: pass rate {rate:.1%}, '
      f'{solved} of {len(sampled)} groups all correct, {failed} all wrong')


def to_group(prompt: Prompt,
             samples: Sequence[tuple[schedule_lib.Completion, str, bool]],
             max_tokens: int) -> Group:
  """The group of a prompt's (completion, text, verdict), in sample order.

  A truncated completion counts as wrong, whatever its text.
  """
  completions, texts, verdicts = zip(*samples)
  token_GT = np.zeros((len(samples), max_tokens), np.int32)
  logp_GT = np.zeros((len(samples), max_tokens), np.float32)
  for row, c in enumerate(completions):
    token_GT[row, :len(c.token_T)] = c.token_T
    logp_GT[row, :len(c.token_T)] = c.logp_T
  length_G = np.array([len(c.token_T) for c in completions], np.int32)
  ended_G = np.array([c.ended for c in completions])
  return Group(prompt, token_GT, logp_GT, length_G, ended_G, texts,
               np.asarray(verdicts, np.float32) * ended_G)


@dataclasses.dataclass
class GroupSampler:
  """Samples G completions of each prompt, and grades them meanwhile.

  Attributes:
    schedule: makes the schedule; called with the weights on the devices, as the
      number of slots may depend on the free memory.
    group_size, max_tokens: G and T.
    check: called after every chunk of decoding; it may raise to stop sampling.
    counts, stats: the grader's counts (no_answer, timeout, died) and the
      schedule's, summed over all calls.
  """
  schedule: Callable[[], schedule_lib.Schedule]
  group_size: int
  max_tokens: int
  grader: grading.Grader
  tokenizer: transformers.PreTrainedTokenizerBase
  timers: progress_lib.Timers
  check: Callable[[], None] = lambda: None
  counts: collections.Counter = dataclasses.field(
      default_factory=collections.Counter)
  stats: schedule_lib.Stats = dataclasses.field(
      default_factory=schedule_lib.Stats)

  def __call__(self, weights: Any, prompts: Sequence[Prompt],
               key: jax.Array) -> list[Group]:
    """The group of each prompt, in the order of the prompts."""
    groups = {group.prompt.cursor: group
              for group in self.stream(weights, prompts, key)}
    return [groups[prompt.cursor] for prompt in prompts]

  def stream(self, weights: Any, prompts: Sequence[Prompt],
             key: jax.Array) -> Iterator[Group]:
    """Yields each prompt's group when it is complete, in any order."""
    graded, members = collections.deque(), collections.defaultdict(dict)
    with futures.ThreadPoolExecutor(1) as thread:
      for completions in self._completions(weights, prompts, key):
        graded.append(thread.submit(self._grade, prompts, completions))
        # Processes may differ in what they have graded by now.
        while graded and jax.process_count() == 1 and graded[0].done():
          yield from self._gather(prompts, members, graded.popleft().result())
      while graded:
        with self.timers('grade'):
          outcome = graded.popleft().result()
        yield from self._gather(prompts, members, outcome)

  def _completions(self, weights, prompts, key):
    """Yields lists of completions as they end; times the sampling."""
    limits = [self.max_tokens] * self.group_size
    requests = [schedule_lib.Request(prompt.token_ids, prompt.cursor, limits)
                for prompt in prompts]
    run = self.schedule().run(weights, requests, key, self.stats)
    while True:
      with self.timers('rollout'):
        completions = next(run, None)
      if completions is None:
        return
      self.check()
      if completions:
        yield completions

  def _grade(self, prompts, completions):
    """(completions, texts, verdicts and counts of this process's share)."""
    texts = self.tokenizer.batch_decode(
        [c.token_T for c in completions], skip_special_tokens=True)
    answers = [prompts[c.request].problem.references for c in completions]
    return completions, texts, *self.grader.grade(
        processes.mine(list(zip(texts, answers))))

  def _gather(self, prompts, members, outcome):
    """Adds graded completions to their groups; yields complete groups."""
    completions, texts, verdicts, counts = outcome
    verdicts = processes.whole(verdicts, len(completions))
    self.counts.update(dict(zip(
        counts, map(int, processes.total(np.array(list(counts.values())))))))
    for completion, text, verdict in zip(completions, texts, verdicts):
      group = members[completion.request]
      group[completion.sample] = completion, text, verdict
      if len(group) == self.group_size:
        del members[completion.request]
        yield to_group(
            prompts[completion.request],
            [group[j] for j in range(self.group_size)], self.max_tokens)
