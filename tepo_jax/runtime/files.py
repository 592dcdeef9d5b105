"""Files that a user names: on a disk, or in a bucket of Google Cloud Storage.

`path` makes a pathlib.Path or, of gs://BUCKET/NAME, a BucketPath with the same
methods. An object of a bucket is written whole, by one request: readers see the
old one or the new one, so no temporary name is needed. It cannot grow.

Every request goes through gcsfs, also those of epath, by which Orbax reads and
writes checkpoints; only the arrays in them go through tensorstore. Requests
that fail for a while are repeated; what remains is a `BucketError`.
"""

from collections.abc import Iterator
import contextlib
import dataclasses
import email.utils
import errno
import functools
import glob
import json
import os
import pathlib
import re
import tempfile
import time
import types
from typing import Any
import urllib.parse
import uuid

from etils.epath import backend
from etils.epath import gpath

from tepo_jax import errors
from tepo_jax.runtime import disk

SCHEME = 'gs://'

_UNFINISHED = 'upload.unfinished'  # in a folder, until all files are there
_UPLOAD_SHARE = 1 / 20  # of the time goes into uploads of a growing file


class BucketError(OSError, errors.InputError):
  """A bucket that is missing, refuses access or does not answer."""


class SilentBucketError(BucketError, errors.Unanswered):
  """A bucket that does not answer, or only that it is overloaded."""


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
    for name in _buckets().ls(str(self), detail=False):
      if (last := name.rstrip('/').rpartition('/')[2]) != self.name:
        yield self / last

  def stat(self) -> types.SimpleNamespace:
    """Returns st_size, in bytes, and st_mtime."""
    info = _buckets().info(str(self))
    return types.SimpleNamespace(
        st_size=info['size'], st_mtime=info['mtime'].timestamp())

  def read_bytes(self) -> bytes:
    return _buckets().cat_file(str(self))

  def read_text(self, encoding: str = 'utf-8', errors: str = 'strict') -> str:
    return self.read_bytes().decode(encoding, errors)

  def write_bytes(self, data: bytes) -> None:
    _buckets().pipe_file(str(self), data)

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
  _buckets()
  return BucketPath(name)


def found(pattern: str) -> list[Path]:
  """The paths that match a pattern such as 'runs/*', sorted."""
  if is_remote(pattern):
    names = map(f'{SCHEME}{{}}'.format, _buckets().glob(pattern))
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
  return os.fspath(name).startswith(SCHEME)


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
      _buckets().put_file(str(temporary), str(path))
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
        _buckets().put_file(str(file), str(target))
    (folder / _UNFINISHED).unlink(missing_ok=True)  # another may have ended


def reserve(folder: BucketPath) -> None:
  """Begins an upload to a folder, so that a program finds out at its start
  whether it may write there.

  Raises:
    BucketError: it may not.
  """
  (folder / _UNFINISHED).write_bytes(b'')


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
      _buckets().get(str(source), str(local), recursive=source.is_dir())
    yield local


def read_range(path: Path, start: int, size: int) -> bytes:
  """The bytes [start, start + size) of a file, or as many as there are."""
  if is_remote(path):
    return _buckets().cat_file(str(path), start, start + size)
  with path.open('rb') as file:
    file.seek(start)
    return file.read(size)


def browser_address(path: BucketPath) -> str:
  """The page of Google's console that shows a folder of a bucket."""
  return (f'https://console.cloud.google.com/storage/browser/'
          f'{str(path).removeprefix(SCHEME)}')


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


@dataclasses.dataclass(frozen=True)
class Version:
  """An object as it was read: its text; stamp, the generation, which every
  write changes; age, seconds since it was written, by the bucket's clock."""
  text: str
  stamp: int
  age: float


