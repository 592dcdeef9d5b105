"""The process and its host: resources used, recompilations, environment."""

from collections.abc import Callable, Iterator, Mapping
import contextlib
import ctypes
import gc
import importlib.metadata
import json
import logging
import os
import pathlib
import platform
import re
import subprocess
import time
from typing import Any

import jax

from tepo_jax import errors
from tepo_jax.runtime import files

_COMPILED = '/jax/core/compile/backend_compile_duration'
_PARTS = (_COMPILED, '/jax/core/compile/jaxpr_trace_duration',
          '/jax/core/compile/jaxpr_to_mlir_module_duration')
# jax has no public event for the start of a compilation. This logger says so at
# level DEBUG: ('Compiling %s with …', name of the program, its inputs, …).
_LOGGER = 'jax._src.interpreters.pxla'
_PACKAGES = (
    'jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint', 'numpy',
    'transformers', 'tokenizers', 'datasets', 'math-verify', 'safetensors')
_PROC = pathlib.Path('/proc')
_CONTAINER_LIMIT = pathlib.Path('/sys/fs/cgroup/memory.max')
_ROOT = pathlib.Path(__file__).parents[2]


def usage() -> dict[str, int]:
  """Resident bytes, open files, and child processes; {} except on Linux."""
  if not (_PROC / 'self' / 'statm').exists():
    return {}
  pages = int((_PROC / 'self' / 'statm').read_text().split()[1])
  return {'host/resident_bytes': pages * os.sysconf('SC_PAGE_SIZE'),
          'host/open_files': len(os.listdir(_PROC / 'self' / 'fd')),
          'host/processes': sum(map(_is_mine, _PROC.glob('[0-9]*/stat')))}


def cache_folder() -> pathlib.Path:
  """The user's own: $XDG_CACHE_HOME/tepo_jax, by default ~/.cache/tepo_jax."""
  base = os.environ.get('XDG_CACHE_HOME')
  return pathlib.Path(base or pathlib.Path.home() / '.cache') / 'tepo_jax'


def memory_bytes() -> int:
  """The memory of this machine, or of its container if that has less."""
  total = os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')
  with contextlib.suppress(OSError, ValueError):  # 'max', or not Linux
    total = min(total, int(_CONTAINER_LIMIT.read_text()))
  return total


def settle() -> None:
  """Returns the memory that compiling or saving used to the system.

  Otherwise the C library keeps it, hundreds of megabytes of a compilation and
  most of a checkpoint's size, and would hide a leak for a long time.
  """
  gc.collect()
  trim()


def trim() -> None:
  """Returns what the C library keeps of freed memory to the system: after
  sampling or an evaluation, up to a gigabyte of buffers below 32 MB each."""
  with contextlib.suppress(AttributeError):  # only glibc has it
    ctypes.CDLL(None).malloc_trim(0)


def _is_mine(stat: pathlib.Path) -> bool:
  with contextlib.suppress(OSError):  # the process may have ended
    # pid (name) state parent …, where the name may contain anything.
    return int(stat.read_text().rpartition(')')[2].split()[1]) == os.getpid()
  return False


class CompilationCounter:
  """Counts the programs that are compiled or read from the cache.

  Compilations after `warm_up` calls of `pop` are logged on stderr. A few may
  come from completions that are longer than any before; if they recur, a shape
  changes from step to step, which costs time.
  """

  def __init__(self, warm_up: int):
    self._left = warm_up
    self._names = []
    # (start, end) of tracing, lowering and compilation, none inside another:
    # tracing a program traces the functions that it calls.
    self._spans: list[tuple[float, float]] = []
    jax.monitoring.register_event_duration_secs_listener(self._listen)

  def pop(self) -> int:
    """Returns the number of compilations since the last call."""
    names, self._names = self._names, []
    if names and not self._left:
      errors.note(f'warning: {errors.counted(len(names), "program")} compiled '
                  f'after the warm-up: {", ".join(sorted(set(names)))}')
    self._left = max(0, self._left - 1)
    return len(names)

  def seconds(self) -> float:
    """Returns the seconds of tracing, lowering and compilation so far."""
    return sum(end - start for start, end in self._spans)

  def _listen(self, event, duration, *, fun_name='?', **_):
    if event == _COMPILED:
      self._names.append(fun_name)
    if event in _PARTS:
      end = time.monotonic()
      while self._spans and self._spans[-1][0] >= end - duration:
        self._spans.pop()
      self._spans.append((end - duration, end))


@contextlib.contextmanager
def traced(folder: files.Path) -> Iterator[None]:
  """A profiler trace in the folder."""
  with files.local_folder(folder) as local, jax.profiler.trace(local):
    yield


@contextlib.contextmanager
def compilations_shown(started: Callable[[str], None],
                       ended: Callable[[], None]) -> Iterator[None]:
  """Calls `started` with each program that compiles, such as 'decode 64 ×
  1,024', then `ended`; also if the cache has it.

  The sizes are those of the program's first array of integers: tokens, or
  positions in the cache.
  """
  last, announced = '', set()  # the names that jax gives their functions

  def announce(record):
    nonlocal last
    if record.msg.startswith('Compiling %s'):
      last, inputs = record.args[:2]
      announced.add(last)
      started(_program(last, inputs))
    return record.levelno >= logging.WARNING

  def listen(event, _, *, fun_name='', **__):
    if event == _COMPILED and (fun_name or last) in announced:
      announced.discard(fun_name or last)
      ended()

  logger, level = logging.getLogger(_LOGGER), logging.getLogger(_LOGGER).level
  logger.setLevel(logging.DEBUG)
  logger.addFilter(announce)
  jax.monitoring.register_event_duration_secs_listener(listen)
  try:
    yield
  finally:
    logger.setLevel(level)
    logger.removeFilter(announce)
    jax.monitoring.unregister_event_duration_listener(listen)


def _program(name, inputs):
  """'jit(decode)' and the shapes of its inputs -> 'decode 64 × 1,024'.

  The first that is one of integers has the size: not of int8 weights, and a
  prefill has its tokens before its prefix.
  """
  name = re.sub(r'^jit[_(](.*?)\)?$', r'\1', name)
  size = next((x.shape for x in inputs
               if x.dtype == jax.numpy.int32 and x.ndim > 1), ())
  return ' '.join([name, ' × '.join(f'{n:,}' for n in size)]).strip()


def record(workdir: files.Path, step: int, more: Mapping[str, Any]) -> None:
  """Appends the environment of a start at `step`, and `more`, to
  DIR/environment.jsonl."""
  devices = jax.devices()
  environment = {
      'step': step,
      'started': time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime()),
      'commit': _commit(), 'python': platform.python_version(),
      'system': f'{platform.system()} {platform.machine()}',
      'cpu_count': os.cpu_count(), 'processes': jax.process_count(),
      'devices': f'{len(devices)} x {devices[0].device_kind}',
  } | dict(more) | {
      name: importlib.metadata.version(name) for name in _PACKAGES}
  file = files.GrowingFile(workdir / 'environment.jsonl')
  file.append(json.dumps(environment) + '\n')
  file.flush()


def _commit():
  """The source's commit, with `+` if files were changed; None if unknown."""
  with contextlib.suppress(OSError, subprocess.SubprocessError):
    commit, changed = (subprocess.run(
        ['git', '-C', str(_ROOT), *command], capture_output=True, text=True,
        check=True, timeout=10).stdout.strip() for command in (
            ('rev-parse', '--short=12', 'HEAD'),
            ('status', '--porcelain', '--untracked-files=no')))
    return commit + ('+' if changed else '')
  return None
