"""Runs evaluation sets under their decodings."""

import collections
from collections.abc import Callable, Iterator, Sequence
import dataclasses
from typing import Any

import jax

from tepo_jax import errors
from tepo_jax.data import datasets
from tepo_jax.job import results as results_lib
from tepo_jax.job import session as session_lib
from tepo_jax.rollout import draw
from tepo_jax.rollout import groups as groups_lib
from tepo_jax.rollout import sampler as sampler_lib
from tepo_jax.runtime import progress


@dataclasses.dataclass(frozen=True)
class Evaluation:
  """One set under one decoding, named 'SET' or 'SET/greedy'.

  Attributes:
    samples: k, completions per problem.
    is_first: whether averages over sets use this decoding of the set.
    style: how the prompt template marks answers.
    too_long: how many problems of the set were skipped for their prompts.
  """
  name: str
  prompts: list[groups_lib.Prompt]
  sampler: sampler_lib.GroupSampler
  samples: int
  is_first: bool
  style: str
  too_long: int

  def run(self, params: Any, key: jax.Array,
          check: Callable[[], None] = lambda: None
          ) -> tuple[list[groups_lib.Group], dict[str, float]]:
    """Samples a group per prompt; returns the groups and their metrics.

    `params` are in the decode layout. check: see `GroupSampler.stream`.
    """
    groups, counts = [], collections.Counter()
    for some, troubles in self.stream(params, key, self.prompts, check):
      groups += some
      counts.update(troubles)
    groups.sort(key=lambda group: group.prompt.prompt_id)
    summary = results_lib.summarize(
        sample_lines(self.name, groups), self.style, self.too_long)
    return groups, results_lib.brief(summary) | counts

  def stream(self, params: Any, key: jax.Array,
             todo: Sequence[groups_lib.Prompt],
             check: Callable[[], None] = lambda: None
             ) -> Iterator[tuple[list[groups_lib.Group], dict[str, int]]]:
    """Yields groups of some of the prompts as they finish, in any order, and
    the grader's timeouts and dead workers since the last.

    Which ones these are does not change a completion.

    Raises:
      errors.RunError: the model's logits are not finite; names the problem.
    """
    if not todo:
      return
    try:
      with progress.counting(self.name, len(self.prompts),
                             len(self.prompts) - len(todo)) as advance:
        for groups, counts in self.sampler.stream(params, todo, key, check):
          advance(len(groups))
          yield groups, {name: counts[name] for name in ('timeout', 'died')}
    except groups_lib.NonFiniteError as error:
      problem = self.prompts[error.prompt_id].problem
      raise errors.RunError(f'{self.name}, {problem.id}: {error}') from error


def prepare(session: session_lib.Session) -> list[Evaluation]:
  """The evaluations of `config.eval`, in its order.

  They are called by `datasets.short_names`.
  """
  session.check_positions('eval')
  settings, style = session.config.eval, session.template.style
  if settings.stop_after_boxed and style != 'boxed':
    raise errors.InputError(
        f'config.eval.stop_after_boxed: with a template of the style {style} '
        r'the answer comes after \boxed{…}')
  evaluations = []
  names = datasets.short_names(settings.sets)
  for name, source in zip(names, settings.sets):
    prompts = session.evaluation_prompts(source)
    prefix = groups_lib.shared_prefix(prompts)
    for index, (samples, temperature) in enumerate(
        _decodings(settings, source)):
      evaluations.append(Evaluation(
          name if temperature > 0 else f'{name}/greedy', prompts,
          session.sampler(
              prompts=len(prompts), samples=samples,
              max_tokens=settings.max_tokens,
              decoding=draw.Decoding(temperature, settings.top_k,
                                     settings.top_p)
              if temperature > 0 else draw.Decoding(0.0),
              stop_after_boxed=settings.stop_after_boxed, prefix=prefix),
          samples, index == 0, style,
          session.too_long[source]))
  return evaluations


def _decodings(settings, name):
  """(samples, temperature) pairs: the main decoding, perhaps a greedy one."""
  samples, temperature = datasets.decoding(
      name, settings.samples, settings.temperature)
  greedy = [(1, 0.0)] if settings.greedy and temperature > 0 else []
  return [(samples, temperature), *greedy]


def sample_lines(name: str, groups: list[groups_lib.Group]) -> list[dict]:
  """The groups' completions as JSON objects, for samples.jsonl."""
  lines = []
  for g in groups:
    problem = g.prompt.problem
    known = {field: value for field in ('level', 'subject')
             if (value := getattr(problem, field)) is not None}
    lines += [
        {'set': name, 'id': problem.id, 'problem': problem.problem,
         'answers': problem.answers, 'sample': j, 'completion': text,
         'correct': bool(g.accuracy_G[j]), 'tokens': int(g.length_G[j]),
         'truncated': not g.ended_G[j], **known}
        for j, text in enumerate(g.text_G)]
  return lines
