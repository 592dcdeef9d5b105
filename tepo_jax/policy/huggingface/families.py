"""Hugging Face's config.json <-> ModelConfig: one table of families.

A row maps an architecture's name to what transformers' class of that name does
beyond the common architecture. A field of config.json that would change the
computed function and is not implemented is rejected by name.
"""

import dataclasses
import math
from typing import Any

from tepo_jax import errors
from tepo_jax.policy import rope
from tepo_jax.policy import transformer


@dataclasses.dataclass(frozen=True)
class Family:
  """What transformers' class does beyond RMSNorm, RoPE, GQA and SwiGLU."""

  model_type: str
  qkv_bias: bool = False
  qk_norm: bool = False
  # Whether the class reads `sliding_window`: 'never'; 'always'; 'switched': if
  # use_sliding_window is set, for the layers from max_window_layers on.
  window: str = 'never'


# Ordered: `to_json` takes the first family that can express the config.
FAMILIES = {
    'LlamaForCausalLM': Family('llama'),
    'Qwen2ForCausalLM': Family('qwen2', qkv_bias=True, window='switched'),
    'Qwen3ForCausalLM': Family('qwen3', qk_norm=True, window='switched'),
    'MistralForCausalLM': Family('mistral', window='always'),
}

# Fields and their supported values. Any other value changes the function, in
# the families above or in models derived from them.
_ONLY = {
    'hidden_act': ('silu',), 'attention_bias': (False, None),
    'mlp_bias': (False, None), 'partial_rotary_factor': (1.0, None),
    'quantization_config': (None,), 'num_experts': (None, 0),
    'num_local_experts': (None, 0), 'n_routed_experts': (None, 0)}

_SIZES = {
    'vocab_size': 'vocab_size', 'hidden_size': 'd_model',
    'num_hidden_layers': 'num_layers', 'num_attention_heads': 'num_heads',
    'intermediate_size': 'd_ff', 'max_position_embeddings': 'max_position'}

# No model is larger; a file that says so is damaged, and would fill the memory.
_MOST_LAYERS, _MOST = 10_000, 2**31 - 1


