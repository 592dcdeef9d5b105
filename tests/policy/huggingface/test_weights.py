"""Hugging Face folders: we load what transformers saves, and vice versa."""

import dataclasses
import json
import os
import shutil

import huggingface_hub
import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.torch
import tokenizers
import torch
import transformers

from tepo_jax import errors
from tepo_jax.policy import rope
from tepo_jax.policy import transformer
from tepo_jax.policy.huggingface import families
from tepo_jax.policy.huggingface import tensor_files
from tepo_jax.policy.huggingface import weights
from tests import runs

_QWEN_7B = runs.ROOT / 'tests/tools/plan/models/qwen2_5_7b'


def _tensors(folder):
  """name -> torch tensor, read by the safetensors package."""
  tensors = {}
  for file in folder.glob('*.safetensors'):
    tensors |= safetensors.torch.load_file(file)
  return tensors


def _assert_same_files(got, want):
  got, want = _tensors(got), _tensors(want)
  assert sorted(got) == sorted(want)
  for name, tensor in want.items():
    assert got[name].dtype == tensor.dtype, name
    assert torch.equal(
        got[name].view(torch.uint8), tensor.view(torch.uint8)), name


@pytest.fixture
def folder(hf_model, tmp_path):
  """A copy of a saved model, which the test corrupts."""
  return shutil.copytree(hf_model('qwen2_window')[0], tmp_path / 'model')


def _edit_config(folder, **fields):
  file = folder / 'config.json'
  raw = json.loads(file.read_text())
  raw |= fields
  file.write_text(json.dumps(
      {key: value for key, value in raw.items() if value is not ...}))


def test_load_save_is_bit_identical_and_transformers_agrees(
    case, hf_model, torch_logits, batch, tmp_path):
  folder, model = hf_model(case)
  config, params = weights.load(folder, 'float32')
  weights.save(tmp_path / 'out', config, params)  # without its source
  _assert_same_files(tmp_path / 'out', folder)
  assert weights.model_config(tmp_path / 'out') == config
  again = type(model).from_pretrained(tmp_path / 'out')
  assert again.dtype == torch.float32
  np.testing.assert_array_equal(
      torch_logits(again, *batch), torch_logits(model, *batch))


def test_bfloat16_round_trip(hf_model, tmp_path):
  folder, model = hf_model('qwen3')
  model = type(model).from_pretrained(folder, dtype=torch.bfloat16)
  model.save_pretrained(tmp_path / 'in')
  config, params = weights.load(tmp_path / 'in', 'bfloat16')
  assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {
      np.dtype(ml_dtypes.bfloat16)}
  weights.save(tmp_path / 'out', config, params)
  _assert_same_files(tmp_path / 'out', tmp_path / 'in')
  assert type(model).from_pretrained(tmp_path / 'out').dtype == torch.bfloat16
  _, wide = weights.load(tmp_path / 'in', 'float32')
  np.testing.assert_array_equal(
      wide['embed']['embedding'],
      model.get_input_embeddings().weight.detach().float().numpy())


def test_fp32_weights_are_saved_as_torch_rounds_them(
    hf_model, tmp_path, monkeypatch):
  """In shards; to the bit, ties and subnormal numbers included."""
  folder, model = hf_model('llama')
  config, params = weights.load(folder, 'float32')
  bits = np.random.default_rng(0).integers(
      0, 2**32, params['embed']['embedding'].shape, np.uint32)
  bits.flat[:4] = 0x3f808000, 0x3f818000, 0x00018000, 0x80008001  # ties
  values = np.where(np.isfinite(bits.view(np.float32)),
                    bits.view(np.float32), np.float32(0))
  params['embed']['embedding'] = values
  model = type(model).from_pretrained(folder)
  model.get_input_embeddings().weight.data = torch.tensor(values)
  monkeypatch.setattr(tensor_files, '_MAX_FILE_BYTES', 5000)
  weights.save(tmp_path / 'out', config, params, folder, dtype='bfloat16')
  assert len(list((tmp_path / 'out').glob('*.safetensors'))) > 2
  model.to(torch.bfloat16).save_pretrained(tmp_path / 'theirs')
  _assert_same_files(tmp_path / 'out', tmp_path / 'theirs')
  again = type(model).from_pretrained(tmp_path / 'out', dtype='auto')
  assert again.dtype == torch.bfloat16
  assert weights.saved_dtype(folder) == 'float32'
  assert weights.saved_dtype(tmp_path / 'out') == 'bfloat16'


