"""Countdown: its checker against a solver, and against cheats."""

import collections
import fractions
import itertools
import random
import re
import warnings

import pytest
import transformers

from tepo_jax import errors
from tepo_jax import grading
from tepo_jax.data import countdown
from tepo_jax.data import embedded
from tepo_jax.grading import arithmetic as checker


def _expressions(numbers):
  """Yields (text, exact value) of every expression that uses each number once,
  up to needless parentheses; no value where it divides by 0."""
  if len(numbers) == 1:
    yield str(numbers[0]), fractions.Fraction(numbers[0])
  for size in range(1, len(numbers)):
    for left in itertools.combinations(range(len(numbers)), size):
      right = [x for i, x in enumerate(numbers) if i not in left]
      for (a, x), (b, y) in itertools.product(
          _expressions([numbers[i] for i in left]), _expressions(right)):
        known = None not in (x, y)
        yield f'({a}+{b})', x + y if known else None
        yield f'({a}-{b})', x - y if known else None
        yield f'({a}*{b})', x * y if known else None
        yield f'({a}/{b})', x / y if known and y else None


@pytest.mark.parametrize('numbers', [(2, 3, 7), (4, 4, 5), (1, 5, 5, 5)])
def test_every_expression_against_a_solver(numbers):
  """Up to 7,680 expressions, for each of three targets."""
  found = dict(_expressions(numbers))
  values = sorted(v for v in found.values() if v and v.denominator == 1)
  for target in (values[0], values[len(values) // 2], values[-1]):
    for text, value in found.items():
      assert checker.is_solution(text, numbers, str(target)) == (
          value == target), text


def test_division_is_exact():
  assert checker.is_solution('(5 - 1/5) * 5', (1, 5, 5, 5), '24')
  assert 1 / 49 * 49 != 1
  assert checker.is_solution('1/49*49', (1, 49, 49), '1')
  assert not checker.is_solution('5/(3-3)', (3, 3, 5), '0')


def test_there_are_no_other_operators():
  for text, numbers, value in (
      ('49//2', (2, 49), '24'), ('5**2', (2, 5), '25'),
      ('-3*-8', (3, 8), '24')):
    assert eval(text) == int(value)
    assert not checker.is_solution(text, numbers, value)


def _mutant(rng):
  """Mostly an expression of 2, 3 and 7, some of value 13; or nearly one."""
  parts = rng.sample(['2', '3', '7'], 3)
  if rng.random() < .2:
    parts[rng.randrange(3)] = rng.choice('237')
  for place in (2, 1):
    parts.insert(place, rng.choice(
        ['+', '-', '*', '/'] * 3 + ['**', '//', '', '+-', '=', ')(']))
  for sign in '()' * rng.randint(0, 2) + ' ' * rng.randint(0, 2):
    parts.insert(rng.randint(0, len(parts)), sign)
  return ''.join(parts)


def test_random_texts_against_python():
  """Python calculates with exact fractions; only binary operators are ours."""
  rng = random.Random(0)
  verdicts = collections.Counter()
  for text in {_mutant(rng) for _ in range(6000)}:
    try:
      with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        value = eval(re.sub(r'\d+', r'F(\g<0>)', text),
                     {'F': fractions.Fraction})
    except (SyntaxError, TypeError, ZeroDivisionError):
      value = None
    want = (value == 13 and sorted(re.findall(r'\d+', text)) == ['2', '3', '7']
            and re.sub(r'[\d() ]', '', text) in {'*+', '+*'})
    assert checker.is_solution(text, (2, 3, 7), '13') == want, text
    verdicts[value == 13, want] += 1
  assert verdicts[True, True] > 20 and verdicts[True, False], verdicts


@pytest.mark.parametrize('text', [
    '', ' ', '24', '()', '(3*8', '3*8)', '3*8=24', '24=3*8', '3*8==24',
    '3*8\n', '3*8,', '(3,8)', '3*8+0', '3*8*1', '3*8+3-3', '8*3*3/3', '3 8*',
    '+3*8', '-3*-8', '--3*8', '3**8', '3//8', '3(8)', '3*8.0', '03*8', '3*8e0',
    '3_*8', '0x3*8', '３*８', '٣*8', '3×8', '3²*8', '3*8#', "__import__('os')",
    'lambda: 24', '3*8 if 1 else 0', '3*8;', '9**9**9**9', '[3*8][0]', '3!*4',
    '\\frac{3}{8}', '(' * 500 + '3*8' + ')' * 500, '3*8' + ' ' * 500])
def test_what_is_no_solution(text):
  with warnings.catch_warnings():
    warnings.simplefilter('error')
    assert not checker.is_solution(text, (3, 8), '24')


def test_spaces_and_needless_parentheses_are_allowed():
  for text in ('3*8', '8*3', ' ( (3) * (8) ) ', '(' * 40 + '3*8' + ')' * 40):
    assert checker.is_solution(text, (3, 8), '24'), text


def test_texts_survive_the_tokenizer_and_fit(tmp_path):
  embedded.build_tokenizer('countdown', tmp_path)
  tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
  rng = random.Random(0)
  for problem in embedded.problems('countdown', 'train', 300):
    chat = tokenizer.apply_chat_template(
        [{'role': 'user', 'content': problem.problem}],
        add_generation_prompt=True, return_dict=False)
    assert len(chat) <= 19 and tokenizer.unk_token_id not in chat
    for style in ('worked', 'direct'):
      text = countdown.demonstration(problem, rng, style)
      ids = tokenizer(text)['input_ids']
      assert tokenizer.decode(ids) == text
      assert tokenizer.unk_token_id not in ids and len(ids) <= 58


def test_demonstrations_are_right_as_their_style_says():
  rng = random.Random(0)
  problems = embedded.problems('countdown', 'train', 300)
  verdicts = {style: [grading.grade(
      countdown.demonstration(p, rng, style), p.references) for p in problems]
              for style in ('worked', 'direct')}
  assert all(verdicts['worked']) and 0 < sum(verdicts['direct']) < 60
  # Steps are right, and only the last one reaches the target.
  for problem in problems:
    text = countdown.demonstration(problem, rng, 'worked')
    for attempt in re.findall(r'[\d+*=-]+(?= no | yes )', text):
      steps = re.findall(r'(?=(?<!\d)(\d+)([-+*])(\d+)=(\d+))', attempt)
      assert len(steps) == 2
      for a, sign, b, value in steps:
        assert eval(f'{a}{sign}{b}') == int(value)
      assert (steps[-1][-1] == problem.answers[0]) == (
          f'{attempt} yes ' in text)


def test_train_and_test_are_disjoint_and_other_tasks_are_refused(tmp_path):
  train, test = ({p.problem for p in embedded.problems('countdown', split, n)}
                 for split, n in (('train', 3000), ('test', 256)))
  assert len(train) == 3000 and len(test) == 256 and not train & test
  with pytest.raises(errors.InputError, match='a.csv is not arithmetic or'):
    embedded.build_tokenizer('a.csv', tmp_path)


def test_the_grader_asks_the_checker():
  (problem,) = embedded.problems('countdown', 'test', 1)
  solved, guess = (countdown.demonstration(problem, random.Random(1), style)
                   for style in ('worked', 'direct'))
  target = problem.answers[0]
  numbers = '+'.join(map(str, problem.numbers))
  texts = (solved, f'\\boxed{{{target}}}', f'\\boxed{{{numbers}={target}}}',
           'none', guess)
  with grading.Grader(workers=1) as grader:
    verdicts, counts = grader.grade([(t, problem.references) for t in texts])
  assert verdicts == [grading.grade(t, problem.references) for t in texts]
  assert verdicts[:4] == [True, False, False, False]
  assert counts['no_answer'] == 1
