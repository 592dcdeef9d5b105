"""Model folders by name: a path, also gs://…, or a Hugging Face hub id."""

from collections.abc import Sequence
import os
import pathlib
import re

import huggingface_hub

from tepo_jax import errors
from tepo_jax.runtime import files
from tepo_jax.runtime import processes
from tepo_jax.runtime import sharing

TOKENIZER_FILES = (
    'tokenizer.json', 'tokenizer_config.json', 'tokenizer.model',
    'special_tokens_map.json', 'added_tokens.json', 'vocab.json', 'merges.txt',
    'chat_template.jinja', 'chat_template.json', 'generation_config.json',
    'config.json')
_MODEL_FILES = (*TOKENIZER_FILES, '*.safetensors', '*.safetensors.index.json')
_ID = re.compile(r'[\w-][\w.-]*/[\w.-]+')


def folder(name: str | os.PathLike,
           names: Sequence[str] = _MODEL_FILES) -> files.Path:
  """Returns the folder `name`, or the cached download of a hub id.

  Args:
    name: a path, or OWNER/NAME.
    names: glob patterns of the files to download.

  Raises:
    InputError: neither a folder nor available from the hub.
  """
  path = files.path(name)
  if path.is_dir():
    return path
  if not _ID.fullmatch(str(name)):
    raise errors.InputError(f'{name}: no such model folder')
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
  if processes.any_of(files.path(name).is_dir()) or not _ID.fullmatch(name):
    return folder(name)
  cache = pathlib.Path(huggingface_hub.constants.HF_HUB_CACHE)
  return sharing.folder_of_first(
      lambda: folder(name), cache / 'of_first' / name.replace('/', '--'))
