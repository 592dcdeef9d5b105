"""Rollout steps under dynamic sampling, with given lengths and verdicts.

They run the sampler's own schedule; a table says how long each completion is,
and whether it is correct. `stream` is what training does. `batches` is what it
is compared with: it samples R prompts at a time, each batch to its last token,
until it has R mixed groups. Both end with the same groups. `carried` makes
several steps, each of which continues what the one before has left.

Axes: Q prompts · G samples of a prompt.
"""

import collections
from collections.abc import Iterator
import dataclasses
from typing import Any, NamedTuple

import jax
import numpy as np

from tepo_jax.rollout import carry
from tepo_jax.rollout import groups as groups_lib
from tepo_jax.rollout import schedule as schedule_lib
from tepo_jax.rollout import selection as selection_lib
from tepo_jax.tools import workload as workload_lib


class Table(NamedTuple):
  """The length of, and the verdict on, every completion of equal prompts.

  limit: what requests state as the most tokens of every completion; None: the
  lengths, which this forces on a model.
  """
  token_P: np.ndarray
  length_QG: np.ndarray
  correct_QG: np.ndarray
  limit: int | None = None

  def request(self, prompt_id: int) -> groups_lib.Request:
    """The request of prompt `prompt_id`."""
    length_G = self.length_QG[prompt_id]
    return groups_lib.Request(
        self.token_P, prompt_id,
        length_G if self.limit is None else np.full_like(length_G, self.limit))

  def is_mixed(self, prompt_id: int) -> bool:
    """Whether the verdicts on a prompt's completions differ."""
    correct_G = self.correct_QG[prompt_id]
    return bool(correct_G.min() != correct_G.max())


def table(workload: workload_lib.Workload, batches: int, mixed_share: float
          ) -> Table:
  """A table of `batches` times the workload's prompts.

  Lengths do not depend on verdicts; a group is mixed with a chance of
  `mixed_share`, and then at least one of its samples is right, one wrong.
  """
  prompts, samples = batches * workload.prompts, workload.samples
  generator = np.random.default_rng(1)
  mixed_Q = generator.random(prompts) < mixed_share
  one_verdict_Q = generator.random(prompts) < 0.5
  right_Q = generator.integers(1, max(2, samples), prompts)
  rank_QG = np.argsort(generator.random((prompts, samples)))
  return Table(
      np.zeros(workload.prompt_tokens, np.int32),
      workload.lengths(prompts * samples).reshape(prompts, samples),
      np.where(mixed_Q[:, None], rank_QG < right_Q[:, None],
               one_verdict_Q[:, None]))


class _Stream:
  """The requests of `stream`."""

  def __init__(self, known, selection):
    self._known, self._selection = known, selection

  def take(self, samples):
    """See `groups.Requests`."""
    return [self._known.request(prompt_id)
            for prompt_id in self._selection.take(samples)]

  def wanted(self, prompt_id):
    """See `groups.Requests`."""
    return self._selection.wanted(prompt_id)

  def see(self, completions):
    """Gives the selection the verdicts on completions."""
    for c in completions:
      correct_G = self._known.correct_QG[c.request.prompt_id]
      self._selection.add(c.request.prompt_id, bool(correct_G[c.sample]))


def stream(schedule: schedule_lib.Schedule, weights: Any, known: Table,
           wanted: int, key: jax.Array, stats: schedule_lib.Stats
           ) -> Iterator[list[groups_lib.Completion]]:
  """Yields the completions of a step that needs `wanted` mixed groups."""
  prompts, samples = known.length_QG.shape
  requests = _Stream(known, selection_lib.Selection(
      cursor=0, wanted=wanted, group_size=samples, mode='refill',
      max_batches=prompts // wanted))
  for completions in schedule.run(weights, requests, key, stats):
    requests.see(completions)
    yield completions


def batches(schedule: schedule_lib.Schedule, weights: Any, known: Table,
            wanted: int, key: jax.Array, stats: schedule_lib.Stats
            ) -> Iterator[list[groups_lib.Completion]]:
  """Yields the same from whole batches of `wanted` prompts."""
  mixed = 0
  for start in range(0, len(known.length_QG), wanted):
    batch = range(start, start + wanted)
    yield from schedule.run(
        weights, groups_lib.Queue(list(map(known.request, batch))), key, stats)
    mixed += sum(map(known.is_mixed, batch))
    if mixed >= wanted:
      return


class _Carried(_Stream):
  """The requests of a step of `carried`."""

  def __init__(self, known, selection):
    super().__init__(known, selection)
    self._flight = carry.InFlight(selection)
    self._seen = collections.Counter()  # complete samples by prompt_id
    for each in selection.carried:
      prompt = groups_lib.Prompt(
          None, tuple(known.request(each.prompt_id).token_ids), each.prompt_id)
      self.see(each.completions(prompt))
      self._flight.first += each.requests(prompt, known.limit)

  def take(self, samples):
    return self._flight.take(samples, self._new)

  def _new(self, samples):
    return [dataclasses.replace(request, born=self._selection.step)
            for request in super().take(samples)]

  def see(self, completions):
    super().see(completions)
    for completion in completions:
      self._flight.note(completion, completion.ended)
      self._seen[completion.request.prompt_id] += 1

  def stopped(self, completion):
    """See `groups.Requests`."""
    self._flight.note(completion, None)

  def end(self, every):
    """The groups to train on, and those that are carried; every: whether all
    complete groups are trained on, not only the mixed ones."""
    leaving = [prompt_id for prompt_id, count in self._seen.items()
               if count == self._selection.size
               and self._selection.leaves(prompt_id)]
    carried = self._flight.carried(leaving)
    trained = self._flight.carried({each.prompt_id for each in carried} | {
        prompt_id for prompt_id in leaving
        if not (every or self._known.is_mixed(prompt_id))})
    return trained, carried


def carried(schedule: schedule_lib.Schedule, known: Table, wanted: int,
            mode: str, max_versions: int, steps: int) -> Iterator[np.ndarray]:
  """Makes steps of `wanted` groups in which completions are carried; yields of
  each the age of the tokens that it trains on, in rollout steps.

  mode: of `selection.Selection`. max_versions: of `carry.Selection`. The table
  must have a limit; a step with 'refill' takes at most 1 / `steps` of its
  prompts.
  """
  prompts, samples = known.length_QG.shape
  left, cursor = (), 0
  for step in range(1, steps + 1):
    selection = carry.Selection(
        step=step, max_versions=max_versions, carried=left, cursor=cursor,
        wanted=wanted, group_size=samples, mode=mode,
        max_batches=prompts // wanted // steps)
    requests = _Carried(known, selection)
    for completions in schedule.run(
        None, requests, None, schedule_lib.Stats()):
      requests.see(completions)
    trained, left = requests.end(mode == 'off')
    cursor = selection.end(())
    yield step - np.concatenate([np.zeros(0, int), *(
        drawn.version_T for group in trained for drawn in group.samples)])