def test_shards_with_index_both_ways(hf_model, tmp_path, monkeypatch):
  folder, model = hf_model('llama')
  model.save_pretrained(tmp_path / 'in', max_shard_size='8KB')
  assert len(list((tmp_path / 'in').glob('*.safetensors'))) > 2
  config, params = weights.load(tmp_path / 'in', 'float32')
  monkeypatch.setattr(tensor_files, '_MAX_FILE_BYTES', 9000)
  weights.save(tmp_path / 'out', config, params)
  files = list((tmp_path / 'out').glob('*.safetensors'))
  assert len(files) > 2
  assert all(file.stat().st_size < 9000 + 2000 for file in files)
  _assert_same_files(tmp_path / 'out', folder)
  assert len(type(model).from_pretrained(
      tmp_path / 'out').state_dict()) == len(model.state_dict())


def test_by_default_shards_are_those_of_huggingface_hub(tmp_path, monkeypatch):
  """Qwen2.5-7B in bfloat16, 15.2 GB, without its bytes; the library's
  MAX_SHARD_SIZE is '5GB'."""
  monkeypatch.setattr(tensor_files, 'create_file', lambda _, part: {
      name: np.broadcast_to(np.zeros((), dtype), shape)
      for name, dtype, shape in part})
  with torch.device('meta'):
    state = transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.from_pretrained(_QWEN_7B),
        dtype=torch.bfloat16).state_dict()
  tensor_files.create(tmp_path, [
      (name, np.dtype(ml_dtypes.bfloat16), tuple(tensor.shape))
      for name, tensor in state.items()])
  ours = json.loads((tmp_path / 'model.safetensors.index.json').read_text())
  theirs = huggingface_hub.split_torch_state_dict_into_shards(state)
  assert ours['weight_map'] == theirs.tensor_to_filename
  assert ours['metadata'] == theirs.metadata == {'total_size': 15_231_233_024}


# ---- config.json


def test_rope_settings_of_transformers_4_and_5(folder):
  config = weights.model_config(folder)
  _edit_config(folder, rope_parameters=..., rope_theta=7e5, rope_scaling=None)
  old = weights.model_config(folder)
  assert old == dataclasses.replace(config, rope_theta=7e5)
  scaling = dict(factor=4.0, original_max_position_embeddings=32)
  _edit_config(folder, rope_scaling=dict(type='yarn', **scaling))
  old = weights.model_config(folder)
  _edit_config(folder, rope_theta=..., rope_scaling=..., rope_parameters=dict(
      rope_type='yarn', rope_theta=7e5, **scaling))
  assert weights.model_config(folder) == old
  assert old.rope_scaling.attention_factor == pytest.approx(
      0.1 * np.log(4) + 1)


@pytest.mark.parametrize('fields,positions', [
    (dict(max_position_embeddings=32_768, rope_scaling=dict(
        type='yarn', factor=4.0, original_max_position_embeddings=32_768)),
     131_072),
    (dict(max_position_embeddings=131_072, rope_scaling=dict(
        type='yarn', factor=4.0, original_max_position_embeddings=32_768)),
     131_072),
    (dict(max_position_embeddings=32_768), 32_768)])
def test_yarn_as_model_cards_add_it_allows_longer_contexts(
    folder, fields, positions):
  _edit_config(folder, rope_parameters=..., rope_theta=1e6, **fields)
  config = weights.model_config(folder)
  assert rope.longest(config.max_position, config.rope_scaling) == positions


@pytest.mark.parametrize('left_out', [
    ('rope_parameters',), ('rope_scaling', 'rope_theta')])
