"""The samples of `evaluate` on disk, by which a killed evaluation resumes."""

from collections.abc import Mapping, Sequence
import json
import os
from typing import Any

from tepo_jax import errors
from tepo_jax.job import results as results_lib
from tepo_jax.policy.huggingface import tensor_files
from tepo_jax.runtime import files
from tepo_jax.runtime import lock as lock_lib

IDENTITY = 'evaluation.json'  # in an evaluation's folder


def saved_date(folder: str | os.PathLike) -> str | None:
  """data.date of the evaluation that a folder holds, if it does."""
  return read_identity(folder).get('data.date')


def read_identity(folder: str | os.PathLike) -> dict[str, Any]:
  """The settings and facts of the evaluation that a folder holds; {} if none.

  Raises:
    errors.InputError: the file is damaged.
  """
  path = files.path(folder) / IDENTITY
  return tensor_files.read_json(path) if path.is_file() else {}


class SampleFile:
  """The samples of an evaluation on disk; complete groups survive a kill."""

  def __init__(self, folder: str | os.PathLike, identity: dict[str, Any]):
    """`identity` holds every setting that determines the samples."""
    self._folder = files.path(folder)
    self._file = files.GrowingFile(self._folder / results_lib.SAMPLES)
    self._identity = json.loads(json.dumps(identity))
    self._groups: dict[str, dict[str, list[dict]]] = {}

  def check(self, has_facts: bool = False) -> None:
    """Checks that the folder is new or this evaluation's; writes nothing.

    has_facts: whether the identity has those of `open`, which the folder's has.

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
    saved = read_identity(self._folder)
    names = self._identity.keys() | (saved.keys() if has_facts else set())
    differing = [name for name in names
                 if saved.get(name) != self._identity.get(name)]
    if differing:
      raise errors.InputError(
          f'--out={self._folder} holds another evaluation: '
          f'{", ".join(sorted(differing))} differ')

  def open(self, samples: Mapping[str, int], facts: Mapping[str, Any]
           ) -> None:
    """Makes the folder, or reads its complete groups and deletes others.

    The caller holds the folder's lock. samples: {name of an evaluation: its
    completions per problem}. facts: of the model and the data, which become
    part of the identity.

    Raises:
      errors.InputError: another evaluation has taken the folder since, the
        facts differ, or a line is no sample.
    """
    self._identity |= json.loads(json.dumps(facts))
    self.check(has_facts=True)
    self._folder.mkdir(parents=True, exist_ok=True)
    self._groups = {name: {} for name in samples}
    files.replace_text(
        self._folder / IDENTITY,
        json.dumps(self._identity, indent=2, sort_keys=True) + '\n')
    if self._file.exists():
      for number, text in enumerate(
          self._file.read().splitlines(keepends=True), 1):
        if not text.endswith('\n'):
          break  # the last line was cut off
        self._take(number, text)
      self._groups = {
          name: {problem: lines for problem, lines in groups.items()
                 if len(lines) == samples[name]}
          for name, groups in self._groups.items()}
      self._rewrite()

  def _take(self, number, text):
    """Adds a line of the file to its group."""
    try:
      line = json.loads(text)
      self._groups[line['set']].setdefault(line['id'], []).append(line)
    except (KeyError, RecursionError, TypeError, ValueError) as error:
      raise errors.InputError(
          f'{self._file.path}: line {number} is no sample of this evaluation: '
          f'{text[:60]!r}; delete that line') from error

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
