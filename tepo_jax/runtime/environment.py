"""What a run ran on: versions, devices, the source's commit."""

import contextlib
import importlib.metadata
import json
import os
import pathlib
import platform
import subprocess
import time
from typing import Any

import jax

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
