"""Samples groups of completions and grades them meanwhile.

Axes: G samples of a prompt · T tokens of a completion.
"""

import collections
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
import dataclasses
from typing import Any

import jax
import numpy as np
import transformers

from tepo_jax.rollout import groups as groups_lib
from tepo_jax.rollout import requests as requests_lib
from tepo_jax.rollout import schedule as schedule_lib
from tepo_jax.rollout import selection as selection_lib
from tepo_jax.runtime import processes
from tepo_jax.runtime import progress as progress_lib
from tepo_jax import grading
from tepo_jax.rollout import reward as reward_lib


@dataclasses.dataclass
class GroupSampler:
  """Samples G completions of each prompt, and grades them meanwhile.

  Attributes:
    schedule: makes the schedule; called with the weights on the devices, as the
      number of slots may depend on the free memory.
    group_size, max_tokens: G and T.
    check: called after every chunk of decoding; it may raise to stop sampling.
    scorer: calls the reward functions; None: there are none but accuracy.
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
  scorer: reward_lib.Scorer | None = None
  counts: collections.Counter = dataclasses.field(
      default_factory=collections.Counter)
  stats: schedule_lib.Stats = dataclasses.field(
      default_factory=schedule_lib.Stats)

  def stream(self, weights: Any, prompts: Sequence[groups_lib.Prompt],
             key: jax.Array) -> Iterator[groups_lib.Group]:
    """Yields each prompt's group when it is complete, in any order."""
    with _Grading(self) as graded:
      queue = requests_lib.Queue([graded.request(p) for p in prompts])
      for completions in self._completions(weights, queue, key):
        # Several processes may differ in what they have graded by now: they
        # wait for all but this chunk's completions.
        yield from graded.groups(
            graded.verdicts(wait=jax.process_count() > 1))
        graded.submit(completions)
      yield from graded.groups(graded.verdicts())

  def select(self, weights: Any, prompt: Callable[[int], groups_lib.Prompt],
             selection: selection_lib.Selection, key: jax.Array
             ) -> selection_lib.Rollout:
    """Samples what a selection asks for; returns what it selects.

    prompt: returns the prompt at an index in the data order.
    """
    with _Grading(self) as graded, _Scoring(self) as scored:
      source = _SelectedPrompts(prompt, selection, graded, scored)
      for completions in self._completions(weights, source, key):
        graded.submit(completions)
      return selection.rollout(scored.groups())

  def _completions(self, weights, source, key):
    """Yields lists of completions as they end; times the sampling."""
    run = self.schedule().run(weights, source, key, self.stats)
    while True:
      with self.timers('rollout'):
        completions = next(run, None)
      if completions is None:
        return
      self.check()
      yield completions


class _Grading:
  """Completions that are being graded in a thread, and groups not complete."""

  def __init__(self, sampler):
    self._sampler = sampler
    self._thread = futures.ThreadPoolExecutor(1)
    self._pending = collections.deque()  # of (completions, future), in order
    self._prompts = {}  # by cursor
    self._members = collections.defaultdict(dict)  # by cursor, then by sample

  def __enter__(self):
    return self

  def __exit__(self, *exception):
    self._thread.shutdown(cancel_futures=True)

  def request(self, prompt):
    """The request for a prompt's G samples; remembers the prompt."""
    self._prompts[prompt.cursor] = prompt
    return requests_lib.Request(
        prompt.token_ids, prompt.cursor,
        [self._sampler.max_tokens] * self._sampler.group_size)

  def submit(self, completions):
    """Starts to grade them."""
    if completions:
      self._pending.append(
          (completions, self._thread.submit(self._grade, completions)))

  def _grade(self, completions):
    """(texts, verdicts and counts of this process's share)."""
    texts = self._sampler.tokenizer.batch_decode(
        [c.token_T for c in completions], skip_special_tokens=True)
    answers = [self._prompts[c.request.prompt_id].problem.references
               for c in completions]
    return texts, *self._sampler.grader.grade(
        processes.mine(list(zip(texts, answers))))

  def verdicts(self, wait=True):
    """Yields (completion, text, verdict) in the order of submission.

    wait: for all that were submitted; all processes must call it alike.
    """
    while self._pending and (wait or self._pending[0][1].done()):
      completions, future = self._pending.popleft()
      with self._sampler.timers('grade'):
        texts, verdicts, counts = future.result()
      verdicts = processes.whole(verdicts, len(completions))
      self._sampler.counts.update(dict(zip(
          counts, map(int, processes.total(np.array(list(counts.values())))))))
      yield from zip(completions, texts, verdicts)

  def groups(self, verdicts):
    """Adds samples to their groups; yields the groups that become complete."""
    for completion, text, verdict in verdicts:
      cursor = completion.request.prompt_id
      group = self._members[cursor]
      group[completion.sample] = completion, text, verdict
      if len(group) == self._sampler.group_size:
        del self._members[cursor]
        yield groups_lib.to_group(
            self._prompts[cursor], [group[j] for j in range(len(group))],
            self._sampler.max_tokens)


