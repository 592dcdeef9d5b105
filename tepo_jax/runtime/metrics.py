"""What a run tells: metrics.jsonl, TensorBoard, phase times, progress."""

import collections
import contextlib
import hashlib
import json
import math
import os
import pathlib
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

from tensorboardX import event_file_writer
from tensorboardX.proto import event_pb2
from tensorboardX.proto import summary_pb2

from tepo_jax import files

PLAIN_PHASE_SECONDS = 5.0  # least time between phase lines off a terminal


class Writer:
  """Appends scalars to DIR/metrics.jsonl and DIR/tensorboard/.

  One line a step, `{"step": 3, "reward": 0.5, ...}`, flushed at once. Every
  line is valid JSON: NaN and the infinities are written as null (TensorBoard
  gets them as they are). metrics.jsonl is the record of the run and errors
  in writing it are raised; TensorBoard and Weights & Biases are conveniences:
  the first error of each is told on stderr and ends it.
  """

  def __init__(self, workdir: str | os.PathLike,
               wandb_project: str | None = None,
               config: Mapping[str, Any] | None = None):
    """`wandb_project`: also log there, with the config."""
    self._path = pathlib.Path(workdir) / 'metrics.jsonl'
    self._path.parent.mkdir(parents=True, exist_ok=True)
    self._sinks = [_Events(pathlib.Path(workdir) / 'tensorboard')]
    if wandb_project:
      self._sinks.append(_Wandb(workdir, wandb_project, config))
    self._file = self._path.open('a', encoding='utf-8')

  def write(self, step: int, scalars: Mapping[str, float]) -> None:
    """Appends one step's scalars: floats, or 0-d arrays on the host."""
    values = {name: float(value) for name, value in scalars.items()}
    line = {'step': int(step)} | {
        name: value if math.isfinite(value) else None
        for name, value in values.items()}
    self._file.write(json.dumps(line, allow_nan=False) + '\n')
    self._file.flush()
    for sink in self._sinks:
      sink.write(int(step), values)

  def truncate(self, step: int) -> None:
    """Forgets what lies after `step`, for a run that resumes there.

    The file is replaced by rename, so that a crash leaves the old one or the
    new one. A torn last line (the process was killed while writing) goes too.
    """
    kept = []
    for line in self._path.read_text('utf-8', 'replace').splitlines():
      with contextlib.suppress(json.JSONDecodeError):
        if json.loads(line)['step'] <= step:
          kept.append(line + '\n')
    self._file.close()
    files.replace_text(self._path, ''.join(kept))
    self._file = self._path.open('a', encoding='utf-8')
    for sink in self._sinks:
      sink.purge_from(step + 1)

  def close(self) -> None:
    self._file.close()
    for sink in self._sinks:
      sink.close()


class NoWriter:
  """In the place of a Writer, on processes that write nothing."""

  def write(self, step: int, scalars: Mapping[str, float]) -> None:
    del step, scalars

  def truncate(self, step: int) -> None:
    del step

  def close(self) -> None:
    pass


class _Sink:
  """Where a run's numbers are shown; a run goes on without.

  name: in the warning. errors: what may go wrong with it.
  """
  name: str
  errors: tuple[type[Exception], ...]
  _broken = False

  @contextlib.contextmanager
  def _told_once(self) -> Iterator[None]:
    try:
      yield
    except self.errors as error:
      if not self._broken:
        print(f'warning: no more {self.name}: {" ".join(str(error).split())}',
              file=sys.stderr, flush=True)
      self._broken = True
      self._writer = None


class _Events(_Sink):
  """TensorBoard events, written in the caller's thread.

  tensorboardX's SummaryWriter has a thread and a bounded queue: when its disk
  fails the thread dies and training hangs on the full queue. Its event writer
  alone is all that scalars need.
  """
  name, errors = 'TensorBoard events', (OSError, ValueError)

  def __init__(self, directory: pathlib.Path):
    self._directory = directory
    self._writer = None

  def write(self, step: int, scalars: Mapping[str, float]) -> None:
    value = summary_pb2.Summary.Value
    self._append(step=step, summary=summary_pb2.Summary(value=[
        value(tag=name, simple_value=x) for name, x in scalars.items()]))

  def purge_from(self, step: int) -> None:
    """TensorBoard hides what older files hold from `step` on."""
    self._append(step=step, session_log=event_pb2.SessionLog(
        status=event_pb2.SessionLog.START))

  def close(self) -> None:
    with self._told_once():
      if self._writer is not None:
        self._writer.close()

  def _append(self, **event) -> None:
    with self._told_once():
      if self._writer is None and not self._broken:
        self._directory.mkdir(parents=True, exist_ok=True)
        self._writer = event_file_writer.EventsWriter(
            str(self._directory / 'events'), f'.{time.time_ns()}')
      if self._writer is not None:
        self._writer.write_event(
            event_pb2.Event(wall_time=time.time(), **event))
        self._writer.flush()


