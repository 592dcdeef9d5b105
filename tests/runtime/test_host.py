"""The resources that a process uses on its host."""

import json
import pathlib
import platform
import subprocess
import sys

import pytest

from tepo_jax.runtime import host

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith('linux'), reason='/proc is Linux\'s')

_MIB = 1 << 20
_TAKES = """
import json, subprocess, sys
import numpy as np
from tepo_jax.runtime import host
before = host.usage()
ballast, untouched = np.ones(64 << 17), np.empty(64 << 17)
child = subprocess.Popen(['sleep', '60'])
with open(sys.argv[1], 'w'):
  during = host.usage()
child.kill()
child.wait()
print(json.dumps([before, during, host.usage()]))
"""

_KEEPS = """
import ctypes, json
from tepo_jax.runtime import host
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
blocks = [libc.malloc(100_000) for _ in range(2000)]
for block in blocks:
  ctypes.memset(block, 1, 100_000)
for block in blocks[:-1]:  # the last one keeps the heap from shrinking
  libc.free(block)
kept = host.usage()
host.trim()
print(json.dumps([kept, host.usage()]))
"""


def test_usage_sees_memory_files_and_processes(tmp_path):
  """In a process of its own: pytest's would free memory at any time."""
  before, during, after = _run(_TAKES, tmp_path / 'open')
  grown = during['host/resident_bytes'] - before['host/resident_bytes']
  assert 60 * _MIB < grown < 72 * _MIB
  assert during['host/open_files'] == before['host/open_files'] + 1
  assert during['host/processes'] == before['host/processes'] + 1
  assert after['host/processes'] == before['host/processes']


@pytest.mark.skipif(
    platform.libc_ver()[0] != 'glibc', reason='others return it themselves')
def test_trim_returns_freed_memory():
  kept, trimmed = _run(_KEEPS)
  returned = kept['host/resident_bytes'] - trimmed['host/resident_bytes']
  assert 180 * _MIB < returned < 200 * _MIB


def _run(program, *arguments):
  """What a Python program prints as JSON."""
  return json.loads(subprocess.run(
      [sys.executable, '-c', program, *arguments], text=True, check=True,
      stdout=subprocess.PIPE, cwd=pathlib.Path(__file__).parents[2]).stdout)


def test_no_usage_without_proc(tmp_path, monkeypatch):
  monkeypatch.setattr(host, '_PROC', tmp_path)
  assert host.usage() == {}