def test_rope_settings_are_saved_for_transformers_4_and_5(
    case, left_out, hf_model):
  config = weights.model_config(hf_model(case)[0])
  raw = families.to_json(config, 'float32')
  for name in left_out:
    raw.pop(name)
  assert families.from_json(raw, '') == config


def test_the_config_keeps_the_source_s_other_fields(folder, tmp_path):
  """The architecture, which fields do not determine, and token ids are kept."""
  _edit_config(folder, architectures=['MistralForCausalLM'],
               model_type='mistral', layer_types=..., sliding_window=None,
               eos_token_id=[3, 5])
  config = weights.model_config(folder)
  raw = families.to_json(
      config, 'bfloat16', json.loads((folder / 'config.json').read_text()))
  assert raw['architectures'] == ['MistralForCausalLM']
  assert raw['eos_token_id'] == [3, 5]
  assert raw['dtype'] == raw['torch_dtype'] == 'bfloat16'
  assert families.to_json(config, 'bfloat16')['architectures'] == [
      'LlamaForCausalLM']


def test_a_config_that_no_family_expresses_is_refused(tmp_path):
  config = transformer.ModelConfig(
      vocab_size=8, d_model=8, num_layers=1, num_heads=2, num_kv_heads=2,
      head_dim=4, d_ff=8, max_position=8, qkv_bias=True, qk_norm=True)
  with pytest.raises(errors.InputError, match='no architecture'):
    weights.save(tmp_path / 'out', config,
                 transformer.abstract_params(config))
  assert not os.listdir(tmp_path)


@pytest.mark.parametrize('fields,message', [
    (dict(architectures=['Qwen2MoeForCausalLM']), 'Qwen2MoeForCausalLM'),
    (dict(architectures=None), 'architectures None'),
    (dict(hidden_act='gelu'), "hidden_act = 'gelu'"),
    (dict(mlp_bias=True), 'mlp_bias'),
    (dict(attention_bias=True), 'attention_bias'),
    (dict(num_experts=8), 'num_experts'),
    (dict(quantization_config={'bits': 4}), 'quantization_config'),
    (dict(partial_rotary_factor=0.5), 'partial_rotary_factor'),
    (dict(rope_parameters=dict(rope_type='longrope')), 'longrope'),
    (dict(rope_parameters=dict(full_attention={})), 'nested'),
    (dict(rope_parameters=dict(rope_type='linear')), 'factor is missing'),
    (dict(layer_types=['sliding_attention'] + ['full_attention'] * 2),
     'layer_types'),
    (dict(layer_types=5), 'layer_types = 5 is not a list'),
    (dict(layer_types={'a': 1}), "layer_types = {'a': 1} is not a list"),
    (dict(hidden_size=...), 'hidden_size is missing'),
    (dict(hidden_size='24'), "hidden_size = '24'"),
    (dict(num_key_value_heads=3), '4 query heads over 3'),
    (dict(vocab_size=10**12), 'vocab_size = 1000000000000 is not usable'),
    (dict(num_hidden_layers=10**9), 'num_hidden_layers = 1000000000 is not us'),
    (dict(rms_norm_eps=float('inf')), 'rms_norm_eps = inf is not usable'),
    (dict(rope_parameters={'rope_theta': float('nan')}), 'rope_theta = nan is'),
    (dict(rope_parameters={'rope_theta': 10**400}), 'rope_theta = 1000'),
    (dict(rope_parameters=dict(rope_type='yarn', factor=4.0, mscale='1',
                               mscale_all_dim=1.0)), "mscale = '1' is not us"),
])
def test_unsupported_configs_are_refused_by_name(folder, fields, message):
  _edit_config(folder, **fields)
  with pytest.raises(errors.InputError) as refusal:
    weights.load(folder, 'float32')
  assert message in str(refusal.value)
  assert str(folder / 'config.json') in str(refusal.value)
  assert '\n' not in str(refusal.value)


# ---- bad folders


