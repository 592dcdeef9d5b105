"""What goes wrong while the processes of a job find each other."""

from collections.abc import Iterator, Mapping
import contextlib
import errno
import glob
import os
import re
import socket
import sys
import threading
import time

from tepo_jax import errors

WAIT_SECONDS = 300  # for the other processes, before a process ends
_SAY_SECONDS = 30

# What srun sets for each task, and jax needs.
_OF_STEP = 'SLURM_STEP_NODELIST'
_GPUS = '/dev/nvidia[0-9]*'


def check_slices(count: int) -> None:
  """Refuses a job of several TPU slices: the mesh would shard the weights over
  the slow network between them.

  Raises:
    InputError: says what to do.
  """
  if count > 1:
    raise errors.InputError(
        f'{count} TPU slices as one job are not supported; take one larger '
        'slice, or start a job per slice, each with its own --workdir')


def slices_of() -> int:
  """How many TPU slices GKE, xpk or the user makes one job of."""
  count = os.environ.get('MEGASCALE_NUM_SLICES', '')
  return int(count) if count.isdecimal() else 1


def check_slurm(environment: Mapping[str, str] = os.environ) -> None:
  """Refuses what jax makes of Slurm's variables otherwise: a traceback without
  srun, and one GPU of several for a task that sees them all.

  Raises:
    InputError: says which command to use.
  """
  if 'SLURM_JOB_ID' not in environment or (
      'JAX_COORDINATOR_ADDRESS' in environment):
    return
  if _OF_STEP not in environment:
    raise errors.InputError(
        'TEPO_MULTIHOST=1 in a Slurm job, but not started by srun; use '
        f'`srun {_command()}`, or unset TEPO_MULTIHOST for one process')
  if 'JAX_LOCAL_DEVICE_IDS' in environment:  # names each task's GPUs
    return
  tasks = re.match(r'\d+', environment.get('SLURM_STEP_TASKS_PER_NODE', ''))
  gpus = _visible_gpus(environment)
  if tasks and gpus > int(tasks[0]):
    raise errors.InputError(
        f'{tasks[0]} Slurm tasks on this node see {gpus} GPUs, of which each '
        f'takes one; use `srun --ntasks-per-node={gpus} {_command()}`')


def _command():
  spec = sys.modules['__main__'].__spec__
  return f'python -m {spec.name if spec else "tepo_jax.train"} …'


def _visible_gpus(environment):
  if 'CUDA_VISIBLE_DEVICES' in environment:
    return len(list(filter(
        None, environment['CUDA_VISIBLE_DEVICES'].split(','))))
  return len(glob.glob(_GPUS))


@contextlib.contextmanager
def explained(coordinates: Mapping[str, str | int]) -> Iterator[None]:
  """Says on stderr, every 30 s, for whom this process waits while it joins.

  Args:
    coordinates: arguments of jax.distributed.initialize; {} if a TPU slice or
      Slurm sets them.

  Raises:
    InputError: the coordinator's port is not free, or nothing names the job.
    Lost: the others did not come within WAIT_SECONDS, or the TPU's metadata
      server does not answer.
  """
  awaited = 'the other processes of the job'
  if coordinates:
    address = str(coordinates['coordinator_address'])
    if coordinates['process_id'] == 0:
      _check_port(address)
      awaited = f'the other {int(coordinates["num_processes"]) - 1} processes'
    else:
      awaited = f'process 0 at JAX_COORDINATOR_ADDRESS={address}'
  done = threading.Event()
  threading.Thread(target=_say, args=(awaited, done), daemon=True).start()
  start = time.monotonic()
  try:
    yield
  except ValueError as error:  # jax found no coordinator
    raise errors.InputError(
        'TEPO_MULTIHOST=1, but this is no TPU slice and no Slurm step, and '
        f'JAX_COORDINATOR_ADDRESS is not set ({errors.one_line(error)})'
    ) from error
  except (OSError, RuntimeError) as error:  # OSError: requests' errors
    raise errors.Lost(
        f'cannot join the job: waited {time.monotonic() - start:.0f} s for '
        f'{awaited}: {errors.one_line(error)[:200]}') from error
  finally:
    done.set()


def _check_port(address):
  """Refuses a port on which another program listens, which jax would share, or
  that this user may not open."""
  port = address.rpartition(':')[2]
  with socket.socket() as probe:
    # Connections that have ended do not count as taking the port.
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
      probe.bind(('', int(port)))
    except OSError as error:
      reason = ('is taken by another program'
                if error.errno == errno.EADDRINUSE else
                f'cannot be opened ({error.strerror})')
      raise errors.InputError(
          f'JAX_COORDINATOR_ADDRESS={address}: {port} {reason} on this host; '
          'choose another port for all processes') from error


def _say(awaited, done):
  start = time.monotonic()
  while not done.wait(_SAY_SECONDS):
    if time.monotonic() - start > WAIT_SECONDS:
      # jax would abort the process, with a stack trace, after twice the time.
      errors.note(f'error: cannot join the job: waited {WAIT_SECONDS} s for '
                  f'{awaited}')
      os._exit(errors.LOST)
    errors.note(f'waiting for {awaited}, for {time.monotonic() - start:.0f} '
                f'of {WAIT_SECONDS} s')
