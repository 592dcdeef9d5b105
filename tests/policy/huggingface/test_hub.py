"""Folders by name: local, or an id in the hub's cache; tokenizers; EOS ids."""

import http.server
import json
import re
import shutil
import threading

import huggingface_hub
import pytest
import tokenizers
import transformers

from tepo_jax import errors
from tepo_jax.policy.huggingface import hub
from tepo_jax.policy.huggingface import weights
from tests import jobs

_TEMPLATE = ("{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}"
             '{% endfor %}')


def _save_tokenizer(folder, eos='<eos>'):
  vocabulary = {'<eos>': 0, 'a': 1, '<': 2, 'user': 3, '>': 4}
  model = tokenizers.models.WordLevel(vocabulary, unk_token='a')
  tokenizer = transformers.PreTrainedTokenizerFast(
      tokenizer_object=tokenizers.Tokenizer(model), eos_token=eos)
  tokenizer.chat_template = _TEMPLATE
  tokenizer.save_pretrained(folder)


@pytest.fixture
def hub_id(hf_model, tmp_path, monkeypatch):
  """'owner/model' in the hub's cache, as a download leaves it; no network."""
  repository = tmp_path / 'models--owner--model'
  snapshot = repository / 'snapshots' / 'f00d'
  shutil.copytree(hf_model('llama')[0], snapshot)
  _save_tokenizer(snapshot)
  (repository / 'refs').mkdir()
  (repository / 'refs' / 'main').write_text('f00d')
  monkeypatch.setattr(huggingface_hub.constants, 'HF_HUB_CACHE', str(tmp_path))
  monkeypatch.setattr(huggingface_hub.constants, 'HF_HUB_OFFLINE', True)
  return 'owner/model'


def test_a_hub_id_serves_as_a_folder(hub_id, tmp_path):
  snapshot = tmp_path / 'models--owner--model' / 'snapshots' / 'f00d'
  assert hub.folder(hub_id).samefile(snapshot)
  assert hub.folder(snapshot) == snapshot
  assert weights.load(hub_id, 'float32')[0] == weights.model_config(snapshot)
  tokenizer = weights.load_tokenizer(hub_id)
  assert tokenizer.eos_token_id == 0
  assert tokenizer.apply_chat_template(
      [{'role': 'user', 'content': 'a'}], tokenize=False) == '<user>a'
  assert weights.eos_ids(hub_id, tokenizer) == (0,)


@pytest.mark.parametrize('name,message', [
    ('owner/other', 'not available from the hub'),
    ('/no/where', 'no such model folder'), ('./here', 'no such model folder'),
    ('a/b/c', 'no such model folder'), ('owner/', 'no such model folder')])
def test_other_names_are_refused_in_one_line(hub_id, name, message):
  with pytest.raises(errors.InputError, match=re.escape(name)) as refusal:
    hub.folder(name)
  assert message in str(refusal.value) and '\n' not in str(refusal.value)


REPOSITORY = (
    'config.json', 'tokenizer.json', 'tokenizer_config.json', 'README.md',
    'model-00001-of-00002.safetensors', 'model-00002-of-00002.safetensors',
    'model.safetensors.index.json', 'consolidated.safetensors',
    'consolidated.safetensors.index.json', 'adapter_model.safetensors',
    'original/consolidated.safetensors', 'original/config.json',
    'onnx/model.safetensors', 'model.safetensors')


@pytest.mark.parametrize('weight_map,expected', [
    ({'a': 'model-00001-of-00002.safetensors',
      'b': 'model-00002-of-00002.safetensors'},
     ['config.json', 'model-00001-of-00002.safetensors',
      'model-00002-of-00002.safetensors', 'model.safetensors.index.json',
      'tokenizer.json', 'tokenizer_config.json']),
    (None, ['config.json', 'model.safetensors', 'tokenizer.json',
            'tokenizer_config.json'])])