def _refusal(folder, *parts):
  with pytest.raises(errors.InputError) as refusal:
    weights.load(folder, 'float32')
  assert '\n' not in str(refusal.value)
  for part in parts:
    assert part in str(refusal.value)


def test_missing_pieces_are_named(folder, tmp_path):
  _refusal(tmp_path / 'nowhere', 'nowhere', 'no such model folder')
  (folder / 'model.safetensors').unlink()
  _refusal(folder, str(folder), 'model.safetensors.index.json')
  (folder / 'config.json').write_text('{"architectures": [')
  _refusal(folder, str(folder / 'config.json'), 'not JSON')
  (folder / 'config.json').unlink()
  _refusal(folder, str(folder / 'config.json'), 'missing')


def test_what_is_there_instead_is_named(folder, tmp_path):
  weights_file = folder / 'model.safetensors'
  _refusal(shutil.copytree(folder, tmp_path / 'repo' / 'snapshots').parent,
           f'missing; did you mean {tmp_path}/repo/snapshots?')
  weights_file.unlink()
  weights_file.mkdir()
  _refusal(folder, '; model.safetensors is a folder')
  weights_file.rmdir()
  weights_file.symlink_to('../blobs/gone')
  _refusal(folder, '; it is a link to nothing')
  weights_file.unlink()
  weights_file.write_text('version https://git-lfs.github.com/spec/v1\nsize 9')
  _refusal(folder, f'{weights_file}: ', 'run `git lfs pull`')
  config = folder / 'config.json'
  config.write_bytes('\ufeff{}'.encode())
  _refusal(folder, f'{config}: not JSON (Unexpected UTF-8 BOM')
  config.write_bytes('{}'.encode('utf-16'))
  _refusal(folder, f'{config}: not JSON', 'in UTF-16')
  config.unlink()
  (folder / 'adapter_config.json').write_text('{}')
  _refusal(folder, f'{config}: missing; the folder holds an adapter')


def test_as_many_layer_types_as_layers(folder):
  _edit_config(folder, layer_types=['full_attention'])
  _refusal(folder, 'but layer_types has 1 layer')


def _rewrite(folder, change):
  file = folder / 'model.safetensors'
  tensors = safetensors.torch.load_file(file)
  change(tensors)
  safetensors.torch.save_file(tensors, file)


def test_wrong_tensors_are_named(folder):
  name = 'model.layers.1.self_attn.q_proj.bias'
  whole = (folder / 'model.safetensors').read_bytes()
  _rewrite(folder, lambda tensors: tensors.pop(name))
  _refusal(folder, f'tensor {name} is missing')
  (folder / 'model.safetensors').write_bytes(whole)
  _rewrite(folder, lambda tensors: tensors.update({name: torch.zeros(7)}))
  _refusal(folder, name, 'shape [7], expected [24]')
  _rewrite(folder, lambda tensors: tensors.update(
      {name: torch.zeros(24, dtype=torch.int8)}))
  _refusal(folder, name, 'I8')
  (folder / 'model.safetensors').write_bytes(whole)
  _rewrite(folder, lambda tensors: tensors.update(
      {'model.layers.0.mlp.gate.weight': torch.zeros(2)}))
  _refusal(folder, '1 unexpected tensors', 'model.layers.0.mlp.gate.weight')


def test_harmless_extra_tensors_are_accepted(hf_model, tmp_path):
  folder = shutil.copytree(hf_model('qwen3')[0], tmp_path / 'tied')
  _rewrite(folder, lambda tensors: tensors.update({
      'lm_head.weight': tensors['model.embed_tokens.weight'].clone(),
      'model.layers.0.self_attn.rotary_emb.inv_freq': torch.zeros(5)}))
  config, params = weights.load(folder, 'float32')
  assert config.tie_embeddings and 'head' not in params


