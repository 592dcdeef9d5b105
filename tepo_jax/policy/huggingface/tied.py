"""Whether a folder whose config ties head and embedding has another head.

Fine-tuning may untie the two and leave the flag as it was. transformers then
uses the file's head; so do we.
"""

import functools
import logging

import numpy as np

from tepo_jax.policy.huggingface import tensor_files
from tepo_jax.runtime import files

HEAD, EMBEDDING = 'lm_head.weight', 'model.embed_tokens.weight'

_LOG = logging.getLogger(__name__)
_ROWS = 4096  # compared at once


def has_own_head(folder: files.Path) -> bool:
  """Whether the folder's safetensors have a head that is not the embedding.

  A head that differs is logged, once. A folder without safetensors has none.

  Raises:
    InputError: a file is damaged.
  """
  if not tensor_files.exists(folder):
    return False
  found = sorted(path for path in folder.iterdir()
                 if path.name.endswith('.safetensors'))
  stats = [(str(path), path.stat()) for path in found]
  return _differ(str(folder), tuple(
      (path, stat.st_size, stat.st_mtime) for path, stat in stats))


@functools.lru_cache(8)
def _differ(folder, version):
  del version  # Part of the cache's key: the files as they are now.
  tensors = tensor_files.open_folder(files.path(folder))
  if not {HEAD, EMBEDDING} <= tensors.keys():
    return False
  pair = tensors[HEAD], tensors[EMBEDDING]
  rows, *_ = pair[0].shape or (0,)
  if pair[0].shape == pair[1].shape and all(
      _same(pair, slice(start, start + _ROWS))
      for start in range(0, rows, _ROWS)):
    return False
  _LOG.warning(
      '%s: config.json has tie_word_embeddings, but %s is not the embedding; '
      'the model is loaded with this head, untied', folder, HEAD)
  return True


def _same(pair, rows):
  parts = [tensor[rows,] for tensor in pair]
  same = np.array_equal(*parts)
  for tensor in pair:
    tensor_files.forget(tensor)
  return same
