"""What this process takes of its host: it should not grow with the steps."""

import contextlib
import ctypes
import gc
import os
import pathlib

_PROC = pathlib.Path('/proc')


def usage() -> dict[str, int]:
  """Resident bytes, open files, and processes started; {} but on Linux."""
  if not (_PROC / 'self' / 'statm').exists():
    return {}
  pages = int((_PROC / 'self' / 'statm').read_text().split()[1])
  return {'host/resident_bytes': pages * os.sysconf('SC_PAGE_SIZE'),
          'host/open_files': len(os.listdir(_PROC / 'self' / 'fd')),
          'host/processes': sum(map(_is_mine, _PROC.glob('[0-9]*/stat')))}


def settle() -> None:
  """Gives back what compiling took: hundreds of megabytes.

  The C library keeps them else, and a leak would long not be seen.
  """
  gc.collect()
  libc = ctypes.CDLL(None)
  if hasattr(libc, 'malloc_trim'):  # glibc
    libc.malloc_trim(0)


def _is_mine(stat: pathlib.Path) -> bool:
  with contextlib.suppress(OSError):  # it may end meanwhile
    # pid (name) state parent …, where the name may hold anything.
    return int(stat.read_text().rpartition(')')[2].split()[1]) == os.getpid()
  return False
