"""runtime.files: the same on a disk and in a bucket."""

import functools
import os
import socket
import subprocess
import sys
import threading
import time

from gcsfs import retry
from google.auth import exceptions
import pytest

from tepo_jax import errors
from tepo_jax.job import exits
from tepo_jax.runtime import buckets
from tepo_jax.runtime import files
from tests import runs


def _names(folder):
  return sorted(entry.name for entry in folder.iterdir())


def test_a_path_has_pathlib_s_methods(folder):
  path = folder / 'a' / 'b.txt'
  path.parent.mkdir(parents=True, exist_ok=True)
  assert not path.exists() and not path.is_file()
  with pytest.raises(FileNotFoundError) as error:
    path.read_text()
  assert error.value.filename == str(path)
  path.write_text('héllo', 'utf-8')
  assert path.read_text('utf-8') == 'héllo'
  assert path.read_text('ascii', 'replace') == 'h\ufffd\ufffdllo'
  assert path.read_bytes() == 'héllo'.encode() and path.stat().st_size == 6
  assert abs(path.stat().st_mtime - time.time()) < 60
  assert path.is_file() and not path.is_dir() and path.parent.is_dir()
  assert files.path(str(path)) == path and path.absolute() == path
  assert _names(folder) == ['a'] and _names(folder / 'a') == ['b.txt']
  (folder / 'a' / 'c~').write_bytes(b'')
  assert _names(folder / 'a') == ['b.txt', 'c~']
  assert list((folder / 'a').glob('b*')) == [path]
  path.unlink()
  with pytest.raises(FileNotFoundError):
    path.unlink()
  path.unlink(missing_ok=True)


def test_a_file_is_replaced_whole(folder):
  path = folder / 'x.txt'
  files.replace_text(path, 'old')
  with pytest.raises(ZeroDivisionError), files.replacing(path) as temporary:
    temporary.write_text('ne')
    raise ZeroDivisionError
  assert path.read_text() == 'old'
  with files.replacing(path) as temporary:
    temporary.write_text('new')
    assert path.read_text() == 'old'
  assert path.read_text() == 'new'


def test_two_may_replace_a_shared_file_at_the_same_time(tmp_path):
  path = tmp_path / 'a.txt'
  with files.replacing(path, is_shared=True) as slow:
    slow.write_text('slow')
    with files.replacing(path, is_shared=True) as fast:
      fast.write_text('fast')
    assert path.read_text() == 'fast'
  assert path.read_text() == 'slow'
  with pytest.raises(ZeroDivisionError), files.replacing(
      path, is_shared=True) as failed:
    failed.touch()
    raise ZeroDivisionError
  assert list(tmp_path.iterdir()) == [path]


def test_a_growing_file(folder, monkeypatch):
  path = folder / 'x.jsonl'
  file = files.GrowingFile(path)
  for text in ('1\n', '2\n'):
    file.append(text)
    file.flush()
    assert file.read() == path.read_text() == '1\n2\n'[:len(path.read_text())]
  assert path.read_text() == '1\n2\n'
  again = files.GrowingFile(path)  # of a run that resumes
  again.replace('1\n')
  again.append('3\n')
  again.append('4\n')
  again.flush()
  assert path.read_text() == '1\n3\n4\n'
  path.write_bytes(b'\xff\n')
  assert again.read() == '\ufffd\n'


def test_uploads_of_a_growing_object_take_little_time(
    bucket_server, monkeypatch):
  now = [0.0]
  monkeypatch.setattr(files.time, 'monotonic', lambda: now[0])
  write = files.BucketPath.write_bytes
  written = []

  def slow(path, data):
    now[0] += 2
    written.append(data)
    write(path, data)

  monkeypatch.setattr(files.BucketPath, 'write_bytes', slow)
  file = files.GrowingFile(files.path('gs://lab/growing.txt'))
  for _ in range(100):
    now[0] += 1
    file.append('x')
  assert len(written) == 3 and now[0] == 106  # at 1 s, 43 s, 85 s


def test_a_folder_is_uploaded_and_an_interrupted_upload_is_finished(folder):
  out = folder / 'hf'
  assert files.is_free(out)
  data = os.urandom(6_000_000)  # in parts

  def fill():
    with files.local_folder(out) as local:
      (local / 'part').mkdir(exist_ok=True)
      (local / 'part' / 'weights').write_bytes(data)
      (local / 'config.json').write_text('{}')

  fill()
  assert not files.is_free(out) and _names(out) == ['config.json', 'part']
  assert (out / 'part' / 'weights').read_bytes() == data
  if not files.is_remote(out):
    return
  (out / 'config.json').unlink()
  (out / 'upload.unfinished').write_text('')
  assert files.is_free(out)
  fill()
  assert _names(out) == ['config.json', 'part']


def test_what_an_interrupted_upload_left_is_discarded(bucket_server, tmp_path):
  out = files.path(f'gs://lab/{tmp_path.name}')
  (out / 'model.safetensors').write_text('old')
  files.discard_unfinished(out)  # this one is no upload's
  files.reserve(out)
  assert _names(out) == ['model.safetensors', 'upload.unfinished']
  files.discard_unfinished(out)
  assert _names(out) == ['upload.unfinished']


