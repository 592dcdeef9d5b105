"""A lock on a folder: one process at a time writes it, also on a shared one.

The lock is a file that names its holder and that the holder touches every
REFRESH_S seconds. It is abandoned if its process has ended, which can be seen
on the same machine only. A lock of another machine is abandoned if it has not
been touched for EXPIRES_S. A holder that finds another's lock in place of its
own, because it was suspended for longer than that, ends at once.
"""

import contextlib
import fcntl
import json
import os
import pathlib
import socket
import sys
import threading
import time
from collections.abc import Iterator

from tepo_jax import errors

FILE = 'run.lock'
REFRESH_S = 10
EXPIRES_S = 150  # shared folders may cache a file's time for 60 s

_PROC = pathlib.Path('/proc')


class FolderLock:
  """A lock on a folder, not yet acquired; a context manager that releases it.

  Acquiring it again is free.
  """

  def __init__(self, folder: str | os.PathLike):
    self._path = pathlib.Path(folder).absolute() / FILE
    self._mine = json.dumps({
        'host': socket.gethostname(), 'process': os.getpid(),
        'machine': _machine(), 'process_started': _started(os.getpid()),
        'locked': time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())}) + '\n'
    self._thread, self._released = None, threading.Event()

  def __enter__(self) -> 'FolderLock':
    return self

  def __exit__(self, *exception):
    self.release()

  def acquire(self) -> None:
    """Makes the folder and locks it; takes over an abandoned lock.

    Raises:
      errors.InputError: another process holds the lock; names it.
      OSError: the folder cannot be made or written.
    """
    if self._thread is not None:
      return
    self._path.parent.mkdir(parents=True, exist_ok=True)
    while True:
      found = _read(self._path)
      if found is not None:
        _wait_until_abandoned(self._path, found)
      with _one_at_a_time(self._path.parent):
        if _read(self._path) == found and self._write(found is None):
          break
    self._thread = threading.Thread(target=self._refresh, daemon=True)
    self._thread.start()

  def release(self) -> None:
    """Removes the lock if this process holds it."""
    if self._thread is None:
      return
    self._released.set()
    self._thread.join(REFRESH_S)
    with contextlib.suppress(OSError):
      if _read(self._path) == self._mine:
        self._path.unlink()

  def _write(self, is_new):
    """Writes the lock; False if there is one although `is_new`."""
    if not is_new:
      temporary = self._path.with_name(f'{FILE}.{_unique()}')
      temporary.write_text(self._mine)
      os.replace(temporary, self._path)
      return True
    try:
      with self._path.open('x') as file:
        file.write(self._mine)
    except FileExistsError:
      return False
    except OSError:  # a full disk
      self._path.unlink(missing_ok=True)
      raise
    return True

  def _refresh(self):
    while not self._released.wait(REFRESH_S):
      with contextlib.suppress(OSError):  # a network's; the next may succeed
        found = _read(self._path)
        if found is None:
          self._write(is_new=True)  # somebody removed it
        elif found == self._mine:
          os.utime(self._path)
        else:
          print(f'error: {self._path.parent} was taken over by '
                f'{_described(found)}: this process was suspended, or its '
                'lock removed', file=sys.stderr, flush=True)
          os._exit(1)


def _wait_until_abandoned(path, found):
  """Returns once the lock is abandoned or has changed; it may take EXPIRES_S.

  Raises:
    InputError: its process is alive.
  """
  holder = _parsed(found)
  text = f'{path.parent} is in use by {_described(found)}'
  if (holder.get('host'), holder.get('machine')) == (
      socket.gethostname(), _machine()):
    if _started(holder.get('process')) == holder.get('process_started'):
      raise errors.InputError(text)
    return
  touched = _touched(path)
  if touched is not None and _clock(path) - touched <= EXPIRES_S:
    print(f'{text}; waiting up to {EXPIRES_S} s for a sign of life',
          file=sys.stderr, flush=True)
  while touched is not None and _clock(path) - touched <= EXPIRES_S:
    time.sleep(REFRESH_S / 10)
    now = _touched(path)
    if _read(path) != found:
      return
    if now != touched:
      raise errors.InputError(
          f'{text}; if that process has ended, remove {path}')


def _read(path) -> str | None:
  """The contents of the lock; None if there is none."""
  try:
    return path.read_text('utf-8', 'replace')
  except FileNotFoundError:
    return None


def _parsed(text):
  """The holder's fields; {} if the lock is incomplete."""
  with contextlib.suppress(ValueError):
    if isinstance(found := json.loads(text), dict):
      return found
  return {}


def _described(text):
  holder = _parsed(text)
  return (f'process {holder.get("process", "?")} on host '
          f'{holder.get("host", "?")}, since {holder.get("locked", "?")}')


def _touched(path):
  with contextlib.suppress(FileNotFoundError):
    return path.stat().st_mtime
  return None


def _clock(path):
  """The time now by the folder's own clock, which may be another machine's."""
  probe = path.with_name(f'{FILE}.clock.{_unique()}')
  try:
    probe.touch()
    return probe.stat().st_mtime
  finally:
    probe.unlink(missing_ok=True)


def _unique():
  return f'{socket.gethostname()}.{os.getpid()}'


def _machine() -> str:
  """Identifies the table of processes: the boot, and the container's part."""
  with contextlib.suppress(OSError):
    boot = (_PROC / 'sys/kernel/random/boot_id').read_text().strip()
    return f'{boot} {os.readlink(_PROC / "self/ns/pid")}'
  return ''


def _started(process: int) -> str | None:
  """When a process of this machine started; None if it does not run.

  A later process may have the same number, but started at another time.
  """
  if _PROC.joinpath('self/stat').exists():
    with contextlib.suppress(OSError):
      # pid (name) state …, where the name may contain anything.
      fields = (_PROC / str(process) / 'stat').read_text().rpartition(
          ')')[2].split()
      return None if fields[0] in 'ZX' else fields[19]  # clock ticks
    return None
  try:
    os.kill(process, 0)
  except ProcessLookupError:
    return None
  except PermissionError:
    pass
  return 'unknown'


@contextlib.contextmanager
def _one_at_a_time(folder) -> Iterator[None]:
  """Lets this machine's processes judge and replace a lock one by one."""
  handle = os.open(folder, os.O_RDONLY)
  try:
    with contextlib.suppress(OSError):  # not on every file system
      fcntl.flock(handle, fcntl.LOCK_EX)
    yield
  finally:
    os.close(handle)
