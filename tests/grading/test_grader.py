"""Grading of completions: order, counts, references, units, faults."""

import pathlib
import subprocess
import sys
import threading

import pytest

from tepo_jax import grading
from tepo_jax.grading import workers
from tests.grading import observed

# (reference, answer) for math-verify; test_equivalence covers the others.
HARD_RIGHT = [('10', r'\sum_{k=1}^{4} k'), ('6', r'\prod_{k=1}^{3} k'),
              ('1/2', r'\int_0^1 x dx')]
HARD_WRONG = [('11', r'\sum_{k=1}^{4} k'), ('5', r'\prod_{k=1}^{3} k'),
              (r'\frac12', 'one half of it')]


def _items(pairs):
  return [(f'so \\boxed{{{answer}}}', [reference])
          for reference, answer in pairs]


def test_grade():
  assert all(grading.grade(*item) for item in _items(HARD_RIGHT))
  assert not any(grading.grade(*item) for item in _items(HARD_WRONG))


@pytest.mark.parametrize('reference, answer, right', [
    (r'\frac{1}{3} E_{1}+\frac{2}{3} E_{2}',
     r'\frac{1}{0} E_{1}+\frac{2}{3} E_{2}', False),
    (r'\frac{2}{3}', r'\frac{1}{5} E_{1}+\frac{2}{3} E_{2}', False),
    (r'\frac{2}{3}', r'It is \(\frac{2}{3}\).', True)])
def test_no_part_stands_for_an_answer_unless_it_is_a_sentence(
    reference, answer, right):
  assert grading.grade(f'\\boxed{{{answer}}}', [reference]) is right


def test_model_text_never_reaches_eval():
  evaluated = []
  for answer in ('zork()', '3*zork', '__import__("zork")', '7 + zork.zork',
                 r'\mathrm{zork()}', r'\text{zork()}', 'x_{zork}', '2 2/3',
                 r'\operatorname{zork}(3)', 'zork = 3', 'it is 3**4**5 .'):
    verdict, _, sources, _ = observed.ask(answer, ['7'])
    assert not verdict
    evaluated += sources
  assert evaluated  # sympify evaluates the lexer's number tokens.
  assert not [source for source in evaluated if '<code' in source]
  assert not [source for source in evaluated if 'zork' in source]


@pytest.mark.parametrize('answer, right', [
    (r'\boxed{0.5}', True), (r'\boxed{7}', True), (r'\boxed{6}', False),
    (r'\boxed{\sum_{k=3}^{4} k}', True), (r'\boxed{\sum_{k=1}^{3} k}', False)])
def test_any_of_several_references(answer, right):
  assert grading.grade(answer, ['7', r'\frac12']) is right


def test_answer_lines():
  assert grading.grade('Answer: 5', ['5'], 'answer')
  assert not grading.grade('five', ['five'])


@pytest.mark.parametrize('reference, answer, right', [
    (grading.Reference('4.2', '%', 0.1), '4.25', True),
    (grading.Reference('4.2', '%', 0.1), r'4.3\%', True),
    (grading.Reference('4.2', '%', 0.1), '4.31', False),
    (grading.Reference('4.2', None, 0.1), r'\frac{17}{4}', True),
    (grading.Reference('166', '$cm^2$'), '166', True),
    (grading.Reference('166', '$cm^2$'), r'166\text{ cm}^2', True),
    (grading.Reference('166', '$cm^2$'), r'166\text{ mm}^2', False),
    (grading.Reference('166', '$cm^2$'), r'0.0166\text{ m}^2', True),
    (grading.Reference('45', 'minute'), r'45\text{ minutes}', True),
    (grading.Reference('45', 'minute'), r'\frac{3}{4}\text{ hours}', True),
    (grading.Reference('45', 'minute'), r'45\text{ hours}', False),
    (grading.Reference(r'\frac{600}{7}',
     'km/h'), r'\frac{600}{7}\mathrm{~km}/\mathrm{h}', True),
    (grading.Reference('(1.00,2.00)', None, 0.01), '(1.004,2.00)', True),
    (grading.Reference('(1.00,2.00)', None, 0.01), '(1.02,2.00)', False),
    (grading.Reference('1.00,2.00', None, 0.01), '1.996,1.004', True),
    (grading.Reference('1.00,2.00', None, 0.01), '1.004,2.02', False),
    (grading.Reference('8', 'min'), r'8', True),
    (grading.Reference('8', 'min'), '9', False)])
def test_units_and_tolerances_of_the_data(reference, answer, right):
  assert grading.grade(f'\\boxed{{{answer}}}', [reference]) is right


def test_grade_in_any_thread():
  verdicts = []
  thread = threading.Thread(target=lambda: verdicts.extend(
      grading.grade(*item) for item in _items(HARD_RIGHT + HARD_WRONG)))
  thread.start()
  thread.join()
  assert verdicts == [True] * 3 + [False] * 3


