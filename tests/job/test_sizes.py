"""Sizes beyond the machine's memory are refused, with numbers."""

import time

import pytest

from configs import base
from configs import fields as fields_lib
from configs import methods
from configs import tiny
from tepo_jax import errors
from tepo_jax.job import configuration
from tepo_jax.job import sizes
from tepo_jax.runtime import host

HUGE = 10**13

# Integers that may be as large as one likes, and why.
UNBOUNDED = {
    'steps': 'a run may be stopped', 'data.limit': 'a set has so many problems',
    'eval.limit': 'a set has so many problems', 'data.skip_bad': 'the same',
    'rollout.max_generation_batches': 'sampling may end earlier',
    'rollout.slots': 'at most a completion each; see memory.check_cache',
    'lora.rank': 'see memory.check',
    'rollout.overlong_buffer': 'at most rollout.max_tokens',
    'rollout.max_left_out': 'at most all steps',
    'optimizer.warmup_steps': 'steps',
    'train.minibatch_prompts': 'divides rollout.prompts',
    'train.shared_prefix': 'less than data.max_prompt_tokens',
    'train.chunk_size': 'at most a microbatch',
    'eval.period': 'a period',
    'eval.top_k': 'at most the vocabulary', 'checkpoint.period': 'a period',
    'checkpoint.keep': 'at most all steps', 'checkpoint.keep_every': 'a period',
    'dump.period': 'a period', 'pretrain.worked_steps': 'steps',
    'pretrain.mixed_steps': 'steps', 'mesh.data': 'at most the devices',
    'mesh.fsdp': 'at most the devices', 'mesh.tensor': 'at most the devices',
    'reward.timeout': 'seconds'}

_INTEGERS = sorted(
    name for name, value in fields_lib.flat(tiny.get_config()).items()
    if type(value) is int and not name.startswith('method.'))
_INTEGERS += ['eval.samples', 'rollout.slots']


def _with(name, value):
  config = tiny.get_config()
  config.update_from_flattened_dict({name: value})
  return config


@pytest.mark.parametrize('name', sorted(set(_INTEGERS) - set(UNBOUNDED)))
def test_a_huge_size_is_refused_at_once(name):
  config, start = _with(name, HUGE), time.monotonic()
  with pytest.raises(errors.InputError) as error:
    configuration.check_values(config)
    sizes.check(config)
  assert time.monotonic() - start < 1
  message = str(error.value)
  assert f'{name.rpartition(".")[2]}={HUGE}' in message
  assert '\n' not in message


def test_every_bounded_field_is_an_integer_of_the_config():
  named = {name for bound in sizes.BOUNDS for name in bound.fields}
  assert named <= set(fields_lib.flat(tiny.get_config()))
  assert not named & set(UNBOUNDED)


def test_the_bound_is_the_machine_s_memory(monkeypatch):
  """32 x 8 completions of 24 + 48 tokens: 256 (8 · 72 + 24 · 48) bytes."""
  config = tiny.get_config()
  size = 256 * (8 * 72 + 24 * 48)
  bound = sizes.BOUNDS[0]
  assert bound.size(config) == size
  monkeypatch.setattr(sizes, 'BOUNDS', (bound,))
  monkeypatch.setattr(host, 'memory_bytes', lambda: size)
  sizes.check(config)
  monkeypatch.setattr(host, 'memory_bytes', lambda: size - 1)
  with pytest.raises(errors.InputError) as error:
    sizes.check(config)
  assert 'config.rollout.prompts=32, config.rollout.samples=8' in str(
      error.value)
  assert f'at least {size / 1e9:.4g} GB' in str(error.value)


@pytest.mark.parametrize('method', methods.methods(1e-3))
def test_the_paper_s_sizes_fit_a_small_host(method, monkeypatch):
  monkeypatch.setattr(host, 'memory_bytes', lambda: 2 * 10**9)
  sizes.check(base.get_config(method))
  sizes.check(tiny.get_config(method))


def test_a_container_s_limit_counts(tmp_path, monkeypatch):
  physical = host.memory_bytes()
  monkeypatch.setattr(host, '_CONTAINER_LIMIT', tmp_path / 'memory.max')
  for text, expected in (('max\n', None), ('1000\n', 1000), (None, None)):
    if text is None:
      (tmp_path / 'memory.max').unlink()
    else:
      (tmp_path / 'memory.max').write_text(text)
    found = host.memory_bytes()
    assert found == expected if expected else found >= physical
