"""Asking a model: what is sampled and shown, for questions and in a chat."""

import contextlib
import io
import types

from absl import flags as flags_lib
import jax
import numpy as np
import pytest
from rich import console

from configs import tiny
from tepo_jax import ask
from tepo_jax import errors
from tepo_jax.data import embedded
from tepo_jax.data import problem as problem_lib
from tepo_jax.data import prompts
from tepo_jax.job import run_folder
from tepo_jax.policy import rope
from tepo_jax.policy import transformer
from tepo_jax.policy.huggingface import weights
from tepo_jax.rollout import groups as groups_lib
from tepo_jax.runtime import lock as lock_lib
from tests.test_bad_input import TINY
from tests.test_bad_input import UNTRAINED

pytestmark = pytest.mark.usefixtures('set_flags')


@pytest.fixture(name='model')
def _model(tmp_path):
  embedded.build_tokenizer('arithmetic', tmp_path)
  config, tokenizer = tiny.get_config(), weights.load_tokenizer(tmp_path)
  return ask.Model('m', types.SimpleNamespace(
      config=config, tokenizer=tokenizer, folder='folder',
      model=types.SimpleNamespace(vocab_size=len(tokenizer)),
      template=prompts.get(config.data.template)), None)


class _Sampler:
  """Answers each prompt by its number, the last prompt first."""

  def stream(self, params, asked, key):
    del params, key
    self.asked = asked
    for prompt in asked[::-1]:
      yield [groups_lib.Group(
          prompt, np.zeros((1, 2), np.int32), np.zeros((1, 2), np.float32),
          np.array([2]), np.array([True]), (f'It is {prompt.prompt_id}.',),
          np.ones(1, np.float32))], {}


def _problem(text):
  return problem_lib.Problem(id='1', problem=text, answers=(), source='ask')


def test_questions_are_answered_in_their_order(model, set_flags):
  set_flags(reference='47')
  sampler = _Sampler()
  groups = model.ask(sampler, ['1 + 2', '3 + 4'], None)
  assert [group.text_G[0] for group in groups] == ['It is 0.', 'It is 1.']
  tokenizer = model.session.tokenizer
  assert '1 + 2' in tokenizer.decode(sampler.asked[0].token_ids)
  assert sampler.asked[1].problem.answers == ('47',)


def test_one_model_s_answer_keeps_its_lines_in_a_file(model, set_flags):
  set_flags(samples=1, reference=None)
  answer = 'a long answer ' * 20 + 'ends'
  group = types.SimpleNamespace(length_G=[82], ended_G=[False],
                                text_G=(f'{answer}\x1b[2J',), accuracy_G=[0.0])
  out = io.StringIO()
  ask._show(console.Console(file=out), 'why\x1b?', [model], [group])
  assert out.getvalue() == (
      f'> why\\x1b?\n{answer}\\x1b[2J\n[82 tokens, truncated]\n\n')


@pytest.mark.parametrize('flags, questions, said', [
    ({}, ['1', ' \n'], 'a question is empty'),
    ({'temperature': float('nan')}, ['1'], '--temperature=nan: must be finite'),
    ({'temperature': float('inf')}, ['1'], '--temperature=inf: must be finite'),
    ({'reference': ''}, ['1'], '--reference is empty'),
    ({'reference': '$$'}, ['1'], '--reference is empty'),
    ({'reference': '\x1b[1m2'}, ['1'], '--reference has the control charact'),
    ({'reference': '2'}, ['1', '2'], '--reference needs exactly one question')])
def test_what_cannot_be_asked_is_refused(set_flags, flags, questions, said):
  set_flags(**{'temperature': None, 'reference': None} | flags)
  with pytest.raises(errors.InputError) as error:
    ask._check(questions)
  assert str(error.value).startswith(said)


def test_a_seed_has_32_bits():
  with pytest.raises(flags_lib.Error, match='in the range'):
    flags_lib.FLAGS['seed'].parse(2**32)


