"""How long programs took to compile, kept in the folder of JAX's cache."""

from collections.abc import Mapping
import contextlib
import json

import jax

from tepo_jax.runtime import files
from tepo_jax.runtime import processes

_NAME = 'seconds.json'


class CompileTimes:
  """Seconds of the longest compilation of each of a model's programs so far.

  A program is read from the cache in less time. Without a cache, these are the
  compilations of this process alone. A file that cannot be read or written is
  no error.
  """

  def __init__(self, model: str | None):
    """Reads what earlier processes kept. `model`: whose programs compile."""
    device = jax.devices()[0]
    self._key = f'{model} on {jax.device_count()} {device.device_kind}'
    self._seconds = _numbers(_read().get(self._key))

  def before(self, program: str) -> float | None:
    """The seconds of `program`, or None if they are not known."""
    return self._seconds.get(program)

  def add(self, program: str, seconds: float) -> None:
    """Takes a compilation, or a reading from the cache."""
    self._seconds[program] = max(seconds, self._seconds.get(program, 0.0))

  def keep(self) -> None:
    """Writes them for later processes; only the first of a job does.

    Of two runs that write at the same time, one's seconds may be lost; its
    next compilations bring them back.
    """
    folder = jax.config.jax_compilation_cache_dir
    if folder and self._seconds and processes.is_first():
      # ValueError: the cache is in a bucket, and gcsfs is not installed.
      with contextlib.suppress(OSError, ValueError):
        with files.replacing(
            files.path(folder) / _NAME, is_shared=True) as new:
          new.write_text(json.dumps(
              _read() | {self._key: self._seconds}, indent=1), 'utf-8')


def _read():
  folder = jax.config.jax_compilation_cache_dir
  if not folder:
    return {}
  with contextlib.suppress(OSError, ValueError):
    found = json.loads((files.path(folder) / _NAME).read_text('utf-8'))
    return found if isinstance(found, dict) else {}
  return {}


def _numbers(found):
  return {name: value for name, value in found.items()
          if isinstance(value, float)} if isinstance(found, Mapping) else {}
