"""Headless Chromium for tests, driven over its debugging pipe."""

import base64
import contextlib
import json
import os
import pathlib
import shutil
import subprocess
import tempfile
import time
from typing import Any

_SECONDS = 60  # until the browser answers on a busy machine


def find() -> str | None:
  """The browser's path, or None."""
  names = ('chromium', 'chromium-browser', 'google-chrome')
  return next(filter(None, map(shutil.which, names)), None)


class Browser:
  """One tab. complaints: console errors and uncaught exceptions. requests:
  addresses that the page has asked for, itself included."""

  def __init__(self):
    self.complaints, self.requests = [], []
    self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    read_here, write_there = os.pipe()
    read_there, write_here = os.pipe()
    command = [find(), '--headless=new', '--no-sandbox', '--disable-gpu',
               '--disable-dev-shm-usage', '--no-first-run',
               f'--user-data-dir={self._profile.name}',
               '--remote-debugging-pipe', 'about:blank']
    # The pipe's ends are file descriptors 3 and 4 of the browser.
    self._process = subprocess.Popen(
        ['bash', '-c', f'exec "$@" 3<&{read_there} 4>&{write_there}', 'sh',
         *command], pass_fds=(read_there, write_there),
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL)
    os.close(read_there)
    os.close(write_there)
    self._out = os.fdopen(write_here, 'wb', buffering=0)
    self._in = os.fdopen(read_here, 'rb')
    self._number, self._session = 0, None
    [target] = [t for t in self._call('Target.getTargets')['targetInfos']
                if t['type'] == 'page']
    self._session = self._call('Target.attachToTarget', flatten=True,
                               targetId=target['targetId'])['sessionId']
    for domain in ('Page', 'Runtime', 'Log', 'Network'):
      self._call(f'{domain}.enable')
    self._call('Network.emulateNetworkConditions', offline=True, latency=0,
               downloadThroughput=0, uploadThroughput=0)

  def close(self) -> None:
    with contextlib.suppress(OSError):
      self._call('Browser.close')
    self._process.wait(_SECONDS)
    self._out.close()
    self._in.close()
    self._profile.cleanup()

  def open(self, path: pathlib.Path, width: int = 1200, height: int = 900,
           dark: bool = False, view: str = '') -> None:
    """Loads a file while offline; `view` is what follows # in its address."""
    self._call('Page.navigate', url='about:blank')  # a new # loads nothing
    self.complaints.clear()
    self.requests.clear()
    self._call('Emulation.setDeviceMetricsOverride', width=width,
               height=height, deviceScaleFactor=1, mobile=width < 600)
    self._call('Emulation.setEmulatedMedia', features=[{
        'name': 'prefers-color-scheme', 'value': 'dark' if dark else 'light'}])
    self._call('Page.navigate', url=path.absolute().as_uri() + (
        f'#{view}' if view else ''))
    deadline = time.monotonic() + _SECONDS
    while not self.run('document.readyState === "complete"'):
      assert time.monotonic() < deadline
      time.sleep(0.05)

  def run(self, expression: str) -> Any:
    """Returns the value of a JavaScript expression."""
    answer = self._call('Runtime.evaluate', expression=expression,
                        returnByValue=True)
    assert 'exceptionDetails' not in answer, answer
    return answer['result'].get('value')

  def press(self, key: str) -> None:
    """Types a key."""
    text = {'text': key} if len(key) == 1 else {}
    self._call('Input.dispatchKeyEvent', type='keyDown', key=key, **text)
    self._call('Input.dispatchKeyEvent', type='keyUp', key=key)

  def move_to(self, selector: str) -> None:
    """Moves the mouse over the middle of an element."""
    self.run(f'document.querySelector({json.dumps(selector)})'
             '.scrollIntoView({block: "center"})')
    x, y = self.run(
        '(() => { const b = document.querySelector('
        f'{json.dumps(selector)}).getBoundingClientRect();'
        'return [b.x + b.width / 2, b.y + b.height / 2]; })()')
    self._call('Input.dispatchMouseEvent', type='mouseMoved', x=x, y=y)

  def drag(self, selector: str, start: float, end: float) -> None:
    """Drags the mouse along an element's middle, by shares of its width."""
    self.move_to(selector)
    left, width, y = self.run(
        '(() => { const b = document.querySelector('
        f'{json.dumps(selector)}).getBoundingClientRect();'
        'return [b.x, b.width, b.y + b.height / 2]; })()')
    for kind, share, buttons in (
        ('mousePressed', start, 1), ('mouseMoved', (start + end) / 2, 1),
        ('mouseMoved', end, 1), ('mouseReleased', end, 0)):
      self._call('Input.dispatchMouseEvent', type=kind, x=left + share * width,
                 y=y, button='left', buttons=buttons, clickCount=1)

  def screenshot(self, whole: bool = False) -> bytes:
    """PNG of the window, or of the whole page."""
    return base64.b64decode(self._call(
        'Page.captureScreenshot', captureBeyondViewport=whole)['data'])

  def _call(self, method, **parameters):
    self._number += 1
    message = {'id': self._number, 'method': method, 'params': parameters}
    if self._session is not None:
      message['sessionId'] = self._session
    self._out.write(json.dumps(message).encode() + b'\0')
    while True:
      answer = self._read()
      if answer.get('id') == self._number:
        assert 'error' not in answer, answer
        return answer['result']
      self._note(answer)

  def _read(self):
    data = bytearray()
    while (byte := self._in.read(1)) != b'\0':
      assert byte, 'the browser has gone'
      data += byte
    return json.loads(data)

  def _note(self, event):
    parameters = event.get('params', {})
    if event['method'] == 'Network.requestWillBeSent':
      self.requests.append(parameters['request']['url'])
    elif event['method'] == 'Runtime.exceptionThrown':
      self.complaints.append(parameters['exceptionDetails'])
    elif event['method'] == 'Log.entryAdded':
      if parameters['entry']['level'] == 'error':
        self.complaints.append(parameters['entry'])
    elif event['method'] == 'Runtime.consoleAPICalled':
      if parameters['type'] in ('error', 'assert'):
        self.complaints.append(parameters['args'])