def test_a_chat_is_part_of_the_next_prompt(model, set_flags):
  set_flags(reference=None)
  model.remember(_problem('5 + 6'), '11')
  sampler = _Sampler()
  model.ask(sampler, ['1 + 2'], None)
  said = model.session.tokenizer.decode(sampler.asked[0].token_ids)
  assert said.index('5 + 6') < said.index('11') < said.index('1 + 2')


def test_a_chat_has_the_questions_as_they_were_put(model, set_flags):
  set_flags(reference=None)
  model.session.template = prompts.Template('Start with 1. {problem}')
  model.remember(_problem('5 + 6'), '11')
  assert model.turns == (('user', 'Start with 1. 5 + 6'), ('assistant', '11'))


def test_a_chat_forgets_its_oldest_exchange(model, set_flags, capsys):
  set_flags(reference=None)
  for question, answer in ('5 + 6', '11'), ('2 + 2', '4'):
    model.remember(_problem(question), answer)
  model.session.config.data.max_prompt_tokens = 100
  sampler = _Sampler()
  model.ask(sampler, ['1 + 2'], None)
  whole = len(sampler.asked[0].token_ids)
  model.session.config.data.max_prompt_tokens = whole - 1
  model.ask(sampler, ['1 + 2'], None)
  assert model.turns == (('user', '2 + 2'), ('assistant', '4'))
  said = model.session.tokenizer.decode(sampler.asked[0].token_ids)
  assert '2 + 2' in said and '5 + 6' not in said
  assert capsys.readouterr().err == (
      f'm: the chat is longer than {whole - 1} tokens; its oldest exchange is '
      'forgotten\n')


def test_a_chat_goes_on_after_a_question_that_is_too_long(
    model, set_flags, monkeypatch, capsys):
  set_flags(reference=None, samples=1)
  asked = ['1 + 2', 8 * '1 + 2 + 3 + 4 + ', '3 + 4']
  monkeypatch.setattr(ask, '_lines', lambda: iter(asked))
  out = io.StringIO()
  ask._chat(console.Console(file=out), [model], [_Sampler()],
            jax.random.key(0))
  assert [line for line in out.getvalue().splitlines() if line[:1] == '>'] == [
      '> 1 + 2', '> 3 + 4']
  assert 'question 1 makes a prompt of' in capsys.readouterr().err


@pytest.mark.parametrize('own, completion, expected', [
    (24, 48, 152), (24, 150, 50), (180, 48, 180)], ids=[
        'positions', 'long completions', 'own'])
def test_a_chat_s_prompt_may_be_longer_than_the_run_s(
    set_flags, monkeypatch, own, completion, expected):
  set_flags(max_tokens=None)
  monkeypatch.setattr(
      weights, 'model_config', lambda _: types.SimpleNamespace(
          max_position=200, rope_scaling=None))
  config = tiny.get_config()
  config.data.max_prompt_tokens, config.rollout.max_tokens = own, completion
  ask._fit_lengths(config, 'folder', is_run=True, is_chat=False)
  assert config.data.max_prompt_tokens == own
  ask._fit_lengths(config, 'folder', is_run=True, is_chat=True)
  assert config.data.max_prompt_tokens == expected


def test_a_long_question_is_refused(model, set_flags):
  set_flags(reference=None)
  model.session.config.data.max_prompt_tokens = 8
  with pytest.raises(errors.InputError, match='question 1 makes a prompt of'):
    model.ask(_Sampler(), ['1 + 2 + 3 + 4 + 5 + 6'], None)


def test_a_question_with_a_token_that_the_embedding_lacks(model, set_flags):
  set_flags(reference=None)
  model.session.model.vocab_size = 3
  with pytest.raises(errors.InputError, match=(
      'the embedding 3 rows; the prompt of question 1 has the id')):
    model.ask(_Sampler(), ['1 + 2'], None)