def test_only_files_that_are_read_are_downloaded(
    tmp_path, monkeypatch, weight_map, expected):
  def download(name, allow_patterns):
    assert name == 'owner/model'
    for file in huggingface_hub.utils.filter_repo_objects(
        REPOSITORY, allow_patterns=allow_patterns):
      if file != 'model.safetensors.index.json':
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text('')
      elif weight_map:
        (tmp_path / file).write_text(json.dumps({'weight_map': weight_map}))
    return str(tmp_path)

  monkeypatch.setattr(huggingface_hub, 'snapshot_download', download)
  assert hub.folder('owner/model') == tmp_path
  assert sorted(str(path.relative_to(tmp_path))
                for path in tmp_path.rglob('*') if path.is_file()) == expected


# The hub has owner/model, and each process a cache of its own.
_JOB = """
import os, pathlib, sys
root, rank = pathlib.Path(sys.argv[1]), os.environ['JAX_PROCESS_ID']
import huggingface_hub
from tepo_jax import errors
from tepo_jax.policy.huggingface import hub
from tepo_jax.runtime import processes, sharing
processes.initialize()
huggingface_hub.constants.HF_HUB_CACHE = str(root / rank)
snapshot, asked = root / rank / 'snapshots/f00d', []

def download(name, allow_patterns):
  asked.append(name)
  if name != 'owner/model':
    raise OSError('no such model')
  snapshot.mkdir(parents=True, exist_ok=True)
  (snapshot / 'config.json').write_text('{}')
  return str(snapshot)

huggingface_hub.snapshot_download = download
# The other machine: its process does not see the first one's folders.
if rank != '0':
  sharing._has = lambda folder, sizes, has=sharing._has: (
      folder.is_relative_to(root / rank) and has(folder, sizes))
folder = hub.folder_of_job('owner/model')
assert folder == (snapshot if rank == '0' else
                  root / rank / 'of_first/owner--model/f00d'), folder
assert (folder / 'config.json').read_text() == '{}'
assert (set(asked) == {'owner/model'}) == (rank == '0'), asked
try:
  hub.folder_of_job('owner/other')
except errors.InputError as error:
  print(error)
assert ('owner/other' in asked) == (rank == '0'), asked
"""


def test_of_a_job_only_the_first_process_asks_the_hub(tmp_path):
  outcomes = jobs.finish(jobs.start(2, ['-c', _JOB], str(tmp_path), devices=1))
  assert [status for status, *_ in outcomes] == [0, 0], outcomes
  assert all('not available from the hub (no such model)' in out
             for _, out, _ in outcomes)


def test_an_index_of_the_hub_that_is_none_is_refused(tmp_path, monkeypatch):
  (tmp_path / 'model.safetensors.index.json').write_text('[1]')
  monkeypatch.setattr(
      huggingface_hub, 'snapshot_download', lambda *_, **__: str(tmp_path))
  with pytest.raises(errors.InputError, match='index.json: not a JSON object'):
    hub.folder('owner/model')


@pytest.mark.parametrize('status, is_unanswered', [
    (503, True), (429, True), (404, False)])
def test_a_hub_that_is_overloaded_may_answer_later(
    monkeypatch, status, is_unanswered):
  class Answer(http.server.BaseHTTPRequestHandler):

    def do_GET(self):  # pylint: disable=invalid-name
      self.send_error(status)

    do_HEAD = do_GET

    def log_message(self, *_):
      """Prints nothing."""

  with http.server.ThreadingHTTPServer(('127.0.0.1', 0), Answer) as server:
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(huggingface_hub.constants, 'ENDPOINT',
                        f'http://127.0.0.1:{server.server_port}')
    with pytest.raises(errors.InputError, match='owner/model: ') as error:
      hub.folder('owner/model')
    server.shutdown()
  assert errors.is_unanswered(error.value) == is_unanswered


