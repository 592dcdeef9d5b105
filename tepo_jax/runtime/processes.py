"""A job of several processes: joining, agreeing, stopping, failing together.

Every process runs the same program on the same host data and holds its part of
the global arrays. Only the first process writes files and to the terminal. With
a single process these functions do nothing special.
"""

from collections.abc import Callable, Iterator, Sequence
import contextlib
import os
import re
import signal
import sys
import tempfile
import traceback
from typing import Any, TypeVar

import jax
from jax.experimental import multihost_utils
import numpy as np

from tepo_jax import errors
from tepo_jax.runtime import buckets
from tepo_jax.runtime import interrupts
from tepo_jax.runtime import joining

_SHUTDOWN_SECONDS = 60  # how long a finished process waits for the others
_MESSAGE_BYTES = 4096

# In the transports' messages when the other side is gone.
_GONE = re.compile(
    r'gloo|nccl|heartbeat|coordination|barrier|socket|unavailable|'
    r'connection (closed|reset|refused)', re.IGNORECASE)

_Item = TypeVar('_Item')


def is_job() -> bool:
  """Whether this process is to join the others of a job."""
  return os.environ.get('TEPO_MULTIHOST') == '1'


def initialize(heartbeat: int = 300) -> None:
  """Joins the job's other processes if TEPO_MULTIHOST=1: by the TPU slice, by
  Slurm, or by JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID.

  Args:
    heartbeat: a process that is silent for longer, in seconds, is lost.

  Raises:
    errors.InputError, errors.Lost: as `joining.check_slices`, `check_slurm`,
      `explained`.
  """
  joining.check_slices(joining.slices_of())
  if not is_job():
    return
  joining.check_slurm()
  # JAX's preemption service swallows SIGTERM, which `StopRequest` handles and
  # which must end other programs.
  jax.config.update('jax_enable_preemption_service', False)
  coordinates = _coordinates()
  with joining.explained(coordinates):
    jax.distributed.initialize(
        **coordinates, initialization_timeout=joining.WAIT_SECONDS,
        heartbeat_timeout_seconds=heartbeat,
        shutdown_timeout_seconds=_SHUTDOWN_SECONDS)


def _coordinates() -> dict[str, str | int]:
  if 'JAX_COORDINATOR_ADDRESS' not in os.environ:
    return {}
  address = os.environ['JAX_COORDINATOR_ADDRESS']
  host, _, port = address.rpartition(':')
  if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
    raise errors.InputError(
        f'JAX_COORDINATOR_ADDRESS={address}: must be HOST:PORT')
  try:
    count, number = (int(os.environ[name]) for name in (
        'JAX_NUM_PROCESSES', 'JAX_PROCESS_ID'))
  except (KeyError, ValueError) as error:
    raise errors.InputError(
        'JAX_COORDINATOR_ADDRESS is set, so JAX_NUM_PROCESSES and '
        f'JAX_PROCESS_ID must be set to integers ({error})') from error
  if not 0 <= number < count:
    raise errors.InputError(
        f'JAX_PROCESS_ID={number}: with JAX_NUM_PROCESSES={count} it must be '
        f'from 0 to {count - 1}')
  return {'coordinator_address': address, 'num_processes': count,
          'process_id': number}


def is_first() -> bool:
  """Whether this process writes files and messages for the job."""
  return jax.process_index() == 0


def on_first(function: Callable[..., Any], *arguments: Any) -> None:
  """Calls the function on the first process; the others wait for it.

  Raises:
    errors.InputError: on every process, if the function raised it.
  """
  if jax.process_count() == 1:
    function(*arguments)
    return
  message = b''
  if is_first():
    try:
      function(*arguments)
    except errors.InputError as error:
      kind = b'?' if errors.is_unanswered(error) else b'!'
      message = (kind + str(error).encode())[:_MESSAGE_BYTES]
  text = np.zeros(_MESSAGE_BYTES, np.uint8)
  text[:len(message)] = np.frombuffer(message, np.uint8)
  message = bytes(multihost_utils.broadcast_one_to_all(text)).rstrip(b'\0')
  if message:
    kind = errors.Unanswered if message[:1] == b'?' else errors.InputError
    raise kind(message[1:].decode(errors='replace'))


@contextlib.contextmanager
def first_writes(folder: str | None = None) -> Iterator[str | None]:
  """Yields `folder` on the first process. The others get a temporary one, which
  is deleted at the end; what they print is dropped."""
  if is_first():
    yield folder
    return
  with (tempfile.TemporaryDirectory() as temporary,
        open(os.devnull, 'w', encoding='utf-8') as nowhere,
        contextlib.redirect_stdout(nowhere)):
    yield temporary


