"""What a run stands on: changed files, changed weights, NaN weights."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tepo_jax import errors
from tepo_jax.job import provenance
from tepo_jax.policy import transformer
from tepo_jax.policy.huggingface import weights
from tepo_jax.runtime import mesh as mesh_lib

MODEL = transformer.ModelConfig(
    vocab_size=31, d_model=16, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=8, d_ff=16, max_position=64)


def _mesh(tensor=1):
  return mesh_lib.make({'data': 1, 'fsdp': -1, 'tensor': tensor})


@pytest.fixture(name='params', scope='module')
def _params():
  return transformer.init(MODEL, jax.random.key(0))


@pytest.fixture(name='folder')
def _folder(tmp_path, params):
  weights.save(tmp_path / 'model', MODEL, params)
  (tmp_path / 'model' / 'tokenizer.json').write_text('{}')
  return tmp_path / 'model'


def _record(folder, tensor=1):
  model, params = provenance.load(str(folder), _mesh(tensor))
  found = provenance.weight_digests(model, params)
  return provenance.record(str(folder), found), found


def test_the_record_is_json_and_does_not_depend_on_the_mesh(folder):
  one, found = _record(folder)
  assert one == json.loads(json.dumps(one)) == _record(folder, tensor=4)[0]
  assert sorted(one['files']) == ['config.json', 'tokenizer.json']
  assert 'model.layers.*.mlp.up_proj.weight' in found
  provenance.check('here', one, str(folder), found)


def test_another_file_layout_of_the_same_numbers_is_the_same(
    folder, params, tmp_path, monkeypatch):
  rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
  for name, dtype in (('half', jnp.bfloat16), ('whole', jnp.float32)):
    weights.save(tmp_path / name, MODEL,
                 jax.tree.map(lambda x: x.astype(dtype), rounded))
  assert _record(tmp_path / 'half')[1] == _record(tmp_path / 'whole')[1]
  assert _record(tmp_path / 'half')[1] != _record(folder)[1]


@pytest.mark.parametrize('change, said', [
    (lambda f: f.joinpath('config.json').write_text(
        f.joinpath('config.json').read_text().replace('10000.0', '10001.0')),
     'config.json has changed'),
    (lambda f: f.joinpath('tokenizer.json').unlink(),
     'tokenizer.json is missing'),
    (lambda f: f.joinpath('chat_template.jinja').write_text('x'),
     'chat_template.jinja is new')])
def test_a_changed_file_is_named(folder, change, said):
  saved, found = _record(folder)
  change(folder)
  with pytest.raises(errors.InputError) as error:
    provenance.check('checkpoint c/3', saved, str(folder), found)
  assert str(error.value).startswith('checkpoint c/3 was made with another')
  assert f'{folder}/{said}' in str(error.value)
  shutil.rmtree(folder)
  with pytest.raises(errors.InputError, match='no such model folder'):
    provenance.check('checkpoint c/3', saved, str(folder), found)


@pytest.mark.parametrize('path', ['embed/embedding', 'layers/up/kernel',
                                  'head/kernel', 'final_norm/scale'])
def test_a_changed_bit_of_one_weight_is_found(folder, params, path, tmp_path):
  saved, _ = _record(folder)
  *sections, leaf = path.split('/')
  other = jax.tree.map(np.array, params)
  node = other
  for section in sections:
    node = node[section]
  node[leaf].reshape(-1).view(np.uint32)[-1] ^= 1
  shutil.rmtree(folder)
  weights.save(folder, MODEL, other)
  (folder / 'tokenizer.json').write_text('{}')
  _, found = _record(folder, tensor=2)
  name = dict((p, n) for n, p, _ in weights.TABLE)[path].replace('{}', '*')
  with pytest.raises(errors.InputError, match='adapts other weights') as error:
    provenance.check('checkpoint c/3', saved, str(folder), found)
  assert name in str(error.value) and str(folder) in str(error.value)


@pytest.mark.parametrize('value', [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize('place, name', [
    (('layers', 'gate', 'kernel'), 'model.layers.1.mlp.gate_proj.weight'),
    (('final_norm', 'scale'), 'model.norm.weight')])
def test_weights_that_are_not_finite_are_named(
    params, tmp_path, value, place, name):
  other = jax.tree.map(np.array, params)
  node = other
  for key in place:
    node = node[key]
  node.reshape(-1)[-1] = value
  weights.save(tmp_path / 'model', MODEL, other)
  for tensor in (1, 2):
    with pytest.raises(errors.InputError) as error:
      provenance.load(str(tmp_path / 'model'), _mesh(tensor))
    assert f'{tmp_path}/model: tensor {name} has' in str(error.value)
