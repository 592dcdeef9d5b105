r"""Is the completion's final answer right? 0 or 1, by math-verify.

Only the extracted answer is judged: the last balanced `\boxed{...}`, or the
last `Answer:` line, at most MAX_CHARS long. Most pairs are decided here by
comparing strings and numbers. The rest goes to math-verify, whose parsing
and simplification may hang, so `Grader` runs it in worker processes that can
be killed; the workers import this module and nothing of jax.

math-verify is used with its LaTeX extraction alone: its expression extraction
calls sympy's parse_expr, which is `eval`, and model text never reaches eval
(latex2sympy lets it make numbers of its lexer's number tokens, nothing else).
Plain expressions (`8.7e8`, `2 2/3`, `exp(16)`) are rewritten to LaTeX instead.
"""

import collections
import contextlib
import decimal
import itertools
import json
import logging
import os
import pathlib
import re
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from multiprocessing import connection

STYLES = ('boxed', 'answer')
MAX_CHARS = 2000
NUMBER_TOLERANCE = decimal.Decimal('1e-6')  # relative, of non-integers
ALARM_S = 4  # of math-verify, for one parse or one comparison; an integer
MEMORY_BYTES = 2 << 30  # address space of a worker
STARTUP_S = 120
RECYCLE_AFTER = 2000  # items, since sympy's caches grow
ATTEMPTS = 3  # of an item whose worker died under it

_ROOT = pathlib.Path(__file__).parents[2]
_SERVE = 'from tepo_jax.tasks import grading; grading.serve()'
_ENVIRONMENT = {
    'JAX_PLATFORMS': 'cpu',
    # gmpy2 holds the GIL in long operations, out of an alarm's reach.
    'SYMPY_GROUND_TYPES': 'python',
    'MPMATH_NOGMPY': '1',
}

# An escaped backslash must not hide the \boxed that follows it.
_BRACES = re.compile(
    r'(?P<box>\\(?:boxed|fbox)\s*\{)|\\[{}]|\\\\(?!boxed|fbox)|\{|\}')
_ANSWER_LINE = re.compile(r'Answer\s*:\s*([^\n]+)', re.IGNORECASE)
_WRAPPERS = re.compile(
    r'\\\((?P<round>.*)\\\)|\\\[(?P<square>.*)\\\]'
    r'|\\(?:boxed|fbox|text|mathrm|textbf|mathbf)\s*\{(?P<braces>[^{}]*)\}',
    re.DOTALL)
_NUMBER = re.compile(
    r'(?P<mantissa>[-+]?(?:(?:\d+|\d{1,3}(?:,\d{3})+)(?:\.\d*)?|\.\d+))'
    r'(?:(?:[eE]|(?:\\times|\\cdot|\*|×)\s?10\^)'
    r'(?:(?P<exponent>[-+]?\d{1,4})|\{(?P<braced>[-+]?\d{1,4})\}))?')
_IGNORED = re.compile(r'\\(?:left|right)(?![a-zA-Z])|\\[!,;]|(?<!\\)\$')
_LOOSE_SPACE = re.compile(r'(?<![a-zA-Z0-9])\s+|\s+(?![a-zA-Z0-9])')
_PLAIN_TO_LATEX = (
    (re.compile(r'\b(?:np|numpy|math)\.'), ''),
    (re.compile(r'(?<![\w.])(\d+(?:\.\d+)?)[eE]([+-]?\d+)(?!\w)'),
     r'\1\\times 10^{\2}'),
    (re.compile(r'^(-?\d+)\s+(\d+)/(\d+)$'), r'\1\\frac{\2}{\3}'),
    (re.compile(r'(?<![\\a-zA-Z])(pi)(?![a-zA-Z])'), r'\\\1'),
    (re.compile(r'(?<![\\a-zA-Z])'
                r'(exp|log|ln|sin|cos|tan|arcsin|arccos|arctan)(?=\s*\()'),
     r'\\\1'),
)


