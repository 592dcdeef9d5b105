r"""Extraction, equivalence, and workers that hang, die or are killed."""

import builtins
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import pytest

from tepo_jax.tasks import datasets, grading

_ROOT = pathlib.Path(__file__).parents[2]
_SHARED = _ROOT.parent / 'shared' / 'benchmarks'
HANG = '9^{9^{9^9}}'


@pytest.mark.parametrize('completion, answer', [
    (r'so \boxed{34}', '34'),
    (r'first \boxed{1}, then \boxed{2}.', '2'),
    (r'\boxed{\frac{1}{2}} and \boxed{unfinished', r'\frac{1}{2}'),
    (r'\boxed{1} \boxed{2 \boxed{3', '1'),
    (r'\boxed{a \boxed{b} c}', 'b'),
    (r'\fbox{7}', '7'),
    (r'\boxed{7} \fbox{8}', '8'),
    (r'\boxed {5}', '5'),
    (r'\boxed{ 5 }', '5'),
    (r'\boxed{\{1,2\}}', r'\{1,2\}'),
    (r'\boxed{\left\{ x \right.}', r'\left\{ x \right.'),
    (r'} { \boxed{5} }', '5'),
    (r'\\boxed{5}', '5'),
    (r'\\\boxed{5}', '5'),
    ('\\boxed{a\nb}', 'a\nb'),
    (r'\boxed{}', None),
    (r'\boxed{', None),
    (r'\boxed', None),
    ('34', None),
    ('', None),
    ('\\boxed{1} \\boxed{' + '1' * 2001 + '}', None),
    ('\\boxed{' + '1' * 2000 + '}', '1' * 2000),
])
def test_extract_box(completion, answer):
  assert grading.extract(completion, 'boxed') == answer


@pytest.mark.parametrize('completion, answer', [
    ('Answer: 34', '34'),
    ('Answer: 1\nno\nanswer : 2\nbye', '2'),
    ('**Answer:** $\\frac12$', '$\\frac12$'),
    ('**Answer: 34**', '34'),
    ('Answer: \\boxed{34}.', '34'),
    ('Answer: \\boxed{34', '\\boxed{34'),
    ('The answer is 34', None),
    ('\\boxed{34}', None),
    ('Answer:', None),
    ('Answer: ' + '1' * 2001, None),
])
def test_extract_answer_line(completion, answer):
  assert grading.extract(completion, 'answer') == answer


def test_extraction_is_linear():
  start = time.perf_counter()
  for text in ('\\boxed{' * 15_000, '\\' * 100_000 + '\\boxed{', '{' * 100_000,
               '\\boxed{' + '{}' * 50_000, '\\boxed' + ' ' * 100_000,
               'Answer' + ' ' * 100_000, 'Answer: ' * 12_000):
    grading.extract(text, 'boxed')
    grading.extract(text, 'answer')
  assert time.perf_counter() - start < 5


def test_unknown_style():
  with pytest.raises(ValueError, match='no answer style'):
    grading.extract('', 'box')
  with pytest.raises(ValueError, match='no answer style'):
    grading.Grader(1, 'box')


