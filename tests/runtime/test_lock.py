"""runtime.lock: one process per folder; dead or silent ones are replaced; on a
disk and in a bucket."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from tepo_jax import errors
from tepo_jax.runtime import lock as lock_lib
from tests import runs

pytestmark = pytest.mark.long

# Acquires the lock of a folder, says so, and sleeps.
_HOLD = """
import sys, time
from tepo_jax import errors
from tepo_jax.runtime import lock
try:
  held = lock.FolderLock(sys.argv[1])
  held.acquire()
  print('held', flush=True)
  time.sleep(float(sys.argv[2]))
  held.release()
except errors.InputError as error:
  print(error)
"""


def _hold(folder, seconds=60):
  return subprocess.Popen(
      [sys.executable, '-c', _HOLD, str(folder), str(seconds)], text=True,
      stdout=subprocess.PIPE, cwd=runs.ROOT)


def _left(folder):
  """The files in a folder that may be missing."""
  return list(folder.iterdir()) if folder.exists() else []


@pytest.fixture(name='quick')
def _quick(monkeypatch):
  monkeypatch.setattr(lock_lib, 'REFRESH_S', 0.1)
  monkeypatch.setattr(lock_lib, 'EXPIRES_S', 1)


def _of_another_host(folder, **changes):
  """Makes this process's lock one of another host."""
  path = folder / lock_lib.FILE
  with lock_lib.FolderLock(folder) as lock:
    lock.acquire()
    text = path.read_text()
  path.write_text(json.dumps(
      json.loads(text) | {'host': 'elsewhere', 'process': 77} | changes))
  return path


def test_it_is_made_and_removed(folder):
  path = folder / 'new' / 'run'
  with lock_lib.FolderLock(path) as lock:
    lock.acquire()
    lock.acquire()
    assert [entry.name for entry in path.iterdir()] == [lock_lib.FILE]
  assert not _left(path)
  with lock_lib.FolderLock(folder / 'never'):
    pass
  assert not (folder / 'never').exists()


def test_a_second_process_is_refused_until_the_first_has_ended(folder):
  first = _hold(folder)
  assert first.stdout.readline() == 'held\n'
  before = (folder / lock_lib.FILE).read_bytes()
  second = _hold(folder)
  said = second.communicate(timeout=30)[0]
  assert f'{folder} is in use by process {first.pid} on host ' in said
  assert socket.gethostname() in said and said.count('\n') == 1
  assert (folder / lock_lib.FILE).read_bytes() == before
  first.send_signal(signal.SIGKILL)  # not yet waited for: a zombie
  time.sleep(0.1)
  with lock_lib.FolderLock(folder) as lock:
    lock.acquire()
  assert not _left(folder)
  first.wait()


def test_a_later_process_of_the_same_number_is_not_the_holder(folder):
  path = folder / lock_lib.FILE
  _of_another_host(folder, host=socket.gethostname(), process=os.getpid(),
                   process_started='1')
  with lock_lib.FolderLock(folder) as lock:
    lock.acquire()
    assert json.loads(path.read_text())['process_started'] != '1'


def test_of_many_at_once_one_takes_over_an_abandoned_lock(folder):
  _of_another_host(folder, host=socket.gethostname(), process=2**22 + 1)
  crowd = [_hold(folder, 8) for _ in range(4)]
  said = [process.communicate(timeout=60)[0] for process in crowd]
  assert sum(text == 'held\n' for text in said) == 1
  [winner] = [p.pid for p, text in zip(crowd, said) if text == 'held\n']
  assert sum(f'process {winner} on' in text for text in said) == 3


def test_another_host_that_touches_its_lock_is_alive(folder, quick):
  path, ended = _of_another_host(folder), threading.Event()

  def refresh():
    while not ended.wait(0.1):
      path.write_text(path.read_text())

  thread = threading.Thread(target=refresh)
  thread.start()
  try:
    with pytest.raises(errors.InputError) as error:
      lock_lib.FolderLock(folder).acquire()
  finally:
    ended.set()
    thread.join()
  assert 'in use by process 77 on host elsewhere' in str(error.value)
  assert str(error.value).endswith(f'remove {path}')
  assert [entry.name for entry in folder.iterdir()] == [lock_lib.FILE]


@pytest.mark.parametrize('text', [None, '', '{"host": 3}', '[]', '\x00'])
def test_a_silent_lock_of_another_host_is_taken_over(
    folder, quick, capsys, text):
  path = _of_another_host(folder)
  if text is not None:
    path.write_text(text)
  start = time.monotonic()
  with lock_lib.FolderLock(folder) as lock:
    lock.acquire()
    assert 0.5 < time.monotonic() - start < 5
    assert json.loads(path.read_text())['process'] == os.getpid()
  [line] = capsys.readouterr().err.splitlines()
  assert 'waiting up to 1 s' in line


def test_an_old_lock_of_another_host_is_taken_over_at_once(tmp_path, capsys):
  path = _of_another_host(tmp_path)
  long_ago = time.time() - 2 * lock_lib.EXPIRES_S
  os.utime(path, (long_ago, long_ago))
  with lock_lib.FolderLock(tmp_path) as lock:
    lock.acquire()
  assert not capsys.readouterr().err


def test_a_lock_that_is_released_meanwhile_is_free(folder, quick):
  path = _of_another_host(folder)
  timer = threading.Timer(0.3, path.unlink)
  timer.start()
  with lock_lib.FolderLock(folder) as lock:
    lock.acquire()
  timer.join()


def test_the_holder_touches_its_lock_and_makes_it_again(tmp_path, quick):
  path = tmp_path / lock_lib.FILE
  with lock_lib.FolderLock(tmp_path) as lock:
    lock.acquire()
    os.utime(path, (0, 0))
    time.sleep(0.5)
    assert path.stat().st_mtime > 1e9
    path.unlink()
    time.sleep(0.5)
    assert path.exists()
  assert not path.exists()


def test_a_holder_that_lost_its_lock_ends(folder):
  code = _HOLD.replace('try:', 'lock.REFRESH_S = 0.1\ntry:')
  process = subprocess.Popen(
      [sys.executable, '-c', code, str(folder), '60'], text=True,
      stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=runs.ROOT)
  assert process.stdout.readline() == 'held\n'
  path = folder / lock_lib.FILE
  path.write_text(json.dumps(
      json.loads(path.read_text()) | {'host': 'elsewhere', 'process': 77}))
  said = process.communicate(timeout=30)[1]
  assert process.returncode == 1
  assert 'taken over by process 77 on host elsewhere' in said
  assert path.exists()