def extract(completion: str, style: str) -> str | None:
  r"""The completion's final answer, or None.

  'boxed': the content of the last `\boxed{...}` or `\fbox{...}` whose brace
  is closed; unterminated ones are passed over. 'answer': the last line with
  `Answer:`, of which the box where there is one. An answer longer than
  MAX_CHARS is none.
  """
  if style not in STYLES:
    raise ValueError(f'no answer style {style!r}, only {STYLES}')
  if style == 'boxed':
    answer = _last_box(completion)
  else:
    lines = _ANSWER_LINE.findall(completion)
    answer = lines[-1].strip(' *') if lines else None
    if answer and len(answer) <= MAX_CHARS:
      answer = _last_box(answer) or answer
  if answer is None or len(answer) > MAX_CHARS:
    return None
  return answer.strip() or None


def _last_box(text):
  """One pass from the first box on, whatever the nesting: linear in len."""
  starts = [i for i in (text.find('\\boxed'), text.find('\\fbox')) if i >= 0]
  if not starts:
    return None
  stack, last = [], None
  for match in _BRACES.finditer(text, min(starts)):
    if match['box'] or match[0] == '{':
      stack.append(match)
    elif match[0] == '}' and stack:
      opening = stack.pop()
      if opening['box'] and (last is None or opening.end() > last[0]):
        last = opening.end(), match.start()
  return None if last is None else text[slice(*last)]


def grade(completion: str, answers: Sequence[str],
          style: str = 'boxed') -> bool:
  """Whether the completion's answer equals any of `answers`.

  In this process: for the main thread only (math-verify's alarms raise
  elsewhere), and with no more protection than those alarms. Completions of a
  model in training belong to `Grader`.
  """
  answer = extract(completion, style)
  if answer is None:
    return False
  verdict = _decide_quickly(answer, answers)
  if verdict is None:
    verdict, _ = _verify(answer, answers)
  return verdict


def _decide_quickly(answer, golds):
  """True, False, or None where math-verify has to tell."""
  answer = _canonical(answer)
  golds = [_canonical(gold) for gold in golds]
  if answer in golds:
    return True
  numbers = [_number(text) for text in (answer, *golds)]
  if None in numbers:
    return None
  return any(_is_close(numbers[0], gold) for gold in numbers[1:])


def _number(text):
  """The Decimal of `1,234`, `-0.5`, `8.7e8` or `8.7\\times 10^8`, or None."""
  match = _NUMBER.fullmatch(text)
  if not match:
    return None
  exponent = match['exponent'] or match['braced'] or '0'
  return decimal.Decimal(f'{match["mantissa"].replace(",", "")}e{exponent}')


def _is_close(answer, gold):
  """Integers exactly, other numbers to a relative 1e-6."""
  if all(number == number.to_integral_value() for number in (answer, gold)):
    return answer == gold
  return abs(answer - gold) <= NUMBER_TOLERANCE * abs(gold)


def _canonical(text):
  r"""The text without wrappers, `$`, `\left`, thin and needless spaces."""
  text = text.strip().rstrip('.').strip()
  text = _IGNORED.sub('', text).replace('{,}', ',')
  while match := _WRAPPERS.fullmatch(text.strip()):
    text = match['round'] or match['square'] or match['braces'] or ''
  text = re.sub(r'\\[dt]frac(?![a-zA-Z])', r'\\frac', text)
  return _LOOSE_SPACE.sub('', ' '.join(text.split()))


def _verify(answer, golds):
  """math-verify's opinion: (verdict, whether an alarm went off)."""
  if threading.current_thread() is not threading.main_thread():
    raise RuntimeError('grading.grade has its alarms in the main thread only: '
                       'use grading.Grader')
  import math_verify  # slow to import, and most runs do without
  from math_verify import errors
  config = [math_verify.LatexExtractionConfig(boxed_match_priority=0)]

  def parse(text):
    return math_verify.parse(
        f'\\boxed{{{_as_latex(text)}}}', extraction_config=config,
        parsing_timeout=ALARM_S, raise_on_error=True)

  timed_out = False
  for gold in golds:
    try:
      for pair in itertools.product(parse(gold), parse(answer)):
        try:
          if math_verify.verify(
              *pair, timeout_seconds=ALARM_S, raise_on_error=True):
            return True, False
        except Exception:  # sympy cannot compare the two: not equal.
          continue
    except errors.TimeoutException:  # a BaseException
      timed_out = True
    except Exception:  # latex2sympy fails on the text: not equal.
      continue
  return False, timed_out


