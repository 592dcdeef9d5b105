"""A run's folder, and the config in it that decides which run may use it."""

import contextlib
import hashlib
import json
import math
import os
import re
from typing import Any

import ml_collections

from configs import fields as fields_lib
from tepo_jax import errors
from tepo_jax.job import configuration
from tepo_jax.policy.huggingface import tensor_files
from tepo_jax.runtime import disk
from tepo_jax.runtime import files
from tepo_jax.runtime import lock as lock_lib
from tepo_jax.runtime import metrics

# The fields by which an embedded model is made.
_MODEL_FIELDS = 'compute.', 'data.', 'pretrain.', 'seed'


def digest(config: ml_collections.ConfigDict) -> str:
  """`digest_of` the fields that must not change on resume."""
  return digest_of({
      name: value for name, value in fields_lib.flat(config).items()
      if configuration.resume_rule(name) == fields_lib.SAME})


def digest_of(fields: dict[str, Any]) -> str:
  """SHA-256 of fields, sorted."""
  return hashlib.sha256(
      json.dumps(fields, sort_keys=True).encode()).hexdigest()


def read_config(workdir: str | os.PathLike) -> ml_collections.ConfigDict:
  """Reads the config that a run saved in its workdir; it is locked.

  Raises:
    InputError: there is no DIR/config.json or it is not a JSON object.
  """
  path = files.path(workdir) / 'config.json'
  if not path.exists():
    raise errors.InputError(
        f'{workdir} is not the workdir of a run: it has no config.json')
  saved = tensor_files.read_json(path)
  try:
    return ml_collections.ConfigDict(_from_json(saved)).lock()
  except (RecursionError, TypeError, ValueError) as error:
    raise errors.InputError(f'{path}: {errors.one_line(error)}') from error


def saved_date(workdir: str | os.PathLike) -> str | None:
  """data.date of the run in a folder; None if it has none, or is no run."""
  path = files.path(workdir) / 'config.json'  # also model folders have one
  saved = fields_lib.flat(read_config(workdir)) if path.is_file() else {}
  return saved['data.date'] if 'data.date' in saved else None


def claim(config: ml_collections.ConfigDict, workdir: str | os.PathLike,
          lock: lock_lib.FolderLock) -> None:
  """Makes DIR the workdir of this config, or checks that it is.

  It acquires the lock, which is DIR's and which the caller releases. It then
  writes every field to DIR/config.json. Until something has been trained, the
  config may change in any way; later such changes are refused, and those of
  fields that affect rounding only are logged on stderr.

  Raises:
    InputError: another process holds the lock, or DIR holds another config (the
      fields are named) or other files than a run's. Nothing in it is changed
      then.
  """
  workdir = files.path(workdir)
  try:
    lock.acquire()
    found = {entry.name for entry in workdir.iterdir()}
    if 'config.json' in found:
      _check_same_run(config, workdir)
    elif found := {name for name in found if name != 'config.json.tmp'
                   and not name.startswith(lock_lib.FILE)}:
      raise errors.InputError(
          f'--workdir={workdir}: holds {errors.listed(sorted(found))} but no '
          'config.json, so it is not the folder of a run; choose another')
    files.replace_text(workdir / 'config.json', json.dumps(
        _for_json(config.to_dict()), indent=2, sort_keys=True, allow_nan=False
    ) + '\n')
  except OSError as error:
    if disk.failure(error) is not None:  # names the file and what is free
      raise
    raise errors.InputError(
        f'--workdir={workdir}: {error.strerror or error}') from error


def check_out(path: str) -> files.Path:
  """As `check_free`; begins `files.local_folder`'s upload if in a bucket."""
  folder = check_free(path)
  if files.is_remote(folder):
    with _naming_out(path):
      files.reserve(folder)
  return folder


