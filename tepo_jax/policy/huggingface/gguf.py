"""A GGUF file of the Llama family -> a Hugging Face folder, without torch.

The `gguf` package reads and dequantises. What differs is the tensors' names,
the order of the rows of q and k, and that the tokenizer is metadata.

Axes: V vocabulary · N heads · H head size · D model.
"""

import json
import pathlib

import numpy as np
import tokenizers
from tokenizers import decoders
from tokenizers import models
from tokenizers import pre_tokenizers

from tepo_jax import errors
from tepo_jax.policy import transformer
from tepo_jax.policy.huggingface import families
from tepo_jax.policy.huggingface import tensor_files

_OUTSIDE = {
    'token_embd.weight': 'model.embed_tokens.weight',
    'output_norm.weight': 'model.norm.weight',
    'output.weight': 'lm_head.weight'}
_IN_LAYER = {
    'attn_norm': 'input_layernorm', 'attn_q': 'self_attn.q_proj',
    'attn_k': 'self_attn.k_proj', 'attn_v': 'self_attn.v_proj',
    'attn_output': 'self_attn.o_proj', 'ffn_norm': 'post_attention_layernorm',
    'ffn_gate': 'mlp.gate_proj', 'ffn_up': 'mlp.up_proj',
    'ffn_down': 'mlp.down_proj'}

# `tokenizer.ggml.pre` -> how text is cut before the merges. In transformers'
# own reader of GGUF files smollm is missing: it does not split digits.
_PRE_TOKENIZERS = {'smollm': lambda: pre_tokenizers.Sequence([
    pre_tokenizers.Digits(individual_digits=True),
    pre_tokenizers.ByteLevel(add_prefix_space=False)])}
_CONTROL = 3  # of tokenizer.ggml.token_type: a special token
_SPECIAL = {ours: f'tokenizer.ggml.{theirs}_token_id' for ours, theirs in (
    ('bos', 'bos'), ('eos', 'eos'), ('pad', 'padding'), ('unk', 'unknown'))}


def convert(file: pathlib.Path, folder: pathlib.Path) -> None:
  """Writes a folder that `weights.load` and transformers read: float32
  safetensors, config.json, tokenizer, chat template, generation_config.json.

  Raises:
    InputError: not a GGUF file, or what it holds is not supported.
  """
  reader = _open(file)
  known = {name: field.contents() for name, field in reader.fields.items()}
  folder.mkdir()
  try:
    config = _model_config(known, {t.name for t in reader.tensors})
    _write_tensors(folder, reader.tensors, config)
    ids = _write_tokenizer(folder, known)
  except KeyError as error:
    raise errors.InputError(f'{file}: no {error.args[0]}') from error
  except NotImplementedError as error:  # also raised by `gguf`
    raise errors.InputError(
        f'{file}: not supported: {errors.one_line(error)}') from error
  tensor_files.write_json(folder / 'generation_config.json', ids)
  tensor_files.write_json(folder / 'config.json', families.to_json(
      config, 'float32', ids | {'architectures': ['LlamaForCausalLM']}))


def _open(file):
  import gguf  # slow to import
  try:
    return gguf.GGUFReader(file)
  except (OSError, ValueError, IndexError) as error:
    raise errors.InputError(
        f'{file}: not a GGUF file ({errors.one_line(error)})') from error


def _model_config(known, names):
  """The ModelConfig in the metadata `known`."""
  if known['general.architecture'] != 'llama':
    raise NotImplementedError(f'architecture {known["general.architecture"]!r}')
  if any(name.startswith('llama.rope.scaling') for name in known):
    raise NotImplementedError('rope scaling')
  return transformer.ModelConfig(
      vocab_size=len(known['tokenizer.ggml.tokens']),
      d_model=known['llama.embedding_length'],
      num_layers=known['llama.block_count'],
      num_heads=known['llama.attention.head_count'],
      num_kv_heads=known['llama.attention.head_count_kv'],
      head_dim=known['llama.rope.dimension_count'],
      d_ff=known['llama.feed_forward_length'],
      max_position=known['llama.context_length'],
      rope_theta=known['llama.rope.freq_base'],
      norm_eps=float(str(np.float32(  # 1e-5, not 9.99999975e-06
          known['llama.attention.layer_norm_rms_epsilon']))),
      tie_embeddings='output.weight' not in names)


def _write_tensors(folder, tensors, config):
  import gguf
  places = tensor_files.create(folder, [
      (_name(t.name), np.dtype(np.float32), tuple(map(int, t.shape[::-1])))
      for t in tensors])
  heads = {'attn_q': config.num_heads, 'attn_k': config.num_kv_heads}
  for tensor, place in zip(tensors, places.values()):
    kind, data = tensor.name.split('.')[-2], tensor.data
    array = gguf.dequantize(data, tensor.tensor_type).reshape(place.shape)
    place[...] = _in_halves(array, heads[kind]) if kind in heads else array
    tensor_files.forget(place)


def _name(name):
  if name in _OUTSIDE:
    return _OUTSIDE[name]
  block, layer, kind, what = [*name.split('.'), *4 * ['']][:4]
  if block != 'blk' or kind not in _IN_LAYER or what != 'weight':
    raise NotImplementedError(f'tensor {name}')
  return f'model.layers.{layer}.{_IN_LAYER[kind]}.weight'


def _in_halves(array_OD, heads):
  """Reorders each head's H rows, O = N H: llama.cpp's are in rotary pairs, 0,
  H/2, 1, H/2 + 1, …"""
  pairs_NH2D = array_OD.reshape(heads, -1, 2, array_OD.shape[-1])
  return pairs_NH2D.swapaxes(1, 2).reshape(array_OD.shape)


def _write_tokenizer(folder: pathlib.Path, known) -> dict[str, int]:
  """Writes the tokenizer's files; returns the ids of bos, eos and padding."""
  kind, pre = known['tokenizer.ggml.model'], known['tokenizer.ggml.pre']
  tokens = known['tokenizer.ggml.tokens']
  if kind != 'gpt2' or pre not in _PRE_TOKENIZERS:
    raise NotImplementedError(f'tokenizer {kind} with {pre}')
  tokenizer = tokenizers.Tokenizer(models.BPE(
      {token: i for i, token in enumerate(tokens)},
      [tuple(pair.split()) for pair in known['tokenizer.ggml.merges']]))
  tokenizer.pre_tokenizer = _PRE_TOKENIZERS[pre]()
  tokenizer.decoder = decoders.ByteLevel()
  tokenizer.add_special_tokens([
      token for token, kind in zip(tokens, known['tokenizer.ggml.token_type'])
      if kind == _CONTROL])
  tokenizer.save(str(folder / 'tokenizer.json'))
  ids = {name: known[key] for name, key in _SPECIAL.items() if key in known}
  (folder / 'tokenizer_config.json').write_text(json.dumps({
      'tokenizer_class': 'PreTrainedTokenizerFast',
      'chat_template': known.get('tokenizer.chat_template'),
      'clean_up_tokenization_spaces': False,
      'model_max_length': known['llama.context_length'],
      **{f'{name}_token': tokens[i] for name, i in ids.items()},
  }, indent=2) + '\n')
  return {f'{name}_token_id': i for name, i in ids.items() if name != 'unk'}
