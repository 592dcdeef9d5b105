"""What differs between processes is seen, whatever it is."""

import dataclasses
import json
import types

import numpy as np
import pytest

from configs import tiny
from tepo_jax import errors
from tepo_jax.data import problem as problem_lib
from tepo_jax.job import facts
from tepo_jax.rollout import groups as groups_lib


def _differing(first, second):
  assert first.keys() == second.keys()
  return {name for name in first if first[name] != second[name]}


def test_a_start(tmp_path, monkeypatch):
  monkeypatch.syspath_prepend(tmp_path)
  (tmp_path / 'own_facts_reward.py').write_text('def f(*_):\n  return 1\n')
  template = tmp_path / 'mine.jinja'
  template.write_text('{{ problem }}')
  config = tiny.get_config()
  config.data.template = str(template)
  config.reward.functions = ('own_facts_reward:f',)
  before = facts.of_start(config)
  config.model = config.compute.cache = '/elsewhere'
  assert facts.of_start(config) == before
  config.seed = 7
  assert _differing(before, facts.of_start(config)) == {'config.seed'}
  config.seed = 0
  template.write_text('{{ problem }}!')
  assert _differing(before, facts.of_start(config)) == {
      'the text of data.template', 'the texts of the templates of data.sets'}
  template.write_text('{{ problem }}')
  (tmp_path / 'own_facts_reward.py').write_text('def f(*_):\n  return 2\n')
  monkeypatch.setenv('XLA_FLAGS', '--xla_other')
  assert _differing(before, facts.of_start(config)) == {
      'the files of config.reward.functions', 'the variable XLA_FLAGS'}


def test_training_sets():
  def found(second):
    return facts.of_prompts(facts.data_sets(
        {'a': PROMPTS, 'b': second}, []))
  assert _differing(found(PROMPTS), found(PROMPTS[::-1])) == {
      'the data set b of training'}


def test_a_model(tmp_path):
  (tmp_path / 'tokenizer.json').write_text('{}')
  weights = np.zeros(9_000, np.uint8)
  file = tmp_path / 'model.safetensors'
  weights.tofile(file)
  before = facts.of_model(tmp_path)
  assert facts.of_model(tmp_path) == before
  for index in (0, 4_500, 8_999):
    other = weights.copy()
    other[index] = 1
    other.tofile(file)
    assert _differing(before, facts.of_model(tmp_path)) == {
        'the model\'s weights'}
  weights.tofile(file)
  (tmp_path / 'tokenizer.json').write_text('{"a": 1}')
  assert _differing(before, facts.of_model(tmp_path)) == {
      'the model\'s configuration and tokenizer'}
  assert facts.of_model(tmp_path / 'none') == {}


PROMPTS = [groups_lib.Prompt(
    problem_lib.Problem(str(n), f'{n}?', (str(n),), 'a'), (n, 1), n)
           for n in range(3)]


@pytest.mark.parametrize('other', [
    PROMPTS[::-1], PROMPTS[:2],
    [*PROMPTS[:2], dataclasses.replace(PROMPTS[2], token_ids=(2, 2))],
    [*PROMPTS[:2], dataclasses.replace(
        PROMPTS[2], problem=dataclasses.replace(
            PROMPTS[2].problem, answers=('3',)))]])
def test_data(other):
  assert facts.of_prompts({'a': PROMPTS}) == facts.of_prompts({'a': PROMPTS[:]})
  assert _differing(facts.of_prompts({'a': PROMPTS}),
                    facts.of_prompts({'a': other})) == {'a'}


def _data(template='dapo_answer', train=PROMPTS, test=PROMPTS[:1], text=(1, 2),
          names=('test',)):
  config = tiny.get_config()
  config.data.template = template
  return json.loads(json.dumps(facts.of_data(
      config, groups_lib.Mixture({'train': train}, [1], seed=0),
      [types.SimpleNamespace(name=name, prompts=test) for name in names],
      [types.SimpleNamespace(
          name='prose', token_NS=np.array([text]), mask_NT=np.ones((1, 1)))])))


@pytest.mark.parametrize('change, named', [
    (dict(template='qwen_boxed'), 'the text of a template has'),
    (dict(train=PROMPTS[::-1]), 'the data set train of training has'),
    (dict(test=PROMPTS[1:], text=(1, 3)),
     'the data set test, the text prose have')])
def test_a_checkpoint_of_other_data_is_refused(change, named):
  with pytest.raises(errors.InputError, match=f'DIR/3 .*: {named} changed'):
    facts.check_data('DIR/3', _data(**change), _data())


def test_a_checkpoint_of_the_same_data_is_not():
  """Evaluations may be left out, and added."""
  facts.check_data('DIR/3', _data(), _data())
  facts.check_data('DIR/3', _data(names=()), _data())
  facts.check_data('DIR/3', _data(), _data(names=()))
  facts.check_data('DIR/3', {'files': {}}, _data())  # of an earlier version
