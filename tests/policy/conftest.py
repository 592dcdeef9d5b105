"""Small random models of transformers, as folders, shared by the tests."""

import functools

import numpy as np
import pytest
import torch
import transformers

_BASE = dict(
    vocab_size=61, hidden_size=24, intermediate_size=40, num_hidden_layers=3,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128,
    bos_token_id=None, eos_token_id=None, pad_token_id=0)

# name -> (family, what differs from _BASE). The rope scalings have an
# original context of 16 positions; the tests go beyond it.
CASES = {
    'qwen2': ('Qwen2', dict(
        num_attention_heads=7, num_key_value_heads=1, hidden_size=42,
        tie_word_embeddings=True)),
    'qwen2_window': ('Qwen2', dict(
        use_sliding_window=True, sliding_window=5, max_window_layers=2)),
    'qwen3': ('Qwen3', dict(
        head_dim=10, num_key_value_heads=4, tie_word_embeddings=True)),
    'qwen3_yarn': ('Qwen3', dict(
        head_dim=14, rope_parameters=dict(
            rope_type='yarn', rope_theta=5e3, factor=4.0,
            original_max_position_embeddings=16))),
    'llama': ('Llama', dict(
        head_dim=6, num_attention_heads=3, num_key_value_heads=3)),
    'llama3': ('Llama', dict(rope_parameters=dict(
        rope_type='llama3', rope_theta=5e2, factor=8.0, low_freq_factor=1.0,
        high_freq_factor=4.0, original_max_position_embeddings=16))),
    'llama_linear': ('Llama', dict(
        tie_word_embeddings=True,
        rope_parameters=dict(rope_type='linear', rope_theta=1e4, factor=3.0))),
    'llama_yarn': ('Llama', dict(head_dim=16, rope_parameters=dict(
        rope_type='yarn', rope_theta=1e4, factor=8.0, beta_fast=4.0,
        beta_slow=0.5, attention_factor=1.3, truncate=False,
        original_max_position_embeddings=16))),
    'mistral': ('Mistral', dict(head_dim=18, sliding_window=None)),
    'mistral_window': ('Mistral', dict(
        num_attention_heads=7, num_key_value_heads=1, head_dim=8,
        sliding_window=7)),
}


@pytest.fixture(params=sorted(CASES))
def case(request):
  """The name of every model in turn."""
  return request.param


@pytest.fixture(scope='session')
def hf_model(tmp_path_factory):
  """case -> (folder saved by transformers, the torch model); made once."""

  @functools.cache
  def make(case):
    family, fields = CASES[case]
    torch.manual_seed(sorted(CASES).index(case))
    model = getattr(transformers, f'{family}ForCausalLM')(
        getattr(transformers, f'{family}Config')(**{**_BASE, **fields})).eval()
    for name, parameter in model.named_parameters():
      torch.nn.init.normal_(parameter, 1.0 if 'norm' in name else 0.0, 0.2)
    folder = tmp_path_factory.mktemp(case)
    model.save_pretrained(folder)
    return folder, model

  return make


@pytest.fixture(scope='session')
def torch_logits():
  """(torch model, token_BS, position_BS) -> logits_BSV of transformers."""

  def run(model, token_BS, position_BS):
    with torch.no_grad():
      return model(
          torch.tensor(token_BS), attention_mask=torch.tensor(position_BS >= 0),
          position_ids=torch.tensor(np.maximum(position_BS, 0))
      ).logits.numpy()

  return run


@pytest.fixture(scope='session')
def batch():
  """(token_BS, position_BS): left-padded rows of 33, 26 and 3 tokens."""
  token_BS = np.random.RandomState(0).randint(0, 61, (3, 33)).astype(np.int32)
  position_BS = np.arange(33, dtype=np.int32) - np.array([[0], [7], [30]])
  return token_BS, np.maximum(position_BS, -1).astype(np.int32)