class VersionedObject:
  """An object that several processes write: a write fails if the object is no
  longer the version that the process has read."""

  def __init__(self, path: BucketPath):
    self.path = path

  def read(self) -> Version | None:
    """The object as it is now; None if there is none."""
    try:
      headers, data = _buckets().call(
          'GET', 'b/{}/o/{}', *_place(self.path), alt='media')
    except FileNotFoundError:
      return None
    now, written = (email.utils.parsedate_to_datetime(headers[name])
                    for name in ('Date', 'Last-Modified'))
    return Version(data.decode('utf-8', 'replace'),
                   int(headers['X-Goog-Generation']),
                   (now - written).total_seconds())

  def age(self, found: Version) -> float:
    """Seconds since it was written."""
    return found.age

  def replace(self, found: Version | None, text: str) -> bool:
    """Writes the object if it is still what was found; whether it has this text
    now: if an answer was lost, the repeated request finds what it has written.
    """
    bucket, name = _place(self.path)
    body = '\n'.join(['--=', 'Content-Type: application/json', '', json.dumps(
        {'name': name}), '--=', 'Content-Type: text/plain', '', text, '--=--'])
    fs = _buckets()
    uploads = fs.base.replace('/storage/', '/upload/storage/')
    try:
      fs.call('POST', f'{uploads}b/{{}}/o', bucket, uploadType='multipart',
              headers={'Content-Type': 'multipart/related; boundary="="'},
              data=body.encode(),
              ifGenerationMatch=found.stamp if found else 0)
    except FileExistsError:
      now = self.read()
      return now is not None and now.text == text
    return True

  def touch(self, found: Version) -> None:
    """Writes it again if it is still what was found."""
    self.replace(found, found.text)

  def remove(self, found: Version) -> None:
    """Deletes it if it is still what was found."""
    with contextlib.suppress(FileExistsError, FileNotFoundError):
      _buckets().call('DELETE', 'b/{}/o/{}', *_place(self.path),
                      ifGenerationMatch=found.stamp)


def _place(path):
  """(bucket, name) of an object."""
  bucket, _, name = str(path).removeprefix(SCHEME).partition('/')
  return bucket, name


@functools.cache
def _buckets():
  """The file system of buckets, also epath's."""
  try:
    import fsspec
    from gcsfs import core
  except ImportError as error:
    raise errors.InputError(
        'gs:// needs gcsfs: run .venv/bin/python -m pip install gcsfs'
    ) from error

  class Buckets(core.GCSFileSystem):
    """gcsfs, with BucketErrors and without its `isdir`, which is False also if
    the bucket does not answer."""

    async def _call(self, method, path, *args, **options):
      try:
        return await super()._call(method, path, *args, **options)
      except FileExistsError:  # another version is there
        raise
      except Exception as error:  # gcsfs, its transport and google.auth
        raise _translated(
            error, method, self._format_path(path, args)) from error

    call = fsspec.asyn.sync_wrapper(_call)

    async def _isdir(self, path):
      try:
        return (await self._info(path))['type'] == 'directory'
      except FileNotFoundError:
        return False

  for name in core.GCSFileSystem.protocol:
    fsspec.register_implementation(name, Buckets, clobber=True)
  # Other processes write there too, so listings are not cached.
  fsspec.config.conf['gcs'] = {
      'use_listings_cache': False,
      'token': 'anon' if 'STORAGE_EMULATOR_HOST' in os.environ else None}
  return backend.fsspec_backend.fs(SCHEME)


def _translated(error, method, url):
  place = re.search(r'/b/([^/?]+)(?:/o/([^/?]+))?', url)
  where = SCHEME + urllib.parse.unquote('/'.join(filter(
      None, place.groups()))) if place else url
  if isinstance(error, FileNotFoundError):
    if method == 'POST':
      return BucketError(f'{where}: there is no such bucket')
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), where)
  from gcsfs import retry
  kind = SilentBucketError if retry.is_retriable(error) or isinstance(
      error, (TimeoutError, ConnectionError)) else BucketError
  text = errors.one_line(error)
  if text.startswith('Forbidden'):
    text = 'no permission: ' + text.partition(' ')[2].partition(' ')[2]
  return kind(f'{where}: {text[:300] or type(error).__name__}')
