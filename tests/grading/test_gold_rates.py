r"""References of the real benchmarks: correct alone, wrong when shuffled.

  pytest tests/grading/test_gold_rates.py -s     prints rates and speed
"""

import pathlib
import random
import re
import time

import pytest

from tepo_jax import grading
from tepo_jax.data import datasets
from tepo_jax.grading import answers
from tepo_jax.grading import structures
from tests.data import benchmarks
from tests.grading import observed

_SHARED = pathlib.Path(__file__).parents[3] / 'shared' / 'benchmarks'

# References with a missing brace: no box can contain them.
UNBOXABLE = {
    '\\frac{5055}{2^{15}', '\\frac{81^{10}}{82^{10}', '\\frac{11}{2^{20}',
    '\\frac{2 k n}{n+k-1}-2 \\frac{k!n!}{(k+n-1)!'}
# References of different problems that are equivalent.
EQUAL = {frozenset(pair) for pair in (
    ('1', '\\frac{1}{2}+\\frac{1}{3}+\\frac{1}{7}+\\frac{1}{42}'), ('2', '+2'))}

pytestmark = pytest.mark.skipif(
    not _SHARED.is_dir(), reason='no real copies here')


@pytest.fixture(name='grader', scope='module')
def _grader():
  with grading.Grader(2) as grader:
    yield grader


def _problems(file):
  return datasets.load(f'{benchmarks.FILES[file]}:{_SHARED / file}.jsonl')


def _boxed(text):
  return f'so \\boxed{{{text}}}'


@pytest.mark.parametrize('file', benchmarks.FILES)
def test_references_are_right_by_themselves(file, grader):
  problems = _problems(file)
  verdicts, counts = grader.grade(
      [(_boxed(p.answers[0]), p.references) for p in problems])
  wrong = {p.answers[0] for p, right in zip(problems, verdicts) if not right}
  assert wrong <= UNBOXABLE and counts['timeout'] == 0
  print(f'\n{file}: {sum(verdicts)} of {len(verdicts)} right by themselves')


def _respelled(text):
  """Writes the same answer in another spelling."""
  text = re.sub(r'(?<!\\)\$', '', text).replace('\\frac', '\\dfrac')
  if ',' not in text and not text[-1].isdigit():
    return f'${text}$'
  return f'\\left({text}\\right)' if text.isdecimal() else f' {text} '


@pytest.mark.long
@pytest.mark.parametrize('file', ['math500', 'minerva_math', 'omni_math_rule',
                                  'olympiadbench'])
def test_references_are_right_in_another_spelling_and_by_value(file, grader):
  """Also grades `1 * reference`, so that no two texts are equal."""
  problems = [p for p in _problems(file) if p.answers[0] not in UNBOXABLE]
  verdicts, _ = grader.grade(
      [(_boxed(_respelled(p.answers[0])), p.references) for p in problems])
  assert sum(verdicts) >= 0.998 * len(problems), [
      p.answers[0] for p, right in zip(problems, verdicts) if not right]
  read = [p for p in problems
          if (node := structures.try_read(answers.canonical(p.answers[0])))
          and node.kind == 'value' and not node.unit
          and ',' not in p.answers[0]]
  verdicts, _ = grader.grade([
      (_boxed(f'1\\cdot({answers.canonical(p.answers[0])})'), p.references)
      for p in read])
  assert len(read) > 0.7 * len(problems)
  assert sum(verdicts) >= 0.998 * len(read), [
      p.answers[0] for p, right in zip(read, verdicts) if not right]


@pytest.mark.long
@pytest.mark.parametrize('file', ['math500', 'minerva_math', 'omni_math_rule',
                                  'olympiadbench'])
def test_no_verdict_takes_a_second(file):
  """In CPU time, with math-verify's: of references in brackets and of others."""
  problems, times = _problems(file), {}
  others = random.Random(1).sample(problems, len(problems))
  for problem, other in zip(problems, others):
    for text in f'({problem.answers[0]})', other.answers[0]:
      times[text, problem.answers[0]] = observed.grade(
          text, problem.references)[1]
  slowest = max(times, key=times.get)
  ranked = sorted(times.values())
  print(f'\n{file}: median {1e3 * ranked[len(ranked) // 2]:.2f} ms, 99 % below '
        f'{1e3 * ranked[len(ranked) * 99 // 100]:.1f} ms, slowest '
        f'{times[slowest]:.2f} s: {slowest}')
  assert times[slowest] < 1


@pytest.mark.parametrize('file', benchmarks.FILES)
def test_shuffled_references_are_wrong(file, grader):
  problems = _problems(file)
  others = random.Random(0).sample(problems, len(problems))
  pairs = [(problem, other.answers[0])
           for problem, other in zip(problems, others)
           if answers.canonical(problem.answers[0]) != answers.canonical(
               other.answers[0])]
  start = time.perf_counter()
  verdicts, counts = grader.grade(
      [(_boxed(text), problem.references) for problem, text in pairs])
  took = time.perf_counter() - start
  right = {frozenset((problem.answers[0], text))
           for (problem, text), verdict in zip(pairs, verdicts) if verdict}
  assert right <= EQUAL
  assert counts['timeout'] <= 0.001 * len(pairs)
  print(f'\n{file}: {sum(verdicts)} of {len(verdicts)} right when shuffled, '
        f'{len(pairs) / took:.0f} a second')
