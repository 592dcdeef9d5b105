"""Phase times of a run, and its progress on the terminal."""

import collections
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import contextlib
import functools
import math
import sys
import threading
import time

from rich import columns
from rich import console as console_lib
from rich import live
from rich import markup
from rich import progress as progress_lib
from rich import progress_bar
from rich import table
from rich import text as text_lib

from tepo_jax import errors
from tepo_jax.runtime import processes

PLAIN_PHASE_SECONDS = 5.0  # minimum between phase lines without a terminal
LONG_SECONDS = 5  # a compilation that takes longer keeps a line
RECENT = 5  # steps, or evaluations, whose mean estimates the time left
SAMPLE_SECONDS = 120  # a completion stays in the live block for so long

_BARS = '▁▂▃▄▅▆▇█'
_TREND = 8  # characters of a trend
_EVALUATING = 'evaluating'  # a phase that is no part of a step's time


class _Console(console_lib.Console):

  def show_cursor(self, show: bool = True) -> bool:
    """Leaves the cursor visible: a killed process could not show it again."""
    return False


_STDERR = _Console(stderr=True)
_is_silent = False


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
  """Shows a run's progress and estimated time left on stderr.

  On a terminal, a live block: the numbers of the last finished step, some with
  their trends over the run; the current step, its phase or the program that
  compiles, and the time left; a completion, another one every few minutes. What
  is printed meanwhile appears above it, and at the end all of it stays. Else a
  line per step and, at most every PLAIN_PHASE_SECONDS, per phase. Only the
  first process of a job shows anything.

  The time left is the number of steps and of evaluations that remain, each
  times its mean over the last RECENT. Compilation is no part of it: the first
  step, which compiles most, does not count once there is another.
  """

  def __init__(self, total_steps: int, *, eval_period: int = 0,
               compile_seconds: Callable[[], float] = lambda: 0.0):
    """`eval_period`: steps between evaluations, 0 if there are none.
    `compile_seconds`: returns the seconds spent on compilation so far."""
    self._total, self._eval_period = total_steps, eval_period
    self._compile_seconds = compile_seconds
    self._step_seconds: list[float] = []
    self._eval_seconds: list[float] = []
    self._began = self._clock()
    self._evaluated = 0.0  # seconds of evaluations since the step began
    self._last_phase = -math.inf
    self._done = 0  # steps
    self._head, self._text, self._left, self._summary = '', '', '', ''
    self._sample, self._sampled = '', -math.inf
    self._history: dict[str, list[float]] = collections.defaultdict(list)
    # A program, since when, and what announces a long one.
    self._compilation: tuple[str, float, threading.Timer] | None = None
    self._phase: tuple[str, float] | None = None  # and when it began
    self._phases: dict[str, float] = {}  # its seconds, of this step so far
    self._shares: dict[str, float] = {}  # of the last step
    self._console = _console()
    self._is_live = _is_live(self._console)
    self._live = live.Live(
        console=self._console, get_renderable=self._block,
        refresh_per_second=1, redirect_stdout=sys.stdout.isatty())

  def begin(self, step: int) -> None:
    """Starts a step, counted from 1."""
    self._began, self._evaluated = self._clock(), 0.0
    self._phase, self._phases = None, {}
    self._done, self._head = step - 1, f'step {step}/{self._total}'

  def phase(self, text: str) -> None:
    """Shows the current phase, with its share of the last step's time if that
    had a phase of the same first word."""
    self._enter(text.split()[0])
    share = self._shares.get(text.split()[0])
    self._text = f'{text} ...' + (f' ({share:.0%})' if share else '')
    now = time.monotonic()
    if self._is_live:
      self._draw()
    elif now - self._last_phase >= PLAIN_PHASE_SECONDS:
      self._last_phase = now
      self.note(self._head, self._text)

  def _enter(self, phase):
    """Ends the current phase; `phase`, or None, begins."""
    if self._phase is not None:
      name, began = self._phase
      self._phases[name] = (
          self._phases.get(name, 0.0) + self._clock() - began)
    self._phase = phase and (phase, self._clock())

  @contextlib.contextmanager
  def evaluating(self, what: str) -> Iterator[None]:
    """Shows an evaluation, and keeps its seconds apart from the step's."""
    self.phase(f'{_EVALUATING} {what}')
    start = self._clock()
    yield
    self._eval_seconds.append(self._clock() - start)
    self._evaluated += self._eval_seconds[-1]

  def note(self, *parts: str) -> None:
    """Prints a permanent line of the parts that are not empty; a terminal
    breaks it between words."""
    line = '  '.join(filter(None, parts))
    if self._is_live:
      self._console.print(text_lib.Text(line))
    else:
      self._console.out(line, highlight=False)

  def trend(self, values: Mapping[str, float]) -> None:
    """Adds a step's values to the trends, by their names in the summary; one
    that is not finite has no bar."""
    for name, value in values.items():
      if math.isfinite(value):
        self._history[name].append(value)

  def sample(self, verdict: str, completion: str) -> None:
    """Shows a completion, unless the last one has been shown only briefly."""
    if time.monotonic() - self._sampled >= SAMPLE_SECONDS:
      self._sampled = time.monotonic()
      self._sample = errors.printable(
          f'{verdict}: {" ".join(completion.split())}')

  def step(self, step: int, summary: str, kept: str = '') -> None:
    """Shows a finished step; `kept` stays on the terminal."""
    self._enter(None)
    seconds = self._clock() - self._began - self._evaluated
    self._step_seconds.append(seconds)
    self._shares = {name: part / seconds for name, part in self._phases.items()
                    if name != _EVALUATING and seconds}
    self._left = f'eta {duration(self.seconds_left(step))}'
    self._done, self._head = step, f'step {step}/{self._total}'
    if not self._is_live:
      self.note(self._head, summary, kept, self._left)
      return
    self._summary, self._text = f'step {step}: {summary}', ''
    if kept:
      self.note(self._head, kept)
    self._draw()

  def seconds_left(self, step: int) -> float:
    """Estimates the seconds after the finished step `step`."""
    evaluations = self._eval_period and len(
        [s for s in range(step + 1, self._total + 1)
         if s % self._eval_period == 0 or s == self._total])
    return ((self._total - step)
            * _recent(self._step_seconds[1:] or self._step_seconds)
            + evaluations * _recent(self._eval_seconds))

  def compiling(self, program: str) -> None:
    """Shows that `program` is being compiled; without a terminal from
    LONG_SECONDS on."""
    self.compiled()
    announcement = threading.Timer(
        LONG_SECONDS, self.note, (self._head, f'compiling {program} ...'))
    announcement.daemon = True
    self._compilation = program, time.monotonic(), announcement
    if not self._is_live:
      announcement.start()

  def compiled(self) -> None:
    """Ends what `compiling` shows; keeps a line if it took LONG_SECONDS."""
    if self._compilation is None:
      return
    program, start, announcement = self._compilation
    announcement.cancel()
    self._compilation = None
    if (seconds := time.monotonic() - start) >= LONG_SECONDS:
      self.note(f'compiled {program} in {duration(seconds)}')

  def close(self) -> None:
    """Ends the live block; its last state stays on the terminal."""
    self.compiled()
    self._live.stop()

  def _clock(self):
    """Seconds, without those of compilation."""
    return time.monotonic() - self._compile_seconds()

  def _draw(self):
    self._live.start()  # unless it has been
    self._live.refresh()

  def _block(self):
    """What the live block shows now; it is as wide as the terminal."""
    now, text = table.Table.grid(padding=(0, 2)), self._text
    if self._compilation is not None:
      program, start, _ = self._compilation
      if (seconds := time.monotonic() - start) >= 1:
        text = f'compiling {program}: {duration(seconds)}'
    now.add_row(*([
        text_lib.Text(self._head, no_wrap=True), progress_bar.ProgressBar(
            self._total, self._done, width=10)] if self._head else []),
                *map(text_lib.Text, filter(None, (self._left, text))))
    last = [columns.Columns(
        map(text_lib.Text, map(self._with_trend, self._summary.split('  '))),
        padding=(0, 2))] if self._summary else []
    sample = [text_lib.Text(shortened(
        self._sample, 2 * self._console.width - 1), style='dim')
              ] if self._sample else []
    return console_lib.Group(*last, now, *sample)

  def _with_trend(self, part):
    """'accuracy 0.5' -> 'accuracy 0.5 ▁▃▅█', if its trend is known."""
    name = part.rpartition(' ')[0].rpartition(' ')[2]
    values = self._history.get(name)
    return f'{part} {spark(values)}' if values else part