def from_json(raw: dict[str, Any], where: str) -> transformer.ModelConfig:
  """The ModelConfig of a parsed config.json, of transformers 4 or 5.

  `where` is its path, for the messages.

  Raises:
    InputError: a field is missing or not supported; names the field.
  """
  names = raw.get('architectures')
  if names not in [[name] for name in FAMILIES]:
    raise errors.InputError(
        f'{where}: architectures {names} is not supported (one of '
        f'{", ".join(FAMILIES)})')
  family = FAMILIES[names[0]]
  for name, values in _ONLY.items():
    if name in raw and raw[name] not in values:
      raise errors.InputError(
          f'{where}: {name} = {raw[name]!r} is not supported')
  sizes = {ours: _number(raw, name, where) for name, ours in _SIZES.items()}
  if sizes['num_layers'] > _MOST_LAYERS:
    raise errors.InputError(
        f'{where}: num_hidden_layers = {sizes["num_layers"]} is not usable')
  heads = sizes['num_heads']
  kv_heads = _number(raw, 'num_key_value_heads', where, heads)
  head_dim = _number(raw, 'head_dim', where, sizes['d_model'] // heads)
  if heads % kv_heads or head_dim % 2:
    raise errors.InputError(
        f'{where}: {heads} query heads over {kv_heads} key/value heads of '
        f'size {head_dim} is not supported (a multiple, an even size)')
  window, full_layers = _window(raw, family, sizes['num_layers'], where)
  theta, scaling = _rope(raw, sizes['max_position'], where)
  return transformer.ModelConfig(
      **sizes, num_kv_heads=kv_heads, head_dim=head_dim, rope_theta=theta,
      rope_scaling=scaling,
      norm_eps=_number(raw, 'rms_norm_eps', where, 1e-6, float),
      tie_embeddings=bool(raw.get('tie_word_embeddings')),
      qkv_bias=family.qkv_bias, qk_norm=family.qk_norm,
      sliding_window=window, num_full_layers=full_layers)


def to_json(config: transformer.ModelConfig, dtype: str,
            source: dict[str, Any] | None = None) -> dict[str, Any]:
  """A config.json that transformers 4 and 5 read as `config`.

  Execution fields are not written; `dtype` is of the saved tensors. The
  architecture of `source`, the config.json that the model came from, is kept
  where it can express `config`; its other fields (token ids) are carried over.
  """
  source = dict(source or {})
  names = source.get('architectures', []) + list(FAMILIES)
  for name in names:
    raw = {**source, **_fields(config, name, dtype)}
    raw.pop('layer_types', None)  # transformers derives it from the others
    if _same(config, raw):
      return raw
  raise errors.InputError(
      f'no architecture of {", ".join(FAMILIES)} can express {config}')


def _same(config, raw):
  try:
    parsed = from_json(raw, '')
  except errors.InputError:
    return False
  return config == dataclasses.replace(parsed, **{
      name: getattr(config, name) for name in transformer.EXECUTION_FIELDS})


def _fields(config, name, dtype):
  """The fields of config.json that `from_json` reads."""
  family = FAMILIES.get(name, Family(''))
  fields = {name: getattr(config, ours) for name, ours in _SIZES.items()}
  fields |= {
      'architectures': [name], 'model_type': family.model_type,
      'num_key_value_heads': config.num_kv_heads, 'head_dim': config.head_dim,
      'hidden_act': 'silu', 'rms_norm_eps': config.norm_eps,
      'tie_word_embeddings': config.tie_embeddings,
      'dtype': dtype, 'torch_dtype': dtype, 'use_cache': True,
  }
  if family.window != 'never':
    fields['sliding_window'] = config.sliding_window
  if family.window == 'switched':
    fields['use_sliding_window'] = config.sliding_window is not None
    fields['max_window_layers'] = (
        config.num_layers if config.sliding_window is None
        else config.num_full_layers)
  return fields | _rope_fields(config)


def _window(raw, family, num_layers, where):
  """(window or None, number of first layers that ignore the window)."""
  window, full_layers = None, 0
  kinds = raw.get('layer_types')
  if not isinstance(kinds, list | None):
    raise errors.InputError(f'{where}: layer_types = {kinds!r} is not a list')
  if family.window == 'always' or (
      family.window == 'switched' and raw.get('use_sliding_window')):
    window = raw.get('sliding_window', 4096)
  if window is not None:
    window = _number(raw, 'sliding_window', where, 4096)
    if family.window == 'switched':
      full_layers = _number(raw, 'max_window_layers', where, 28, least=0)
      if kinds is not None:
        full_layers = kinds.count('full_attention')
  full_layers = min(full_layers, num_layers)
  if window is None or full_layers == num_layers:
    window, full_layers = None, 0
  sliding = 0 if window is None else num_layers - full_layers
  plain = ['full_attention'] * (num_layers - sliding)
  if kinds is not None and len(kinds) != num_layers:
    raise errors.InputError(
        f'{where}: num_hidden_layers is {num_layers}, but layer_types has '
        f'{errors.counted(len(kinds), "layer")}')
  if kinds is not None and kinds != plain + ['sliding_attention'] * sliding:
    raise errors.InputError(
        f'{where}: layer_types {kinds} is not supported: only full attention '
        'in the first layers and the sliding window in the others')
  return window, full_layers


def _rope(raw, max_position, where):
  """(theta, RopeScaling or None), from the fields of transformers 5 or 4."""
  settings = raw.get('rope_scaling') or raw.get('rope_parameters') or {}
  nested = not isinstance(settings, dict) or any(
      isinstance(value, dict) for value in settings.values())
  kind = 'nested' if nested else (
      settings.get('rope_type') or settings.get('type') or 'default')
  if kind not in ('default', 'linear', 'llama3', 'yarn'):
    raise errors.InputError(
        f'{where}: rope type {kind!r} is not supported (default, linear, '
        'llama3 or yarn)')
  if settings.get('partial_rotary_factor') not in _ONLY[
      'partial_rotary_factor']:
    raise errors.InputError(
        f'{where}: rope partial_rotary_factor = '
        f'{settings["partial_rotary_factor"]!r} is not supported')
  # If both places have a field, transformers uses these.
  merged = {**raw, **settings}
  original = 'original_max_position_embeddings'
  if raw.get(original) is not None:
    merged[original] = raw[original]

  def number(name, default=None, kind=float):
    return _number(merged, name, where, default, kind)

  theta = number('rope_theta', 1e4)
  if kind == 'default':
    return theta, None
  if kind == 'linear':
    return theta, rope.RopeScaling(kind, number('factor'))
  original = number(original, max_position, int)
  if kind == 'llama3':
    return theta, rope.RopeScaling(
        kind, number('factor'), original,
        low_freq_factor=number('low_freq_factor'),
        high_freq_factor=number('high_freq_factor'))
  # transformers reads a yarn factor of null as the ratio of the contexts.
  factor = number('factor', max_position / original)
  return theta, rope.RopeScaling(
      kind, factor, original,
      beta_fast=number('beta_fast', 32.0), beta_slow=number('beta_slow', 1.0),
      attention_factor=number('attention_factor', _yarn_attention(
          factor, *(_number(settings, name, where, kind=float)
                    for name in ('mscale', 'mscale_all_dim')
                    if settings.get(name)))),
      truncate=settings.get('truncate') is not False)


def _yarn_attention(factor, *scales):
  """The default factor on cos and sin: 0.1 ln(factor) + 1 (2309.00071).

  scales: mscale and mscale_all_dim, which count only if both are given.
  """
  def scale(weight):
    return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0

  if len(scales) == 2:
    return scale(scales[0]) / scale(scales[1])
  return scale(1.0)


def _rope_fields(config):
  """The rope settings under the names of transformers 4 and of 5."""
  scaling = config.rope_scaling
  fields = {'rope_type': 'default'}
  if scaling is not None:
    fields = {'rope_type': scaling.kind, 'factor': scaling.factor}
    names = {
        'linear': (),
        'llama3': ('low_freq_factor', 'high_freq_factor'),
        'yarn': ('beta_fast', 'beta_slow', 'attention_factor', 'truncate'),
    }[scaling.kind]
    fields |= {name: getattr(scaling, name) for name in names}
    if names:
      fields['original_max_position_embeddings'] = (
          scaling.original_max_position)
  return {
      'rope_theta': config.rope_theta,
      'rope_scaling': None if scaling is None else fields,
      'rope_parameters': {'rope_theta': config.rope_theta, **fields},
  }


def _number(raw, name, where, default=None, kind=int, least=1):
  """A positive number of type `kind` of config.json; `default` if absent."""
  value = raw.get(name)
  value = default if value is None else value
  whole = type(value) is int and value <= _MOST
  if kind is float and (whole or type(value) is float) and (
      0 < value < math.inf):
    return float(value)
  if kind is int and whole and value >= least:
    return value
  problem = 'is missing' if value is None else f'= {value!r} is not usable'
  raise errors.InputError(f'{where}: {name} {problem}')
