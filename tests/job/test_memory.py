"""What an update recomputes; full memory is explained."""

import math

import jax
import pytest

from configs import tiny
from tepo_jax import errors
from tepo_jax.job import memory as memory_lib
from tepo_jax.job import programs as programs_lib
from tepo_jax.policy import transformer
from tepo_jax.runtime import mesh as mesh_lib


def test_full_memory_is_explained_whatever_the_exception(monkeypatch):
  monkeypatch.setattr(memory_lib, '_describe_held', lambda *_: 'it holds 3')
  full = pytest.raises(jax.errors.JaxRuntimeError, match='of 4 B; it holds 3')
  with full, memory_lib.explaining_exhaustion(None, None):
    raise ValueError('RESOURCE_EXHAUSTED: of 4 B')
  for other in (ValueError('another'), errors.RunError(
      'checkpoint could not be saved: RESOURCE_EXHAUSTED: No space left on '
      'device')):
    with pytest.raises(type(other), match=f'^{other}$'):
      with memory_lib.explaining_exhaustion(None, None):
        raise other


def test_an_update_recomputes_no_more_than_it_must():
  """Bytes by policy, a limit, where to begin -> what is compiled."""
  config = tiny.get_config('grpo')
  config.compute.remat = 'auto'
  small = transformer.ModelConfig(
      vocab_size=32, d_model=16, num_layers=1, num_heads=2, num_kv_heads=1,
      head_dim=8, d_ff=16, max_position=128)
  mesh = mesh_lib.make(config.mesh, jax.devices()[:1])
  programs = programs_lib.make(
      config, programs_lib.prepare_model(small, config, mesh), mesh)
  sizes = {'none': math.inf, 'dots': 4e9, 'mlp': 3e9, 'full': 2e9}
  for limit, begin, tried in (
      (4e9, None, ('none', 'dots')), (3.9e9, 'dots', ('dots', 'mlp')),
      (9e9, 'mlp', ('mlp',)), (1e9, None, tuple(sizes)),
      (1e4, None, ('full',))):  # the arrays that stay alone do not fit
    asked = []

    def size_of(programs):
      asked.append(programs.model.remat)  # pylint: disable=cell-var-from-loop
      return sizes[programs.model.remat]

    found, size = memory_lib.fitted(
        config, programs, size_of, limit=limit, begin=begin)
    assert tuple(asked) == tried
    assert found.model.remat == found.scorer.model.remat == tried[-1]
    assert size == sizes[tried[-1]]
  config.compute.remat = 'full'
  assert memory_lib.fitted(config, programs, None) == (programs, None)
