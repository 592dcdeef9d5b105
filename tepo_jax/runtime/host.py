"""What this process takes of its host: it should not grow with the steps."""

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
from typing import Any

import jax

_PROC = pathlib.Path('/proc')


def usage() -> dict[str, int]:
  """Resident bytes, open files, and processes started; {} but on Linux."""
  if not (_PROC / 'self' / 'statm').exists():
    return {}
  pages = int((_PROC / 'self' / 'statm').read_text().split()[1])
  return {'host/resident_bytes': pages * os.sysconf('SC_PAGE_SIZE'),
          'host/open_files': len(os.listdir(_PROC / 'self' / 'fd')),
          'host/processes': sum(map(_is_mine, _PROC.glob('[0-9]*/stat')))}


def settle() -> None:
  """Gives back what compiling took: hundreds of megabytes.

  The C library keeps them else, and a leak would long not be seen.
  """
  gc.collect()
  libc = ctypes.CDLL(None)
  if hasattr(libc, 'malloc_trim'):  # glibc
    libc.malloc_trim(0)


def _is_mine(stat: pathlib.Path) -> bool:
  with contextlib.suppress(OSError):  # it may end meanwhile
    # pid (name) state parent …, where the name may hold anything.
    return int(stat.read_text().rpartition(')')[2].split()[1]) == os.getpid()
  return False

_COMPILED = '/jax/core/compile/backend_compile_duration'


class CompilationCounter:
  """Counts the programs that are compiled, or read from the cache.

  What is compiled after `warm_up` calls of `pop` is told on stderr: a few
  times it may be a completion longer than any before; again and again it is a
  shape that changes from step to step, and time lost.
  """

  def __init__(self, warm_up: int):
    self._left = warm_up
    self._names = []
    jax.monitoring.register_event_duration_secs_listener(self._listen)

  def pop(self) -> int:
    """How many since the last call."""
    names, self._names = self._names, []
    if names and not self._left:
      print(f'warning: {len(names)} programs compiled after the warm-up: '
            f'{", ".join(sorted(set(names)))}', file=sys.stderr, flush=True)
    self._left = max(0, self._left - 1)
    return len(names)

  def _listen(self, event, *_, fun_name='?', **__):
    if event == _COMPILED:
      self._names.append(fun_name)

_PACKAGES = (
    'jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint', 'numpy',
    'transformers', 'tokenizers', 'datasets', 'math-verify', 'safetensors')
_ROOT = pathlib.Path(__file__).parents[2]


def describe() -> dict[str, Any]:
  """Name -> value, all of them text or numbers."""
  devices = jax.devices()
  return {
      'started': time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime()),
      'commit': _commit(), 'python': platform.python_version(),
      'system': f'{platform.system()} {platform.machine()}',
      'cpu_count': os.cpu_count(), 'processes': jax.process_count(),
      'devices': f'{len(devices)} x {devices[0].device_kind}',
  } | {name: importlib.metadata.version(name) for name in _PACKAGES}


def record(workdir: pathlib.Path, step: int) -> None:
  """Appends a start at `step` to DIR/environment.jsonl."""
  with (workdir / 'environment.jsonl').open('a', encoding='utf-8') as file:
    file.write(json.dumps({'step': step} | describe()) + '\n')


def _commit():
  """The source's commit, `+` behind it if files were changed; or None."""
  with contextlib.suppress(OSError, subprocess.SubprocessError):
    commit, changed = (subprocess.run(
        ['git', '-C', str(_ROOT), *command], capture_output=True, text=True,
        check=True, timeout=10).stdout.strip() for command in (
            ('rev-parse', '--short=12', 'HEAD'),
            ('status', '--porcelain', '--untracked-files=no')))
    return commit + ('+' if changed else '')
  return None
