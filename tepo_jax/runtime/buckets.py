"""Requests to buckets of Google Cloud Storage, and what they raise.

Every request goes through gcsfs, also those of epath, by which Orbax reads and
writes checkpoints; only the arrays in them go through tensorstore. Requests
that fail for a while are repeated; what remains is a `BucketError`.
"""

import contextlib
import dataclasses
import email.utils
import errno
import functools
import json
import os
import re
from typing import Any
import urllib.parse

from etils.epath import backend
from etils.epath import gpath

from tepo_jax import errors

SCHEME = 'gs://'


class BucketError(OSError, errors.InputError):
  """A bucket that is missing, refuses access or does not answer."""


class SilentBucketError(BucketError, errors.Unanswered):
  """A bucket that does not answer, or only that it is overloaded."""


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

  def __init__(self, path: gpath.PosixGPath):
    self.path = path

  def read(self) -> Version | None:
    """The object as it is now; None if there is none."""
    try:
      headers, data = client().call(
          'GET', 'b/{}/o/{}', *place(self.path), alt='media')
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
    bucket, name = place(self.path)
    body = '\n'.join(['--=', 'Content-Type: application/json', '', json.dumps(
        {'name': name}), '--=', 'Content-Type: text/plain', '', text, '--=--'])
    fs = client()
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
      client().call('DELETE', 'b/{}/o/{}', *place(self.path),
                    ifGenerationMatch=found.stamp)


def place(path):
  """(bucket, name) of an object."""
  bucket, _, name = str(path).removeprefix(SCHEME).partition('/')
  return bucket, name


@functools.cache
def client() -> Any:
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
  match = re.search(r'/b/([^/?]+)(?:/o/([^/?]+))?', url)
  where = SCHEME + urllib.parse.unquote('/'.join(filter(
      None, match.groups()))) if match else url
  if isinstance(error, FileNotFoundError):
    if method == 'POST':
      return BucketError(f'{where}: there is no such bucket')
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), where)
  kind = SilentBucketError if _is_silent(error) else BucketError
  text = errors.one_line(error)
  if text.startswith('Forbidden'):
    text = 'no permission: ' + text.partition(' ')[2].partition(' ')[2]
  return kind(f'{where}: {text[:300] or type(error).__name__}')


def _is_silent(error):
  """Whether a request may succeed later, with the same rights."""
  from gcsfs import retry
  from google.auth import exceptions
  if isinstance(error, exceptions.GoogleAuthError):
    return isinstance(error, exceptions.TransportError) or error.retryable
  if getattr(error, 'code', None) == 401:
    return False
  return retry.is_retriable(error) or isinstance(
      error, (TimeoutError, ConnectionError))
