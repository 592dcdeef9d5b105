"""Starts jobs of several processes on the CPU, for tests."""

import os
import socket
import subprocess
import sys

from tests import runs


def start(count, program, *arguments, devices=2, **changes):
  """Starts `python PROGRAM…` as `count` processes of one job on the CPU."""
  with socket.socket() as probe:
    probe.bind(('localhost', 0))
    port = probe.getsockname()[1]
  environment = os.environ | {
      'XLA_FLAGS': os.environ.get('XLA_FLAGS', '')
                   + f' --xla_force_host_platform_device_count={devices}',
      'PYTHONPATH': str(runs.ROOT), 'TEPO_MULTIHOST': '1',
      'JAX_COORDINATOR_ADDRESS': f'localhost:{port}',
      'JAX_NUM_PROCESSES': str(count)} | changes
  return [
      subprocess.Popen(
          [sys.executable, *program, *arguments], text=True, cwd=runs.ROOT,
          env=environment | {'JAX_PROCESS_ID': str(rank)},
          stdout=subprocess.PIPE, stderr=subprocess.PIPE)
      for rank in range(count)]


def finish(job, timeout=60):
  """(status, stdout, stderr) of each process; kills all on a timeout."""
  try:
    outputs = [process.communicate(timeout=timeout) for process in job]
    return [(process.returncode, *output)
            for process, output in zip(job, outputs)]
  finally:
    for process in job:
      process.kill()