def test_chat_templates_without_a_default_are_refused(tmp_path):
  _save_tokenizer(tmp_path)
  (tmp_path / 'chat_template.jinja').unlink(missing_ok=True)
  file = tmp_path / 'tokenizer_config.json'
  settings = json.loads(file.read_text())
  for name in ('rag', 'default'):
    file.write_text(json.dumps(settings | {'chat_template': [
        {'name': name, 'template': _TEMPLATE}]}))
    if name == 'default':
      weights.load_tokenizer(tmp_path)
      continue
    with pytest.raises(errors.InputError) as error:
      weights.load_tokenizer(tmp_path)
    assert 'chat_template is a list without a default, of rag' in str(
        error.value)


def test_a_tokenizer_that_transformers_replaces_is_refused(tmp_path):
  """The class of a qwen2 folder makes another model of the vocabulary."""
  _save_tokenizer(tmp_path)
  weights.load_tokenizer(tmp_path)
  (tmp_path / 'config.json').write_text('{"model_type": "qwen2"}')
  file = tmp_path / 'tokenizer_config.json'
  settings = json.loads(file.read_text()) | {
      'tokenizer_class': 'Qwen2Tokenizer'}
  file.write_text(json.dumps(settings))
  with pytest.raises(errors.InputError) as error:
    weights.load_tokenizer(tmp_path)
  assert 'tokenizer.json alone tokenizes a sentence differently' in str(
      error.value)


@pytest.mark.parametrize('name', ['generation_config.json', 'config.json'])
@pytest.mark.parametrize('found', [-1, '2', [3, -1], 1.5, True, {}, [[1]]])
def test_an_end_token_that_is_none_is_refused(tmp_path, found, name):
  _save_tokenizer(tmp_path)
  tokenizer = weights.load_tokenizer(tmp_path)
  (tmp_path / name).write_text(json.dumps({'eos_token_id': found}))
  with pytest.raises(errors.InputError) as error:
    weights.eos_ids(tmp_path, tokenizer)
  assert str(error.value).startswith(
      f'{tmp_path / name}: eos_token_id ')


def test_code_that_comes_with_a_tokenizer_is_not_run(tmp_path):
  _save_tokenizer(tmp_path)
  (tmp_path / 'evil.py').write_text('raise SystemExit("it ran")')
  file = tmp_path / 'tokenizer_config.json'
  settings = json.loads(file.read_text()) | {
      'tokenizer_class': 'Evil', 'auto_map': {
          'AutoTokenizer': ['evil.Evil', None]}}
  file.write_text(json.dumps(settings))
  try:
    weights.load_tokenizer(tmp_path)
  except errors.InputError:
    pass  # rejecting it, or reading it without that class, are both fine


@pytest.mark.parametrize('family,in_tokenizer,in_generation,in_config,ids', [
    # Llama 3.1: <|end_of_text|>, <|eom_id|>, <|eot_id|>.
    ('llama 3', 0, [128001, 128008, 128009], [128001, 128008, 128009],
     (0, 128001, 128008, 128009)),
    # Qwen: <|im_end|> ends a message, <|endoftext|> a text.
    ('qwen', 0, [151645, 151643], 151645, (0, 151643, 151645)),
    ('mistral', 0, 2, 2, (0, 2)),
    ('no generation_config', 0, ..., 5, (0, 5)),
    ('none but the tokenizer', 0, ..., None, (0,))])
def test_every_eos_counts(
    tmp_path, family, in_tokenizer, in_generation, in_config, ids):
  _save_tokenizer(tmp_path)
  if in_generation is not ...:
    (tmp_path / 'generation_config.json').write_text(
        json.dumps({'eos_token_id': in_generation}))
  (tmp_path / 'config.json').write_text(
      json.dumps({'model_type': 'llama', 'eos_token_id': in_config}))
  tokenizer = weights.load_tokenizer(tmp_path)
  assert weights.eos_ids(tmp_path, tokenizer) == ids
