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

# In the messages of libraries that pass them on as other exceptions.
_TEXTS = re.compile('|'.join((
    r'\bENOSPC\b', r'\bEDQUOT\b', r'\bEROFS\b', r'\bEFBIG\b',
    *(re.escape(os.strerror(number)) for number in sorted(_ERRORS)))))


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
    free = _free_bytes(error.filename) if error.errno in _FULL else None
    return f'{where}{os.strerror(error.errno)}' + (
        '' if free is None else f' ({free / 1e6:.4g} MB free)')
  text = errors.one_line(error)
  return text[:800] if _TEXTS.search(text) else None


def _free_bytes(name):
  """The free bytes of the disk that holds a file; None if unknown."""
  if name is None:
    return None
  place = pathlib.Path(os.fsdecode(name)).absolute()
  with contextlib.suppress(OSError):
    return shutil.disk_usage(next(
        folder for folder in place.parents if folder.is_dir())).free
  return None
