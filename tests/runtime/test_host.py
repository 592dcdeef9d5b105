"""What a process takes of its host, seen to change."""

import subprocess
import sys

import numpy as np
import pytest

from tepo_jax.runtime import host

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith('linux'), reason='/proc is Linux\'s')


def test_usage_sees_memory_files_and_processes(tmp_path):
  before = host.usage()
  ballast = np.ones(8 << 20)  # 64 MiB
  child = subprocess.Popen(['sleep', '60'])
  with (tmp_path / 'open').open('w'):
    during = host.usage()
  child.kill()
  child.wait()
  grown = during['host/resident_bytes'] - before['host/resident_bytes']
  assert 0.9 * ballast.nbytes < grown < 2 * ballast.nbytes
  assert during['host/open_files'] == before['host/open_files'] + 1
  assert during['host/processes'] == before['host/processes'] + 1
  assert host.usage()['host/processes'] == before['host/processes']


def test_nothing_is_said_where_nothing_is_known(tmp_path, monkeypatch):
  monkeypatch.setattr(host, '_PROC', tmp_path)
  assert host.usage() == {}
