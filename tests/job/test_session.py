"""Restores weights of a run's checkpoint on another mesh than the run's."""

import dataclasses
import datetime
import types

import jax
import numpy as np
import pytest

from configs import tiny
from tepo_jax import errors
from tepo_jax.data import embedded
from tepo_jax.job import programs as programs_lib
from tepo_jax.job import provenance
from tepo_jax.job import restore
from tepo_jax.job import run_folder
from tepo_jax.job import session
from tepo_jax.policy import transformer
from tepo_jax.policy.huggingface import weights
from tepo_jax.runtime import checkpoint
from tepo_jax.runtime import lock as lock_lib
from tepo_jax.runtime import mesh as mesh_lib

MODEL = transformer.ModelConfig(
    vocab_size=31, d_model=16, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=8, d_ff=16, max_position=64)


def _mesh(tensor):
  return mesh_lib.make({'data': 1, 'fsdp': -1, 'tensor': tensor})


def _programs(config, model, mesh):
  return programs_lib.make(
      config, programs_lib.prepare_model(model, config, mesh), mesh)


def test_long_completions_are_refused_where_they_are_sampled():
  """Those of evaluation only if there is one."""
  config = tiny.get_config('grpo')
  config.data.max_prompt_tokens, config.eval.period = 32, 0
  config.rollout.max_tokens, config.eval.max_tokens = 32, 33
  tokenizer = types.SimpleNamespace(chat_template='')
  with session._open(
      config, _mesh(1), 'folder', MODEL, tokenizer, (0,)) as opened:
    with pytest.raises(errors.InputError, match=(
        r'data.max_prompt_tokens \+ eval.max_tokens = 65 exceeds the model.s '
        '64 positions')):
      opened.check_positions('eval')
    config.rollout.max_tokens = 33
    with pytest.raises(errors.InputError, match='max_tokens = 65 exceed'):
      opened.training_prompts()


def test_prompts_are_checked_against_the_embedding_when_they_are_loaded(
    tmp_path):
  """Those of training and of evaluation."""
  embedded.build_tokenizer('arithmetic', tmp_path)
  tokenizer, config = weights.load_tokenizer(tmp_path), tiny.get_config()
  config.data.max_prompt_tokens = config.rollout.max_tokens = 32
  model = dataclasses.replace(MODEL, vocab_size=5)
  with session._open(config, _mesh(1), 'folder', model, tokenizer,
                     (tokenizer.eos_token_id,)) as opened:
    said = 'folder: the tokenizer has .* ids, but the embedding 5 rows; in '
    with pytest.raises(errors.InputError, match=said):
      opened.training_prompts()
    with pytest.raises(errors.InputError, match=said):
      opened.evaluation_prompts('arithmetic')


def test_problems_of_two_sets_are_counted_without_controls(
    tmp_path, capsys):
  embedded.build_tokenizer('arithmetic', tmp_path)
  tokenizer, config = weights.load_tokenizer(tmp_path), tiny.get_config()
  config.data.max_prompt_tokens = config.rollout.max_tokens = 32
  first, second = (tmp_path / f'\x1b[31m{name}.jsonl' for name in 'ab')
  for path in first, second:
    path.write_text('{"problem": "What is 1 + 1?", "answer": "2"}\n')
  config.eval.sets = str(first), str(second)
  model = dataclasses.replace(MODEL, vocab_size=len(tokenizer))
  with session._open(config, _mesh(1), 'folder', model, tokenizer,
                     (tokenizer.eos_token_id,)) as opened:
    for name in config.eval.sets:
      opened.evaluation_prompts(name)
  said = capsys.readouterr().err
  assert r'\x1b[31ma' in said and r'\x1b[31mb' in said
  assert '1 of 1 problem is also in' in said and '\x1b' not in said


def test_a_file_of_training_and_evaluation_is_named(tmp_path, capsys):
  """Not the task whose splits are apart."""
  embedded.build_tokenizer('arithmetic', tmp_path)
  tokenizer, config = weights.load_tokenizer(tmp_path), tiny.get_config()
  config.data.max_prompt_tokens = config.rollout.max_tokens = 32
  model = dataclasses.replace(MODEL, vocab_size=len(tokenizer))
  path = tmp_path / 'a.jsonl'
  path.write_text('{"problem": "What is 1 + 1?", "answer": "2"}\n')
  for name, said in ((str(path), '1 of 1 problem is also in the training set'),
                     ('arithmetic', None)):
    config.data.name = name
    with session._open(config, _mesh(1), 'folder', model, tokenizer,
                       (tokenizer.eos_token_id,)) as opened:
      opened.training_prompts()
      opened.evaluation_prompts(name)
    found = capsys.readouterr().err
    assert said in found if said else 'also in' not in found