def test_a_tuned_head_needs_the_flag_that_says_so(
    hf_model, torch_logits, batch, tmp_path):
  """transformers uses the file's head, whatever the flag says."""
  source, model = hf_model('qwen3')
  folder = shutil.copytree(source, tmp_path / 'tuned')
  _rewrite(folder, lambda tensors: tensors.update({
      'lm_head.weight': tensors['model.embed_tokens.weight'] + 1}))
  _refusal(folder, str(folder), 'set tie_word_embeddings to false')
  _edit_config(folder, tie_word_embeddings=False)
  config, params = weights.load(folder, 'float32')
  assert not config.tie_embeddings
  np.testing.assert_array_equal(
      params['head']['kernel'], params['embed']['embedding'].T + 1)
  weights.save(tmp_path / 'out', config, params, folder)
  _assert_same_files(tmp_path / 'out', folder)
  assert weights.model_config(tmp_path / 'out') == config
  np.testing.assert_array_equal(*(
      torch_logits(type(model).from_pretrained(path), *batch)
      for path in (folder, tmp_path / 'out')))


def test_damaged_files_are_named(folder):
  file = folder / 'model.safetensors'
  whole = file.read_bytes()
  for damaged in (b'', whole[:5], whole[:100], whole[:-10], whole + b'x',
                  b'\xff' * 64, whole[:9] + b'#' + whole[10:]):
    file.write_bytes(damaged)
    _refusal(folder, str(file))


def _write_header(file, entries, size):
  header = json.dumps({
      name: {'dtype': 'F32', 'shape': [2], 'data_offsets': range_}
      for name, range_ in entries.items()}).encode()
  file.write_bytes(len(header).to_bytes(8, 'little') + header + bytes(size))


@pytest.mark.parametrize('entries,size', [
    ({'a': [0, 8], 'b': [4, 12]}, 12), ({'a': [0, 8], 'b': [0, 8]}, 8),
    ({'a': [0, 8], 'b': [12, 20]}, 20), ({'a': [8, 16]}, 16)])
def test_tensors_share_no_bytes(folder, entries, size):
  _write_header(folder / 'model.safetensors', entries, size)
  _refusal(folder, 'do not take each of its')


def test_deeply_nested_json_is_refused(folder):
  deep = b'{"a": ' * 10**5
  (folder / 'model.safetensors').write_bytes(
      len(deep).to_bytes(8, 'little') + deep)
  _refusal(folder, 'bad safetensors header')
  (folder / 'config.json').write_bytes(deep)
  _refusal(folder, 'config.json: not JSON')


def test_bad_indexes_are_named(hf_model, tmp_path):
  folder = tmp_path / 'in'
  hf_model('llama')[1].save_pretrained(folder, max_shard_size='8KB')
  index = folder / 'model.safetensors.index.json'
  whole = json.loads(index.read_text())
  first = sorted(folder.glob('*.safetensors'))[0]
  spoilt = {**whole, 'weight_map': {**whole['weight_map'], 'x': first.name}}
  index.write_text(json.dumps(spoilt))
  _refusal(folder, first.name, 'tensor x is missing')
  index.write_text('{}')
  _refusal(folder, str(index), 'weight_map')
  shutil.copy(first, tmp_path / 'outside.safetensors')
  for outside in (
      '../outside.safetensors', str(tmp_path / 'outside.safetensors'),
      'a/../../outside.safetensors'):
    name = min(whole['weight_map'])
    index.write_text(json.dumps(
        {'weight_map': {**whole['weight_map'], name: outside}}))
    _refusal(folder, str(index), f'names {outside!r}, which is not a file of')
  shutil.copy(first, folder / 'again.safetensors')
  index.write_text(json.dumps(
      {'weight_map': {**whole['weight_map'], min(whole['weight_map']):
                      'again.safetensors'}}))
  _refusal(folder, 'is also in another file')
  index.write_text(json.dumps(whole))
  first.unlink()
  _refusal(folder, str(index), f'names {first.name}, which is missing')


# ---- saving, tokenizers


