"""Phase times and progress lines of a run."""

import collections
from collections.abc import Iterator
import contextlib
import math
import shutil
import sys
import time

PLAIN_PHASE_SECONDS = 5.0  # minimum between phase lines without a terminal


class Timers:
  """Sums wall-clock seconds by phase: `with timers('rollout'): ...`.

  The seconds of a phase inside another one count for the inner one alone.
  """

  def __init__(self):
    self._seconds = collections.defaultdict(float)
    self._inside = 0.0  # seconds of phases that ended inside the current one

  @contextlib.contextmanager
  def __call__(self, name: str) -> Iterator[None]:
    start, inside_outer = time.perf_counter(), self._inside
    self._inside = 0.0
    try:
      yield
    finally:
      seconds = time.perf_counter() - start
      self._seconds[name] += seconds - self._inside
      self._inside = inside_outer + seconds

  def pop(self) -> dict[str, float]:
    """Returns the seconds since the last call, by phase."""
    seconds = dict(self._seconds)
    self._seconds.clear()
    return seconds


class Progress:
  """Writes a run's progress and estimated time left to `stream`.

  On a terminal it rewrites two lines in place: step, phase and time left; and
  the summary of the last step. Permanent lines are printed above them. Else
  it prints a line per step and, at most every PLAIN_PHASE_SECONDS, per phase.
  """

  def __init__(self, total_steps: int, stream=None):
    self._total, self._finished = total_steps, 0
    self._stream = sys.stderr if stream is None else stream
    self._tty = self._stream.isatty()
    self._start, self._last_phase = time.monotonic(), -math.inf
    self._head, self._left, self._summary = '', '', ''
    self._drawn = 0  # lines of the block on the terminal

  def phase(self, text: str) -> None:
    """Shows the current phase."""
    now = time.monotonic()
    if self._tty:
      self._draw(f'{self._head}{text} ...{self._left}')
    elif now - self._last_phase >= PLAIN_PHASE_SECONDS:
      self._last_phase = now
      self._print(f'{self._head}{text} ...\n')

  def step(self, step: int, summary: str, kept: str = '') -> None:
    """Shows a finished step, counted from 1; `kept` stays on the terminal."""
    self._finished += 1
    seconds = (time.monotonic() - self._start) / self._finished
    left = f'eta {_duration(seconds * (self._total - step))}'
    done = f'step {step}/{self._total}'
    self._head = f'step {step + 1}/{self._total}  '
    if not self._tty:
      parts = filter(None, (done, summary, kept, left))
      self._print('  '.join(parts) + '\n')
      return
    filled = round(20 * step / self._total)
    bar = '━' * filled + '─' * (20 - filled)
    self._head += f'{bar}  '
    self._left, self._summary = f'  {left}', summary
    if kept:
      self._print(f'{self._erase()}{done}  {kept}\n')
    self._draw(f'{done}  {bar}{self._left}')

  def close(self) -> None:
    """Keeps the last lines on the terminal and moves the cursor below."""
    if self._drawn:
      self._drawn = 0
      self._print('\n')

  def _draw(self, line):
    width = shutil.get_terminal_size().columns - 1
    lines = [text[:width] for text in (line, self._summary) if text]
    text = self._erase() + '\n'.join(lines)
    self._drawn = len(lines)
    self._print(text)

  def _erase(self):
    """Control codes: go to the block's first line and clear from there."""
    up = f'\x1b[{self._drawn - 1}A' if self._drawn > 1 else ''
    self._drawn = 0
    return f'\r{up}\x1b[J'

  def _print(self, text: str) -> None:
    self._stream.write(text)
    self._stream.flush()


def _duration(seconds: float) -> str:
  """90 -> '1m30s', 7260 -> '2h01m'."""
  minutes, rest = divmod(round(seconds), 60)
  hours, minutes = divmod(minutes, 60)
  if hours:
    return f'{hours}h{minutes:02d}m'
  return f'{minutes}m{rest:02d}s' if minutes else f'{rest}s'
