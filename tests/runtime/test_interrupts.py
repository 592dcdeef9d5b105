"""runtime.interrupts: what Ctrl-C does to a process."""

import signal
import subprocess
import sys
import time

import pytest

from tests import runs


def _run(code, *delays):
  """Status and stderr of a program that gets SIGINTs after it says 'ready'."""
  process = subprocess.Popen(
      [sys.executable, '-c', 'import time\n'
       'from tepo_jax.runtime import interrupts\n' + code], text=True,
      cwd=runs.ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
  assert process.stdout.readline() == 'ready\n'
  for delay in delays:
    time.sleep(delay)
    process.send_signal(signal.SIGINT)
  out, err = process.communicate(timeout=20)
  return process.returncode, out, err


_WAIT = 'print("ready", flush=True)\ntime.sleep(15)\n'
# Holds the main thread in C, as a compilation does.
_BUSY = ('import zlib\nprint("ready", flush=True)\n'
         'for _ in range(15):\n  zlib.compress(bytes(1 << 28), 9)\n')


@pytest.mark.parametrize('body', [_WAIT, _BUSY])
def test_it_ends_the_process_at_once(body):
  start = time.monotonic()
  status, _, err = _run('interrupts.install()\n' + body, 0.1)
  assert (status, err) == (130, 'interrupted\n')
  assert time.monotonic() - start < 10


def test_the_last_words_come_last():
  code = ('interrupts.install()\n'
          'interrupts.set_last_words(lambda: "step 3 is saved")\n')
  assert _run(code + _WAIT, 0.1) == (130, '', 'step 3 is saved\n')


def test_the_first_may_be_a_request_and_the_second_ends():
  code = ('interrupts.install()\n'
          'interrupts.on_first(lambda: print("first", flush=True))\n')
  status, out, err = _run(code + _WAIT, 0.1, 0.5)
  assert (status, out, err) == (130, 'first\n', 'interrupted\n')
  status, out, err = _run(code + 'print("ready", flush=True)\n'
                          'time.sleep(1)\nprint("end")\n', 0.1)
  assert (status, out, err) == (0, 'first\nend\n', '')


def test_the_first_may_unwind_the_main_thread_once():
  code = ('interrupts.install()\ninterrupts.unwind_on_first()\ntry:\n'
          '  print("ready", flush=True)\n  time.sleep(15)\n'
          'except KeyboardInterrupt:\n  print(interrupts.happened())\n')
  assert _run(code, 0.1) == (0, 'True\n', '')
  status, out, err = _run(code + '  ' + _WAIT.replace('\n', '\n  '), 0.1, 0.5)
  assert (status, err) == (130, 'interrupted\n') and 'True' in out


def test_a_program_that_is_being_imported_ends_without_a_traceback():
  process = subprocess.Popen(
      [sys.executable, '-X', 'importtime', '-m', 'tepo_jax.train'], text=True,
      cwd=runs.ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
  for line in process.stderr:
    if 'absl' in line:  # after tepo_jax itself, long before the end
      break
  process.send_signal(signal.SIGINT)
  said = process.communicate(timeout=60)[1]
  assert process.returncode == 130
  assert 'interrupted' in said and 'Traceback' not in said
