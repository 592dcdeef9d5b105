"""A run's metrics: metrics.jsonl, TensorBoard, Weights & Biases."""

from collections.abc import Callable, Mapping
import json
import math
import os
import secrets
import time
from typing import Any

from tensorboardX import event_file_writer
from tensorboardX.proto import event_pb2
from tensorboardX.proto import summary_pb2

from tepo_jax import errors
from tepo_jax.runtime import disk
from tepo_jax.runtime import files

FILE = 'metrics.jsonl'  # in the workdir


class Writer:
  """Appends scalars to DIR/metrics.jsonl and DIR/tensorboard/.

  metrics.jsonl gets one line per step, `{"step": 3, "reward": 0.5, ...}`,
  flushed at once and valid JSON: NaN and infinities become null (TensorBoard
  gets them unchanged). It is the record of the run, so errors in writing it are
  raised; in a bucket it is uploaded whole at every step. TensorBoard and
  Weights & Biases are conveniences: the first error of each is logged on
  stderr and disables it.
  """

  def __init__(self, workdir: str | os.PathLike,
               wandb_project: str | None = None,
               config: Mapping[str, Any] | None = None):
    """`wandb_project`: also log there, with the config."""
    workdir = files.path(workdir)
    workdir.mkdir(parents=True, exist_ok=True)
    self._file = files.GrowingFile(workdir / FILE)
    self._is_new = not self._file.exists()
    self._file.append('')  # makes it
    self._sinks: list[_Sink] = [_Events(workdir / 'tensorboard')]
    if wandb_project:
      self._sinks.append(_Wandb(workdir, wandb_project, config))

  def write(self, step: int, scalars: Mapping[str, float]) -> None:
    """Appends one step's scalars: floats, or 0-d arrays on the host."""
    values = {name: float(value) for name, value in scalars.items()}
    line = {'step': int(step)} | {
        name: value if math.isfinite(value) else None
        for name, value in values.items()}
    self._file.append(json.dumps(line, allow_nan=False) + '\n')
    self._file.flush()  # before a checkpoint says that the step is done
    for sink in self._sinks:
      sink.call(sink.write, int(step), values)

  def truncate(self, step: int) -> None:
    """Deletes the metrics after `step`, for a run that resumes there.

    A torn last line, of a process killed while writing, is deleted too.

    Raises:
      errors.InputError: another line is not the record of a step.
    """
    if step > 0 and self._is_new:
      errors.note(f'warning: {self._file.path} is missing: the metrics of '
                  f'steps up to {step} are lost')
    self._file.replace(''.join(
        line + '\n' for line, record in _records(
            self._file.path, self._file.read()) if record['step'] <= step))
    for sink in self._sinks:
      sink.call(sink.purge_from, step + 1)

  def close(self) -> None:
    for sink in self._sinks:
      sink.call(sink.close)


def read(workdir: str | os.PathLike) -> list[dict[str, Any]]:
  """The records of DIR/metrics.jsonl; none if the file is missing.

  A torn last line, of a run that was killed or writes it now, is left out.

  Raises:
    errors.InputError: another line is not the record of a step.
  """
  path = files.path(workdir) / FILE
  text = path.read_text('utf-8', 'replace') if path.exists() else ''
  return [record for _, record in _records(path, text)]


def parse(line: str) -> dict[str, Any]:
  """The record of a step, whose values are numbers or null.

  Raises:
    json.JSONDecodeError: the line is torn.
    ValueError: it is JSON, but no record.
  """
  record = json.loads(line)
  if (not isinstance(record, dict) or type(record.get('step')) is not int
      or not {*map(type, record.values())} <= {int, float, type(None)}):
    raise ValueError(f'not the record of a step: {line[:60]!r}')
  return record


def _records(path, text):
  """Yields (line, record) of a file, see `read`."""
  lines = text.splitlines()
  for number, line in enumerate(lines, 1):
    try:
      yield line, parse(line)
    except ValueError as error:
      what = error
      if isinstance(error, json.JSONDecodeError):
        if number == len(lines) and not text.endswith('\n'):
          return  # torn
        what = f'not JSON: {line[:60]!r}'
      raise errors.InputError(
          f'{path}: line {number} is {what}; delete that line') from error


class NoWriter:
  """The Writer of processes that write nothing."""

  def write(self, *_: Any) -> None:
    """Does nothing, like the other methods."""

  truncate = close = write


class _Sink:
  """An optional output: after its first error, the run continues without it."""
  name: str  # for the warning
  _broken = False

  def call(self, method: Callable[..., None], *arguments: Any) -> None:
    """Calls one of the sink's methods, unless the sink is disabled."""
    try:
      if not self._broken:
        method(*arguments)
    except Exception as error:  # wandb and a bucket raise many types
      reason = disk.failure(error) or errors.one_line(error)
      errors.note(f'warning: {self.name} disabled: {reason}')
      self._broken = True


class _Events(_Sink):
  """TensorBoard events, written in the caller's thread.

  If the disk fails, the thread of tensorboardX's SummaryWriter dies, and
  training hangs on its full queue. Scalars need only its event writer.
  """
  name = 'TensorBoard events'

  def __init__(self, directory: files.Path):
    self._directory, self._writer = directory, None

  def write(self, step: int, scalars: Mapping[str, float]) -> None:
    value = summary_pb2.Summary.Value
    self._append(step=step, summary=summary_pb2.Summary(value=[
        value(tag=name, simple_value=x) for name, x in scalars.items()]))

  def purge_from(self, step: int) -> None:
    """Makes TensorBoard hide the events from `step` on in older files."""
    self._append(step=step, session_log=event_pb2.SessionLog(
        status=event_pb2.SessionLog.START))

  def close(self) -> None:
    if self._writer is not None:
      self._writer.close()

  def _append(self, **event) -> None:
    if self._writer is None:
      self._directory.mkdir(exist_ok=True)
      self._writer = event_file_writer.EventsWriter(
          str(self._directory / 'events'), f'.{time.time_ns()}')
    with disk.naming(self._directory):
      self._writer.write_event(event_pb2.Event(wall_time=time.time(), **event))
      self._writer.flush()


class _Wandb(_Sink):
  """The Weights & Biases run of this workdir, continued if it exists; the
  environment's WANDB_MODE selects its mode (online, offline).

  Its id is drawn once and kept in the workdir. Derived from the path, it would
  continue the curve of a run that was deleted, or of another container.
  """
  name = 'Weights & Biases'

  def __init__(self, workdir: files.Path, project: str,
               config: Mapping[str, Any]):
    self._run = None
    self.call(self._init, workdir.absolute(), project, config)

  def _init(self, path, project, config):
    import wandb  # optional: not in requirements.txt
    file = path / 'wandb_id'
    if not file.exists():
      files.replace_text(file, secrets.token_hex(8))
    self._run = wandb.init(
        project=project, name=path.name, config=dict(config),
        dir=None if files.is_remote(path) else path,  # None: the current one
        id=file.read_text('utf-8').strip(), resume='allow')

  def write(self, step: int, scalars: Mapping[str, float]) -> None:
    self._run.log(scalars, step=step)

  def purge_from(self, step: int) -> None:
    """Does nothing: its steps only increase, so it keeps later ones."""

  def close(self) -> None:
    self._run.finish()
