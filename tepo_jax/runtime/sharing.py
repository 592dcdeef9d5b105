"""A folder that one process of a job has: the others get copies from it.

So a job of many hosts asks the Hugging Face hub, which limits requests, once.
"""

from collections.abc import Callable
import json
import os
import pathlib

import jax
from jax.experimental import multihost_utils
import numpy as np

from tepo_jax.runtime import processes

_CHUNK = 1 << 26  # bytes that are sent at once


def folder_of_first(find: Callable[[], pathlib.Path],
                    copies: pathlib.Path) -> pathlib.Path:
  """Returns the folder `find()`; it is called on the first process only.

  A process that does not see that folder, as on another machine, gets a copy in
  `copies`. All processes must call this.

  Raises:
    errors.InputError: on every process, if `find` raised it.
  """
  if jax.process_count() == 1:
    return find()
  found = []
  processes.on_first(lambda: found.append(find()))
  where, sizes = json.loads(_text_of_first(
      json.dumps([str(found[0]), _sizes(found[0])]) if found else ''))
  folder = pathlib.Path(where)
  if not found and not _has(folder, sizes):
    folder = copies / folder.name
  if processes.any_of(not _has(folder, sizes)):
    for name, size in sizes.items():
      _copy_file(folder / name, size, is_source=bool(found))
  return folder


def _sizes(folder):
  """{path in the folder: bytes} of its files."""
  return {str(path.relative_to(folder)): path.stat().st_size
          for path in sorted(folder.rglob('*')) if path.is_file()}


def _has(folder, sizes):
  return all((folder / name).is_file()
             and (folder / name).stat().st_size == size
             for name, size in sizes.items())


def _text_of_first(text):
  data = text.encode()
  return _send(data, processes.of_first(len(data))).decode()


def _send(data, size):
  """The first process's bytes, of a size that all processes know."""
  array = np.zeros(size, np.uint8)
  array[:len(data)] = np.frombuffer(data, np.uint8)
  return bytes(multihost_utils.broadcast_one_to_all(array))


def _copy_file(path, size, is_source):
  """Sends the first process's file; the others write it unless they have it."""
  is_wanted = not is_source and not _has(path.parent, {path.name: size})
  # Of several processes on a machine each writes a file of its own.
  partial = path.with_name(f'{path.name}.{os.getpid()}')
  path.parent.mkdir(parents=True, exist_ok=True)
  with open(path if is_source else partial if is_wanted else os.devnull,
            'rb' if is_source else 'wb') as file:
    for start in range(0, size, _CHUNK):
      length = min(_CHUNK, size - start)
      data = _send(file.read(length) if is_source else b'', length)
      if not is_source:
        file.write(data)
  if is_wanted:
    partial.replace(path)