def spark(values: Sequence[float]) -> str:
  """The values as bars from the least to the greatest: each bar is the mean of
  an equal part of them."""
  count = min(_TREND, len(values))
  ends = [round(i * len(values) / count) for i in range(count + 1)]
  means = [sum(values[a:b]) / (b - a) for a, b in zip(ends, ends[1:])]
  least, span = min(means), max(means) - min(means)
  return ''.join(_BARS[round((len(_BARS) - 1) * (mean - least) / span)]
                 if span else _BARS[0] for mean in means)


def shortened(text: str, most: int) -> str:
  """The text, without its middle if it has more than `most` characters."""
  if len(text) <= most:
    return text
  end = (most - 3) // 2
  return f'{text[:most - 3 - end]} … {text[len(text) - end:]}'


@contextlib.contextmanager
def counting(title: str, total: int, done: int
             ) -> Iterator[Callable[[int], None]]:
  """Yields a function to call with the number of items that are finished;
  meanwhile a terminal shows how many of `total` are, `done` of them before."""
  console = _console()
  with progress_lib.Progress(console=console, transient=True,
                             disable=not _is_live(console)) as bar:
    task = bar.add_task(markup.escape(title), total=total, completed=done)
    yield functools.partial(bar.advance, task)


def track(items: Iterable, title: str, total: int) -> Iterator:
  """Yields the items, shown by `counting`."""
  with counting(title, total, done=0) as advance:
    for item in items:
      yield item
      advance(1)


def silence() -> None:
  """From now on no progress is shown."""
  global _is_silent
  _is_silent = True


def _console() -> console_lib.Console:
  """That of stderr; nobody's on any process but the first."""
  return _STDERR if processes.is_first() and not _is_silent else (
      console_lib.Console(quiet=True))


def _is_live(console):
  """Whether there is a terminal that can show a live block."""
  return (not console.quiet and console.file.isatty()
          and console.is_interactive)


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