def test_further_end_tokens_are_the_models_own():
  config = tiny.get_config('grpo')
  config.data.max_prompt_tokens = 16
  config.rollout.stop_ids = (9, 5, 2)
  arguments = (_mesh(1), 'folder', MODEL,
               types.SimpleNamespace(chat_template=''), (0, 5))
  with session._open(config, *arguments) as opened:
    assert opened.eos_ids == (0, 2, 5, 9)
  with pytest.raises(errors.InputError, match=(
      f'folder: the end token {MODEL.vocab_size} is beyond the model.s voc')):
    session._open(config, *arguments[:-1], (0, MODEL.vocab_size))
  config.rollout.stop_ids = (9, MODEL.vocab_size)
  with pytest.raises(errors.InputError, match=(
      rf'stop_ids=\(9, {MODEL.vocab_size}\): folder has a vocabulary of')):
    session._open(config, *arguments)


def test_a_stop_text_with_a_special_token_is_refused():
  config = tiny.get_config('grpo')
  config.data.max_prompt_tokens, config.rollout.stop = 16, ('x</s>',)
  token = types.SimpleNamespace(content='</s>', special=True)
  with pytest.raises(errors.InputError, match='set config.rollout.stop_ids'):
    session._open(config, _mesh(1), 'folder', MODEL, types.SimpleNamespace(
        chat_template='', added_tokens_decoder={2: token}), (0,))


@pytest.mark.long_after_first
@pytest.mark.parametrize('trained_on,read_on', [(4, 1), (1, 2), (2, 4)])
def test_vocabulary_padding_depends_on_the_mesh_alone(
    trained_on, read_on, tmp_path):
  """A vocabulary of 31 tokens: 32 rows of weights and moments, or 31."""
  params = transformer.init(MODEL, jax.random.key(0))
  weights.save(tmp_path / 'model', MODEL, params)
  config = tiny.get_config('grpo')
  config.model = str(tmp_path / 'model')
  workdir = tmp_path / 'run'
  with lock_lib.FolderLock(workdir) as lock:
    run_folder.claim(config, workdir, lock)
  mesh = _mesh(trained_on)
  programs = _programs(config, MODEL, mesh)
  _, sharded = weights.load(tmp_path / 'model', 'float32', mesh)
  checkpointer = checkpoint.Checkpointer(workdir / session.CHECKPOINTS)
  checkpointer.save(
      3, programs.init_state(sharded),
      {'stands_on': provenance.record(config.model, {})},
      unpadded=programs_lib.restorable(programs)[1])
  checkpointer.close()

  folder, restored = restore.restore_params(workdir, _mesh(read_on), 3)
  assert folder == config.model
  expected, placed = weights.load(folder, 'float32', _mesh(read_on))
  assert dataclasses.replace(expected, vocab_padding=0, kv_copies=1) == MODEL
  jax.tree.map(np.testing.assert_array_equal, restored, placed)
  assert jax.tree.all(jax.tree.map(
      lambda a, b: a.sharding == b.sharding, restored, placed))


@pytest.mark.parametrize('vocab_size', [30, 33])
def test_another_vocabulary_size_is_refused(vocab_size, tmp_path):
  config = tiny.get_config('grpo')
  saved, other = (
      _programs(config, dataclasses.replace(MODEL, vocab_size=size), _mesh(1))
      for size in (31, vocab_size))
  checkpointer = checkpoint.Checkpointer(tmp_path)
  checkpointer.save(1, saved.init_state(
      transformer.init(MODEL, jax.random.key(0))), {},
                    unpadded=programs_lib.restorable(saved)[1])
  with pytest.raises(errors.InputError) as error:
    checkpointer.restore(1, *programs_lib.restorable(other))
  assert not isinstance(error.value, checkpoint.DamagedError)
  assert (f'embed/embedding is float32[31, 16] in it, float32[{vocab_size}, 16]'
          ' in this run') in str(error.value)
  checkpointer.close()


@pytest.mark.parametrize('file, template, given, earlier, expected', [
    ('chat_template.jinja', '{{ strftime_now("%d") }}', None, (),
     datetime.date.today().isoformat()),
    ('chat_template.jinja', '{{ strftime_now("%d") }}', None,
     (None, '2024-02-29', '2024-03-01'), '2024-02-29'),
    ('tokenizer_config.json', '{"chat_template": "{{ strftime_now(1) }}"}',
     None, ('2024-02-29',), '2024-02-29'),
    ('chat_template.jinja', '{{ strftime_now("%d") }}', '2024-02-28',
     ('2024-02-29',), '2024-02-28'),
    ('chat_template.jinja', '{{ messages }}', None, ('2024-02-29',), None)])
def test_a_template_that_reads_the_clock_gets_the_run_s_date(
    tmp_path, file, template, given, earlier, expected):
  (tmp_path / file).write_text(template)
  config = tiny.get_config()
  config.data.date = given
  session.fix_date(config, tmp_path, *earlier)
  assert config.data.date == expected
