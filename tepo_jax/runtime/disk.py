"""Failures of a disk: which file, what is wrong, how much is free."""

from collections.abc import Iterator
import contextlib
import errno
import os
import pathlib
import re
import shutil

from tepo_jax import errors

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_ERRORS = _FULL | {errno.EFBIG, errno.EIO, errno.EROFS}


def _texts(numbers):
  return re.compile('|'.join(
      rf'\b{errno.errorcode[number]}\b|{re.escape(os.strerror(number))}'
      for number in sorted(numbers)))


# In the messages of libraries that pass them on as other exceptions.
_TEXTS, _FULL_TEXTS = _texts(_ERRORS), _texts(_FULL)
_QUOTED = re.compile('"([^"]*/[^"]*)"')  # a file that such a message names


@contextlib.contextmanager
def naming(path: os.PathLike) -> Iterator[None]:
  """Puts the file's name into an OSError that has none, as of a write."""
  try:
    yield
  except OSError as error:
    if error.errno is not None and error.filename is None:
      error.filename = str(path)
    raise


def failure(error: BaseException) -> str | None:
  """'FILE: No space left on device (3 MB free)' if a disk is full, over quota,
  read-only or broken; None for other errors.

  tensorstore's error of a full disk is RESOURCE_EXHAUSTED, as is that of a
  device without memory.
  """
  if isinstance(error, OSError) and error.errno in _ERRORS:
    where = f'{error.filename}: ' if error.filename else ''
    text = f'{where}{os.strerror(error.errno)}'
    return text + free(text, error.filename)
  text = errors.one_line(error)
  if not _TEXTS.search(text):
    return None
  named = _QUOTED.search(text)
  return text[:800] + free(text, named and named[1])


def refused(error: BaseException) -> bool:
  """Whether a disk or the system refused to read files, which may be whole."""
  return failure(error) is not None or (
      isinstance(error, OSError) and error.errno not in (None, errno.ENOENT))


def free(message: str, path: str | os.PathLike | None) -> str:
  """' (3 MB free)' if an error's message says that a disk is full or over
  quota: that of the file or folder `path`. '' otherwise, or if unknown."""
  if path is None or not _FULL_TEXTS.search(message):
    return ''
  place = pathlib.Path(os.fsdecode(path)).absolute()
  with contextlib.suppress(OSError):
    size = shutil.disk_usage(next(
        folder for folder in (place, *place.parents) if folder.is_dir())).free
    return f' ({size / 1e6:,.0f} MB free)'
  return ''
