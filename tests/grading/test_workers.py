"""Workers that hang, die, starve or are killed; a parent that dies."""

import os
import pathlib
import signal
import subprocess
import sys
import threading
import time
import types

import pytest

from tepo_jax.grading import grader
from tepo_jax.grading import workers

pytestmark = pytest.mark.long

_ROOT = pathlib.Path(__file__).parents[2]
WARM_UP = 'from tepo_jax.grading import verifying\nverifying._warm_up()\n'
READY = 'connection.Connection(os.dup(0)).send_bytes(b"ready")\n'
SERVE = "workers.serve('tepo_jax.grading.verifying:verify', None)"
HANG = (r'\int_0^1 \sin(x^{x})\cos(x^x)dx', ('5',))


def _question(n, right=True):
  """A question for math-verify: the larger of two numbers."""
  return f'\\max({n},{n + 1})', (str(n + 1 if right else n),)


def _ask(questions, size=2, timeout_s=10):
  asked = workers.Pool(size, timeout_s, grader.VERIFYING)
  try:
    return asked.ask(questions)
  finally:
    asked.close()


def test_answers_in_any_thread():
  questions = [_question(n, n % 2) for n in range(20)]
  asked, outcomes = workers.Pool(2, 10, grader.VERIFYING), []
  thread = threading.Thread(
      target=lambda: outcomes.append(asked.ask(questions)))
  thread.start()
  thread.join()
  asked.close()
  assert outcomes == [
      ({question: (n % 2 == 1, False)
        for n, question in enumerate(questions)}, 0)]


def test_an_answer_that_used_its_cpu_time_is_not_asked_again(monkeypatch):
  sent, send = [], workers._Worker.send
  monkeypatch.setattr(workers._Worker, 'send', lambda worker, question, time_s: (
      sent.append(question), send(worker, question, time_s)))
  question = (r'a=\sum_{i=0}^{k-1}\binom{k-1}{i}\frac{D_{n+9-k-i}}{n-k-i}',
              (r'a=\sum_{i=0}^{k-1}\binom{k-1}{i}\frac{D_{n+1-k-i}}{n-k-i}',))
  outcomes, deaths = _ask([question], 1, 60)
  assert (outcomes, deaths) == ({question: (False, True)}, 0)
  assert sent == [question]


def test_the_clock_of_a_verdict_ends_with_it():
  script = '''
import time
from tepo_jax.grading import verifying
assert verifying.verify('1', ('1.0',), 5) == (True, False)
end = time.process_time() + 2 * verifying.CPU_S
while time.process_time() < end:
  pass
'''
  subprocess.run(
      [sys.executable, '-c', script], cwd=_ROOT, timeout=100, check=True)


def test_a_worker_that_does_not_read_is_replaced():
  """A question of more bytes than the pipe holds would wait for it."""
  asked = workers.Pool(1, 3, grader.VERIFYING)
  short, long = _question(1), ('1' * 3_000_000, ('2',))
  assert asked.ask([short]) == ({short: (True, False)}, 0)
  [stopped] = asked._workers
  os.kill(stopped.process.pid, signal.SIGSTOP)
  outcomes, deaths = asked.ask([long])
  asked.close()
  assert not outcomes[long][0] and deaths >= 1
  assert stopped.process.poll() is not None


def test_without_questions_no_worker_starts():
  asked = workers.Pool(2, 10, grader.VERIFYING)
  assert asked.ask([]) == ({}, 0)
  assert not asked._workers


def test_hanging_questions_affect_no_others():
  also = (f'7+{HANG[0]}', ('5',))
  fine = [_question(n) for n in range(10)]
  asked = workers.Pool(2, 4, grader.VERIFYING)
  asked.ask(fine[:2])
  before = {worker.process.pid for worker in asked._workers}
  outcomes, deaths = asked.ask([HANG, also, *fine])
  # sympy's caches may be inconsistent after an alarm.
  assert not before & {worker.process.pid for worker in asked._workers}
  asked.close()
  assert deaths == 0
  assert outcomes == {HANG: (False, True), also: (False, True)} | {
      question: (True, False) for question in fine}


def test_workers_that_start_share_the_cpus(monkeypatch):
  """Else a late worker seems to have had too little CPU time."""
  shares = []

  def worker(question):
    return types.SimpleNamespace(
        question=question, ready=question is not None, kill=lambda: None,
        collect=lambda is_late, cpu_share: (
            shares.append(cpu_share) or (question, 'replace', (False, True))))

  asked, late = workers.Pool(1, 10, grader.VERIFYING), worker(HANG)
  monkeypatch.setattr(os, 'cpu_count', lambda: 2)
  monkeypatch.setattr(asked, '_feed', lambda waiting: None)
  monkeypatch.setattr(asked, '_wait', lambda: [(late, True)])
  monkeypatch.setattr(
      asked, '_workers', [late, worker(None), worker(None), worker(None)])
  assert asked.ask([HANG]) == ({HANG: (False, True)}, 0)
  assert shares == [2 / 4]


