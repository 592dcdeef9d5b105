"""Mangled input is read, or refused in one line."""

import json
from unittest import mock

import hypothesis
from hypothesis import strategies as st
import numpy as np
import pytest
from safetensors import numpy as safetensors_numpy

from tepo_jax import errors
from tepo_jax.data import datasets
from tepo_jax.data import problem as problem_lib
from tepo_jax.data import prompts
from tepo_jax.grading import answers
from tepo_jax.policy.huggingface import tensor_files
from tepo_jax.policy.huggingface import weights

TENSORS = safetensors_numpy.save(
    {'a': np.arange(6, dtype='f4').reshape(2, 3), 'b': np.zeros(2, 'f2')})
CONFIG = {
    'architectures': ['Qwen3ForCausalLM'], 'model_type': 'qwen3',
    'vocab_size': 32, 'hidden_size': 16, 'num_hidden_layers': 1,
    'num_attention_heads': 2, 'num_key_value_heads': 1, 'head_dim': 8,
    'intermediate_size': 16, 'max_position_embeddings': 32,
    'rms_norm_eps': 1e-6, 'rope_theta': 1e4, 'rope_scaling': None,
    'tie_word_embeddings': True, 'hidden_act': 'silu',
    'attention_bias': False, 'use_sliding_window': False}
ROW = {'id': 'a', 'problem': '1 + 1', 'answers': ['2'], 'unit': 'm',
       'level': 1, 'error': '1e-3'}

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.text(), inner, max_size=3), max_leaves=6)


@st.composite
def mangled(draw, data):
  """Bytes of `data` cut, replaced and inserted."""
  data = bytearray(data)
  for _ in range(draw(st.integers(1, 4))):
    start = draw(st.integers(0, len(data)))
    end = min(len(data), start + draw(st.integers(0, 8)))
    data[start:end] = draw(st.binary(max_size=8))
  return bytes(data)


def changed(mapping):
  """`mapping` with one value replaced, or one more."""
  return st.tuples(st.sampled_from(sorted(mapping)) | st.text(),
                   json_values).map(lambda pair: mapping | dict([pair]))


def read_or_refused(read, *arguments):
  try:
    read(*arguments)
  except errors.InputError as error:
    assert str(error) and '\n' not in str(error)


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  return tmp_path_factory.mktemp('fuzz')


@hypothesis.settings(deadline=None)
@hypothesis.given(mangled(TENSORS) | st.binary(max_size=80))
def test_safetensors(folder, data):
  (folder / 'model.safetensors').write_bytes(data)
  read_or_refused(tensor_files.open_folder, folder)


@hypothesis.settings(deadline=None)
@hypothesis.given(changed(CONFIG).map(lambda c: json.dumps(c).encode())
                  | mangled(json.dumps(CONFIG).encode()))
def test_model_config(folder, data):
  (folder / 'config.json').write_bytes(data)
  read_or_refused(weights.model_config, folder)


@hypothesis.settings(deadline=None)
@hypothesis.given(st.lists(changed(ROW).map(
    lambda row: json.dumps(row).encode()) | mangled(json.dumps(ROW).encode()),
                           max_size=3))
def test_data_rows(folder, lines):
  path = folder / 'rows.jsonl'
  path.write_bytes(b'\n'.join(lines))
  read_or_refused(datasets.load, str(path))


CSV = b'problem,answer,level\n1+1?,2,1\n"a, ""b""?",3,2\n'
JSON = json.dumps([ROW, ROW | {'id': 'b'}]).encode()


@hypothesis.settings(deadline=None)
@hypothesis.given(st.sampled_from(['csv', 'json']), mangled(CSV) | mangled(JSON)
                  | st.binary(max_size=40))
def test_data_files(folder, suffix, data):
  path = folder / f'rows.{suffix}'
  path.write_bytes(data)
  read_or_refused(datasets.load, str(path))


TEMPLATE = b"""{% set style = 'answer' %}
{% set is_chat = false %}
{{ problem | trim }}{% if row.level %} {{ row.level | upper }}{% endif %}
"""


@hypothesis.settings(deadline=None)
@hypothesis.given(mangled(TEMPLATE))
def test_prompt_templates(folder, data):
  path = folder / 'mine.jinja'
  path.write_bytes(data)
  problem = problem_lib.Problem('a', '1+1?', ('2',), 's', row={'level': '1'})
  tokenizer = mock.MagicMock(chat_template=None)
  read_or_refused(lambda: prompts.render(
      prompts.get(str(path)), tokenizer, problem))


latex = st.lists(st.sampled_from(
    ['\\boxed{', '\\fbox{', '{', '}', '\\{', '\\}', '$', '\\frac', '12', '^',
     'Answer:', '\n', '\\text{', ' ', ',', '\\', '\x00', 'é']) | st.text(
         max_size=3), max_size=30).map(''.join)


@hypothesis.given(latex, st.sampled_from(['boxed', 'answer']))
def test_answers_are_extracted_or_there_is_none(text, style):
  answer = answers.extract(text, style)
  assert answer is None or answer in text


@pytest.mark.long
@hypothesis.settings(deadline=None, max_examples=40)
@hypothesis.given(
    st.sampled_from(['steps', 'eval.sets', 'method', 'method.clip', 'seed',
                     'optimizer.learning_rate', 'compute.remat', 'mesh']),
    st.sampled_from(['=', '.', ' ', '', '==']),
    st.text(st.characters(codec='utf-8', exclude_characters='\x00')))
def test_overrides(programs, tmp_path_factory, field, sign, value):
  workdir = tmp_path_factory.getbasetemp() / 'never'
  done = programs.run(
      'train', '--config=configs/tiny.py:tepo', f'--workdir={workdir}',
      '--config.model=/nowhere', f'--config.{field}{sign}{value}')
  assert done.returncode == 2, done.stderr
  assert done.stderr.startswith('tepo_jax.train: error: ')
  assert done.stderr.count('\n') == 1 and not workdir.exists()
