"""Calls functions that may hang or crash in worker processes.

math-verify's parsing and a user's reward function may hang, use up memory or
crash: the parent kills and replaces a worker that misses the deadline of its
question.

Messages are JSON: [*question, timeout_s] to the worker, [answer, whether an
alarm went off] back. A worker that has not answered in time is killed, so an
answer that comes late is never taken for the next question's.
"""

import collections
from collections.abc import Sequence
import contextlib
import dataclasses
import gc
import importlib
import json
import logging
import math
from multiprocessing import connection
import os
import pathlib
import resource
import signal
import subprocess
import sys
import threading
import time
from typing import Any

MEMORY_BYTES = 2 << 30  # address space of a worker
STARTUP_S = 120
RECYCLE_AFTER = 2000  # questions, because sympy's caches grow
ATTEMPTS = 3  # at a question whose worker died or got no CPU time

_ROOT = pathlib.Path(__file__).parents[2]
_ENVIRONMENT = {
    'JAX_PLATFORMS': 'cpu',
    # gmpy2 holds the GIL in long operations, which delays the alarms.
    'SYMPY_GROUND_TYPES': 'python',
    'MPMATH_NOGMPY': '1',
}

# The arguments of the workers' function: what JSON can hold, in tuples.
Question = tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Job:
  """What a pool's workers do.

  function: 'module:name' of a function of (*question, alarm_s) -> (answer,
    whether an alarm went off); alarm_s is a limit that it may set itself.
  first: a question that a worker answers before it counts as ready, or None.
  missing: the answer to a question whose worker hung or died.
  path: folders from which workers may import, besides this process's.
  modules: imported before a worker counts as ready.
  alarmed: whether the function ends by itself after alarm_s of work. A late
    worker that used little CPU time then had none, and its question is retried;
    otherwise it may have waited for something else.
  cpu_s: CPU time after which the function ends by itself.
  """
  function: str
  first: Question | None = None
  missing: Any = None
  path: tuple[str, ...] = ()
  modules: tuple[str, ...] = ()
  alarmed: bool = True
  cpu_s: float = math.inf

  def command(self) -> str:
    """The program of a worker."""
    return ('from tepo_jax.grading import workers; workers.serve('
            f'{self.function!r}, {self.first!r}, {self.modules!r}, '
            f'{self.alarmed})')


class Pool:
  """At most `size` workers, started on demand.

  A question that its worker does not answer within `timeout_s` gets the answer
  `job.missing`, and the worker is replaced. A question whose worker died
  (killed from outside, out of memory) or got too little CPU time to answer is
  retried. Workers end with this process: their pipe closes, and a CPU time
  limit ends one that is too busy to notice.

  Any thread may call `ask`; calls run one at a time.
  """

  def __init__(self, size: int, timeout_s: int, job: Job):
    self._size, self._timeout_s, self._job = size, timeout_s, job
    self._workers: list[_Worker] = []
    self._lock = threading.Lock()

  def ask(self, questions: Sequence[Question]
          ) -> tuple[dict[Question, tuple[Any, bool]], int]:
    """Returns {question: (answer, timed out)} and the count of workers that
    died."""
    with self._lock:
      return self._dispatch(questions) if questions else ({}, 0)

  def close(self) -> None:
    """Ends the workers; a later `ask` starts new ones."""
    with self._lock:
      for worker in self._workers:
        worker.kill()
      self._workers = []

  def _dispatch(self, questions):
    waiting = collections.deque(questions)
    attempts, outcomes = collections.Counter(), {}
    deaths = failed_starts = 0
    try:
      while len(outcomes) < len(questions):
        self._feed(waiting)
        for worker, is_late in self._wait():
          busy = sum(map(_is_busy, self._workers))
          question, status, outcome = worker.collect(
              is_late, min(1, os.cpu_count() / max(1, busy)))
          if status == 'ready':
            continue
          if status != 'answered':
            self._drop(worker)
          if question is None:
            failed_starts += 1
            continue
          deaths += status == 'died'
          attempts[question] += 1
          if status in ('died', 'starved') and attempts[question] < ATTEMPTS:
            waiting.append(question)
          else:
            outcomes[question] = outcome
        if failed_starts > 2 * self._size:
          raise RuntimeError('grading workers do not start; to see why, run '
                             f'{sys.executable} -c "{self._job.command()}"')
    finally:  # After an exception, no late answer may reach a later question.
      for worker in list(self._workers):
        if worker.question is not None:
          self._drop(worker)
    return outcomes, deaths

  def _drop(self, worker):
    worker.kill()
    self._workers.remove(worker)

  def _feed(self, waiting):
    for worker in list(self._workers):
      if worker.ready and worker.question is None and (
          worker.process.poll() is not None):
        self._drop(worker)
    busy = sum(worker.question is not None for worker in self._workers)
    while len(self._workers) < min(self._size, busy + len(waiting)):
      self._workers.append(_Worker(self._job))
    for worker in self._workers:
      if waiting and worker.ready and worker.question is None:
        worker.send(waiting.popleft(), self._timeout_s)

  def _wait(self):
    """Waits for output or a deadline: [(worker, whether it is late)]."""
    active = list(filter(_is_busy, self._workers))
    patience = min(worker.deadline for worker in active) - time.monotonic()
    readable = connection.wait(
        [worker.pipe for worker in active], max(0, patience))
    now = time.monotonic()
    return [(worker, worker.pipe not in readable) for worker in active
            if worker.pipe in readable or worker.deadline <= now]