# (gold, answer): decided without math-verify.
QUICK_EQUAL = [
    ('34', '34'), ('073', '73'), ('-5', '-5'), ('1234', '1,234'),
    ('10,080', r'10{,}080'), ('10080', r'10,\!080'), ('142', '142.0'),
    ('0.5', '.50'), ('8.7e8', r'8.7\times 10^8'),
    ('8.7e8', r'8.7 \times 10^{8}'), ('1e-3', '0.001'), ('5', '+5'),
    (r'\frac{1}{2}', r'\dfrac{1}{2}'), (r'\left( 3, 4 \right)', '(3,4)'),
    ('Evelyn', r'\text{Evelyn}'), ('$2^{1009}$', '2^{1009}'),
    (r'\[ x+1 \]', 'x+1'), (r'\(x\)', '$x$'), ('x + 1', 'x+1'),
    ('7.', '7'), ('$69$,$84$', '69,84'), ('0.333333', '0.3333333'),
]
QUICK_DIFFERENT = [
    ('34', '35'), ('34', '-34'), ('12', '1.2'), ('0.5', '0.51'),
    ('2.88e-19', '1.325e-27'), ('1e9999', '5'), ('1e-9999', '0'),
    ('12345678901234567890123456789012', '12345678901234567890123456789013'),
    ('9007199254740993', '9007199254740992'), ('100000000', '100000001'),
]
# (gold, answer): for math-verify.
EQUAL = [
    (r'\frac83', '2 2/3'), (r'2\frac{2}{3}', r'\frac{8}{3}'),
    (r'\frac{\pi}{2}', 'pi/2'), ('e^{16}', 'exp(16)'), ('exp(16)', 'e^{16}'),
    ('np.arcsin(10/13)', r'\arcsin(10/13)'), ('-2<x<7', '(-2,7)'),
    ('5', 'x=5'), ('x=5', '5'), ('5', r'5\text{ cm}'), ('90', r'90^\circ'),
    ('0.5', r'50\%'), ('0.5', r'\frac12'), ('1/2', '0.5'),
    (r'\frac{3\sqrt{2}}{2}', r'\frac{3}{\sqrt2}'), ('x^2+2x+1', '(x+1)^2'),
    (r'\{1,2\}', r'\{2,1\}'), ('1,2', '2,1'), (r'2\sqrt{3}', '2*sqrt(3)'),
    (r'\begin{pmatrix}1\\2\end{pmatrix}', r'\begin{bmatrix}1\\2\end{bmatrix}'),
    ('(C)', r'\text{C}'), (r'\$18.90', '18.9'),
]
DIFFERENT = [
    ('[-2,7]', '(-2,7)'), ('(1,2)', '(2,1)'), ('(1,2)', r'\{2,1\}'),
    ('22/3', '2 2/3'), ('12', '1 2'), ('x', 'y'), ('1/3', '0.34'),
    ('y=2x+3', 'y=3x+2'), (r'1,2,\ldots,n', r'1,2,\ldots,m'),
    ('5', 'not 5'), ('5', '__import__("os").getpid()'), ('1/2', '2'),
    (r'\frac{1}{2}', r'\frac{1}{}'), ('x+1', ')('), ('Evelyn', 'Carla'),
]


def _pairs(*lists):
  return [(gold, answer) for pairs in lists for gold, answer in pairs]


def test_quick_verdicts():
  for gold, answer in QUICK_EQUAL:
    assert grading._decide_quickly(answer, (gold,)) is True, (gold, answer)
  for gold, answer in QUICK_DIFFERENT:
    assert grading._decide_quickly(answer, (gold,)) is False, (gold, answer)
  for gold, answer in _pairs(EQUAL, DIFFERENT):
    assert grading._decide_quickly(answer, (gold,)) is None, (gold, answer)


def test_grade_in_this_process():
  for gold, answer in _pairs(QUICK_EQUAL, EQUAL):
    assert grading.grade(f'\\boxed{{{answer}}}', [gold]), (gold, answer)
  for gold, answer in _pairs(QUICK_DIFFERENT, DIFFERENT):
    assert not grading.grade(f'\\boxed{{{answer}}}', [gold]), (gold, answer)


def test_model_text_never_reaches_eval(monkeypatch):
  evaluated, builtin_eval = [], builtins.eval

  def watching_eval(source, *scope):
    evaluated.append(source)
    return builtin_eval(source, *scope)

  monkeypatch.setattr(builtins, 'eval', watching_eval)
  for answer in ('zork()', '3*zork', '__import__("zork")', '7 + zork.zork',
                 r'\mathrm{zork()}', r'\text{zork()}', 'x_{zork}', '2 2/3',
                 r'\operatorname{zork}(3)', 'zork = 3', 'it is 3**4**5 .'):
    assert not grading.grade(f'\\boxed{{{answer}}}', ['7'])
  assert evaluated  # sympify makes numbers of the lexer's number tokens.
  assert all(isinstance(source, str) for source in evaluated)  # no code
  assert not [source for source in evaluated if 'zork' in source]


def test_any_of_several_golds():
  assert grading.grade(r'\boxed{0.5}', ['7', r'\frac12'])
  assert grading.grade(r'\boxed{5}', ['7', '5'])
  assert not grading.grade(r'\boxed{5}', ['7', '6'])
  assert grading.grade('Answer: 5', ['5'], 'answer')
  assert not grading.grade('five', ['five'])


def test_grade_refuses_other_threads():
  caught = []

  def call():
    try:
      grading.grade(r'\boxed{0.5}', [r'\frac12'])
    except RuntimeError as error:
      caught.append(error)

  thread = threading.Thread(target=call)
  thread.start()
  thread.join()
  assert 'main thread' in str(caught[0])


