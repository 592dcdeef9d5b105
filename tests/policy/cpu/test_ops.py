"""The CPU's table against the plain one, operation by operation."""

import dataclasses
import functools
import math
import re

import jax
from jax import numpy as jnp
import numpy as np
import pytest

from configs import tiny
from tepo_jax.job import programs as programs_lib
from tepo_jax.policy import cache as cache_lib
from tepo_jax.policy import ops
from tepo_jax.policy import transformer
from tepo_jax.policy.cpu import ops as cpu_ops
from tepo_jax.runtime import mesh as mesh_lib

MODEL = transformer.ModelConfig(
    vocab_size=32, d_model=16, num_layers=1, num_heads=2, num_kv_heads=1,
    head_dim=8, d_ff=16, max_position=32)


def _normal(*shapes):
  rng = np.random.default_rng(0)
  return [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]


def test_every_operation_has_a_form():
  for field in dataclasses.fields(ops.Ops):
    assert getattr(cpu_ops.OPS, field.name) is not getattr(
        ops.PLAIN, field.name)


def _block(queries):
  """Arguments of `attend_block`: 3 rows, 2 heads for 5 queries each, 48 keys.
  """
  visible = np.random.default_rng(1).random((3, queries, 48)) < 0.5
  return (*_normal((3, queries, 2, 5, 8), (3, 48, 2, 8), (3, 48, 2, 8)),
          visible)


def test_a_block_of_attention_and_its_gradients():
  *arrays, visible = _block(queries=7)

  def results(table):
    return jax.vjp(
        lambda *x: table.attend_block(*x, visible), *arrays)

  (got, got_vjp), (want, want_vjp) = map(results, (cpu_ops.OPS, ops.PLAIN))
  np.testing.assert_allclose(got, want, rtol=0, atol=1e-6)
  for x, y in zip(got_vjp(want), want_vjp(want), strict=True):
    np.testing.assert_allclose(x, y, rtol=0, atol=1e-5)


@pytest.mark.parametrize('queries', [1, 7])
def test_no_product_transposes_the_scores(queries):
  """As compiled for a CPU: that would take longer than the product."""
  program = jax.jit(cpu_ops.OPS.attend_block).lower(*_block(queries)).compile()
  moved = [math.prod(map(int, shape.split(','))) for shape in re.findall(
      r' = f32\[([\d,]+)\]\S* (?:transpose|copy)\(', program.as_text())]
  assert moved and 3 * 10 * queries * 48 not in moved


@pytest.mark.parametrize('inputs, outputs', [(3, 5), (5, 3), (4, 4)])
def test_a_transposed_kernel(inputs, outputs):
  x_MI, kernel_OI = _normal((6, inputs), (outputs, inputs))
  np.testing.assert_allclose(
      cpu_ops.transposed_linear(x_MI, kernel_OI),
      np.float64(x_MI) @ np.float64(kernel_OI).T, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('tied', [True, False])
def test_logits_contract_the_last_axis_of_the_first_operand(tied):
  """As compiled with the transpose that follows in `draw`; and their values."""
  generator = np.random.default_rng(0)
  hidden_MD, weight = (
      jnp.asarray(generator.normal(size=shape), jnp.float32)
      for shape in ((6, 32), (48, 32) if tied else (32, 48)))
  program = jax.jit(lambda *x: 2 * cpu_ops.OPS.decoding_logits(*x, tied).T
                    ).lower(hidden_MD, weight).compile()
  contracted = re.findall(r'lhs_contracting_dims={(\d)}', program.as_text())
  assert contracted == ['1']
  weight_DV = np.float64(weight).T if tied else np.float64(weight)
  np.testing.assert_allclose(
      program(hidden_MD, weight), 2 * (np.float64(hidden_MD) @ weight_DV).T,
      atol=2e-5)


def test_kernels_are_transposed_if_the_table_has_a_product_for_that():
  params = transformer.abstract_params(MODEL)
  for table, leaf, shape, names in (
      (ops.PLAIN, 'kernel', (16, 8), ('embed', 'kv_heads')),
      (cpu_ops.OPS, 'transposed_kernel', (8, 16), ('kv_heads', 'embed'))):
    config = dataclasses.replace(MODEL, ops=table)
    layer, = jax.eval_shape(
        functools.partial(cache_lib.convert, config), params)['layers']
    assert layer['k'][leaf].shape == shape
    assert cache_lib.logical_axes(config)['layers'][0]['k'][leaf] == names


def test_the_platform_of_the_mesh_chooses_the_table():
  model = programs_lib.execution(
      MODEL, tiny.get_config('tepo').compute,
      mesh_lib.make(dict(data=1, fsdp=1, tensor=1), jax.devices()[:1]))
  assert model.ops is cpu_ops.OPS