def _as_latex(text):
  text = re.sub(r'(?<!\\)\$', '', text).strip().rstrip('.')
  for pattern, replacement in _PLAIN_TO_LATEX:
    text = pattern.sub(replacement, text)
  return text


class Grader:
  """Grades lists of completions in worker processes that can be killed.

  Workers start when the first item needs one. An item whose worker does not
  answer within `timeout_s` is wrong and its worker is replaced; an item whose
  worker dies (killed from outside, out of memory) is tried again. Workers end
  with this process: their pipe closes, and a limit on CPU time ends one that
  is too busy to notice.

  `grade` may be called from any thread; calls wait for one another.
  """

  def __init__(self, workers: int = 2, style: str = 'boxed',
               timeout_s: int = 10):
    if style not in STYLES:
      raise ValueError(f'no answer style {style!r}, only {STYLES}')
    if workers < 1 or not isinstance(timeout_s, int) or timeout_s <= ALARM_S:
      raise ValueError(
          f'need a worker and a whole number of seconds above {ALARM_S}, got '
          f'{workers} and {timeout_s!r}')
    self._size, self._style, self._timeout_s = workers, style, timeout_s
    self._workers: list[_Worker] = []
    self._lock = threading.Lock()

  def grade(self, items: Iterable[tuple[str, Sequence[str]]]
            ) -> tuple[list[bool], dict[str, int]]:
    """Verdicts on (completion, answers) pairs, in their order, and counts.

    Returns:
      verdicts, and {'no_answer', 'timeout', 'died'}: completions without an
      answer; completions called wrong since time ran out; worker deaths.
    """
    pairs = [(extract(completion, self._style), tuple(answers))
             for completion, answers in items]
    occurrences = collections.Counter(pairs)
    verdicts = {pair: False if pair[0] is None else _decide_quickly(*pair)
                for pair in occurrences}
    hard = [pair for pair, verdict in verdicts.items() if verdict is None]
    counts = {'no_answer': sum(answer is None for answer, _ in pairs),
              'timeout': 0, 'died': 0}
    if hard:
      with self._lock:
        outcomes, counts['died'] = self._dispatch(hard)
      for pair, (verdicts[pair], timed_out) in outcomes.items():
        counts['timeout'] += timed_out * occurrences[pair]
    return [verdicts[pair] for pair in pairs], counts

  def close(self) -> None:
    """Ends the workers. `grade` would start new ones."""
    with self._lock:
      for worker in self._workers:
        worker.kill()
      self._workers = []

  def __enter__(self):
    return self

  def __exit__(self, *exception):
    self.close()

  def _dispatch(self, pairs):
    """{pair: (verdict, timed out)} and the number of worker deaths."""
    waiting = collections.deque(pairs)
    deaths, failed_starts, outcomes = collections.Counter(), 0, {}
    try:
      while len(outcomes) < len(pairs):
        self._feed(waiting)
        for worker, is_late in self._wait():
          pair, status, outcome = worker.collect(is_late)
          if status in ('died', 'replace'):
            self._drop(worker)
          if status == 'ready':
            continue
          if pair is None:
            failed_starts += 1
          elif status == 'died' and deaths[pair] < ATTEMPTS - 1:
            waiting.append(pair)
          else:
            outcomes[pair] = outcome
          if pair is not None:
            deaths[pair] += status == 'died'
        if failed_starts > 2 * self._size:
          raise RuntimeError('grading workers do not start: see what '
                             f'{sys.executable} -c "{_SERVE}" prints')
    finally:  # After an exception no answer may meet the next question.
      for worker in [w for w in self._workers if w.pair is not None]:
        self._drop(worker)
    return outcomes, deaths.total()

  def _drop(self, worker):
    worker.kill()
    self._workers.remove(worker)

  def _feed(self, waiting):
    for worker in list(self._workers):
      if worker.ready and worker.pair is None and worker.is_dead():
        self._drop(worker)
    busy = sum(worker.pair is not None for worker in self._workers)
    while len(self._workers) < min(self._size, busy + len(waiting)):
      self._workers.append(_Worker())
    for worker in self._workers:
      if waiting and worker.ready and worker.pair is None:
        worker.send(waiting.popleft(), self._timeout_s)

  def _wait(self):
    """[(worker that has something to collect or is late, is late)]."""
    active = [w for w in self._workers if w.pair is not None or not w.ready]
    patience = min(worker.deadline for worker in active) - time.monotonic()
    readable = connection.wait(
        [worker.process.stdout for worker in active], max(0, patience))
    now = time.monotonic()
    return [(worker, worker.process.stdout not in readable)
            for worker in active
            if worker.process.stdout in readable or worker.deadline <= now]


