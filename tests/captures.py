r"""What a person sees of a run: texts of the terminal, pictures of the page.

  python -m tests.captures --out=DIR [--step=N] --workdir=WORKDIR

Trains `configs/tiny.py:tepo` below WORKDIR in terminals of 80 and of 120
columns: `terminal_80.txt` has the screen after N steps, after Ctrl-C, and at
the end. Then draws the report in windows of 1280 and 390 pixels, in the light
and in the dark scheme: `page_*.png`, and `pointer_*.png` with the pointer at a
figure. Nothing is checked: look at the files.
"""

import argparse
import fcntl
import os
import pathlib
import pty
import signal
import struct
import subprocess
import sys
import termios
import threading
import time

import pyte

from tests import runs
from tests.tools.report import browser as browser_lib

_ROWS = 40


class Terminal:
  """A program in a terminal of so many columns."""

  def __init__(self, columns: int, *command: str):
    self._screen = pyte.Screen(columns, _ROWS)
    self._stream = pyte.ByteStream(self._screen)
    here, there = pty.openpty()
    fcntl.ioctl(there, termios.TIOCSWINSZ,
                struct.pack('HHHH', _ROWS, columns, 0, 0))
    self.process = subprocess.Popen(
        command, cwd=runs.ROOT, stdin=there, stdout=there, stderr=there,
        start_new_session=True, env=os.environ | {
            'TERM': 'xterm-256color', 'JAX_PLATFORMS': 'cpu'})
    os.close(there)
    self._reader = threading.Thread(target=self._read, args=(here,))
    self._reader.start()

  def _read(self, here):
    while True:
      try:
        self._stream.feed(os.read(here, 4096))
      except OSError:  # the program has ended
        return

  def text(self) -> str:
    """The screen, without the empty rest of its lines."""
    return '\n'.join(map(str.rstrip, self._screen.display)).rstrip() + '\n'

  def wait(self) -> int:
    """The program's status, once it has ended and all is on the screen."""
    status = self.process.wait()
    self._reader.join()
    return status


def terminal(columns: int, step: int, workdir: pathlib.Path,
             *more: str) -> str:
  """The screen of a run after a step, after Ctrl-C, and at the end."""
  command = [sys.executable, '-m', 'tepo_jax.train',
             '--config=configs/tiny.py:tepo', f'--workdir={workdir}', *more]
  first = Terminal(columns, *command)
  while (first.process.poll() is None
         and f'step {step}: ' not in first.text()):
    time.sleep(0.2)
  shown = [f'after step {step}', first.text()]
  first.process.send_signal(signal.SIGINT)
  shown += [f'Ctrl-C: status {first.wait()}', first.text()]
  last = Terminal(columns, *command)
  shown += [f'the same command again: status {last.wait()}', last.text()]
  return '\n'.join(shown)


def pictures(page: pathlib.Path, out: pathlib.Path) -> None:
  """PNGs of the whole page, and of what a figure shows below the pointer: two
  widths, light and dark."""
  browser = browser_lib.Browser()
  for width in 1280, 390:
    for scheme in 'light', 'dark':
      browser.open(page, width=width, dark=scheme == 'dark')
      (out / f'page_{width}_{scheme}.png').write_bytes(
          browser.screenshot(whole=True))
      browser.move_to('svg.chart')
      (out / f'pointer_{width}_{scheme}.png').write_bytes(browser.screenshot())
  browser.close()


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument('--out', required=True, type=pathlib.Path)
  parser.add_argument('--workdir', required=True, type=pathlib.Path)
  parser.add_argument('--step', type=int, default=12)
  given = parser.parse_args()
  given.out.mkdir(parents=True, exist_ok=True)
  more = []
  for columns in 80, 120:
    workdir = given.workdir.resolve() / str(columns)
    (given.out / f'terminal_{columns}.txt').write_text(
        terminal(columns, given.step, workdir, *more), 'utf-8')
    # The second run takes the model that the first has made.
    more = [f'--config.model={workdir}/base_model']
  runs.run('report', f'--runs={given.workdir.resolve()}/80',
           f'--out={given.out.resolve()}/report')
  pictures(given.out / 'report/report.html', given.out)


if __name__ == '__main__':
  main()