def test_two_processes_upload_to_one_folder(folder, monkeypatch):
  """One ends while the other has begun."""
  out, reserve = folder / 'profile', files.reserve

  def interrupted(path):
    reserve(path)
    monkeypatch.setattr(files, 'reserve', reserve)
    with files.local_folder(out) as local:
      (local / 'b').write_text('b')

  monkeypatch.setattr(files, 'reserve', interrupted)
  with files.local_folder(out) as local:
    (local / 'a').write_text('a')
  names = ['a', 'b'] if files.is_remote(out) else ['a']
  assert _names(out) == names


def test_copies_for_libraries_that_need_a_disk(folder):
  (folder / 'sub').mkdir()
  for name in ('a', 'b', 'sub/c'):
    (folder / name).write_text(name)
  with files.downloaded(folder) as local:
    assert (local / 'sub' / 'c').read_text() == 'sub/c'
    assert _names(local) == ['a', 'b', 'sub']
  with files.downloaded(folder / 'a') as local:
    assert local.name == 'a' and local.read_text() == 'a'
  with files.downloaded(folder, ('b', 'none')) as local:
    assert (local / 'b').read_text() == 'b' and not (local / 'none').exists()


def test_a_range_of_bytes(bucket_server):
  path = files.path('gs://lab/range')
  path.write_bytes(bytes(range(256)))
  before = len(bucket_server.log)
  assert files.read_range(path, 10, 5) == bytes(range(10, 15))
  assert files.read_range(path, 250, 100) == bytes(range(250, 256))
  assert sum(size for *_, size in bucket_server.log[before:]) == 11


def test_of_two_writers_one_replaces_a_version(bucket_server):
  found = buckets.VersionedObject(files.path('gs://lab/version'))
  assert found.read() is None
  assert found.replace(None, 'é')
  assert not found.replace(None, 'b')
  old = found.read()
  assert old.text == 'é' and 0 <= found.age(old) < 60
  assert found.replace(old, 'c')
  assert not found.replace(old, 'd') and found.replace(old, 'c')
  assert found.read().text == 'c'


@pytest.mark.parametrize('bucket, said', [
    ('closed', 'no permission'), ('none', 'there is no such bucket')])
def test_a_bucket_that_does_not_take_files(bucket_server, bucket, said):
  path = files.path(f'gs://{bucket}/run/x')
  for write in (path.write_text, files.GrowingFile(path).append,
                functools.partial(buckets.VersionedObject(path).replace, None)):
    with pytest.raises(errors.InputError) as error:
      write('x')
    assert exits.outcome(error.value)[0] == 2
    assert said in str(error.value) and f'gs://{bucket}' in str(error.value)
    assert '\n' not in str(error.value)


@pytest.mark.parametrize('error, is_silent', [
    (exceptions.RefreshError('revoked'), False),
    (exceptions.RefreshError('busy', retryable=True), True),
    (exceptions.DefaultCredentialsError('none'), False),
    (exceptions.TransportError('no route'), True),
    (retry.HttpError({'code': 401, 'message': 'Invalid Credentials'}), False),
    (retry.HttpError({'code': 503, 'message': 'busy'}), True),
    (TimeoutError(), True), (OSError('Forbidden: x\nno'), False)])
def test_only_what_may_pass_is_a_reason_to_start_again(error, is_silent):
  raised = buckets._translated(error, 'GET', 'https://host/b/lab/o/x')
  assert str(raised).startswith('gs://lab/x: ')
  assert errors.is_unanswered(raised) == is_silent


def test_a_bucket_that_does_not_answer_is_not_a_missing_file(bucket_server):
  path = files.path('gs://closed/run/x')
  for read in (path.exists, path.is_dir, path.read_bytes, path.stat,
               lambda: list(path.iterdir())):
    with pytest.raises(buckets.BucketError, match='gs://closed.*no permission'):
      read()


def test_no_bucket_at_all(tmp_path):
  """A server that resets every connection: one line, after some repeats."""
  with socket.create_server(('127.0.0.1', 0)) as server:
    def reset():
      while True:
        try:
          server.accept()[0].close()
        except OSError:
          return

    threading.Thread(target=reset, daemon=True).start()
    port = server.getsockname()[1]
    code = ('from gcsfs import retry\n'
            'import asyncio\n'
            'async def at_once(_): pass\n'
            'retry.asyncio.sleep = at_once\n'
            'from tepo_jax.runtime import buckets, files\n'
            'try: files.path("gs://lab/x").exists()\n'
            'except buckets.BucketError as raised: print(error := raised)\n'
            'from tepo_jax.job import exits\n'
            'print(exits.outcome(error)[0])\n')
    done = subprocess.run(
        [sys.executable, '-c', code], cwd=runs.ROOT, text=True,
        capture_output=True, timeout=100,
        env=os.environ | {'STORAGE_EMULATOR_HOST': f'http://127.0.0.1:{port}'})
  assert done.stdout.startswith('gs://lab/x: '), done.stderr[-2000:]
  assert done.stdout.splitlines()[1:] == [str(errors.LOST)]


def test_without_gcsfs_only_buckets_are_refused(tmp_path):
  (tmp_path / 'gcsfs.py').write_text('raise ImportError')
  code = ('from tepo_jax.runtime import files\n'
          'print(files.path("here"))\n'
          'files.path("gs://lab/x")\n')
  done = subprocess.run(
      [sys.executable, '-c', code], text=True, capture_output=True,
      env=os.environ | {'PYTHONPATH': f'{tmp_path}:{runs.ROOT}'})
  assert done.stdout == 'here\n'
  assert 'InputError: gs:// needs gcsfs: run ' in done.stderr