class _Scoring:
  """Complete groups, and a thread in which reward functions score them.

  Each process scores its share of the groups.
  """

  def __init__(self, sampler):
    self._scorer, self._timers = sampler.scorer, sampler.timers
    self._thread = futures.ThreadPoolExecutor(1)
    self._pending = []  # of (groups, future or None)

  def __enter__(self):
    return self

  def __exit__(self, *exception):
    self._thread.shutdown(cancel_futures=True)

  def submit(self, groups):
    """Starts to score them."""
    future = None
    if self._scorer is not None:
      future = self._thread.submit(self._scorer.score, [
          _to_score(g) for g in groups if _is_mine(g)])
    self._pending.append((groups, future))

  def groups(self):
    """Waits for all groups, and returns them with their scores."""
    scored = []
    for groups, future in self._pending:
      if future is not None:
        with self._timers('reward'):
          groups = _with_scores(groups, self._scorer.names, future.result())
      scored += groups
    return scored


def _is_mine(group):
  """Whether this process scores the group."""
  return processes.is_mine(group.prompt.cursor)


def _to_score(group):
  """What `reward_lib.Scorer.score` takes."""
  problem = group.prompt.problem
  return problem.id, (group.text_G, problem.columns, group.length_G.tolist(),
                      group.ended_G.tolist())


def _with_scores(groups, names, share):
  """The groups with their scores; `share`: of this process's groups."""
  score_BFG = np.zeros(
      (len(groups), len(names), len(groups[0].text_G)), np.float32)
  mine = [i for i, group in enumerate(groups) if _is_mine(group)]
  for i, scores in zip(mine, share, strict=True):
    score_BFG[i] = [scores[name] for name in names]
  score_BFG = processes.total(score_BFG)
  return [dataclasses.replace(group, scores=dict(zip(names, score_FG)))
          for group, score_FG in zip(groups, score_BFG)]


class _SelectedPrompts:
  """The source of a schedule that samples what a selection asks for.

  Before each chunk of decoding it waits for the verdicts on all completions
  but those of the last chunk, which are graded while the next one is decoded.
  So what it gives does not depend on how fast they are graded.
  """

  def __init__(self, prompt, selection, graded, scored):
    self._prompt, self._selection = prompt, selection
    self._graded, self._scored = graded, scored

  def take(self, samples):
    """See requests.Source."""
    verdicts = list(self._graded.verdicts())
    for completion, _, verdict in verdicts:
      self._selection.add(completion.request.prompt_id,
                          groups_lib.is_correct(completion, verdict))
    if groups := list(self._graded.groups(verdicts)):
      self._scored.submit(groups)
    return [self._graded.request(self._prompt(cursor))
            for cursor in self._selection.take(samples)]

  def wanted(self, prompt_id):
    """See requests.Source."""
    return self._selection.wanted(prompt_id)
