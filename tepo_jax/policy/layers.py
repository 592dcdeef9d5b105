"""The modules that hold the transformer's parameters, with their logical axes.

Axes: M tokens, I inputs, O outputs, R rank of an adapter.
"""

from typing import Any

from flax import linen as nn
import jax
import jax.numpy as jnp

from tepo_jax.policy import lora as lora_lib
from tepo_jax.policy import ops as ops_lib

INIT_STDDEV = 0.02  # of every kernel and the embedding
_TRANSPOSED = 'transposed_kernel'
_INT8, _SCALE = 'int8_kernel', 'kernel_scale'
_INT8_MAX = 127


class Norm(nn.Module):
  """RMSNorm over the last axis, in float32."""

  eps: float

  @nn.compact
  def __call__(self, x):
    scale = self.param(
        'scale', nn.with_logical_partitioning(nn.initializers.ones, ('norm',)),
        (x.shape[-1],))
    x32 = x.astype(jnp.float32)
    variance = jnp.mean(jnp.square(x32), axis=-1, keepdims=True)
    return (x32 * jax.lax.rsqrt(variance + self.eps)
            * scale.astype(jnp.float32)).astype(x.dtype)


class Linear(nn.Module):
  """x @ kernel (+ bias) (+ scale (x @ lora_a) @ lora_b), on [M, inputs].

  The adapter starts as 0: A uniform in ±1/√I, B = 0 (arXiv 2106.09685, as in
  peft). Also takes the parameters that `transposed` and `quantized` return.
  """

  features: int
  axes: tuple[str | None, str | None]
  use_bias: bool = False
  lora: lora_lib.Lora | None = None
  ops: ops_lib.Ops = ops_lib.PLAIN

  @nn.compact
  def __call__(self, x_MI):
    inputs, dtype = x_MI.shape[-1], x_MI.dtype
    if self.has_variable('params', _TRANSPOSED):
      kernel_OI = self.get_variable('params', _TRANSPOSED)
      y_MO = self.ops.transposed_linear(x_MI, kernel_OI.astype(dtype))
    elif self.has_variable('params', _INT8):
      kernel_IO, scale_O = (
          self.get_variable('params', name) for name in (_INT8, _SCALE))
      y_MO = x_MI @ kernel_IO.astype(dtype) * scale_O.astype(dtype)
    else:
      kernel_IO = self._param(
          'kernel', nn.initializers.normal(INIT_STDDEV), self.axes,
          (inputs, self.features))
      y_MO = x_MI @ kernel_IO.astype(dtype)
    if self.use_bias:
      bias_O = self._param(
          'bias', nn.initializers.zeros, self.axes[1:], (self.features,))
      # The bias's gradient, a sum over M, is wrong by 1 % and more in bfloat16.
      wide = jnp.promote_types(dtype, jnp.float32)
      y_MO = (y_MO.astype(wide) + bias_O.astype(dtype).astype(wide)
              ).astype(dtype)
    if self.lora is not None and f'{self.name}_proj' in self.lora.targets:
      a_IR = self._param(
          'lora_a',
          nn.initializers.variance_scaling(1 / 3, 'fan_in', 'uniform'),
          (self.axes[0], None), (inputs, self.lora.rank))
      b_RO = self._param(
          'lora_b', nn.initializers.zeros, (None, self.axes[1]),
          (self.lora.rank, self.features))
      y_MR = x_MI @ a_IR.astype(dtype)
      y_MO += y_MR @ b_RO.astype(dtype) * self.lora.scale
    return y_MO

  def _param(self, name, init, axes, shape):
    return self.param(name, nn.with_logical_partitioning(init, axes), shape)


class Gated(Linear):
  """Linear(silu(gate) * up).

  Under `nn.remat` the backward pass recomputes the product from gate and up,
  which it keeps anyway.
  """

  def __call__(self, gate_MI, up_MI):
    return super().__call__(nn.silu(gate_MI) * up_MI)


class Weight(nn.Module):
  """One parameter without an operation: the embedding table, the head."""

  leaf: str
  shape: tuple[int, int]
  axes: tuple[str, str]

  @nn.compact
  def __call__(self):
    return self.param(self.leaf, nn.with_logical_partitioning(
        nn.initializers.normal(INIT_STDDEV), self.axes), self.shape)


def transposed(layer: dict[str, Any]) -> dict[str, Any]:
  """A layer's parameters with kernels stored as [O, I], for CPU decoding.

  Accepts parameters or logical axes. XLA's CPU backend first copies the second
  operand of a product, which for one token a row takes as long as the product.
  """
  return _replaced(layer, lambda kernel: {
      _TRANSPOSED: kernel[::-1] if isinstance(kernel, tuple) else kernel.T})


def quantized(layer: dict[str, Any]) -> dict[str, Any]:
  """A layer's parameters with each kernel as int8 and a scale per output.

  W[i, o] ≈ q[i, o] · scale[o], scale[o] = maxᵢ |W[i, o]| / 127, rounded to the
  dtype of W before q is, so that it rounds nothing later. Accepts parameters or
  logical axes. Norms, biases and adapters stay as they are.
  """
  def one(kernel):
    if isinstance(kernel, tuple):
      return {_INT8: kernel, _SCALE: kernel[1:]}
    largest_O = jnp.max(jnp.abs(kernel), axis=0).astype(jnp.float32)
    scale_O = (jnp.where(largest_O > 0, largest_O, 1) / _INT8_MAX).astype(
        kernel.dtype)
    steps_IO = jnp.round(
        kernel.astype(jnp.float32) / scale_O.astype(jnp.float32))
    return {_INT8: jnp.clip(steps_IO, -_INT8_MAX, _INT8_MAX).astype(jnp.int8),
            _SCALE: scale_O}

  return _replaced(layer, one)


def _replaced(layer, replace):
  """The layer's parameters with what `replace` makes of each kernel."""
  if 'kernel' in layer:
    others = {name: x for name, x in layer.items() if name != 'kernel'}
    return replace(layer['kernel']) | others
  return {name: _replaced(x, replace) if isinstance(x, dict) else x
          for name, x in layer.items()}
