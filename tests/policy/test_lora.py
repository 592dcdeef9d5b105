"""LoRA: against peft on transformers' models, and against the merged model."""

import dataclasses
import functools

import jax
import numpy as np
import peft
import pytest
import torch

from tepo_jax import errors
from tepo_jax.policy import cache as cache_lib
from tepo_jax.policy import lora as lora_lib
from tepo_jax.policy import ops
from tepo_jax.policy import transformer
from tepo_jax.policy.cpu import ops as cpu_ops
from tepo_jax.policy.huggingface import adapters as adapters_lib
from tepo_jax.policy.huggingface import weights
from tepo_jax.runtime import mesh as mesh_lib

# One case per family; some with a subset of the targets.
LORA = {
    'qwen2': lora_lib.Lora(3, 6.0),
    'qwen3_yarn': lora_lib.Lora(2, 1.0, ('q_proj', 'v_proj')),
    'llama3': lora_lib.Lora(4, 4.0, ('o_proj', 'down_proj', 'gate_proj')),
    'mistral_window': lora_lib.Lora(1, 1.0),
}


@functools.partial(jax.jit, static_argnums=0)
def _logits(config, params, token_BS, position_BS):
  hidden_BSD, _ = transformer.forward(config, params, token_BS, position_BS)
  return transformer.logits(config, params, hidden_BSD)


def _random(tree):
  rng = np.random.RandomState(0)
  return jax.tree.map(
      lambda leaf: rng.normal(0, 0.3, leaf.shape).astype(np.float32), tree)


@pytest.fixture(params=sorted(LORA))
def model(request, hf_model):
  """(folder, torch model, config with adapters, base, trained adapters)."""
  folder, torch_model = hf_model(request.param)
  config, base = weights.load(folder, 'float32')
  config = dataclasses.replace(config, lora=LORA[request.param])
  adapters = _random(
      lora_lib.split(transformer.abstract_params(config))[1])
  return folder, torch_model, config, base, adapters


@pytest.mark.long_after_first
def test_logits_are_those_of_peft(model, batch, tmp_path):
  folder, torch_model, config, base, adapters = model
  adapters_lib.save(tmp_path / 'out', config.lora, adapters, str(folder), '')
  # A fresh model, because peft modifies the one it is given.
  torch_model = type(torch_model).from_pretrained(folder)
  with_peft = peft.PeftModel.from_pretrained(torch_model, tmp_path / 'out')
  assert with_peft.peft_config['default'].base_model_name_or_path == str(folder)
  loaded = sum(p.numel() for name, p in with_peft.named_parameters()
               if 'lora_' in name)
  assert loaded == sum(leaf.size for leaf in jax.tree.leaves(adapters))
  token_BS, position_BS = batch
  with torch.no_grad():
    want = with_peft(
        torch.tensor(token_BS), attention_mask=torch.tensor(position_BS >= 0),
        position_ids=torch.tensor(np.maximum(position_BS, 0))).logits.numpy()
  params = lora_lib.combine(base, adapters)
  real = position_BS >= 0
  got = np.asarray(_logits(config, params, *batch))
  assert np.abs(want).max() > 1
  np.testing.assert_allclose(got[real], want[real], rtol=0, atol=1e-4)
  # The merged model has the same logits without adapters.
  merged = lora_lib.merge(config.lora, base, adapters)
  plain = _logits(dataclasses.replace(config, lora=None), merged, *batch)
  np.testing.assert_allclose(plain[real], got[real], rtol=0, atol=1e-4)
  unadapted = _logits(dataclasses.replace(config, lora=None), base, *batch)
  assert np.abs(unadapted - got)[real].max() > 0.1


@pytest.mark.long_after_first
def test_initial_adapters_do_not_change_the_base(model, batch):
  _, _, config, base, _ = model
  params = jax.jit(transformer.init, static_argnums=0)(
      config, jax.random.key(0))
  _, adapters = lora_lib.split(params)
  np.testing.assert_array_equal(
      _logits(config, lora_lib.combine(base, adapters), *batch),
      _logits(dataclasses.replace(config, lora=None), base, *batch))
  for name, node in adapters['layers'].items():
    assert f'{name}_proj' in config.lora.targets
    assert not node['lora_b'].any()
    bound = node['lora_a'].shape[1] ** -0.5  # as torch's kaiming_uniform(√5)
    assert 0.7 * bound < np.abs(node['lora_a']).max() <= bound


def test_split_and_combine_are_inverse(model):
  _, _, config, base, adapters = model
  tree = transformer.abstract_params(config)
  apart = lora_lib.split(tree)
  assert lora_lib.combine(*apart) == tree
  assert jax.tree.structure(apart[0]) == jax.tree.structure(base)
  assert jax.tree.structure(apart[1]) == jax.tree.structure(adapters)
  assert lora_lib.combine(None, tree) is tree


@pytest.mark.long_after_first
@pytest.mark.parametrize('table', [cpu_ops.OPS, ops.PLAIN])
def test_decoding_with_adapters(model, batch, table):
  """With a cache: layer by layer, one token at a time."""
  _, _, config, base, adapters = model
  config = dataclasses.replace(config, ops=table)
  params = lora_lib.combine(base, adapters)
  want = _logits(config, params, *batch)[:, -1]
  token_BS, position_BS = batch

  @jax.jit
  def decode(params):
    params = cache_lib.convert(config, params)
    cache = cache_lib.init_cache(config, 3, 33, 'float32')
    _, cache = transformer.forward(
        config, params, token_BS[:, :-1], position_BS[:, :-1], cache)
    hidden_B1D, _ = transformer.forward(
        config, params, token_BS[:, -1:], position_BS[:, -1:], cache)
    return transformer.logits(config, params, hidden_B1D)[:, 0]

  # As the comparisons above: adapters change logits by more than 0.1.
  np.testing.assert_allclose(decode(params), want, rtol=0, atol=1e-4)


def test_sharded_adapters_are_saved_whole(hf_model, tmp_path):
  folder, _ = hf_model('mistral')
  mesh = mesh_lib.make({'data': 1, 'fsdp': 2, 'tensor': 2})
  config, _ = weights.load(folder, 'float32', mesh)
  config = dataclasses.replace(config, lora=lora_lib.Lora(2, 4.0))
  _, adapters = lora_lib.split(_random(transformer.abstract_params(config)))
  _, shardings = lora_lib.split(
      mesh_lib.shardings(mesh, transformer.logical_axes(config)))
  placed = jax.device_put(adapters, shardings)
  assert placed['layers']['q']['lora_a'].sharding.spec[1] == 'fsdp'
  assert placed['layers']['q']['lora_b'].sharding.spec[2] == 'tensor'
  for name, tree in (('a', adapters), ('b', placed)):
    adapters_lib.save(tmp_path / name, config.lora, tree, 'base', '')
  read = [(tmp_path / name / 'adapter_model.safetensors').read_bytes()
          for name in 'ab']
  assert read[0] == read[1]
  with pytest.raises(errors.InputError, match='not empty'):
    adapters_lib.save(tmp_path / 'a', config.lora, adapters, 'base', '')
