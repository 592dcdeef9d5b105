"""Nats per token against full forward passes of single texts."""

import dataclasses
import json
import types

import jax
import ml_collections
import numpy as np
import pytest

from tepo_jax import errors
from tepo_jax.data import embedded
from tepo_jax.job import texts
from tepo_jax.policy import transformer
from tepo_jax.policy.huggingface import weights
from tepo_jax.runtime import mesh as mesh_lib

_LONG = 'Start with 7 (1) * 6 (2) + 8.\n' * 200  # several windows
_ROWS = [dict(text='Start with 3 (1) + 4.'),
         dict(prompt='Start with 9 (1) - 2.', completion='\\boxed{7}')]



@pytest.fixture(scope='module')
def tokenizer(tmp_path_factory):
  folder = tmp_path_factory.mktemp('tokenizer')
  embedded.build_tokenizer('arithmetic', folder)
  return weights.load_tokenizer(folder)


@pytest.fixture(scope='module')
def model(tokenizer):
  config = transformer.ModelConfig(
      vocab_size=len(tokenizer), d_model=32, num_layers=2, num_heads=4,
      num_kv_heads=2, head_dim=8, d_ff=48, max_position=512)
  rng = np.random.default_rng(0)
  return config, jax.tree.map(
      lambda leaf: rng.normal(size=leaf.shape).astype(np.float32) / 8,
      transformer.abstract_params(config))


@pytest.fixture
def files(tmp_path):
  (tmp_path / 'long.txt').write_text(_LONG)
  (tmp_path / 'rows.jsonl').write_text('\n'.join(map(json.dumps, _ROWS)))
  return tmp_path


def _session(model, tokenizer, mesh, *names):
  return types.SimpleNamespace(
      model=model[0], mesh=mesh, tokenizer=tokenizer, folder='folder',
      config=ml_collections.ConfigDict(dict(
          data=dict(date=None, template_args=''),
          train=dict(chunk_size=64, microbatch_tokens=1024),
          eval=dict(texts=names))))


def _nats(model, rows):
  """−log π of each row's last tokens: [(ids, how many)] -> the mean."""
  @jax.jit
  def log_softmax(params, token_BS):
    hidden_BSD, _ = transformer.forward(
        model[0], params, token_BS, np.arange(token_BS.shape[1])[None])
    return jax.nn.log_softmax(
        transformer.logits(model[0], params, hidden_BSD[0]))

  found = []
  for ids, scored in rows:
    logp = np.array(log_softmax(model[1], np.array([ids])))
    found += [-logp[i - 1, ids[i]] for i in range(len(ids) - scored, len(ids))]
  return float(np.mean(found))


@pytest.mark.long
@pytest.mark.parametrize('devices', [1, 4])
def test_only_texts_and_completions_count(devices, model, tokenizer, files):
  mesh = mesh_lib.make({'data': 1, 'fsdp': -1, 'tensor': 1},
                       jax.devices()[:devices])
  long, rows = texts.prepare(_session(
      model, tokenizer, mesh, str(files / 'long.txt'),
      str(files / 'rows.jsonl')))
  params = jax.device_put(model[1], mesh_lib.replicated(mesh))
  assert (long.name, rows.name) == ('long', 'rows')

  ids = tokenizer.encode(_LONG)
  windows = [ids[i:i + 512] for i in range(0, len(ids), 512)]
  assert len(windows) > 2
  assert long.nats_per_token(params) == pytest.approx(
      _nats(model, [(w, len(w) - 1) for w in windows]), abs=1e-5)

  plain = tokenizer.encode(_ROWS[0]['text'])
  chat = tokenizer.apply_chat_template(
      [dict(role='user', content=_ROWS[1]['prompt'])],
      add_generation_prompt=True, return_dict=False)
  answer = tokenizer.encode(_ROWS[1]['completion'])
  assert rows.nats_per_token(params) == pytest.approx(_nats(model, [
      (plain, len(plain) - 1), (chat + answer, len(answer))]), abs=1e-5)


@pytest.mark.parametrize('name, content, message', [
    ('absent.txt', None, 'no .txt or .jsonl file'),
    ('absent.jsonl', None, 'no such file'),
    ('empty.txt', '', 'no token to score'),
    ('a.jsonl', '{"text": "Start with 3."}\n{"text": 3}', 'row 2'),
    ('b.jsonl', '{"prompt": "Start with 3."}', 'row 1: neither'),
    ('c.jsonl', '{"prompt": "3", "completion": ""}', 'row 1: no token'),
    ('d.jsonl', 'text', 'row 1: not JSON')])
def test_a_bad_file_is_refused_in_one_line(
    name, content, message, model, tokenizer, tmp_path):
  if content is not None:
    (tmp_path / name).write_text(content)
  mesh = mesh_lib.make({'data': 1, 'fsdp': 1, 'tensor': 1}, jax.devices()[:1])
  with pytest.raises(errors.InputError, match=message) as refusal:
    texts.prepare(_session(model, tokenizer, mesh, str(tmp_path / name)))
  assert name in str(refusal.value) and '\n' not in str(refusal.value)


@pytest.mark.parametrize('name', ['long.txt', 'rows.jsonl'])
def test_a_token_that_the_embedding_lacks(name, model, tokenizer, files):
  smaller = dataclasses.replace(model[0], vocab_size=3)
  mesh = mesh_lib.make({'data': 1, 'fsdp': 1, 'tensor': 1}, jax.devices()[:1])
  with pytest.raises(errors.InputError, match=(
      f'the embedding 3 rows; text 1 of .*{name} has the id')):
    texts.prepare(_session((smaller,), tokenizer, mesh, str(files / name)))
