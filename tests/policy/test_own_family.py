"""The recipe for a model family in configs/README.md, carried out in a copy."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
import transformers

from tepo_jax import errors
from tepo_jax.policy.huggingface import weights
from tests import recipes

TITLE = 'Your own model family'
PLACES = (  # of the recipe's blocks
    ('transformer.py', dict(after='  qk_norm: bool = False\n')),
    ('transformer.py', dict(
        after='  def __call__(self, x_MD, layer, columns, stores=None):\n'
              '    config = self.config\n')),
    ('huggingface/families.py', dict(after='  qk_norm: bool = False\n')),
    ('huggingface/families.py', dict(
        after="    'MistralForCausalLM': "
              "Family('mistral', window='always'),\n")),
    ('huggingface/families.py', dict(before='\n\ndef _window(')),
    ('huggingface/families.py', dict(
        after='qkv_bias=family.qkv_bias, qk_norm=family.qk_norm,\n')),
    ('huggingface/families.py', dict(
        before="  if family.window != 'never':\n    fields[")))

# Scores a batch in one call, as training does, and with a cache, as sampling
# does; writes the model again.
_PROGRAM = """
import inspect
import jax
import numpy as np
from tepo_jax.policy import cache as cache_lib, transformer
from tepo_jax.policy.huggingface import weights

assert inspect.getfile(transformer).startswith(FOLDER)
config, params = weights.load('MODEL', 'float32')
weights.save('AGAIN', config, params, source='MODEL')
assert weights.model_config('AGAIN') == config
batch = np.load('batch.npz')

@jax.jit
def logits(params, token_BS, position_BS):
  cache = cache_lib.init_cache(config, *token_BS.shape, 'float32')
  hidden = (transformer.forward(config, params, token_BS, position_BS),
            transformer.forward(config, cache_lib.convert(config, params),
                                token_BS, position_BS, cache))
  return [transformer.logits(config, params, x) for x, _ in hidden]

np.save('logits.npy', logits(params, batch['token'], batch['position']))
"""


@pytest.fixture(name='model')
def _model(tmp_path):
  """A small random SmolLM3, saved in MODEL; layers 3 and 7 have no RoPE."""
  torch.manual_seed(0)
  model = transformers.SmolLM3ForCausalLM(transformers.SmolLM3Config(
      vocab_size=61, hidden_size=24, intermediate_size=40, num_hidden_layers=8,
      num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
      bos_token_id=None, eos_token_id=None, pad_token_id=0)).eval()
  for name, parameter in model.named_parameters():
    torch.nn.init.normal_(parameter, 1.0 if 'norm' in name else 0.0, 0.2)
  model.save_pretrained(tmp_path / 'MODEL')
  return model


@pytest.mark.long
def test_the_recipe(tmp_path, model, batch, torch_logits):
  with pytest.raises(errors.InputError, match='SmolLM3ForCausalLM'):
    weights.model_config(tmp_path / 'MODEL')
  recipes.copy(tmp_path, 'tepo_jax')
  for block, (name, place) in zip(
      recipes.blocks(TITLE, 'python'), PLACES, strict=True):
    recipes.insert(tmp_path / 'tepo_jax' / 'policy' / name, block, **place)
  np.savez(tmp_path / 'batch.npz', token=batch[0], position=batch[1])
  done = subprocess.run(
      [sys.executable, '-c', _PROGRAM.replace('FOLDER', repr(str(tmp_path)))],
      cwd=tmp_path, text=True, capture_output=True,
      env=os.environ | {'PYTHONPATH': str(tmp_path)})
  assert done.returncode == 0, done.stderr[-3000:]
  want, real = torch_logits(model, *batch), batch[1] >= 0
  for got in np.load(tmp_path / 'logits.npy'):
    np.testing.assert_allclose(got[real], want[real], rtol=0, atol=1e-4)
  again = type(model).from_pretrained(tmp_path / 'AGAIN')
  np.testing.assert_array_equal(torch_logits(again, *batch), want)


def test_the_number_of_lines():
  lines = sum(len(block.splitlines())
              for block in recipes.blocks(TITLE, 'python'))
  assert f'in {lines} lines' in recipes.section(TITLE)
