"""Runs `python -m tepo_jax.PROGRAM` many times, importing jax only once.

  with Server() as server:
    done = server.run('train', '--config=configs/tiny.py:tepo', ...)

The server process only imports what the programs import; each run is a fork of
it that executes the module as __main__, without root's right to ignore file
permissions.
"""

import json
import pathlib
import subprocess
import sys
import tempfile

from tests import runs

_SERVER = """
import ctypes, json, os, runpy, struct, sys
from tepo_jax import cli
from tepo_jax.job import base_model, configuration, trainer

def drop_capabilities():
  libc = ctypes.CDLL(None)
  if hasattr(libc, 'capset'):  # version 3, this process; drop everything
    assert not libc.capset(
        struct.pack('Ii', 0x20080522, 0), struct.pack('6I', *[0] * 6))

def child(order):
  drop_capabilities()
  for number, path in ((1, order['out']), (2, order['err'])):
    os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
  os.environ.update(order['environment'])
  sys.path[:0] = filter(None, os.environ.get('PYTHONPATH', '').split(':'))
  sys.argv[:] = ['tepo_jax', *order['arguments']]
  if order['folder']:
    os.chdir(order['folder'])
    sys.path.insert(0, order['folder'])
  try:
    runpy.run_module(order['module'], run_name='__main__', alter_sys=True)
    status = 0
  except SystemExit as error:
    status = error.code or 0
  except BaseException:
    sys.excepthook(*sys.exc_info())
    status = 1
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(status)

for line in sys.stdin:
  order = json.loads(line)
  pid = os.fork()
  if not pid:
    child(order)
  print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


class Server:
  """A process that has imported everything, and its forks."""

  def __init__(self):
    self._process = subprocess.Popen(
        [sys.executable, '-c', _SERVER], cwd=runs.ROOT, text=True,
        env=runs.environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE)

  def __enter__(self) -> 'Server':
    return self

  def __exit__(self, *exception):
    self._process.stdin.close()
    self._process.wait()

  def run(self, program, *arguments, status: int | None = None,
          folder: pathlib.Path | None = None, **environment
          ) -> subprocess.CompletedProcess:
    """Status, stdout and stderr of one run from the repository's root.

    status: which the run must end with; None: any. folder: of another program
    than the package's, which runs there.
    """
    with tempfile.TemporaryDirectory() as scratch:
      out, err = (pathlib.Path(scratch) / name for name in ('out', 'err'))
      self._process.stdin.write(json.dumps({
          'module': program if folder else f'tepo_jax.{program}',
          'folder': folder and str(folder),
          'arguments': list(map(str, arguments)), 'environment': environment,
          'out': str(out), 'err': str(err)}) + '\n')
      self._process.stdin.flush()
      done = subprocess.CompletedProcess(
          arguments, int(self._process.stdout.readline()), out.read_text(),
          err.read_text())
      assert status in (None, done.returncode), done.stderr[-3000:]
      return done
