"""A lock on a folder: one process at a time writes it, also on a shared one.

The lock is a file that names its holder and that the holder touches every
REFRESH_S seconds. It is abandoned if its process has ended, which can be seen
on the same machine only. A lock of another machine is abandoned if it has not
been touched for EXPIRES_S. A holder that finds another's lock in place of its
own, because it was suspended for longer than that, ends at once.

In a bucket, every write replaces the version of the object that was read
before, or fails: of several processes that find an abandoned lock one takes it.
"""

from collections.abc import Iterator
import contextlib
import dataclasses
import fcntl
import json
import os
import pathlib
import socket
import threading
import time

from tepo_jax import errors
from tepo_jax.runtime import buckets
from tepo_jax.runtime import disk
from tepo_jax.runtime import files

FILE = 'run.lock'
REFRESH_S = 10
EXPIRES_S = 150  # shared folders may cache a file's time for 60 s

_PROC = pathlib.Path('/proc')


class FolderLock:
  """A lock on a folder, not yet acquired; a context manager that releases it.

  Acquiring it again is free.
  """

  def __init__(self, folder: str | os.PathLike):
    self._folder = files.path(folder).absolute()
    kind = buckets.VersionedObject if files.is_remote(folder) else _DiskFile
    self._file = kind(self._folder / FILE)
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
    self._folder.mkdir(parents=True, exist_ok=True)
    while True:
      found = self._file.read()
      if found is not None:
        _wait_until_abandoned(self._file, found)
      if self._file.replace(found, self._mine):
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
      found = self._file.read()
      if found is not None and found.text == self._mine:
        self._file.remove(found)

  def _refresh(self):
    while not self._released.wait(REFRESH_S):
      with contextlib.suppress(OSError):  # a network's; the next may succeed
        found = self._file.read()
        if found is None:
          self._file.replace(None, self._mine)  # somebody removed it
        elif found.text == self._mine:
          self._file.touch(found)
        else:
          errors.note(f'error: {self._folder} was taken over by '
                      f'{_described(found.text)}: this process was suspended, '
                      'or its lock removed')
          os._exit(1)


@dataclasses.dataclass(frozen=True)
class _Found:
  """A lock as it was read; `stamp`: when it was touched, by the folder's own
  clock."""
  text: str
  stamp: float


class _DiskFile:
  """The lock on a disk, perhaps another machine's. Its methods are those of
  buckets.VersionedObject."""

  def __init__(self, path: pathlib.Path):
    self.path = path

  def read(self) -> _Found | None:
    """The lock; None if there is none."""
    try:
      return _Found(self.path.read_text('utf-8', 'replace'),
                    self.path.stat().st_mtime)
    except FileNotFoundError:
      return None

  def age(self, found: _Found) -> float:
    """Seconds since it was touched, by the folder's own clock."""
    probe = self.path.with_name(f'{FILE}.clock.{_unique()}')
    try:
      probe.touch()
      return probe.stat().st_mtime - found.stamp
    finally:
      probe.unlink(missing_ok=True)

  def replace(self, found: _Found | None, text: str) -> bool:
    """Writes the lock if it is still what was found; whether it was."""
    with _one_at_a_time(self.path.parent), disk.naming(self.path):
      now = self.read()
      if (now and now.text) != (found and found.text):
        return False
      if found is None:
        return self._create(text)
      temporary = self.path.with_name(f'{FILE}.{_unique()}')
      temporary.write_text(text)
      os.replace(temporary, self.path)
      return True

  def _create(self, text):
    try:
      with self.path.open('x') as file:
        file.write(text)
    except FileExistsError:  # another machine's
      return False
    except OSError:  # a full disk
      self.path.unlink(missing_ok=True)
      raise
    return True

  def touch(self, _: _Found) -> None:
    """Shows that the holder is alive."""
    os.utime(self.path)

  def remove(self, _: _Found) -> None:
    """Deletes the lock."""
    self.path.unlink()


def _wait_until_abandoned(file, found):
  """Returns once the lock is abandoned or has changed; it may take EXPIRES_S.

  Raises:
    InputError: its process is alive.
  """
  holder = _parsed(found.text)
  text = f'{file.path.parent} is in use by {_described(found.text)}'
  if (holder.get('host'), holder.get('machine')) == (
      socket.gethostname(), _machine()):
    if _started(holder.get('process')) == holder.get('process_started'):
      raise errors.InputError(text)
    return
  if file.age(found) > EXPIRES_S:
    return
  errors.note(f'{text}; waiting up to {EXPIRES_S} s for a sign of life')
  while True:
    time.sleep(REFRESH_S / 10)
    now = file.read()
    if now is None or now.text != found.text or file.age(now) > EXPIRES_S:
      return
    if now.stamp != found.stamp:
      raise errors.InputError(
          f'{text}; if that process has ended, remove {file.path}')


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
