"""Several processes that are one job: joining, agreeing, ending together.

Every process runs the same program on the same host data, and each holds its
part of the global arrays. What touches the outside, a file or the terminal, is
the first one's. With a single process all of this is nothing.
"""

import contextlib
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax
from jax.experimental import multihost_utils
import numpy as np

from tepo_jax import errors

LOST = 3  # exit status where another process is gone: worth another start

_HEARTBEAT_SECONDS = 60  # a process that is silent for so long is gone
_SHUTDOWN_SECONDS = 60  # how long one that has ended waits for the others
_MESSAGE_BYTES = 4096

# What the transports say when the other side is gone.
_GONE = re.compile(
    r'gloo|nccl|heartbeat|coordination|barrier|socket|unavailable|'
    r'connection (closed|reset|refused)', re.IGNORECASE)

_Item = TypeVar('_Item')


def initialize() -> None:
  """Joins the job's other processes; nothing on one process.

  TEPO_MULTIHOST=1 asks for it. JAX then finds the coordinator, the number of
  processes and this one's index: from the TPU slice, from Slurm, or from
  JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID.
  """
  if os.environ.get('TEPO_MULTIHOST') == '1':
    jax.distributed.initialize(
        **_coordinates(), heartbeat_timeout_seconds=_HEARTBEAT_SECONDS,
        shutdown_timeout_seconds=_SHUTDOWN_SECONDS)


def _coordinates() -> dict[str, str | int]:
  if 'JAX_COORDINATOR_ADDRESS' not in os.environ:
    return {}
  try:
    return {
        'coordinator_address': os.environ['JAX_COORDINATOR_ADDRESS'],
        'num_processes': int(os.environ['JAX_NUM_PROCESSES']),
        'process_id': int(os.environ['JAX_PROCESS_ID']),
    }
  except (KeyError, ValueError) as error:
    raise errors.InputError(
        'JAX_COORDINATOR_ADDRESS is set: JAX_NUM_PROCESSES and JAX_PROCESS_ID '
        f'must be integers beside it ({error})') from error


def is_first() -> bool:
  """Whether this process writes and speaks for the job."""
  return jax.process_index() == 0


def on_first(function: Callable[..., Any], *arguments: Any) -> None:
  """Calls it on the first process, while the others wait for its end.

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
      message = str(error).encode()[:_MESSAGE_BYTES] or b'bad input'
  text = np.zeros(_MESSAGE_BYTES, np.uint8)
  text[:len(message)] = np.frombuffer(message, np.uint8)
  told = bytes(multihost_utils.broadcast_one_to_all(text)).rstrip(b'\0')
  if told:
    raise errors.InputError(told.decode(errors='replace'))


def any_of(flag: bool) -> bool:
  """Whether any process says so; all of them must ask."""
  return bool(total(np.array(flag, np.int32)))


def total(array: np.ndarray) -> np.ndarray:
  """The sum of the processes' arrays, on all of them; all must ask."""
  if jax.process_count() == 1:
    return array
  return np.asarray(multihost_utils.process_allgather(array)).sum(
      0, dtype=array.dtype)


def mine(items: Sequence[_Item]) -> Sequence[_Item]:
  """This process's share of a list that all of them have: every n-th."""
  return items[jax.process_index()::jax.process_count()]


def whole(part: Sequence[float], length: int) -> np.ndarray:
  """The list of which every process has its share (`mine`), float32.

  All of them must ask, with the same length.
  """
  values = np.zeros(length, np.float32)
  values[jax.process_index()::jax.process_count()] = part
  return total(values)


@contextlib.contextmanager
def ending_together() -> Iterator[None]:
  """Ends this process at once when it fails, so that the others notice.

  Bad input and a run that cannot go on are found by all alike, and pass. Of
  anything else the others know nothing: leaving in order would wait for them,
  as they wait for this one.
  """
  try:
    yield
  except (errors.InputError, KeyboardInterrupt):
    raise
  except Exception as error:  # pylint: disable=broad-exception-caught
    reason = _lost(error)
    if jax.process_count() == 1 or (
        reason is None and isinstance(error, errors.RunError)):
      raise
    if reason is not None:
      print(f'error: process {jax.process_index()}: another process of the '
            f'job is gone ({reason}); started again, the job goes on from its '
            'last checkpoint', file=sys.stderr)
      status = LOST
    else:
      traceback.print_exc()
      status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _lost(error: BaseException | None) -> str | None:
  """What an error, or one behind it, says of a process that is gone.

  Closing a run after such an error may fail for the same reason.
  """
  while error is not None:
    if _GONE.search(str(error)):
      return ' '.join(str(error).split())[:200]
    error = error.__cause__ or error.__context__
  return None
