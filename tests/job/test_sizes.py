"""Sizes beyond the machine's memory are refused, with numbers."""

import time

import pytest

from configs import base
from configs import methods
from configs import tiny
from tepo_jax import errors
from tepo_jax.job import configuration
from tepo_jax.job import sizes
from tepo_jax.runtime import host

HUGE = 10**13


def _with(name, value):
  config = tiny.get_config()
  config.update_from_flattened_dict({name: value})
  return config


@pytest.mark.parametrize('name', [
    'rollout.prompts', 'rollout.samples', 'rollout.max_tokens',
    'data.max_prompt_tokens', 'grading.workers'])
def test_a_huge_size_is_refused_at_once(name):
  config, start = _with(name, HUGE), time.monotonic()
  with pytest.raises(errors.InputError) as error:
    configuration.check_values(config)
    sizes.check(config)
  assert time.monotonic() - start < 1
  message = str(error.value)
  assert f'{name.rpartition(".")[2]}={HUGE}' in message
  assert '\n' not in message


def test_the_bound_is_the_machine_s_memory(monkeypatch):
  """32 x 8 completions of 24 + 48 tokens: 256 (8 · 72 + 24 · 48) bytes."""
  config = tiny.get_config()
  config.grading.workers = 0
  size = 256 * (8 * 72 + 24 * 48)
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
