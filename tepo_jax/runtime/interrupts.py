"""Ctrl-C (SIGINT): what the first one does; any later one ends the process.

A thread reacts, not the main thread: Python runs signal handlers only between
two bytecodes, and a compilation may keep the main thread busy for minutes.
"""

from collections.abc import Callable
import os
import signal
import threading

STATUS = 130  # of an interrupted program: 128 + SIGINT
WORD = 'interrupted'  # what a program says that was

_first: Callable[[], None] | None = None
_unwinds = False
_happened = False
_last_words: Callable[[], str] = lambda: WORD


def install() -> None:
  """From now on Ctrl-C ends this process at once with status 130."""
  if signal.getsignal(signal.SIGINT) is _handle:
    return
  read, write = os.pipe()
  os.set_blocking(write, False)
  signal.set_wakeup_fd(write, warn_on_full_buffer=False)
  signal.signal(signal.SIGINT, _handle)
  threading.Thread(target=_watch, args=(read,), daemon=True).start()


def on_first(function: Callable[[], None] | None) -> None:
  """The next Ctrl-C calls the function, in a thread; None: it ends the
  process."""
  global _first, _unwinds
  _first, _unwinds = function, False


def unwind_on_first() -> None:
  """The next Ctrl-C raises KeyboardInterrupt in the main thread."""
  global _first, _unwinds
  _first, _unwinds = lambda: None, True


def happened() -> bool:
  """Whether there was a Ctrl-C; a library may swallow a KeyboardInterrupt."""
  return _happened


def set_last_words(function: Callable[[], str]) -> None:
  """What the function returns is printed where `end` ends the process."""
  global _last_words
  _last_words = function


def end() -> None:
  """Ends this process at once, without any cleaning up."""
  # On a terminal, the cursor may be behind a live block and '^C'.
  try:
    os.write(2, b'\n' * os.isatty(2) + f'{_last_words()}\n'.encode())
  finally:
    os._exit(STATUS)


def _handle(*_):
  global _unwinds, _happened
  _happened = True  # the thread may be later
  if _unwinds:
    _unwinds = False
    raise KeyboardInterrupt


def _watch(read):
  global _first, _happened
  while True:
    for number in os.read(read, 64):
      if number == signal.SIGINT:
        _happened = True
        function, _first = _first or end, None
        function()
