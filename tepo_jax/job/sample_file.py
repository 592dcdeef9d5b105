"""samples.jsonl, written as groups come, and taken up where it stopped.

A folder belongs to one evaluation: evaluation.json says of which config and
checkpoint. A group's lines are there or not; half a group, as a kill leaves
it, is dropped and sampled again.
"""

import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from tepo_jax import errors
from tepo_jax import files
from tepo_jax.analysis import results

IDENTITY = 'evaluation.json'


class SampleFile:
  """The completions of an evaluation in `folder`."""

  def __init__(self, folder: str | os.PathLike, identity: dict[str, Any]):
    """Checks that the folder is new or this evaluation's; writes nothing.

    Raises:
      errors.InputError: it holds another evaluation or other files.
    """
    self._folder = pathlib.Path(folder)
    self._path = self._folder / results.SAMPLES
    self._identity = json.loads(json.dumps(identity))
    self._groups: dict[str, dict[str, list[dict]]] = {}
    found = self._folder / IDENTITY
    if found.exists():
      self._check(found)
    elif self._folder.is_dir() and any(self._folder.iterdir()):
      raise errors.InputError(
          f'--out={folder}: is there, not empty, and not an evaluation\'s')

  def _check(self, path):
    try:
      saved = json.loads(path.read_text())
    except (OSError, ValueError) as error:
      raise errors.InputError(f'{path}: {error}') from error
    differing = [name for name in saved.keys() | self._identity.keys()
                 if saved.get(name) != self._identity.get(name)]
    if differing:
      raise errors.InputError(
          f'--out={self._folder} holds another evaluation: '
          f'{", ".join(sorted(differing))} differ')

  def open(self, samples: Mapping[str, int]) -> None:
    """Makes the folder, or reads what is there.

    samples: {name of an evaluation: its completions a problem}.
    """
    self._folder.mkdir(parents=True, exist_ok=True)
    self._groups = {name: {} for name in samples}
    files.replace_text(
        self._folder / IDENTITY,
        json.dumps(self._identity, indent=2, sort_keys=True) + '\n')
    if self._path.exists():
      for line in _whole_lines(self._path):
        self._groups[line['set']].setdefault(line['id'], []).append(line)
      self._groups = {
          name: {problem: lines for problem, lines in groups.items()
                 if len(lines) == samples[name]}
          for name, groups in self._groups.items()}
      self._rewrite()

  def done(self, name: str) -> set[str]:
    """Ids of the problems that this evaluation has its completions of."""
    return set(self._groups[name])

  def add(self, lines: Sequence[dict]) -> None:
    """One group's lines, on disk when this returns."""
    self._groups[lines[0]['set']][lines[0]['id']] = list(lines)
    with self._path.open('a') as file:
      file.write(_text(lines))

  def finish(self, order: Mapping[str, Sequence[str]]) -> dict[str, list[dict]]:
    """The lines of each evaluation; the file gets the order of the problems."""
    self._groups = {name: {problem: self._groups[name][problem]
                           for problem in order[name]} for name in order}
    self._rewrite()
    return {name: sum(groups.values(), [])
            for name, groups in self._groups.items()}

  def _rewrite(self):
    files.replace_text(self._path, ''.join(
        _text(lines) for groups in self._groups.values()
        for lines in groups.values()))


def _whole_lines(path):
  """Parsed lines; the last is left out if it was cut off."""
  for line in path.read_text().splitlines(keepends=True):
    if line.endswith('\n'):
      yield json.loads(line)


def _text(lines):
  return ''.join(json.dumps(line) + '\n' for line in lines)
