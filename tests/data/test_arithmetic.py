"""The embedded task: correct answers, disjoint splits, exact tokenizer."""

import ast
import operator
import random
import re

import pytest
import transformers

from tepo_jax import errors
from tepo_jax.data import arithmetic
from tepo_jax.data import embedded
from tepo_jax.data import problem as problem_lib

_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub,
              ast.Mult: operator.mul}


def _evaluate(expression):
  """Evaluates with Python's precedence, unlike the module's left-to-right."""
  def value(node):
    if isinstance(node, ast.Constant):
      return node.value
    return _OPERATORS[type(node.op)](value(node.left), value(node.right))
  return value(ast.parse(expression, mode='eval').body)


def _expression(problem):
  """'Start with 2 (1) + 7.' -> '2 + 7'."""
  body = re.fullmatch(r'Start with (.*)\.', problem.problem)[1]
  return re.sub(r'\(\d+\) ', '', body)


@pytest.fixture(scope='module')
def tokenizer(tmp_path_factory):
  directory = tmp_path_factory.mktemp('tokenizer')
  embedded.build_tokenizer('arithmetic', directory)
  return transformers.AutoTokenizer.from_pretrained(directory)


def test_answers_are_correct():
  for problem in embedded.problems('arithmetic', 'train', 3000, seed=3):
    assert problem.answers == (str(_evaluate(_expression(problem))),)


def test_the_level_is_the_number_of_operations():
  for i, problem in enumerate(embedded.problems(
      'arithmetic:3,6', 'test', 200)):
    assert problem.level == ('3', '6')[i % 2]
    assert len(re.findall('[-+*]', problem.problem)) == int(problem.level)


def test_operands_and_running_totals_stay_small():
  negative = 0
  for problem in embedded.problems('arithmetic:3,9', 'train', 1000):
    first, *rest = _expression(problem).split(' ')
    assert all(1 <= int(operand) <= 9 for operand in (first, *rest[1::2]))
    assert '*' not in rest[2::2]
    totals = [int(first)]
    for sign, operand in zip(rest[::2], rest[1::2]):
      totals.append(_evaluate(f'{totals[-1]} {sign} {operand}'))
    assert all(0 <= total <= 999 for total in totals[:-1])
    assert -9 <= totals[-1] <= 999
    negative += totals[-1] < 0
  assert negative > 0


def test_train_and_test_are_disjoint_for_any_seed():
  train = {p.problem for seed in range(3)
           for p in embedded.problems('arithmetic', 'train', 3000, seed)}
  test = {p.problem for seed in range(3)
          for p in embedded.problems('arithmetic', 'test', 1000, seed)}
  assert len(train) > 8000 and len(test) > 2000
  assert not train & test


def test_problems_are_distinct_and_a_function_of_the_seed():
  first = embedded.problems('arithmetic', 'train', 500, seed=1)
  assert embedded.problems('arithmetic', 'train', 600, seed=1)[:500] == first
  assert embedded.problems('arithmetic', 'train', 500, seed=2) != first
  assert len({p.problem for p in first}) == len({p.id for p in first}) == 500


def test_impossible_requests_are_refused():
  with pytest.raises(ValueError, match='no split'):
    embedded.problems('arithmetic', 'validation', 1)
  with pytest.raises(ValueError, match='too few problems'):
    embedded.problems('countdown:1', 'test', 20)
  for levels in ('', '0', '10', '3,', '3-5'):
    with pytest.raises(errors.InputError, match='from 1 to 9'):
      embedded.problems(f'arithmetic:{levels}', 'test', 1)


def test_demonstrations_by_hand():
  problem = problem_lib.Problem(
      '', 'Start with 7 (1) * 6 (2) + 8 (3) - 5.', ('45',), '')
  rng = random.Random(0)
  for style, chain in (
      ('worked', ' (1) * 6 = 42 (2) + 8 = 50 (3) - 5 = 45 '), ('direct', '')):
    assert {arithmetic.demonstration(problem, rng, style)
            for _ in range(99)} == {
                f'{opening}{chain}\\boxed{{45}}'
                for opening in arithmetic.OPENINGS[style]}


def test_openings_differ_between_styles():
  assert not (set(arithmetic.OPENINGS['direct'])
              & set(arithmetic.OPENINGS['worked']))


def test_worked_steps_are_correct():
  rng = random.Random(0)
  for problem in embedded.problems('arithmetic', 'train', 500):
    solution = arithmetic.demonstration(problem, rng, 'worked')
    steps = re.findall(r'([-+*]) (\d+) = (-?\d+)', solution)
    total = int(re.search(r'\d+', problem.problem)[0])
    for sign, operand, result in steps:
      assert _evaluate(f'{total} {sign} {operand}') == int(result)
      total = int(result)
    assert str(total) == problem.answers[0]
    assert len(steps) == int(problem.level)


def test_tokenizer_round_trip_and_lengths(tokenizer):
  assert len(tokenizer) % 16 == 0 and len(tokenizer) < 128
  assert tokenizer.eos_token == '<|im_end|>'
  assert tokenizer.pad_token == '<|endoftext|>'
  rng = random.Random(0)
  for problem in embedded.problems('arithmetic', 'train', 1000):
    prompt = tokenizer.apply_chat_template(
        [{'role': 'user', 'content': problem.problem}],
        add_generation_prompt=True, return_dict=False)
    assert tokenizer.decode(prompt) == (
        f'<|im_start|>user\n{problem.problem}<|im_end|>\n'
        '<|im_start|>assistant\n')
    worked, direct = (arithmetic.demonstration(problem, rng, style)
                      for style in ('worked', 'direct'))
    for text, longest in ((worked, 38), (direct, 6)):
      ids = tokenizer(text)['input_ids']
      assert tokenizer.decode(ids) == text
      assert tokenizer.unk_token_id not in ids
      assert len(ids) <= longest
    assert len(prompt) <= 24 and tokenizer.unk_token_id not in prompt


def test_each_digit_is_one_token(tokenizer):
  digits = ''.join(f'{number:02d}' for number in range(100))
  ids = tokenizer(digits)['input_ids']
  assert tokenizer.convert_ids_to_tokens(ids) == list(digits)


def test_foreign_text_becomes_unknown_not_an_error(tokenizer):
  assert tokenizer.unk_token_id in tokenizer('Hello 5')['input_ids']