class _Worker:
  """A process that answers one question at a time."""

  def __init__(self):
    search_path = os.pathsep.join(
        filter(None, (str(_ROOT), os.environ.get('PYTHONPATH'))))
    self.process = subprocess.Popen(
        [sys.executable, '-P', '-c', _SERVE], stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, bufsize=0,
        env={**os.environ, **_ENVIRONMENT, 'PYTHONPATH': search_path},
        start_new_session=True)  # Ctrl-C at the terminal is not for it.
    self.ready, self.pair, self.served = False, None, 0
    self.deadline = time.monotonic() + STARTUP_S

  def is_dead(self):
    return self.process.poll() is not None

  def send(self, pair, timeout_s):
    self.pair, self.deadline = pair, time.monotonic() + timeout_s
    question = json.dumps([*pair, timeout_s]).encode() + b'\n'
    with contextlib.suppress(BrokenPipeError):  # collect() will find it dead.
      self.process.stdin.write(question)

  def collect(self, is_late):
    """(pair, status, (verdict, timed out)).

    status: 'ready' (started), 'answered', 'replace' (answered or late, and
    not to be used again) or 'died'. While a worker starts, its pair is None.
    """
    pair, self.pair = self.pair, None
    if is_late:
      return pair, 'died' if pair is None else 'replace', (False, True)
    line = self.process.stdout.read(4096)  # Short lines arrive whole.
    if not line.endswith(b'\n'):
      return pair, 'died', (False, False)
    if not self.ready:
      self.ready = True
      return None, 'ready', None
    self.served += 1
    verdict, timed_out = json.loads(line)
    # An alarm may strike inside sympy and leave its caches half written.
    worn = timed_out or self.served >= RECYCLE_AFTER
    return pair, 'replace' if worn else 'answered', (verdict, timed_out)

  def kill(self):
    self.process.kill()
    self.process.wait()
    self.process.stdin.close()
    self.process.stdout.close()


def serve() -> None:
  """What a worker runs: one JSON question a line in, one answer a line out."""
  _limit(resource.RLIMIT_AS, MEMORY_BYTES)
  _limit(resource.RLIMIT_CORE, 0)
  logging.disable(logging.CRITICAL)
  answers = os.dup(1)
  os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
  _verify('1', ('\\frac{1}{2}',))
  os.write(answers, b'ready\n')
  for line in sys.stdin.buffer:
    answer, golds, timeout_s = json.loads(line)
    # The kernel ends a worker that outlives its parent in a C call.
    used_s = int(time.process_time())
    _limit(resource.RLIMIT_CPU, used_s + timeout_s + 2)
    os.write(answers, json.dumps(_verify(answer, golds)).encode() + b'\n')


def _limit(kind, value):
  _, hard = resource.getrlimit(kind)
  if hard != resource.RLIM_INFINITY:
    value = min(value, hard)
  resource.setrlimit(kind, (value, hard))
