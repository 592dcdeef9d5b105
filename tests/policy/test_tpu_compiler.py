"""What the TPU's own compiler says, without a TPU (needs libtpu)."""

import functools

import jax
import jax.numpy as jnp
import pytest

from tepo_jax.policy import attention
from tepo_jax.runtime import mesh as mesh_lib
from tepo_jax.tools.plan import chips
from tepo_jax.tools.plan import cost

pytest.importorskip('libtpu')
pytestmark = [pytest.mark.long, pytest.mark.usefixtures('optimized')]

LENGTH = 8192
# float32 scores of what one of the 2 x 2 devices has: 2 rows, 2 heads.
SCORES = 2 * 2 * LENGTH ** 2 * 4


@pytest.fixture(scope='module')
def mesh():
  devices = chips.topology('v5e:2x2').devices
  return mesh_lib.make({'data': 1, 'fsdp': 2, 'tensor': 2}, devices)


def _compiled(mesh, backend, window=None, size=128):
  """Attention of packed rows with its gradients, 4 heads over 2."""
  def loss(q, k, v, position, segment):
    return jnp.sum(attention.attend(
        q, k, v, position, None, window, backend, segment
    ).astype(jnp.float32))

  def rows(*shape, dtype=jnp.int32, axes=('batch', None)):
    return jax.ShapeDtypeStruct(
        (4, LENGTH, *shape), dtype, sharding=mesh_lib.shardings(mesh, axes))

  heads = functools.partial(
      rows, dtype=jnp.bfloat16, axes=('batch', None, 'heads', None))
  return jax.jit(mesh_lib.on_mesh(mesh, jax.grad(loss, (0, 1, 2)))).lower(
      heads(4, size), heads(2, size), heads(2, size), rows(), rows()).compile()


@pytest.mark.parametrize('window,size,blocks', [
    (None, 128, 16 * 17 // 2), (1000, 64, 1 + 2 + 14 * 3)])
def test_splash_compiles_and_holds_no_scores(mesh, window, size, blocks):
  compiled = _compiled(mesh, 'splash', window, size)
  # Forward, and the gradients of queries and of keys with values.
  assert compiled.as_text().count('custom_call_target="tpu_custom_call"') == 3
  assert compiled.memory_analysis().temp_size_in_bytes < SCORES / 8
  # What a plan counts: nine products of the blocks of 512, 2 rows, 2 heads.
  assert cost.of(compiled.as_text()).flops == (
      9 * 2 * 2 * 2 * blocks * 512 ** 2 * size)


@pytest.mark.nightly
def test_xla_holds_the_scores_of_a_block(mesh):
  """Of eight; several arrays of that shape, in the backward pass too."""
  compiled = _compiled(mesh, 'xla')
  assert compiled.memory_analysis().temp_size_in_bytes < 3 * SCORES / 8
