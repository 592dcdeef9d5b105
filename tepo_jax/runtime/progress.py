"""Phase times and progress lines of a run."""

import collections
from collections.abc import Callable, Iterator
import contextlib
import math
import shutil
import sys
import threading
import time

PLAIN_PHASE_SECONDS = 5.0  # minimum between phase lines without a terminal
TICK_SECONDS = 1.0  # between two views of a compilation's seconds
LONG_SECONDS = 5  # a compilation that takes longer keeps a line
RECENT = 5  # steps, or evaluations, whose mean estimates the time left


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

  On a terminal it rewrites two lines in place: the numbers of the last finished
  step; and the current step, its phase and the time left. Permanent lines are
  printed above them. Else it prints a line per step and, at most every
  PLAIN_PHASE_SECONDS, per phase.

  The time left is the number of steps and of evaluations that remain, each
  times its mean over the last RECENT. Compilation is no part of it: the first
  step, which compiles most, does not count once there is another.
  """

  def __init__(self, total_steps: int, stream=None, *, eval_period: int = 0,
               compile_seconds: Callable[[], float] = lambda: 0.0):
    """`eval_period`: steps between evaluations, 0 if there are none.
    `compile_seconds`: returns the seconds spent on compilation so far."""
    self._total, self._eval_period = total_steps, eval_period
    self._compile_seconds = compile_seconds
    self._stream = sys.stderr if stream is None else stream
    self._tty = self._stream.isatty()
    self._step_seconds: list[float] = []
    self._eval_seconds: list[float] = []
    self._began = self._clock()
    self._evaluated = 0.0  # seconds of evaluations since the step began
    self._last_phase = -math.inf
    self._head, self._left, self._summary, self._text = '', '', '', ''
    self._drawn = 0  # lines of the block on the terminal
    self._lock = threading.RLock()  # `_tick` draws from another thread
    # Program, start, the event that ends its thread, and the thread.
    self._compilation: tuple | None = None

  def begin(self, step: int) -> None:
    """Starts a step, counted from 1."""
    self._began, self._evaluated = self._clock(), 0.0
    self._head = f'step {step}/{self._total}  '
    if self._tty:
      self._head += f'{self._bar(step - 1)}  '

  def phase(self, text: str) -> None:
    """Shows the current phase."""
    now, self._text = time.monotonic(), text
    if self._tty:
      self._draw(f'{self._head}{text} ...{self._left}')
    elif now - self._last_phase >= PLAIN_PHASE_SECONDS:
      self._last_phase = now
      self._print(f'{self._head}{text} ...\n')

  @contextlib.contextmanager
  def evaluating(self, what: str) -> Iterator[None]:
    """Shows an evaluation, and keeps its seconds apart from the step's."""
    self.phase(f'evaluating {what}')
    start = self._clock()
    yield
    self._eval_seconds.append(self._clock() - start)
    self._evaluated += self._eval_seconds[-1]

  def note(self, text: str) -> None:
    """Prints a permanent line."""
    with self._lock:
      self._print(f'{self._erase() if self._tty else ""}{text}\n')

  def step(self, step: int, summary: str, kept: str = '') -> None:
    """Shows a finished step; `kept` stays on the terminal."""
    self._step_seconds.append(self._clock() - self._began - self._evaluated)
    left = f'eta {duration(self.seconds_left(step))}'
    done = f'step {step}/{self._total}'
    if not self._tty:
      parts = filter(None, (done, summary, kept, left))
      self._print('  '.join(parts) + '\n')
      return
    self._left, self._summary = f'  {left}', f'step {step}: {summary}'
    if kept:
      self.note(f'{done}  {kept}')
    self._draw(f'{done}  {self._bar(step)}{self._left}')

  def seconds_left(self, step: int) -> float:
    """Estimates the seconds after the finished step `step`."""
    evaluations = self._eval_period and len(
        [s for s in range(step + 1, self._total + 1)
         if s % self._eval_period == 0 or s == self._total])
    return ((self._total - step)
            * _recent(self._step_seconds[1:] or self._step_seconds)
            + evaluations * _recent(self._eval_seconds))

  def compiling(self, program: str) -> None:
    """Shows from the first second on that `program` is being compiled."""
    self._stop_ticking()
    done = threading.Event()
    ticker = threading.Thread(
        target=self._tick, args=(program, done), daemon=True)
    self._compilation = program, time.monotonic(), done, ticker
    ticker.start()

  def compiled(self) -> None:
    """Ends what `compiling` shows; keeps a line if it took LONG_SECONDS."""
    if self._compilation is None:
      return
    program, start, *_ = self._compilation
    self._stop_ticking()
    seconds = time.monotonic() - start
    if seconds >= LONG_SECONDS:
      self.note(f'compiled {program} in {duration(seconds)}')
    if self._tty and self._text:
      self.phase(self._text)

  def _stop_ticking(self):
    if self._compilation is not None:
      *_, done, ticker = self._compilation
      done.set()
      ticker.join()
      self._compilation = None

  def _tick(self, program, done):
    """Shows the seconds of a compilation, in a thread of its own."""
    text, seconds = f'compiling {program}, first run only', 0
    while not done.wait(TICK_SECONDS):
      seconds += 1
      if self._tty:
        self._draw(f'{self._head}{text}: {duration(seconds)}')
      elif seconds == LONG_SECONDS:
        self._print(f'{self._head}{text} ...\n')

  def close(self) -> None:
    """Keeps the last lines on the terminal and moves the cursor below."""
    self._stop_ticking()
    if self._drawn:
      self._drawn = 0
      self._print('\n')

  def _clock(self):
    """Seconds, without those of compilation."""
    return time.monotonic() - self._compile_seconds()

  def _bar(self, step):
    filled = round(20 * step / self._total)
    return '━' * filled + '─' * (20 - filled)

  def _draw(self, line):
    width = shutil.get_terminal_size().columns - 1
    lines = [text[:width] for text in (self._summary, line) if text]
    with self._lock:
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


def _recent(seconds: list[float]) -> float:
  """The mean of the last RECENT; 0 of none."""
  last = seconds[-RECENT:]
  return sum(last) / len(last) if last else 0.0


def duration(seconds: float) -> str:
  """90 -> '1m30s', 7260 -> '2h01m'."""
  minutes, rest = divmod(round(seconds), 60)
  hours, minutes = divmod(minutes, 60)
  if hours:
    return f'{hours}h{minutes:02d}m'
  return f'{minutes}m{rest:02d}s' if minutes else f'{rest}s'