def test_pool_agrees_keeps_order_and_counts():
  right, wrong = _pairs(QUICK_EQUAL, EQUAL), _pairs(QUICK_DIFFERENT, DIFFERENT)
  items, expected = [], []
  for i in range(max(len(right), len(wrong))):
    for pairs, verdict in ((right, True), (wrong, False)):
      gold, answer = pairs[i % len(pairs)]
      items.append((f'\\boxed{{{answer}}}', [gold]))
      expected.append(verdict)
    items.append(('I do not know', ['5']))
    expected.append(False)
  with grading.Grader(2) as grader:
    result = []
    thread = threading.Thread(target=lambda: result.append(grader.grade(items)))
    thread.start()
    thread.join()
  verdicts, counts = result[0]
  assert verdicts == expected
  assert counts == {'no_answer': len(items) // 3, 'timeout': 0, 'died': 0}


def test_easy_items_start_no_worker():
  with grading.Grader(2) as grader:
    assert grader.grade([(r'\boxed{5}', ['5']), (r'\boxed{5}', ['6'])]) == (
        [True, False], {'no_answer': 0, 'timeout': 0, 'died': 0})
    assert grader.grade([]) == ([], {'no_answer': 0, 'timeout': 0, 'died': 0})
    assert not grader._workers


def test_hangs_in_every_worker_harm_no_one_else():
  hang = (f'\\boxed{{{HANG}}}', ['5'])
  also = (f'\\boxed{{7^{{{HANG}}}}}', ['5'])
  fine = [(f'\\boxed{{{n}/2}}', [str(n / 2)]) for n in range(1, 40, 2)]
  with grading.Grader(2) as grader:
    assert grader.grade(fine[:2])[0] == [True, True]
    before = {worker.process.pid for worker in grader._workers}
    start = time.monotonic()
    verdicts, counts = grader.grade([hang, also, hang] + fine + [hang])
    assert verdicts == [False] * 3 + [True] * 20 + [False]
    assert counts == {'no_answer': 0, 'timeout': 4, 'died': 0}
    assert time.monotonic() - start < 40
    # sympy's caches may be half written where an alarm struck.
    assert not before & {worker.process.pid for worker in grader._workers}


def test_workers_killed_from_outside_are_replaced():
  items = [(r'\boxed{1/2}', ['0.5']), (r'\boxed{1/4}', ['0.25'])]
  with grading.Grader(2) as grader:
    assert grader.grade(items)[0] == [True, True]
    for worker in grader._workers:
      os.kill(worker.process.pid, signal.SIGKILL)
      worker.process.wait()
    assert grader.grade(items) == (
        [True, True], {'no_answer': 0, 'timeout': 0, 'died': 0})


def test_after_an_interruption_no_answer_meets_the_next_question(monkeypatch):
  with grading.Grader(1) as grader:
    assert grader.grade([(r'\boxed{1/2}', ['0.5'])])[0] == [True]

    def interrupt():
      raise KeyboardInterrupt

    monkeypatch.setattr(grader, '_wait', interrupt)
    with pytest.raises(KeyboardInterrupt):
      grader.grade([(r'\boxed{1/4}', ['0.25'])])
    monkeypatch.undo()
    time.sleep(0.5)  # time enough for the stale answer
    assert grader.grade([(r'\boxed{1/4}', ['0.5'])])[0] == [False]


def _serve_with(monkeypatch, code):
  monkeypatch.setattr(
      grading, '_SERVE',
      'import itertools, os, time\nfrom tepo_jax.tasks import grading\n' + code)


def test_a_worker_deaf_to_alarms_is_killed(monkeypatch):
  _serve_with(monkeypatch, 'os.write(1, b"ready\\n")\ntime.sleep(600)')
  with grading.Grader(1, timeout_s=5) as grader:
    start = time.monotonic()
    verdicts, counts = grader.grade([(r'\boxed{1/2}', ['0.5'])])
    assert 5 <= time.monotonic() - start < 60
    assert (verdicts, counts) == (
        [False], {'no_answer': 0, 'timeout': 1, 'died': 0})
    monkeypatch.undo()
    assert grader.grade([(r'\boxed{1/2}', ['0.5'])])[0] == [True]


def test_an_item_is_tried_again_when_its_worker_dies(monkeypatch, tmp_path):
  flag = tmp_path / 'flag'
  dying = ('os.write(1, b"ready\\n")\nos.read(0, 1)\n'
           f'open({str(flag)!r}, "a").write("x")\nos._exit(1)\n')
  _serve_with(monkeypatch, f'if not os.path.exists({str(flag)!r}):\n  '
              + dying.replace('\n', '\n  ') + '\ngrading.serve()')
  item = (r'\boxed{1/2}', ['0.5'])
  with grading.Grader(1) as grader:
    assert grader.grade([item]) == (
        [True], {'no_answer': 0, 'timeout': 0, 'died': 1})
  _serve_with(monkeypatch, dying)
  with grading.Grader(1) as grader:
    assert grader.grade([item, (r'\boxed{5}', ['5'])]) == (
        [False, True], {'no_answer': 0, 'timeout': 0, 'died': 3})


def test_workers_that_cannot_start_are_an_error(monkeypatch):
  _serve_with(monkeypatch, 'raise SystemExit(1)')
  with grading.Grader(2) as grader:
    with pytest.raises(RuntimeError, match='do not start'):
      grader.grade([(r'\boxed{1/2}', ['0.5'])])


def test_workers_are_recycled(monkeypatch):
  monkeypatch.setattr(grading, 'RECYCLE_AFTER', 2)
  with grading.Grader(1) as grader:
    verdicts, counts = grader.grade(
        [(f'\\boxed{{{n}/2}}', [str(n / 2)]) for n in range(1, 11, 2)])
    assert verdicts == [True] * 5 and counts['died'] == 0
    assert grader._workers[0].served == 1


@pytest.mark.parametrize('arguments', [(0,), (1, 'boxed', 4), (1, 'boxed', 8.)])
def test_senseless_pools_are_refused(arguments):
  with pytest.raises(ValueError, match='need a worker'):
    grading.Grader(*arguments)


def _is_alive(pid):
  try:
    return pathlib.Path(f'/proc/{pid}/stat').read_text().split()[2] != 'Z'
  except FileNotFoundError:
    return False


def test_workers_die_with_their_parent():
  """An idle one by its pipe; one in an endless C call by the CPU limit."""
  script = r'''
import itertools, os, signal, sys, threading, time
from tepo_jax.tasks import grading
idle = grading.Grader(1)
idle.grade([(r'\boxed{1/2}', ['0.5'])])
grading._SERVE = (
    'import itertools\nfrom tepo_jax.tasks import grading\nverify = '
    'grading._verify\ngrading._verify = lambda answer, golds: verify(answer, '
    'golds) if answer == "1" else all(itertools.repeat(1))\ngrading.serve()')
busy = grading.Grader(1, timeout_s=5)
threading.Thread(
    target=busy.grade, args=([(r'\boxed{1/2}', ['0.5'])],), daemon=True).start()
while not (busy._workers and busy._workers[0].pair):
  time.sleep(0.1)
for grader in (idle, busy):
  print(grader._workers[0].process.pid)
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


def test_workers_import_no_jax_and_little_else():
  subprocess.run(
      [sys.executable, '-c',
       'import sys\nfrom tepo_jax.tasks import grading\n'
       'assert "sympy" not in sys.modules\n'
       'grading._verify("1", ("0.5",))\n'
       'assert not {"jax", "numpy", "transformers", "datasets"} '
       '& set(sys.modules)'], cwd=_ROOT, check=True)


# Golds with a brace missing: no box can hold them.
UNBOXABLE = {
    '\\frac{5055}{2^{15}', '\\frac{81^{10}}{82^{10}', '\\frac{11}{2^{20}',
    '\\frac{2 k n}{n+k-1}-2 \\frac{k!n!}{(k+n-1)!'}


@pytest.mark.skipif(not _SHARED.is_dir(), reason='no real copies here')
@pytest.mark.parametrize('name, file', [
    ('dapo_math', 'dapo_math_17k'), ('gsm8k', 'gsm8k_test'),
    ('math500', 'math500'), ('aime24', 'aime24'),
    ('aime25', 'aime25'), ('amc', 'amc83'),
    ('omni_math', 'omni_math_rule'), ('minerva', 'minerva_math'),
    ('olympiadbench', 'olympiadbench')])
def test_golds_are_right_by_themselves(name, file):
  problems = datasets.load(f'{name}:{_SHARED / file}.jsonl')
  items = [(f'so \\boxed{{{p.answers[0]}}}', p.answers) for p in problems]
  with grading.Grader(2) as grader:
    verdicts, _ = grader.grade(items)
  assert {p.answers[0] for p, right in zip(problems, verdicts)
          if not right} <= UNBOXABLE


@pytest.mark.skipif(not _SHARED.is_dir(), reason='no real copies here')
def test_golds_are_equal_by_math_verify_too():
  """What the fast paths let through, math-verify lets through."""
  golds = []
  for file in ('math500', 'olympiadbench', 'minerva_math', 'omni_math_rule'):
    lines = (_SHARED / f'{file}.jsonl').read_text().splitlines()[::25]
    golds += [json.loads(line)['answers'][0] for line in lines]
  for gold in golds:
    assert grading._verify(gold, (gold,)) == (True, False), gold