def test_idle_workers_killed_from_outside_are_replaced():
  questions = [_question(1), _question(2)]
  asked = workers.Pool(2, 10, grader.VERIFYING)
  expected = {question: (True, False) for question in questions}, 0
  assert asked.ask(questions) == expected
  for worker in asked._workers:
    os.kill(worker.process.pid, signal.SIGKILL)
    worker.process.wait()
  assert asked.ask(questions) == expected
  asked.close()


def test_questions_of_killed_workers_are_retried():
  questions = [_question(n) for n in range(40)]
  asked, done = workers.Pool(2, 10, grader.VERIFYING), threading.Event()

  def kill_some():
    killed = set()
    while not done.is_set() and len(killed) < 4:
      for worker in list(asked._workers):
        if worker.question and worker.process.pid not in killed:
          killed.add(worker.process.pid)
          worker.process.send_signal(signal.SIGKILL)
      time.sleep(0.02)

  killer = threading.Thread(target=kill_some)
  killer.start()
  outcomes, deaths = asked.ask(questions)
  done.set()
  killer.join()
  asked.close()
  assert outcomes == {question: (True, False) for question in questions}
  assert deaths >= 1


def test_after_an_interruption_no_late_answer_is_used(monkeypatch):
  asked = workers.Pool(1, 10, grader.VERIFYING)
  asked.ask([_question(1)])

  def interrupt():
    raise KeyboardInterrupt

  monkeypatch.setattr(asked, '_wait', interrupt)
  with pytest.raises(KeyboardInterrupt):
    asked.ask([_question(2)])
  monkeypatch.undo()
  time.sleep(0.5)  # for the stale answer to arrive
  wrong = _question(3, right=False)
  assert asked.ask([wrong]) == ({wrong: (False, False)}, 0)
  asked.close()


def _serve_with(monkeypatch, code):
  """Lets workers run `code`, with SERVE in place of 'workers.serve()'."""
  code = code.replace('workers.serve()', SERVE)
  monkeypatch.setattr(workers.Job, 'command', lambda self: (
      'import itertools, os, time\nfrom multiprocessing import connection\n'
      'from tepo_jax.grading import workers\n' + code))


def test_a_worker_that_ignores_alarms_is_killed(monkeypatch):
  _serve_with(
      monkeypatch, f'{READY}all(itertools.repeat(1))')
  start = time.monotonic()
  assert _ask([_question(1)], timeout_s=2) == (
      {_question(1): (False, True)}, 0)
  assert time.monotonic() - start >= 2


def test_a_question_without_cpu_time_is_retried(
    monkeypatch, tmp_path):
  """Load on the machine does not make a correct answer wrong."""
  flag = tmp_path / 'flag'
  _serve_with(
      monkeypatch, f'if not os.path.exists({str(flag)!r}):\n'
      f'  open({str(flag)!r}, "w").close()\n'
      f'  {READY}  time.sleep(600)\n'
      f'{WARM_UP}workers.serve()')
  # On a busy machine the second worker's answer takes seconds.
  assert _ask([_question(1)], 1, 10) == ({_question(1): (True, False)}, 0)
  # Wrong if the worker never gets CPU time.
  _serve_with(monkeypatch, f'{READY}time.sleep(600)')
  monkeypatch.setattr(workers, 'ATTEMPTS', 2)
  assert _ask([_question(1)], 1, 2) == ({_question(1): (False, True)}, 0)


def test_a_question_is_retried_when_its_worker_dies(monkeypatch, tmp_path):
  flag = tmp_path / 'flag'
  dying = (f'{READY}os.read(0, 1)\n'
           f'open({str(flag)!r}, "a").write("x")\nos._exit(1)\n')
  _serve_with(monkeypatch, f'if not os.path.exists({str(flag)!r}):\n  '
              + dying.replace('\n', '\n  ') + '\nworkers.serve()')
  assert _ask([_question(1)], 1) == ({_question(1): (True, False)}, 1)
  _serve_with(monkeypatch, dying)
  assert _ask([_question(1)], 1) == ({_question(1): (False, False)}, 3)


def test_a_fork_of_the_function_answers_nothing(monkeypatch):
  _serve_with(monkeypatch, WARM_UP + '''
verify = verifying.verify
def forking(*question):
  os.fork()
  return verify(*question)
verifying.verify = forking
workers.serve()''')
  questions = [_question(n, n % 3) for n in range(8)]
  assert _ask(questions, 1) == (
      {question: (n % 3 != 0, False)
       for n, question in enumerate(questions)}, 0)


