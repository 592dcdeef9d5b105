"""Prompts in, graded groups out: the host's side of sampling.

Axes: G samples a prompt · T completion slots.
"""

import collections
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
import dataclasses
from typing import Any

import jax
import numpy as np
import transformers

from tepo_jax.rollout import collect
from tepo_jax.rollout import schedule as schedule_lib
from tepo_jax.runtime import metrics
from tepo_jax.runtime import processes
from tepo_jax.tasks import grading


@dataclasses.dataclass
class GroupSampler:
  """Samples G completions of each prompt, and grades them meanwhile.

  Attributes:
    schedule: makes the schedule, when the weights are on the devices: how
      many slots there are may depend on the memory that is left.
    group_size, max_tokens: G and T.
    grader, tokenizer, timers: what else it takes.
    check: called after every chunk of decoding; may raise, to give up.
    counts: of the grader (no_answer, timeout, died), added up.
    stats: of the schedule, added up.
  """
  schedule: Callable[[], schedule_lib.Schedule]
  group_size: int
  max_tokens: int
  grader: grading.Grader
  tokenizer: transformers.PreTrainedTokenizerBase
  timers: metrics.Timers
  check: Callable[[], None] = lambda: None
  counts: collections.Counter = dataclasses.field(
      default_factory=collections.Counter)
  stats: schedule_lib.Stats = dataclasses.field(
      default_factory=schedule_lib.Stats)

  def __call__(self, weights: Any, prompts: Sequence[collect.Prompt],
               key: jax.Array) -> list[collect.Group]:
    """A group of each prompt, in their order."""
    groups = {group.prompt.cursor: group
              for group in self.stream(weights, prompts, key)}
    return [groups[prompt.cursor] for prompt in prompts]

  def stream(self, weights: Any, prompts: Sequence[collect.Prompt],
             key: jax.Array) -> Iterator[collect.Group]:
    """The prompts' groups as they are done, in any order."""
    graded, members = collections.deque(), collections.defaultdict(dict)
    with futures.ThreadPoolExecutor(1) as thread:
      for completions in self._completions(weights, prompts, key):
        graded.append(thread.submit(self._grade, prompts, completions))
        # What is done by now may differ between processes.
        while graded and jax.process_count() == 1 and graded[0].done():
          yield from self._gather(prompts, members, graded.popleft().result())
      while graded:
        with self.timers('grade'):
          outcome = graded.popleft().result()
        yield from self._gather(prompts, members, outcome)

  def _completions(self, weights, prompts, key):
    """Lists of completions, as they end; timed."""
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
    """The completions, their texts, and what the grader says of our share."""
    texts = self.tokenizer.batch_decode(
        [c.token_T for c in completions], skip_special_tokens=True)
    answers = [prompts[c.request].problem.golds for c in completions]
    return completions, texts, *self.grader.grade(
        processes.mine(list(zip(texts, answers))))

  def _gather(self, prompts, members, outcome):
    """Adds what was graded to its groups; those that are whole now."""
    completions, texts, verdicts, counts = outcome
    verdicts = processes.whole(verdicts, len(completions))
    self.counts.update(dict(zip(
        counts, map(int, processes.total(np.array(list(counts.values())))))))
    for completion, text, verdict in zip(completions, texts, verdicts):
      group = members[completion.request]
      group[completion.sample] = completion, text, verdict
      if len(group) == self.group_size:
        del members[completion.request]
        yield collect.to_group(
            prompts[completion.request],
            [group[j] for j in range(self.group_size)], self.max_tokens)