def _is_busy(worker):
  """Whether it uses CPU time: it answers a question or starts."""
  return worker.question is not None or not worker.ready


class _Worker:
  """A process that answers one question at a time."""

  def __init__(self, job):
    self.job = job
    search_path = os.pathsep.join(filter(
        None, (str(_ROOT), *job.path, os.environ.get('PYTHONPATH'))))
    self.pipe, its_end = connection.Pipe()
    with its_end:
      self.process = subprocess.Popen(
          [sys.executable, '-P', '-c', job.command()], stdin=its_end.fileno(),
          stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
          env={**os.environ, **_ENVIRONMENT, 'PYTHONPATH': search_path},
          start_new_session=True)  # Ctrl-C at the terminal does not reach it.
    self.ready, self.question, self.served = False, None, 0
    self.deadline = time.monotonic() + STARTUP_S

  def send(self, question, timeout_s):
    self.question, self.deadline = question, time.monotonic() + timeout_s
    self.timeout_s, self.used_s = timeout_s, self._cpu_s()
    # A worker that does not read a long question would block this process.
    late = threading.Timer(timeout_s, self.process.kill)
    late.start()
    with contextlib.suppress(OSError):  # It has died: collect() will see it.
      self.pipe.send_bytes(json.dumps([*question, timeout_s]).encode())
    late.cancel()

  def collect(self, is_late, cpu_share):
    """Returns (question, status, (answer, timed out)).

    status: 'ready' (started), 'answered', 'replace' (answered or late, and not
    to be reused), 'starved' (late for lack of CPU time) or 'died'. While a
    worker starts, its question is None. cpu_share: of one CPU, that it had at
    least unless other programs took it.
    """
    question, self.question = self.question, None
    if is_late:
      status = self._why_late(cpu_share) if question else 'died'
      return question, status, (self.job.missing, True)
    try:
      message = self.pipe.recv_bytes()
    except (EOFError, OSError):
      return question, 'died', (self.job.missing, False)
    if not self.ready:
      self.ready = True
      return None, 'ready', None
    self.served += 1
    answer, timed_out = json.loads(message)
    if timed_out:  # An alarm may leave sympy's caches inconsistent.
      return question, self._why_late(cpu_share), (answer, True)
    status = 'replace' if self.served >= RECYCLE_AFTER else 'answered'
    return question, status, (answer, False)

  def _why_late(self, cpu_share):
    """'starved' if the worker ran for less than half the time that it has."""
    if not self.job.alarmed:
      return 'replace'
    used_s = self._cpu_s() - self.used_s
    needed_s = min(cpu_share * self.timeout_s / 4, self.job.cpu_s / 2)
    return 'starved' if used_s < needed_s else 'replace'

  def _cpu_s(self):
    """CPU time used so far; infinite if unknown."""
    try:
      stat = pathlib.Path(f'/proc/{self.process.pid}/stat').read_text()
    except OSError:
      return float('inf')
    user, system = stat.rpartition(')')[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf('SC_CLK_TCK')

  def kill(self):
    with contextlib.suppress(ProcessLookupError):
      os.killpg(self.process.pid, signal.SIGKILL)  # with what it started
    self.process.wait()
    self.pipe.close()


def serve(function: str, first: Question | None,
          modules: Sequence[str] = (), alarmed: bool = True) -> None:
  """Runs in a worker, whose stdin is its end of the pipe: answers questions.

  The arguments are those of `Job`.
  """
  _limit(resource.RLIMIT_AS, MEMORY_BYTES)
  _limit(resource.RLIMIT_CORE, 0)
  logging.disable(logging.CRITICAL)
  pipe = connection.Connection(os.dup(0))
  os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
  module, _, name = function.partition(':')
  call = getattr(importlib.import_module(module), name)
  for module in modules:
    with contextlib.suppress(Exception):  # said again when it is called
      importlib.import_module(module)
  if first is not None:
    call(*first, STARTUP_S)
  gc.freeze()  # Collections pass over what imports made.
  threads = 1 if alarmed else os.cpu_count()
  _limit(resource.RLIMIT_FSIZE, 0)  # of files; answers go to a pipe
  pipe.send_bytes(b'ready')
  process = os.getpid()
  while True:
    try:
      *question, timeout_s = json.loads(pipe.recv_bytes())
    except (EOFError, OSError):  # the parent has ended
      return
    # The kernel ends a worker whose parent died during a C call.
    used_s = int(time.process_time())
    _limit(resource.RLIMIT_CPU, used_s + threads * (timeout_s + 2))
    answer, timed_out = call(*question, max(1, timeout_s // 2))
    if os.getpid() != process:  # a fork by the function: it answers nothing
      os._exit(0)
    pipe.send_bytes(json.dumps([answer, timed_out]).encode())


def _limit(kind, value):
  _, hard = resource.getrlimit(kind)
  resource.setrlimit(kind, (
      value if hard == resource.RLIM_INFINITY else min(value, hard), hard))
