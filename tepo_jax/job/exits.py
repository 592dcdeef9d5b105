"""How a program ends: the exit status and the line of an error."""

import errno
import resource

from tepo_jax import errors
from tepo_jax.runtime import disk
from tepo_jax.runtime import interrupts

# Of paths that the user gave.
_BAD_PATHS = (errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENAMETOOLONG,
              errno.EISDIR, errno.ENOTDIR, errno.EEXIST)
# The fields that determine a run's device memory.
_FIELDS = (
    'in sampling, lower config.rollout.slots; in updates, '
    'config.train.microbatch_tokens (a row per shard at least) or '
    'config.train.chunk_size, raise config.mesh.tensor, or set '
    'config.compute.remat=full')
# Enough for configs/tiny.py; with 2.2 GB XLA aborts.
_MIN_ADDRESS_BYTES = 3 * 10**9


def check_address_space() -> None:
  """Refuses a limit (ulimit -v) in which jax's libraries or XLA would abort.

  Raises:
    errors.InputError: it is lower than _MIN_ADDRESS_BYTES.
  """
  limit, _ = resource.getrlimit(resource.RLIMIT_AS)
  if limit != resource.RLIM_INFINITY and limit < _MIN_ADDRESS_BYTES:
    raise errors.InputError(
        f'this process may have {limit / 1e9:.1f} GB of address space '
        f'(ulimit -v); jax reserves {_MIN_ADDRESS_BYTES / 1e9:g} GB and more, '
        'which is more than it uses')


def outcome(error: BaseException) -> tuple[int, str] | None:
  """(exit status, message) of an error, or None if it is a bug."""
  text = errors.one_line(error)
  if isinstance(error, KeyboardInterrupt):
    return interrupts.STATUS, str(error) or interrupts.WORD
  if isinstance(error, errors.Lost) or errors.is_unanswered(error):
    return errors.LOST, f'error: {text}'
  if isinstance(error, errors.InputError):
    return 2, f'error: {text}'
  if isinstance(error, errors.RunError):
    return 1, f'error: {text}'
  if isinstance(error, errors.Interrupted):
    return errors.INTERRUPTED, str(error)
  if (status := errors.backend_status(text)) is not None:
    return status, f'error: {text[:800]}'
  if (isinstance(error, OSError) and error.errno in _BAD_PATHS
      and error.filename is not None):
    return 2, f'error: {error.filename}: {error.strerror}'
  if isinstance(error, MemoryError):
    return 1, (f'error: out of host memory{": " if text else ""}{text[:800]}; '
               'a limit of the address space (ulimit -v) counts what jax '
               'reserves, which is more than it uses')
  if (failure := disk.failure(error)) is not None:
    return 1, f'error: {failure}'
  if 'RESOURCE_EXHAUSTED' in text:  # jax's error, without importing jax
    return 1, (f'error: out of device memory: {text[:800]}; {_FIELDS}; '
               '`python -m tepo_jax.plan` shows what fits')
  return None
