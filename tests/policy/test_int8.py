"""Kernels as int8, for decoding."""

import dataclasses

import jax
from jax import numpy as jnp
import numpy as np
import pytest
import torch

from tepo_jax.policy import cache as cache_lib
from tepo_jax.policy import layers
from tepo_jax.policy import lora
from tepo_jax.policy import transformer

MODEL = transformer.ModelConfig(
    vocab_size=48, d_model=24, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=8, d_ff=40, max_position=32, qkv_bias=True, qk_norm=True,
    lora=lora.Lora(2, 4.0))


def _kernel(dtype):
  kernel_IO = np.random.default_rng(0).normal(0, .1, (96, 32))
  kernel_IO[:, 3] = 0
  kernel_IO[5, 4] = -9  # alone far from the rest of its output
  return jnp.asarray(kernel_IO, dtype)


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_int8_is_torch_s_quantization_by_output(dtype):
  kernel_IO = _kernel(dtype)
  got = layers.quantized({'o': {'kernel': kernel_IO, 'bias': 0}})['o']
  assert got.keys() == {'int8_kernel', 'kernel_scale', 'bias'}
  assert got['int8_kernel'].dtype == 'int8'
  assert got['kernel_scale'].dtype == dtype
  scale_O = np.float64(got['kernel_scale'])
  theirs = torch.fake_quantize_per_channel_affine(
      torch.tensor(np.float32(kernel_IO)), torch.tensor(np.float32(scale_O)),
      torch.zeros(32, dtype=torch.int32), 1, -127, 127)
  np.testing.assert_allclose(
      got['int8_kernel'] * scale_O, theirs.numpy(), rtol=1e-6)
  largest_O = np.abs(np.float64(kernel_IO)).max(0)
  used = np.arange(32) != 3
  rounding = {'float32': 2.**-23, 'bfloat16': 2.**-8}[dtype]
  np.testing.assert_allclose(
      scale_O[used], largest_O[used] / 127, rtol=rounding)
  assert not np.any(got['int8_kernel'][:, 3])


def _as_float(layer):
  """The kernels that `quantized` parameters stand for."""
  if 'int8_kernel' not in layer:
    return {name: _as_float(x) if isinstance(x, dict) else x
            for name, x in layer.items()}
  others = {name: x for name, x in layer.items()
            if name not in ('int8_kernel', 'kernel_scale')}
  return {'kernel': layer['int8_kernel'] * layer['kernel_scale'], **others}


@pytest.mark.long
def test_a_model_with_int8_kernels_computes_what_they_stand_for():
  """Biases, norms, adapters, embedding and head are those of the policy."""
  params = jax.tree.map(
      lambda x: x + .1 * jax.random.normal(jax.random.key(1), x.shape),
      transformer.init(MODEL, jax.random.key(0)))
  quantized = cache_lib.convert(MODEL, params, int8=True)
  plain = {**quantized, 'layers': tuple(map(_as_float, quantized['layers']))}
  token_BS = np.arange(12, dtype=np.int32).reshape(2, 6)
  position_BS = np.tile(np.arange(6, dtype=np.int32), (2, 1))

  @jax.jit
  def logits(params):
    cache = cache_lib.init_cache(MODEL, 2, 6, 'float32')
    hidden, _ = transformer.forward(
        MODEL, params, token_BS, position_BS, cache)
    return transformer.logits(MODEL, params, hidden)

  got, want = logits(quantized), logits(plain)
  np.testing.assert_allclose(got, want, atol=1e-5)
  exact = logits(cache_lib.convert(MODEL, params))
  assert 1e-4 < np.abs(got - exact).max() < .1  # the rounding is there


def test_int8_kernels_are_cut_like_the_kernels():
  """A scale like the outputs; nothing else changes its axes."""
  config = dataclasses.replace(MODEL, lora=None)
  plain, quantized = (cache_lib.logical_axes(config, int8)['layers'][1]
                      for int8 in (False, True))
  for name in ('q', 'o', 'down'):
    kernel, scale = (
        quantized[name][leaf] for leaf in ('int8_kernel', 'kernel_scale'))
    assert kernel == plain[name]['kernel'] and scale == kernel[1:]
  assert quantized['q']['bias'] == plain['q']['bias']
