"""The embedded tasks for pretrained models: correct answers, their prompts."""

import re

import pytest

from configs import smollm2
from tepo_jax import errors
from tepo_jax import grading
from tepo_jax.data import datasets
from tepo_jax.data import embedded
from tepo_jax.data import prompts
from tepo_jax.job import configuration


@pytest.mark.parametrize('name', ['sums', 'word_problems'])
def test_a_thousand_problems_are_held_out(name):
  train = embedded.problems(
      name, 'train', smollm2.get_config(name).data.limit)
  test = embedded.problems(name, 'test', 1000)
  assert not {p.problem for p in train} & {p.problem for p in test}


def test_too_few_problems_are_refused_with_their_number():
  with pytest.raises(errors.InputError, match='sums: level 1 has too few '
                     'problems for 10,000 .* test: set a limit, of ') as error:
    datasets.load('sums', 'test')
  most = int(str(error.value).split('of ')[-1].split(' ')[0].replace(',', ''))
  assert len(datasets.load('sums', 'test', most)) == most


def test_own_problems_are_asked_with_examples_and_not_evaluated():
  config = smollm2.get_config('own,grpo')
  assert (config.data.template, config.eval.period) == ('word_problems', 0)
  config.data.name = 'mine.jsonl'
  configuration.check(config, ['data.name'])


def test_sums_are_correct():
  for problem in embedded.problems('sums', 'train', 1000):
    body = re.fullmatch(r'What is (\d+ [+-] \d)\?', problem.problem)[1]
    assert problem.answers == (str(eval(body)),)  # pylint: disable=eval-used


def _solve(text):
  """The answer by another way than the module's: from the words."""
  a, b = map(int, re.findall(r'\d+', text))
  if 'more' in text:
    return a + b
  if 'gives away' in text:
    return a - b
  if 'in each' in text:
    return a * b
  assert 'equally' in text and a % b == 0
  return a // b


def test_word_problems_are_correct():
  for problem in embedded.problems('word_problems', 'train', 2000):
    assert problem.answers == (str(_solve(problem.problem)),)


@pytest.mark.parametrize('name', ['sums', 'word_problems'])
def test_the_examples_of_a_prompt_are_correct_and_come_before_the_problem(name):
  template = prompts.get(name)
  (problem,) = embedded.problems(name, 'test', 1)
  *turns, last = prompts._turns(template, problem)
  assert last == {'role': 'user', 'content': problem.problem}
  assert [turn['role'] for turn in turns] == (
      ['user', 'assistant'] * len(template.examples))
  for user, assistant in template.examples:
    found = grading.extract(assistant, template.style)
    numbers = user.removeprefix('What is ').removesuffix('?')
    assert found == str(
        eval(numbers) if name == 'sums' else _kinds(user))  # pylint: disable=eval-used


def _kinds(user):
  a, b = map(int, re.findall(r'\d+', user))
  return a - b if 'loses' in user else _solve(user)


def test_no_model_can_be_made_for_them(tmp_path):
  with pytest.raises(errors.InputError, match='sums is for pretrained models'):
    embedded.build_tokenizer('sums', tmp_path)