class _Wandb(_Sink):
  """The Weights & Biases run of this workdir, continued if it is known there.

  Its mode (online, offline) is that of the environment's WANDB_MODE.
  """
  name, errors = 'Weights & Biases', (Exception,)  # it raises many kinds

  def __init__(self, workdir: str | os.PathLike, project: str,
               config: Mapping[str, Any]):
    path, self._writer = pathlib.Path(workdir).absolute(), None
    with self._told_once():
      import wandb  # optional: not in requirements.txt
      self._writer = wandb.init(
          project=project, name=path.name, dir=path, config=dict(config),
          id=hashlib.sha256(str(path).encode()).hexdigest()[:16],
          resume='allow')

  def write(self, step: int, scalars: Mapping[str, float]) -> None:
    with self._told_once():
      if self._writer is not None:
        self._writer.log(scalars, step=step)

  def purge_from(self, step: int) -> None:
    """Its steps only go up: what it has of later ones it keeps."""

  def close(self) -> None:
    with self._told_once():
      if self._writer is not None:
        self._writer.finish()


class Timers:
  """Wall-clock seconds by phase: `with timers('rollout'): ...`."""

  def __init__(self):
    self._seconds = collections.defaultdict(float)

  @contextlib.contextmanager
  def __call__(self, name: str) -> Iterator[None]:
    start = time.perf_counter()
    try:
      yield
    finally:
      self._seconds[name] += time.perf_counter() - start

  def pop(self) -> dict[str, float]:
    """The seconds since the last pop, by phase; starts again from none."""
    seconds, self._seconds = dict(self._seconds), self._seconds.__class__(float)
    return seconds


class Progress:
  """Says on `stream` what is happening and how long it will take.

  On a terminal two lines are rewritten in place: step, phase and time left,
  and what the last step was like; what must stay is printed above them.
  Elsewhere every step is one line, and so is a phase, but no more than one
  every PLAIN_PHASE_SECONDS.
  """

  def __init__(self, total_steps: int, stream=None):
    self._total = total_steps
    self._stream = sys.stderr if stream is None else stream
    self._tty = self._stream.isatty()
    self._start = time.monotonic()
    self._finished = 0
    self._last_phase = -math.inf
    self._head, self._left, self._summary = '', '', ''
    self._drawn = 0  # lines of the block on the terminal

  def phase(self, text: str) -> None:
    """Shows what is happening now."""
    now = time.monotonic()
    if self._tty:
      self._draw(f'{self._head}{text} ...{self._left}')
    elif now - self._last_phase >= PLAIN_PHASE_SECONDS:
      self._last_phase = now
      self._print(f'{self._head}{text} ...\n')

  def step(self, step: int, summary: str, kept: str = '') -> None:
    """Shows a step that is done; `step` counts from 1. `kept` must stay."""
    self._finished += 1
    seconds = (time.monotonic() - self._start) / self._finished
    left = _duration(seconds * (self._total - step))
    self._head = f'step {step + 1}/{self._total}  {self._bar(step)}  '
    self._left, self._summary = f'  eta {left}', summary
    if not self._tty:
      self._head = f'step {step + 1}/{self._total}  '
      parts = [f'step {step}/{self._total}', summary, kept, f'eta {left}']
      self._print('  '.join(filter(None, parts)) + '\n')
      return
    if kept:
      self._print(f'{self._erase()}step {step}/{self._total}  {kept}\n')
    self._draw(f'step {step}/{self._total}  {self._bar(step)}{self._left}')

  def close(self) -> None:
    """Leaves the last lines on the terminal, the cursor below them."""
    if self._drawn:
      self._drawn = 0
      self._print('\n')

  def _bar(self, step):
    filled = round(20 * step / self._total)
    return '━' * filled + '─' * (20 - filled)

  def _draw(self, line):
    width = shutil.get_terminal_size().columns - 1
    lines = [text[:width] for text in (line, self._summary) if text]
    text = self._erase() + '\n'.join(lines)
    self._drawn = len(lines)
    self._print(text)

  def _erase(self):
    """To the block's first line, clearing from there on."""
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
