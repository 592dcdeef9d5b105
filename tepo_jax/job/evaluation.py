"""Runs evaluation sets under their decodings; keeps their samples on disk."""

import collections
from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
import json
import os
from typing import Any

import jax

from tepo_jax import errors
from tepo_jax.data import datasets
from tepo_jax.job import results as results_lib
from tepo_jax.job import session as session_lib
from tepo_jax.job import texts as texts_lib
from tepo_jax.rollout import draw
from tepo_jax.rollout import groups as groups_lib
from tepo_jax.rollout import sampler as sampler_lib
from tepo_jax.runtime import files
from tepo_jax.runtime import lock as lock_lib
from tepo_jax.runtime import progress

IDENTITY = 'evaluation.json'  # in an evaluation's folder
TROUBLES = 'timeout', 'died'  # of the grader's counts


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

  def metrics(self) -> set[str]:
    """The names of the metrics that `run` returns."""
    line = dict(id='', completion='', correct=False, tokens=0, truncated=False)
    return {*TROUBLES, *results_lib.brief(results_lib.summarize(
        [line | {'sample': j} for j in range(self.samples)], self.style))}

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
          yield groups, {name: counts[name] for name in TROUBLES}
    except groups_lib.NonFiniteError as error:
      problem = self.prompts[error.prompt_id].problem
      raise errors.RunError(f'{self.name}, {problem.id}: {error}') from error


def prepare(session: session_lib.Session) -> list[Evaluation]:
  """The evaluations of `config.eval`, in its order.

  They are called by `datasets.short_names`.
  """
  session.check_evaluation()
  settings = session.config.eval
  evaluations = []
  names = datasets.short_names(settings.sets)
  for name, source in zip(names, settings.sets):
    prompts = session.evaluation_prompts(source)
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
              stop_after_boxed=settings.stop_after_boxed),
          samples, index == 0, session.template.style,
          session.too_long[source]))
  return evaluations


def check_published(metric: str | None, evaluations: Sequence[Evaluation],
                    texts: Sequence[texts_lib.Text]) -> None:
  """Refuses a `config.published.metric` that no evaluation records.

  Raises:
    errors.InputError: names the metrics that are recorded in its place.
  """
  if metric is None or not metric.startswith('eval/'):
    return
  recorded = {f'eval/{text.name}/{results_lib.NATS}' for text in texts} | {
      f'eval/{item.name}/{name}' for item in evaluations
      for name in item.metrics()}
  if metric not in recorded:
    main = sorted(name for name in recorded if '/avg@' in name) or ['none']
    raise errors.InputError(
        f'config.published.metric={metric}: no evaluation of this run records '
        f'it; accuracies that are recorded: {", ".join(main)}')


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


def saved_date(folder: str | os.PathLike) -> str | None:
  """data.date of the evaluation that a folder holds, if it does."""
  path = files.path(folder) / IDENTITY
  saved = _read_identity(path) if path.is_file() else {}
  return saved['data.date'] if 'data.date' in saved else None


def _read_identity(path):
  try:
    saved = json.loads(path.read_text())
  except (OSError, RecursionError, ValueError) as error:
    raise errors.InputError(f'{path}: {error}') from error
  if not isinstance(saved, dict):
    raise errors.InputError(f'{path}: not a JSON object')
  return saved


class SampleFile:
  """The samples of an evaluation on disk; complete groups survive a kill."""

  def __init__(self, folder: str | os.PathLike, identity: dict[str, Any]):
    """`identity` holds every setting that determines the samples."""
    self._folder = files.path(folder)
    self._file = files.GrowingFile(self._folder / results_lib.SAMPLES)
    self._identity = json.loads(json.dumps(identity))
    self._groups: dict[str, dict[str, list[dict]]] = {}

  def check(self) -> None:
    """Checks that the folder is new or this evaluation's; writes nothing.

    Raises:
      errors.InputError: it holds another evaluation or other files.
    """
    path = self._folder / IDENTITY
    if not path.exists():
      if self._folder.is_dir() and any(
          entry.name != lock_lib.FILE for entry in self._folder.iterdir()):
        raise errors.InputError(f'--out={self._folder}: not empty, and not the '
                                'folder of an evaluation')
      return
    saved = _read_identity(path)
    differing = [name for name in saved.keys() | self._identity.keys()
                 if saved.get(name) != self._identity.get(name)]
    if differing:
      raise errors.InputError(
          f'--out={self._folder} holds another evaluation: '
          f'{", ".join(sorted(differing))} differ')

  def open(self, samples: Mapping[str, int]) -> None:
    """Makes the folder, or reads its complete groups and deletes others.

    The caller holds the folder's lock. samples: {name of an evaluation: its
    completions per problem}.

    Raises:
      errors.InputError: another evaluation has taken the folder since.
    """
    self.check()
    self._folder.mkdir(parents=True, exist_ok=True)
    self._groups = {name: {} for name in samples}
    files.replace_text(
        self._folder / IDENTITY,
        json.dumps(self._identity, indent=2, sort_keys=True) + '\n')
    if self._file.exists():
      for text in self._file.read().splitlines(keepends=True):
        if not text.endswith('\n'):
          break  # the last line was cut off
        line = json.loads(text)
        self._groups[line['set']].setdefault(line['id'], []).append(line)
      self._groups = {
          name: {problem: lines for problem, lines in groups.items()
                 if len(lines) == samples[name]}
          for name, groups in self._groups.items()}
      self._rewrite()

  def done(self, name: str) -> set[str]:
    """Ids of the problems whose completions the evaluation `name` has; none if
    this process has not opened the file."""
    return set(self._groups.get(name, ()))

  def add(self, lines: Sequence[dict]) -> None:
    """Appends one group's lines; they are on disk when this returns, in a
    bucket some seconds later."""
    self._groups[lines[0]['set']][lines[0]['id']] = list(lines)
    self._file.append(_lines_text(lines))

  def flush(self) -> None:
    """Uploads what a bucket does not have yet."""
    self._file.flush()

  def finish(self, order: Mapping[str, Sequence[str]]) -> dict[str, list[dict]]:
    """Sorts the file by problem; returns the lines of each evaluation.

    order: {name of an evaluation: ids of its problems}.
    """
    self._groups = {name: {problem: self._groups[name][problem]
                           for problem in order[name]} for name in order}
    self._rewrite()
    return {name: sum(groups.values(), [])
            for name, groups in self._groups.items()}

  def _rewrite(self):
    self._file.replace(''.join(
        _lines_text(lines) for groups in self._groups.values()
        for lines in groups.values()))


def _lines_text(lines):
  return ''.join(json.dumps(line) + '\n' for line in lines)