def any_of(flag: bool) -> bool:
  """Whether the flag is set on any process; all of them must call it."""
  return bool(total(np.array(flag, np.int32)))


def total(array: np.ndarray) -> np.ndarray:
  """The sum of all processes' arrays; all of them must call it."""
  if jax.process_count() == 1:
    return array
  return np.asarray(multihost_utils.process_allgather(array)).sum(
      0, dtype=array.dtype)


def least(size: int) -> int:
  """The least of all processes' sizes in bytes, so that they decide alike; all
  of them must call it."""
  if jax.process_count() == 1:
    return size
  # In MiB: jax has no 64-bit integers by default.
  return int(np.min(multihost_utils.process_allgather(
      np.int32(size >> 20)))) << 20


def greatest(number: int) -> int:
  """The greatest of all processes' numbers; all of them must call it."""
  if jax.process_count() == 1:
    return number
  return int(np.max(multihost_utils.process_allgather(np.int32(number))))


def of_first(number: int) -> int:
  """The first process's number; all of them must call it."""
  return int(total(np.array(number if is_first() else 0, np.int32)))


def mine(items: Sequence[_Item]) -> Sequence[_Item]:
  """This process's share of a list that all of them have: every n-th item."""
  return items[jax.process_index()::jax.process_count()]


def is_mine(number: int) -> bool:
  """Whether this process does the work of that number: every n-th one."""
  return number % jax.process_count() == jax.process_index()


def whole(part: Sequence[float], length: int) -> np.ndarray:
  """Joins the processes' shares (`mine`) of a list, as float32.

  All processes must call it, with the same length.
  """
  values = np.zeros(length, np.float32)
  mine(values)[:] = part
  return total(values)


class Stopped(Exception):
  """The run was asked to stop."""


class StopRequest:
  """Makes SIGTERM, and after `defer_interrupts` Ctrl-C, a request to stop.

  Ctrl-C before that, when there is nothing to save, ends the process at once.
  So does a second one.

  Attributes:
    requested: a signal has arrived in this process.
    interrupted: it was Ctrl-C, in this process or another of the job.
  """

  def __init__(self):
    self.requested = self.interrupted = False
    signal.signal(signal.SIGTERM, self._request)
    interrupts.on_first(None)

  def defer_interrupts(self) -> None:
    """From now on the first Ctrl-C only requests a stop."""
    if not self.interrupted:
      interrupts.on_first(self._interrupt)

  def check(self) -> None:
    """Raises Stopped on every process if any of them received a signal."""
    if any_of(self.requested):
      self.interrupted = any_of(self.interrupted)
      raise Stopped

  def _request(self, *_):
    self.requested = True

  def _interrupt(self):
    self.requested = self.interrupted = True
    errors.note('interrupted: the run saves its state and ends; a second '
                'Ctrl-C ends it at once')


@contextlib.contextmanager
def ending_together() -> Iterator[None]:
  """Ends this process at once if it fails, so that the others notice.

  All processes find bad input and RunErrors alike; these pass. Of other errors
  the other processes know nothing: an orderly exit would wait for them while
  they wait for this process. So it is with a bucket that did not answer this
  one.
  """
  try:
    yield
  except buckets.BucketError as error:
    if jax.process_count() == 1:
      raise
    errors.note(f'error: process {jax.process_index()}: {error}')
    os._exit(errors.LOST if errors.is_unanswered(error) else 2)
  except (errors.InputError, errors.Interrupted, KeyboardInterrupt):
    raise
  except Exception as error:  # pylint: disable=broad-exception-caught
    status = errors.backend_status(str(error))
    if status is not None:  # jax.process_count() fails then too
      errors.note(f'error: {errors.one_line(error)[:800]}')
      os._exit(status)
    reason = _lost(error)
    if jax.process_count() == 1 or (
        reason is None and isinstance(error, errors.RunError)):
      raise
    if reason is None:
      traceback.print_exc()
    else:
      errors.note(f'error: process {jax.process_index()}: another process of '
                  f'the job is gone ({reason}); restarted, the job resumes '
                  'from its last checkpoint')
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1 if reason is None else errors.LOST)


def _lost(error: BaseException | None) -> str | None:
  """The message of an error that a lost process caused, else None.

  It may be the cause of the given error: closing the run can fail again. What
  names a bucket came of that. A RunError's own text counts for nothing: it may
  quote a completion, or the service that a reward function asks.
  """
  while error is not None:
    if (not isinstance(error, errors.RunError) and _GONE.search(str(error))
        and buckets.SCHEME not in str(error)):
      return errors.one_line(error)[:200]
    error = error.__cause__ or error.__context__
  return None