def test_save_overwrites_nothing_and_leaves_nothing_half_done(
    hf_model, tmp_path, monkeypatch):
  config, params = weights.load(hf_model('llama')[0], 'float32')
  (tmp_path / 'used').mkdir()
  (tmp_path / 'used' / 'mine').write_text('')
  with pytest.raises(errors.InputError, match='not empty'):
    weights.save(tmp_path / 'used', config, params)
  assert os.listdir(tmp_path / 'used') == ['mine']

  def fail(*_):
    raise OSError('disk full')

  monkeypatch.setattr(tensor_files, 'write_json', fail)
  with pytest.raises(OSError):
    weights.save(tmp_path / 'out', config, params)
  assert os.listdir(tmp_path) == ['used']


def _save_tokenizer(folder, eos):
  model = tokenizers.models.WordLevel({'<eos>': 0, 'a': 1}, unk_token='a')
  tokenizer = transformers.PreTrainedTokenizerFast(
      tokenizer_object=tokenizers.Tokenizer(model), eos_token=eos)
  tokenizer.save_pretrained(folder)


def test_tokenizer_and_generation_config_travel(hf_model, tmp_path):
  source = shutil.copytree(hf_model('llama')[0], tmp_path / 'in')
  _save_tokenizer(source, '<eos>')
  (source / 'generation_config.json').write_text(
      json.dumps({'eos_token_id': [7, 5]}))
  config, params = weights.load(source, 'float32')
  weights.save(tmp_path / 'out', config, params, source)
  tokenizer = weights.load_tokenizer(tmp_path / 'out')
  assert tokenizer('a')['input_ids'] == [1]
  assert weights.eos_ids(tmp_path / 'out', tokenizer) == (0, 5, 7)


def test_a_bad_tokenizer_is_refused(tmp_path):
  with pytest.raises(errors.InputError, match='no such model folder'):
    weights.load_tokenizer(tmp_path / 'nowhere')
  with pytest.raises(errors.InputError, match='no usable tokenizer') as refusal:
    weights.load_tokenizer(tmp_path)
  assert '\n' not in str(refusal.value)
  _save_tokenizer(tmp_path, None)
  with pytest.raises(errors.InputError, match='no EOS token'):
    weights.load_tokenizer(tmp_path)


@pytest.mark.parametrize('name, content, said', [
    ('tokenizer.json', b'{"version": ', 'not JSON'),
    ('tokenizer.json', b'version https://git-lfs.github.com/spec/v1',
     'run `git lfs pull`'),
    ('chat_template.jinja', b'gro\xdf', 'not in UTF-8')])
def test_the_file_of_a_bad_tokenizer_is_named(tmp_path, name, content, said):
  _save_tokenizer(tmp_path, '<eos>')
  (tmp_path / name).write_bytes(content)
  with pytest.raises(errors.InputError) as refusal:
    weights.load_tokenizer(tmp_path)
  assert str(refusal.value).startswith(f'{tmp_path / name}: ')
  assert said in str(refusal.value)


def test_a_tokenizer_without_its_file_is_refused(tmp_path):
  """Of tokenizer_config.json alone transformers makes one of special tokens:
  all prompts would be empty but for those."""
  transformers.Qwen2Config().save_pretrained(tmp_path)
  _save_tokenizer(tmp_path, '<eos>')
  (tmp_path / 'tokenizer.json').unlink()
  with pytest.raises(errors.InputError, match='tokenizer.json is missing'):
    weights.load_tokenizer(tmp_path)


def test_what_transformers_says_of_a_config_is_kept(tmp_path):
  transformers.Qwen2Config().save_pretrained(tmp_path)
  _save_tokenizer(tmp_path, '<eos>')
  _edit_config(tmp_path, rms_norm_eps=None)
  with pytest.raises(errors.InputError, match='or config.json .*rms_norm_eps.*'
                     'float'):
    weights.load_tokenizer(tmp_path)


def test_the_folder_in_which_a_program_was_started_may_be_the_export(
    tmp_path, monkeypatch):
  (tmp_path / 'out').mkdir()
  monkeypatch.chdir(tmp_path / 'out')
  with weights.atomic_folder('.') as partial:
    (partial / 'file').write_text('all')
  assert [path.name for path in tmp_path.rglob('*')] == ['out', 'file']