def check_free(path: str) -> files.Path:
  """Checks that --out=`path` is empty or can be made; makes nothing.

  Raises:
    InputError: it is not empty, or cannot be made.
  """
  folder = files.path(path)
  with _naming_out(path):
    if folder.is_dir() and not files.is_free(folder):
      raise errors.InputError(f'--out={path}: exists and is not empty')
    if files.is_remote(folder):
      return folder
    found = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    if not found.is_dir():
      raise errors.InputError(f'--out={path}: {found} is not a folder')
    if not os.access(found, os.W_OK):
      raise errors.InputError(f'--out={path}: no permission to write {found}')
  return folder


@contextlib.contextmanager
def _naming_out(path):
  try:
    yield
  except OSError as error:
    raise errors.InputError(
        f'--out={path}: {error.strerror or error}') from error


def split_step(spec: str) -> tuple[str, int | None]:
  """(folder, step) of 'FOLDER[@STEP]'; a step has at most 18 digits."""
  found = re.fullmatch(r'(.+)@([0-9]{1,18})', spec, re.DOTALL)
  return (found[1], int(found[2])) if found else (spec, None)


def is_untrained(workdir: files.Path) -> bool:
  """Whether there is no checkpoint and no record of a finished step."""
  return not _has_checkpoints(workdir) and not any(
      record['step'] for record in metrics.read(workdir))


def _has_checkpoints(workdir):
  from tepo_jax.job import session as session_lib  # imports jax
  checkpoints = workdir / session_lib.CHECKPOINTS
  return checkpoints.is_dir() and any(checkpoints.iterdir())


def _check_same_run(config, workdir):
  saved = fields_lib.flat(read_config(workdir))
  asked = fields_lib.flat(_from_json(_for_json(config.to_dict())))
  differing = {fields_lib.SAME: [], fields_lib.ROUNDING: [],
               fields_lib.FREE: []}
  for name in sorted(saved.keys() | asked.keys()):
    if _shown(saved, name) != _shown(asked, name):
      differing[configuration.resume_rule(name)].append(
          f'{name} (was {_shown(saved, name)}, now {_shown(asked, name)})')
  if other := differing[fields_lib.SAME]:
    what = f'belongs to another config: {errors.listed(other)}'
    # A model folder's config.json has none of a run's fields.
    if 'steps' not in saved or not is_untrained(workdir):
      can_fork = 'steps' in saved and _has_checkpoints(workdir)
      fork = f'; a fork can: --workdir=NEW --from={workdir}'
      raise errors.InputError(
          f'--workdir={workdir} {what}{fork if can_fork else ""}')
    from tepo_jax.job import session as session_lib  # imports jax
    if (workdir / session_lib.BASE_MODEL).exists() and any(
        name.startswith(_MODEL_FIELDS) for name in other):
      raise errors.InputError(
          f'--workdir={workdir} {what}, which made its base_model/; choose '
          'another folder')
    errors.note(f'{workdir}: nothing has been trained yet, so it takes the new '
                f'config: {errors.listed(other)}')
  if changed := differing[fields_lib.ROUNDING]:
    errors.note(f'{workdir}: these fields have changed, so results are not '
                f'bit-identical from here on: {errors.listed(changed)}')


def _shown(fields: dict[str, Any], name: str) -> str:
  return repr(fields[name]) if name in fields else 'absent'


def _for_json(node: Any) -> Any:
  """Turns infinities, which JSON lacks, into 'Infinity' and '-Infinity'."""
  if isinstance(node, dict):
    return {key: _for_json(value) for key, value in node.items()}
  if isinstance(node, (list, tuple)):
    return [_for_json(value) for value in node]
  return {math.inf: 'Infinity', -math.inf: '-Infinity'}.get(node, node)


def _from_json(node: Any) -> Any:
  """Turns lists into tuples and reads `_for_json`'s infinities."""
  if isinstance(node, dict):
    return {key: _from_json(value) for key, value in node.items()}
  if isinstance(node, list):
    return tuple(map(_from_json, node))
  return float(node) if node in ('Infinity', '-Infinity') else node
