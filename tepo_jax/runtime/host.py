"""The process and its host: resources used, recompilations, environment."""

import contextlib
import ctypes
import gc
import importlib.metadata
import json
import os
import pathlib
import platform
import subprocess
import sys
import time

import jax

_COMPILED = '/jax/core/compile/backend_compile_duration'
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


def memory_bytes() -> int:
  """The memory of this machine, or of its container if that has less."""
  total = os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')
  with contextlib.suppress(OSError, ValueError):  # 'max', or not Linux
    total = min(total, int(_CONTAINER_LIMIT.read_text()))
  return total


def settle() -> None:
  """Returns memory that compiling used, hundreds of megabytes, to the system.

  Otherwise the C library keeps it, and would hide a leak for a long time.
  """
  gc.collect()
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
    jax.monitoring.register_event_duration_secs_listener(self._listen)

  def pop(self) -> int:
    """Returns the number of compilations since the last call."""
    names, self._names = self._names, []
    if names and not self._left:
      print(f'warning: {len(names)} programs compiled after the warm-up: '
            f'{", ".join(sorted(set(names)))}', file=sys.stderr, flush=True)
    self._left = max(0, self._left - 1)
    return len(names)

  def _listen(self, event, *_, fun_name='?', **__):
    if event == _COMPILED:
      self._names.append(fun_name)


def record(workdir: pathlib.Path, step: int) -> None:
  """Appends the environment of a start at `step` to DIR/environment.jsonl."""
  devices = jax.devices()
  environment = {
      'step': step,
      'started': time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime()),
      'commit': _commit(), 'python': platform.python_version(),
      'system': f'{platform.system()} {platform.machine()}',
      'cpu_count': os.cpu_count(), 'processes': jax.process_count(),
      'devices': f'{len(devices)} x {devices[0].device_kind}',
  } | {name: importlib.metadata.version(name) for name in _PACKAGES}
  with (workdir / 'environment.jsonl').open('a', encoding='utf-8') as file:
    file.write(json.dumps(environment) + '\n')


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