@pytest.mark.long
def test_a_fork_has_a_worker_of_its_own():
  """Else the two would read each other's verdicts."""
  script = r'''
import os
from tepo_jax import grading
from tepo_jax.grading import grader
answers = [(rf"\boxed{{\sum_{{k=1}}^{{{n}}} k}}",
            [str(n * (n + 1) // 2 + n % 2)]) for n in range(1, 21)]
expected = [n % 2 == 0 for n in range(1, 21)]
assert grading.grade(*answers[1])
first = grader._worker(os.getpid())._workers[0]
child = os.fork()
assert [grading.grade(*answer) for answer in answers] == expected
is_first = grader._worker(os.getpid())._workers[0] is first
assert is_first == bool(child)  # A worker of two processes is replaced.
if child:
  assert os.waitpid(child, 0)[1] == 0
'''
  subprocess.run([sys.executable, '-c', script], timeout=100, check=True,
                 cwd=pathlib.Path(__file__).parents[2])


def test_the_grader_keeps_order_and_counts():
  right = HARD_RIGHT + [('5', '5.0'), ('34', '34')]
  wrong = HARD_WRONG + [('5', '6'), ('1/3', '0.34')]
  items, expected = [], []
  for pair in zip(right, wrong):
    items += _items(pair) + [('I do not know', ['5'])]
    expected += [True, False, False]
  with grading.Grader(2) as grader:
    assert grader.grade(items * 3) == (
        expected * 3, {'no_answer': 15, 'timeout': 0, 'died': 0})


def test_math_verify_alone_decides_if_asked_to():
  """Both verdicts are its known errors; it accepts 1/2004! for 1/2006!."""
  pairs = [('\\frac12', '0.5', True, True), ('5', '6', False, False),
           ('1/2004!', '1/2006!', True, False),
           (r'\frac83', '2 2/3', False, True)]
  items = _items([pair[:2] for pair in pairs])
  for place, verifier in ((2, 'math_verify'), (3, 'own')):
    with grading.Grader(1, verifier=verifier) as grader:
      assert grader.grade(items)[0] == [pair[place] for pair in pairs]


@pytest.mark.long
def test_timeouts_are_counted_per_completion():
  hang = _items([('5', r'\int_0^1 \sin(x^{x})\cos(x^x)dx')])
  with grading.Grader(1, timeout_s=2) as grader:
    assert grader.grade(hang * 3 + _items(HARD_RIGHT[1:2])) == (
        [False] * 3 + [True], {'no_answer': 0, 'timeout': 3, 'died': 0})


def test_equal_questions_are_asked_once(monkeypatch):
  asked = []
  monkeypatch.setattr(workers.Pool, 'ask', lambda self, questions: (
      asked.extend(questions) or {q: (True, False) for q in questions}, 0))
  with grading.Grader(1) as grader:
    verdicts, _ = grader.grade(_items(HARD_RIGHT * 100))
  assert verdicts == [True] * 300
  assert sorted(asked) == sorted((a, (g,)) for g, a in HARD_RIGHT)


def test_easy_items_start_no_worker(monkeypatch):
  monkeypatch.setattr(workers.Job, 'command', lambda self: 'raise SystemExit(1)')
  with grading.Grader(2) as grader:
    assert grader.grade([(r'\boxed{5}', ['5']), (r'\boxed{5}', ['6'])]) == (
        [True, False], {'no_answer': 0, 'timeout': 0, 'died': 0})
    assert grader.grade([]) == ([], {'no_answer': 0, 'timeout': 0, 'died': 0})


def test_ten_thousand_long_answers():
  """Grades texts of 100 kB: prose, unclosed boxes, braces; 10 % answers."""
  talk, braces = 'so ' * 33_333, '{}' * 50_000

  def completions():
    for i in range(10_000):
      if i % 10 == 0:
        yield f'{talk}\\boxed{{{i}}}', [str(i)]
      else:
        yield (f'\\boxed{{{talk}{i}}}' if i % 10 == 1 else talk), [str(i)]
    for opening in ('\\boxed{' * 14_000, '\\boxed{' + braces, braces):
      yield opening, ['5']

  with grading.Grader(2) as grader:
    verdicts, counts = grader.grade(completions())
  assert verdicts == [i % 10 == 0 for i in range(10_000)] + [False] * 3
  assert counts == {'no_answer': 9_003, 'timeout': 0, 'died': 0}


@pytest.mark.parametrize('arguments', [
    (0,), (1, 'boxed', 1), (1, 'box'), (1, 'boxed', 8, 'x')])
def test_bad_arguments_are_refused(arguments):
  with pytest.raises(ValueError, match='workers must be|unknown'):
    grading.Grader(*arguments)
