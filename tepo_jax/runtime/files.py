"""Files that a user names: on a disk, or in a bucket of Google Cloud Storage.

`path` makes a pathlib.Path or, of gs://BUCKET/NAME, a BucketPath with the same
methods. An object of a bucket is written whole, by one request: readers see the
old one or the new one, so no temporary name is needed. It cannot grow.
"""

from collections.abc import Iterator
import contextlib
import glob
import os
import pathlib
import tempfile
import time
import types
from typing import Any
import uuid

from etils.epath import gpath

from tepo_jax.runtime import buckets
from tepo_jax.runtime import disk

_UNFINISHED = 'upload.unfinished'  # in a folder, until all files are there
_UPLOAD_SHARE = 1 / 20  # of the time goes into uploads of a growing file


class BucketPath(gpath.PosixGPath):
  """gs://BUCKET/NAME. A folder exists while there are objects in it."""

  def absolute(self) -> 'BucketPath':
    """Returns the path itself, like `resolve`."""
    return self

  def resolve(self, strict: bool = False) -> 'BucketPath':
    return self

  def mkdir(self, *_: Any, **__: Any) -> None:
    """Does nothing: there are no empty folders."""

  def is_file(self) -> bool:
    return self.exists() and not self.is_dir()

  def iterdir(self) -> Iterator['BucketPath']:
    for name in buckets.client().ls(str(self), detail=False):
      if (last := name.rstrip('/').rpartition('/')[2]) != self.name:
        yield self / last

  def stat(self) -> types.SimpleNamespace:
    """Returns st_size, in bytes, and st_mtime."""
    info = buckets.client().info(str(self))
    return types.SimpleNamespace(
        st_size=info['size'], st_mtime=info['mtime'].timestamp())

  def read_bytes(self) -> bytes:
    return buckets.client().cat_file(str(self))

  def read_text(self, encoding: str = 'utf-8', errors: str = 'strict') -> str:
    return self.read_bytes().decode(encoding, errors)

  def write_bytes(self, data: bytes) -> None:
    buckets.client().pipe_file(str(self), data)

  def write_text(self, data: str, encoding: str = 'utf-8') -> None:
    self.write_bytes(data.encode(encoding))


Path = pathlib.Path | BucketPath


def path(name: str | os.PathLike) -> Path:
  """The path of a file or folder that a user has named.

  Raises:
    errors.InputError: it is in a bucket, and gcsfs is not installed.
  """
  if not is_remote(name):
    return pathlib.Path(name)
  buckets.client()
  return BucketPath(name)


def found(pattern: str) -> list[Path]:
  """The paths that match a pattern such as 'runs/*', sorted."""
  if is_remote(pattern):
    names = map(f'{buckets.SCHEME}{{}}'.format, buckets.client().glob(pattern))
  else:
    names = glob.glob(pattern)
  return list(map(path, sorted(names)))


def below(folder: Path, name: str) -> list[Path]:
  """The files of that name in a folder and in all folders below it, sorted;
  links are not followed."""
  if is_remote(folder):
    return found(f'{folder}/**/{name}')
  return sorted(folder.rglob(name))


def is_remote(name: str | os.PathLike) -> bool:
  """Whether the file is in a bucket."""
  return os.fspath(name).startswith(buckets.SCHEME)


def replace_text(path: Path, text: str) -> None:
  """Writes `path`: after a crash it is the old file or the new."""
  if is_remote(path):
    path.write_text(text)
    return
  with replacing(path) as temporary:
    temporary.write_text(text, 'utf-8')


@contextlib.contextmanager
def replacing(path: Path, is_shared: bool = False) -> Iterator[pathlib.Path]:
  """Yields a file to write on this disk, which then replaces `path` at once. If
  other processes may do so too (`is_shared`), it has a name of its own."""
  if is_remote(path):
    with tempfile.TemporaryDirectory() as scratch:
      temporary = pathlib.Path(scratch) / path.name
      yield temporary
      buckets.client().put_file(str(temporary), str(path))
    return
  own = f'.{uuid.uuid4().hex}' if is_shared else ''
  temporary = path.with_name(f'{path.name}{own}.tmp')
  with disk.naming(path):
    try:
      yield temporary
      os.replace(temporary, path)
    finally:
      temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def local_folder(folder: Path) -> Iterator[pathlib.Path]:
  """Yields a folder of this disk to write into, which is made: `folder` itself,
  or a temporary one that is then uploaded.

  config.json, without which a folder is no model, is uploaded last.
  """
  if not is_remote(folder):
    folder.mkdir(parents=True, exist_ok=True)
    with disk.naming(folder):
      yield folder
    return
  with tempfile.TemporaryDirectory() as scratch:
    yield pathlib.Path(scratch)
    reserve(folder)
    for file in sorted(pathlib.Path(scratch).rglob('*'),
                       key=lambda file: (file.name == 'config.json', file)):
      target = folder / file.relative_to(scratch).as_posix()
      if file.is_file():
        buckets.client().put_file(str(file), str(target))
    (folder / _UNFINISHED).unlink(missing_ok=True)  # another may have ended