@pytest.mark.parametrize('scaling, prompt, completion', [
    (None, 40, 40), (rope.RopeScaling('yarn', 4.0, 80), 160, 160)])
def test_a_folder_is_asked_within_its_positions(
    set_flags, monkeypatch, scaling, prompt, completion):
  """Also those that yarn adds."""
  set_flags(max_tokens=None)
  monkeypatch.setattr(
      weights, 'model_config', lambda _: types.SimpleNamespace(
          max_position=80, rope_scaling=scaling))
  config = tiny.get_config()
  config.data.max_prompt_tokens = 500
  ask._fit_lengths(config, 'folder', is_run=False, is_chat=False)
  assert (config.data.max_prompt_tokens, config.rollout.max_tokens) == (
      prompt, completion)


def test_a_run_whose_checkpoints_are_a_file_is_no_model(set_flags, tmp_path):
  architecture = transformer.ModelConfig(
      vocab_size=31, d_model=16, num_layers=1, num_heads=2, num_kv_heads=2,
      head_dim=8, d_ff=16, max_position=64)
  config = tiny.get_config('grpo')
  config.model = str(tmp_path / 'model')
  weights.save(config.model, architecture,
               transformer.init(architecture, jax.random.key(0)))
  with lock_lib.FolderLock(tmp_path / 'run') as lock:
    run_folder.claim(config, tmp_path / 'run', lock)
  (tmp_path / 'run' / 'checkpoints').touch()
  set_flags(temperature=None, template=None)
  for step in '', '@1':
    with contextlib.ExitStack() as stack, pytest.raises(
        errors.InputError, match='/checkpoints is a file, not a folder'):
      ask.open_model(f'{tmp_path}/run{step}', stack)


def test_a_run_is_asked_with_its_own_settings(set_flags, tmp_path):
  config = tiny.get_config('grpo')
  config.rollout.temperature, config.mesh.data = 0.7, 16
  with lock_lib.FolderLock(tmp_path) as lock:
    run_folder.claim(config, tmp_path, lock)
  (tmp_path / 'checkpoints').mkdir()
  set_flags(reference=None)
  found = ask._settings(str(tmp_path), True, None)
  assert found.rollout.temperature == 0.7
  assert found.data.template == config.data.template
  assert found.mesh.data == 1  # this machine's
  assert found.rollout.slots == 64  # as CPUs do not say what fits
  set_flags(temperature=0.0, template='plain')
  found = ask._settings(str(tmp_path), True, None)
  assert (found.rollout.temperature, found.data.template) == (0, 'plain')
  with (contextlib.ExitStack() as stack, pytest.raises(
      errors.InputError, match='is not the workdir of a run')):
    ask.open_model(f'{tmp_path / "checkpoints"}@3', stack)
  set_flags(temperature=None, template=None)
  beside = ask._settings('folder', False, found)
  assert (beside.model, beside.data.template, beside.compute.dtype) == (
      'folder', 'plain', config.compute.dtype)


@pytest.mark.long
def test_two_models_are_asked_side_by_side(programs, tmp_path):
  base = tmp_path / 'base'
  assert not programs.run('pretrain', TINY, f'--out={base}',
                          *UNTRAINED).returncode
  done = programs.run(
      'ask', f'--model={base}', f'--against={base}', '--max_tokens=4',
      '--samples=2', '--reference=7', '--temperature=0', '3+4=')
  assert done.returncode == 0, done.stderr
  assert done.stdout.startswith('> 3+4=\n')
  assert done.stdout.count('wrong') + done.stdout.count('correct') == 4
  for arguments, said in (
      ((f'--model={base}@3', 'x'), 'is not the workdir of a run'),
      ((f'--model={base}', '--reference=7', 'x', 'y'), 'exactly one question'),
      (('--model=/nowhere', 'x'), '/nowhere')):
    refused = programs.run('ask', *arguments)
    assert refused.returncode == 2 and said in refused.stderr
    assert refused.stderr.count('\n') == 1