def test_workers_that_cannot_start_are_an_error(monkeypatch):
  _serve_with(monkeypatch, 'raise SystemExit(1)')
  with pytest.raises(RuntimeError, match='do not start'):
    _ask([_question(1)])


@pytest.mark.parametrize('greedy', [
    'bytearray(4 << 30)', 'open({file!r}, "wb", 0).write(b"x")'],
                         ids=['memory', 'file'])
def test_workers_keep_to_their_limits(greedy, monkeypatch, tmp_path):
  """A question that exceeds a limit is wrong; the next one is answered."""
  path = tmp_path / 'file'
  _serve_with(monkeypatch, f'''
import math_verify
parse = math_verify.parse
def greedy(text, **options):
  if '666' in text:
    {greedy.format(file=str(path))}
  return parse(text, **options)
math_verify.parse = greedy
workers.serve()''')
  outcomes, deaths = _ask([_question(666), _question(1)], 1)
  assert deaths == 0
  assert outcomes == {_question(666): (False, False),
                      _question(1): (True, False)}
  assert not path.exists() or not path.stat().st_size


def test_workers_are_recycled(monkeypatch):
  monkeypatch.setattr(workers, 'RECYCLE_AFTER', 2)
  asked = workers.Pool(1, 10, grader.VERIFYING)
  outcomes, deaths = asked.ask([_question(n) for n in range(3)])
  assert all(verdict for verdict, _ in outcomes.values()) and deaths == 0
  assert asked._workers[0].served == 1
  asked.close()


def _is_alive(pid):
  try:
    return pathlib.Path(f'/proc/{pid}/stat').read_text().split()[2] != 'Z'
  except FileNotFoundError:
    return False


def test_workers_die_with_their_parent():
  """The pipe ends an idle worker, the CPU limit one in an endless C call."""
  script = r'''
import os, signal, sys, threading, time
from tepo_jax.grading import grader, workers
idle = workers.Pool(1, 10, grader.VERIFYING)
idle.ask([(r'\max(1,2)', ('2',))])
workers.Job.command = lambda self: (
    'import itertools\nfrom tepo_jax.grading import workers, verifying\n'
    'verifying.verify = lambda *question: all(itertools.repeat(1))\n'
    'workers.serve("tepo_jax.grading.verifying:verify", None)')
busy = workers.Pool(1, 2, grader.VERIFYING)
threading.Thread(
    target=busy.ask, args=([(r'\max(1,2)', ('2',))],), daemon=True).start()
while not (busy._workers and busy._workers[0].question):
  time.sleep(0.1)
for asked in (idle, busy):
  print(asked._workers[0].process.pid)
sys.stdout.flush()
os.kill(os.getpid(), signal.SIGKILL)
'''
  output = subprocess.run(
      [sys.executable, '-c', script], cwd=_ROOT, capture_output=True).stdout
  pids = [int(pid) for pid in output.split()]
  assert len(pids) == 2
  deadline = time.monotonic() + 60
  while any(map(_is_alive, pids)) and time.monotonic() < deadline:
    time.sleep(0.1)
  alive = [pid for pid in pids if _is_alive(pid)]
  for pid in alive:
    os.kill(pid, signal.SIGKILL)
  assert not alive


_FAULTS = {
    'closed': 'for number in (0, 1, 2):\n  os.close(number)',
    # Like a full disk: no file can grow. Pipes still work.
    'full': 'full = os.open("/dev/full", os.O_WRONLY)\n'
            'os.dup2(full, 1)\nos.dup2(full, 2)\n'
            'signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n'
            'resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))'}


@pytest.mark.parametrize('fault', _FAULTS)
def test_closed_or_full_output_changes_no_verdict(fault):
  script = f'''
import os, resource, signal
{_FAULTS[fault]}
from tepo_jax import grading
with grading.Grader(2) as grader:
  verdicts, counts = grader.grade(
      [(r"\\boxed{{\\sum_{{k=1}}^2 k}}", ["3"]),
       (r"\\boxed{{\\sum_{{k=1}}^2 k}}", ["1"]),
       (r"\\boxed{{2}}", ["2"])])
right = verdicts == [True, False, True] and not any(counts.values())
os._exit(7 if right else 8)
'''
  assert subprocess.run([sys.executable, '-c', script], cwd=_ROOT
                        ).returncode == 7


def test_workers_import_no_jax_and_little_else():
  subprocess.run(
      [sys.executable, '-c',
       'import sys\nfrom tepo_jax.grading import workers, verifying\n'
       'assert "sympy" not in sys.modules\n'
       'verifying.verify("1", ("0.5",), 5)\n'
       'assert not {"jax", "numpy", "transformers", "datasets"} '
       '& set(sys.modules)'], cwd=_ROOT, check=True)
