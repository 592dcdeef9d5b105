"""What an update recomputes; full memory is explained."""

import math
from unittest import mock

import jax
from jax import numpy as jnp
import pytest

from configs import tiny
from tepo_jax import errors
from tepo_jax.job import memory as memory_lib
from tepo_jax.job import programs as programs_lib
from tepo_jax.policy import transformer
from tepo_jax.runtime import mesh as mesh_lib
from tepo_jax.tools.plan import chips


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


@pytest.mark.parametrize('platform, peak, temporaries', [
    ('tpu', 90, 30), ('tpu', 200, 40), ('tpu', 10, 0),
    ('tpu', 0, 40),  # not known, as of a program from a cache
    ('gpu', 90, 40), ('cpu', 90, 40)])
def test_the_smaller_count_of_temporaries(platform, peak, temporaries):
  """50 bytes of arguments, 40 of outputs of which 30 are also arguments."""
  compiled = mock.Mock()
  compiled.memory_analysis.return_value = mock.Mock(
      argument_size_in_bytes=50, output_size_in_bytes=40,
      alias_size_in_bytes=30, temp_size_in_bytes=40,
      generated_code_size_in_bytes=5, peak_memory_in_bytes=peak)
  assert memory_lib.program_bytes(compiled, platform) == (
      50, 10, temporaries, 5)


@pytest.mark.long
def test_a_tpu_program_takes_what_is_alive_at_its_peak():
  """XLA refuses the program of the first size at which our count, which grows
  with its layers, is above a v6e's memory."""
  pytest.importorskip('libtpu')
  chip = chips.topology('v6e:1x1')
  device = jax.sharding.SingleDeviceSharding(chip.devices[0])

  def update(weights, moment, x):  # the first two are donated
    def loss(weights):
      layer = jax.checkpoint(lambda x, w: (jnp.tanh(x @ w), None))
      return jnp.sum(jax.lax.scan(layer, x, weights)[0] ** 2)

    moment = .9 * moment + jax.grad(loss)(weights)
    return weights - moment, moment

  def bytes_of(layers):
    weights, x = (jax.ShapeDtypeStruct(shape, jnp.float32, sharding=device)
                  for shape in ((layers, 4096, 4096), (8192, 4096)))
    compiled = jax.jit(update, donate_argnums=(0, 1)).lower(
        weights, weights, x).compile()
    found = compiled.memory_analysis()
    return memory_lib.program_bytes(compiled, 'tpu'), (
        found.argument_size_in_bytes + found.temp_size_in_bytes)

  limit = chip.chip.hbm_bytes
  (few, _), (more, by_sizes) = bytes_of(100), bytes_of(108)
  a_layer = (sum(more) - sum(few)) / 8
  assert sum(more) < limit < by_sizes
  fit = 108 + int((limit - sum(more)) / a_layer)
  assert sum(bytes_of(fit)[0]) <= limit
  with pytest.raises(jax.errors.JaxRuntimeError, match='RESOURCE_EXHAUSTED'):
    bytes_of(fit + 1)
