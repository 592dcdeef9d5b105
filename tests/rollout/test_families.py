"""Greedy decoding of each family through refills, against transformers."""

import numpy as np
import pytest
import torch
import transformers

from tepo_jax.policy.huggingface import weights
from tepo_jax.rollout import draw

T = 20
FAMILIES = {
    'Qwen2': dict(use_sliding_window=True, sliding_window=7,
                  max_window_layers=1),
    'Qwen3': dict(head_dim=10, tie_word_embeddings=True),
    'Llama': dict(rope_parameters=dict(
        rope_type='llama3', rope_theta=5e2, factor=8.0, low_freq_factor=1.0,
        high_freq_factor=4.0, original_max_position_embeddings=16)),
    'Mistral': dict(sliding_window=6)}


def _model(family):
  torch.manual_seed(0)
  model = getattr(transformers, f'{family}ForCausalLM')(
      getattr(transformers, f'{family}Config')(
          vocab_size=61, hidden_size=24, intermediate_size=40,
          num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
          max_position_embeddings=128, bos_token_id=None, eos_token_id=None,
          pad_token_id=0, **FAMILIES[family])).eval()
  for name, parameter in model.named_parameters():
    torch.nn.init.normal_(parameter, 1.0 if 'norm' in name else 0.0, 0.2)
  return model


@pytest.mark.long_after_first
@pytest.mark.parametrize('page, shared', [(0, 0), (8, 0), (0, 8), (8, 8)])
@pytest.mark.parametrize('family', FAMILIES)
def test_greedy_tokens_are_those_of_transformers(
    family, page, shared, make_engine, tmp_path):
  """Nine prompts of very different lengths through four slots, with a rectangle
  and with pages; with tokens that all begin with, too, prefilled once."""
  torch_model = _model(family)
  torch_model.save_pretrained(tmp_path)
  config, params = weights.load(tmp_path, 'float32')
  rng = np.random.default_rng(0)
  first = tuple(map(int, rng.integers(0, 61, shared)))
  prompts = [np.append(np.array(first, int), rng.integers(0, 61, n))
             for n in (33, 1, 2, 30, 9, 17, 1, 5, 12)]
  engine = make_engine(
      config, params, slots=4, prompt_tokens=33 + shared, max_tokens=T, chunk=8,
      decoding=draw.Decoding(0.0), prefix=first,
      prompts=(9 + shared, 33 + shared), columns=(40 + shared, 60 + shared),
      page=page, pages=40)
  limits = rng.integers(T // 4, T + 1, (9, 1))
  got, stats = engine.sample(prompts, 1, limits)
  assert stats.chunks > 9 // 4
  for i, prompt in enumerate(prompts):
    with torch.no_grad():
      want = torch_model.generate(
          torch.tensor(prompt)[None], do_sample=False,
          attention_mask=torch.ones(1, len(prompt), dtype=int),
          max_new_tokens=int(limits[i, 0])).numpy()[0, len(prompt):]
    np.testing.assert_array_equal(got[i, 0].token_T, want)