def reserve(folder: BucketPath) -> None:
  """Begins an upload to a folder, so that a program finds out at its start
  whether it may write there.

  Raises:
    buckets.BucketError: it may not.
  """
  (folder / _UNFINISHED).write_bytes(b'')


def discard_unfinished(folder: BucketPath) -> None:
  """Deletes what an interrupted upload has left in a folder."""
  for path in folder.iterdir() if (folder / _UNFINISHED).exists() else ():
    if path.name != _UNFINISHED:
      path.unlink()


def checksums(folder: BucketPath) -> dict[str, str]:
  """What the bucket says of the contents of a folder's objects, by name."""
  return {name: item['crc32c'] for name, item in _objects(folder).items()}


def sizes(folder: Path) -> dict[str, int]:
  """The bytes of the files in a folder, by name; of a bucket in one request."""
  if is_remote(folder):
    return {name: item['size'] for name, item in _objects(folder).items()}
  return {path.name: path.stat().st_size for path in folder.iterdir()
          if path.is_file()}


def _objects(folder):
  """What the bucket says of a folder's objects, by name, in one request."""
  return {item['name'].rpartition('/')[2]: item
          for item in buckets.client().ls(str(folder), detail=True)
          if item['type'] == 'file'}


def is_free(folder: Path) -> bool:
  """Whether a folder is missing or empty, or its upload was interrupted."""
  if not folder.exists():
    return True
  return folder.is_dir() and (not any(folder.iterdir()) or (
      is_remote(folder) and (folder / _UNFINISHED).exists()))


@contextlib.contextmanager
def downloaded(source: Path, names: tuple[str, ...] = ()
               ) -> Iterator[pathlib.Path]:
  """Yields the file or folder on this disk: itself, or a temporary copy.

  names: of the files that are needed of a folder; all if empty.
  """
  if not is_remote(source):
    yield source
    return
  with tempfile.TemporaryDirectory() as scratch:
    local = pathlib.Path(scratch) / source.name
    if names:
      local.mkdir()
      for name in names:
        with contextlib.suppress(FileNotFoundError):
          (local / name).write_bytes((source / name).read_bytes())
    else:
      buckets.client().get(str(source), str(local), recursive=source.is_dir())
    yield local


def read_range(path: Path, start: int, size: int) -> bytes:
  """The bytes [start, start + size) of a file, or as many as there are."""
  if is_remote(path):
    return buckets.client().cat_file(str(path), start, start + size)
  with path.open('rb') as file:
    file.seek(start)
    return file.read(size)


def browser_address(path: BucketPath) -> str:
  """The page of Google's console that shows a folder of a bucket."""
  return (f'https://console.cloud.google.com/storage/browser/'
          f'{str(path).removeprefix(buckets.SCHEME)}')


class GrowingFile:
  """A text file to which lines are appended.

  On a disk each is there when `append` returns. An object is uploaded whole: by
  `flush`, and by `append` if it then takes a twentieth of the time at most.
  """

  def __init__(self, path: Path):
    self.path = path
    self._contents: bytearray | None = None  # of an object, once it is read
    self._next, self._is_new = 0.0, False

  def exists(self) -> bool:
    return self.path.exists()

  def read(self) -> str:
    """The text; undecodable bytes are replaced."""
    return self.path.read_text('utf-8', 'replace')

  def append(self, text: str) -> None:
    """Writes the text at the end of the file; makes the file if needed."""
    if not is_remote(self.path):
      with (disk.naming(self.path),
            self.path.open('a', encoding='utf-8') as file):
        file.write(text)
      return
    if self._contents is None:
      self._contents = bytearray()
      with contextlib.suppress(FileNotFoundError):
        self._contents += self.path.read_bytes()
    self._contents += text.encode()
    self._is_new = True
    if time.monotonic() >= self._next:
      self.flush()

  def replace(self, text: str) -> None:
    """Replaces the whole file at once."""
    replace_text(self.path, text)
    self._contents, self._is_new = None, False

  def flush(self) -> None:
    """Uploads what has been appended to an object."""
    if self._is_new:
      start = time.monotonic()
      self.path.write_bytes(bytes(self._contents))
      self._is_new, end = False, time.monotonic()
      self._next = end + (end - start) / _UPLOAD_SHARE
