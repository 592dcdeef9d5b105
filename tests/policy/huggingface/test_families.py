"""config.json of the paper's models, as published, and what follows from it."""

import math

import jax
import pytest
import transformers

from tepo_jax.policy import rope
from tepo_jax.policy import transformer
from tepo_jax.policy.huggingface import families

_QWEN_7B = dict(
    architectures=['Qwen2ForCausalLM'], attention_dropout=0.0,
    hidden_act='silu', hidden_size=3584, intermediate_size=18944,
    max_position_embeddings=131072, max_window_layers=28, model_type='qwen2',
    num_attention_heads=28, num_hidden_layers=28, num_key_value_heads=4,
    rms_norm_eps=1e-6, rope_theta=1e6, sliding_window=131072,
    tie_word_embeddings=False, torch_dtype='bfloat16', use_mrope=False,
    use_sliding_window=False, vocab_size=152064)
_LLAMA_3 = dict(
    factor=8.0, high_freq_factor=4.0, low_freq_factor=1.0,
    original_max_position_embeddings=8192, rope_type='llama3')
_MISTRAL = dict(
    architectures=['MistralForCausalLM'], hidden_act='silu', hidden_size=4096,
    intermediate_size=14336, max_position_embeddings=32768,
    model_type='mistral', num_attention_heads=32, num_hidden_layers=32,
    num_key_value_heads=8, rms_norm_eps=1e-5, rope_theta=1e6,
    sliding_window=None, tie_word_embeddings=False, vocab_size=32000)

# The file's fields; its parameters by the hub's count; heads, key/value heads,
# their size; what else differs between the families.
PUBLISHED = {
    'Qwen2.5-7B': (_QWEN_7B, 7_615_616_512, (28, 4, 128), dict(
        rope_theta=1e6, qkv_bias=True, qk_norm=False)),
    'DeepSeek-R1-Distill-Qwen-7B': (
        _QWEN_7B | dict(rope_theta=10000, sliding_window=4096), 7_615_616_512,
        (28, 4, 128), dict(rope_theta=1e4, qkv_bias=True)),
    'Qwen3-14B': (dict(
        architectures=['Qwen3ForCausalLM'], attention_bias=False, head_dim=128,
        hidden_act='silu', hidden_size=5120, intermediate_size=17408,
        max_position_embeddings=40960, max_window_layers=40,
        model_type='qwen3', num_attention_heads=40, num_hidden_layers=40,
        num_key_value_heads=8, rms_norm_eps=1e-6, rope_scaling=None,
        rope_theta=1000000, sliding_window=None, tie_word_embeddings=False,
        use_sliding_window=False, vocab_size=151936), 14_768_307_200,
        (40, 8, 128), dict(qk_norm=True, qkv_bias=False, rope_theta=1e6)),
    'DeepSeek-R1-Distill-Llama-8B': (dict(
        architectures=['LlamaForCausalLM'], attention_bias=False,
        hidden_act='silu', hidden_size=4096, intermediate_size=14336,
        max_position_embeddings=131072, mlp_bias=False, model_type='llama',
        num_attention_heads=32, num_hidden_layers=32, num_key_value_heads=8,
        pretraining_tp=1, rms_norm_eps=1e-5, rope_scaling=_LLAMA_3,
        rope_theta=500000.0, tie_word_embeddings=False, vocab_size=128256),
        8_030_261_248, (32, 8, 128), dict(
            rope_theta=5e5, norm_eps=1e-5, rope_scaling=rope.RopeScaling(
                'llama3', 8.0, 8192, low_freq_factor=1.0,
                high_freq_factor=4.0))),
    'Mistral-7B-Instruct-v0.1': (
        _MISTRAL | dict(rope_theta=10000.0, sliding_window=4096),
        7_241_732_096, (32, 8, 128), dict(sliding_window=4096, rope_theta=1e4)),
    'Mistral-7B-Instruct-v0.2': (
        _MISTRAL, 7_241_732_096, (32, 8, 128), dict(rope_theta=1e6)),
    'Mistral-7B-Instruct-v0.3': (
        _MISTRAL | dict(vocab_size=32768), 7_248_023_552, (32, 8, 128),
        dict(rope_theta=1e6, norm_eps=1e-5)),
}


@pytest.mark.parametrize('name', PUBLISHED)
def test_published_configs(name):
  raw, parameters, heads, fields = PUBLISHED[name]
  config = families.from_json(raw, name)
  sizes = jax.tree.leaves(jax.tree.map(
      lambda leaf: math.prod(leaf.shape), transformer.abstract_params(config)))
  assert sum(sizes) == parameters
  assert (config.num_heads, config.num_kv_heads, config.head_dim) == heads
  fields = dict(sliding_window=None, num_full_layers=0) | fields
  assert {key: getattr(config, key) for key in fields} == fields
  # Written and read again, for transformers 4 and 5, it is the same model.
  assert families.from_json(families.to_json(config, 'bfloat16', raw), '') == (
      config)


def test_a_config_without_rope_theta_has_the_default_of_transformers():
  raw = dict(_MISTRAL)
  del raw['rope_theta']
  config = families.from_json(raw, '')
  published = transformers.MistralConfig(**raw)
  assert config.rope_theta == published.rope_parameters['rope_theta']
