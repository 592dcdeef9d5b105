"""A run's folder, and whose it is: the config saved in it."""

import hashlib
import json
import math
import os
import pathlib
import sys
from typing import Any

import ml_collections

from tepo_jax import errors
from tepo_jax.runtime import files

# What may differ between an interrupted run and its continuation.
_CONTINUABLE = frozenset({'steps', 'compute.cache', 'profile.steps'})

# How a run is computed. What it computes is the same but for rounding: a
# continuation may change these too, and says so.
_EXECUTION = frozenset({
    'mesh.data', 'mesh.fsdp', 'mesh.tensor', 'rollout.slots', 'rollout.chunk',
    'train.microbatch_tokens', 'train.attention_room', 'train.chunk_size',
    'compute.attention', 'compute.remat', 'compute.unroll', 'grading.workers'})


def field_names(config: ml_collections.ConfigDict) -> dict[str, Any]:
  """{'optimizer.learning_rate': 1e-6, ...}: dotted names of all the fields."""
  fields = {}
  for name, value in config.items():
    if isinstance(value, ml_collections.ConfigDict):
      inner = field_names(value)
      fields |= {f'{name}.{key}': inner[key] for key in inner}
    else:
      fields[name] = value
  return fields


def digest(config: ml_collections.ConfigDict) -> str:
  """SHA-256 of the fields that make a run what it is, sorted.

  All of them but `_CONTINUABLE` and `_EXECUTION`: a run that goes on for
  longer, is traced, or goes on on another mesh is the same run.
  """
  fields = {name: value for name, value in field_names(config).items()
            if name not in _CONTINUABLE | _EXECUTION}
  return hashlib.sha256(
      json.dumps(fields, sort_keys=True).encode()).hexdigest()


def save_config(config: ml_collections.ConfigDict,
                workdir: str | os.PathLike) -> None:
  """Writes DIR/config.json: every field, sorted, replaced by rename.

  JSON has no infinity: it is the text 'Infinity', which `read_config` takes.
  """
  text = json.dumps(_for_json(config.to_dict()), indent=2, sort_keys=True,
                    allow_nan=False)
  files.replace_text(pathlib.Path(workdir) / 'config.json', text + '\n')


def read_config(workdir: str | os.PathLike) -> ml_collections.ConfigDict:
  """The config that a run saved in its workdir, locked.

  Raises:
    InputError: there is no DIR/config.json or it is not a JSON object.
  """
  path = pathlib.Path(workdir) / 'config.json'
  try:
    saved = json.loads(path.read_text('utf-8'))
  except FileNotFoundError as error:
    raise errors.InputError(
        f'{workdir} is not the workdir of a run: no config.json') from error
  except (OSError, ValueError) as error:
    raise errors.InputError(f'{path}: {error}') from error
  if not isinstance(saved, dict):
    raise errors.InputError(f'{path}: not a JSON object')
  return ml_collections.ConfigDict(_from_json(saved)).lock()


def claim(config: ml_collections.ConfigDict,
          workdir: str | os.PathLike) -> None:
  """Makes DIR the workdir of this config, or checks that it is.

  Says on stderr how the run is computed now, where that has changed.

  Raises:
    InputError: DIR holds another config (the fields are named) or files that
      are no run's. Nothing in it is changed then.
  """
  workdir = pathlib.Path(workdir)
  try:
    workdir.mkdir(parents=True, exist_ok=True)
    found = {entry.name for entry in workdir.iterdir()}
    if 'config.json' in found:
      _check_same_run(config, workdir)
    elif found - {'config.json.tmp'}:
      raise errors.InputError(
          f'--workdir={workdir}: holds {listed(sorted(found))} and no '
          'config.json, so it is not the folder of a run; choose another')
    save_config(config, workdir)
  except OSError as error:
    raise errors.InputError(
        f'--workdir={workdir}: {error.strerror or error}') from error


def new_folder(path: str) -> pathlib.Path:
  """A folder of that name that is to be made; nothing is made yet.

  Raises:
    InputError: it holds something already, or cannot be made.
  """
  folder = pathlib.Path(path)
  try:
    if folder.is_dir() and any(folder.iterdir()):
      raise errors.InputError(f'--out={path}: is there and not empty')
    there = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    if not there.is_dir():
      raise errors.InputError(f'--out={path}: {there} is not a folder')
    if not os.access(there, os.W_OK):
      raise errors.InputError(f'--out={path}: no permission to write there')
  except OSError as error:
    raise errors.InputError(
        f'--out={path}: {error.strerror or error}') from error
  return folder


def _check_same_run(config: ml_collections.ConfigDict,
                    workdir: pathlib.Path) -> None:
  saved = field_names(read_config(workdir))
  # Through JSON, as the saved one: whatever that does to it.
  asked = field_names(ml_collections.ConfigDict(_from_json(
      json.loads(json.dumps(_for_json(config.to_dict()))))))
  differing = {
      name: f'{name} ({_shown(saved, name)} there, {_shown(asked, name)} here)'
      for name in sorted((saved.keys() | asked.keys()) - _CONTINUABLE)
      if _shown(saved, name) != _shown(asked, name)}
  other = [said for name, said in differing.items() if name not in _EXECUTION]
  if other:
    raise errors.InputError(
        f'--workdir={workdir} belongs to another config: {listed(other)}')
  if differing:
    changes = listed(list(differing.values()))
    print(f'{workdir} was computed otherwise, and rounds otherwise from here '
          f'on: {changes}', file=sys.stderr, flush=True)


def _shown(fields: dict[str, Any], name: str) -> str:
  return repr(fields[name]) if name in fields else 'absent'


def _for_json(node: Any) -> Any:
  if isinstance(node, dict):
    return {key: _for_json(value) for key, value in node.items()}
  return 'Infinity' if node == math.inf else node


def _from_json(node: Any) -> Any:
  """JSON's lists as the tuples that configs hold; see `save_config`."""
  if isinstance(node, dict):
    return {key: _from_json(value) for key, value in node.items()}
  if isinstance(node, list):
    return tuple(map(_from_json, node))
  return math.inf if node == 'Infinity' else node


def listed(names: list[str]) -> str:
  """Up to six of them, and how many more."""
  more = f' and {len(names) - 6} more' if len(names) > 6 else ''
  return ', '.join(names[:6]) + more
