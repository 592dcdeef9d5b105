"""The CPU's attention: what it skips, and what XLA makes of it.

`tests/policy/test_attention.py` has its values and gradients.
"""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tepo_jax.policy import attention
from tepo_jax.policy.cpu import block_attention
from tepo_jax.policy.cpu import packed_attention
from tepo_jax.runtime import mesh as mesh_lib

pytestmark = pytest.mark.usefixtures('quick_compile')


def _attend(q, k, v, position, window, segment):
  return packed_attention.attend(q, k, v, position, None, window, segment)


@pytest.mark.parametrize('window,unseen', [(None, 128), (32, 192)])
def test_hidden_blocks_are_skipped(window, unseen):
  """NaN in the values of a row's first sequence, or of all columns before the
  window, stay within the blocks that hold them: forward and backward."""
  length, first = 310, 128
  rng = np.random.RandomState(7)
  q, k, v = rng.randn(3, 1, length, 2, 8).astype(np.float32)
  sizes = first, length - first
  position = np.concatenate(list(map(np.arange, sizes)))[None]
  segment = np.repeat(np.arange(2), sizes)[None]
  v[:, :unseen] = np.nan
  last = slice(256, length)  # a block of queries, not a whole one

  def total(q, k, v):
    out = _attend(q, k, v, position, window, segment)
    return jnp.sum(out[:, last] ** 2), out

  gradients, out = jax.jit(
      jax.grad(total, argnums=(0, 1, 2), has_aux=True))(q, k, v)
  assert np.isfinite(out[:, last]).all()
  assert np.isnan(out[:, :first]).all()
  assert np.isfinite(gradients[0][:, last]).all()


def test_a_query_that_sees_nothing_has_no_gradient(monkeypatch):
  monkeypatch.setattr(packed_attention, '_SHORT', 0)
  q, k, v = np.random.RandomState(8).randn(3, 1, 70, 2, 8).astype(np.float32)
  position = np.where(np.arange(70) < 60, np.arange(70), -1)[None]

  def total(q, k, v):
    out = _attend(q, k, v, position, None, np.zeros_like(position))
    return jnp.sum(out[position < 0])

  for gradient in jax.jit(jax.grad(total, argnums=(0, 1, 2)))(q, k, v):
    np.testing.assert_array_equal(gradient, 0)


def test_long_packed_rows_on_a_mesh(monkeypatch):
  """Blocks of 8 of 21 columns, forward and backward, against the plain form."""
  rng = np.random.RandomState(2)
  arrays = [rng.randn(2, 21, heads, 8).astype(np.float32)
            for heads in (4, 2, 2)]
  position = np.full((2, 21), -1)
  segment = np.zeros((2, 21), int)
  position[0, 3:19] = np.arange(16)
  for index, (start, stop) in enumerate([(0, 9), (9, 13), (15, 21)]):
    position[1, start:stop] = np.arange(stop - start)
    segment[1, start:stop] = index
  mesh = mesh_lib.make(dict(data=1, fsdp=2, tensor=2))

  def total(attend, q, k, v):
    out = attend(q, k, v, position, None, 9, segment)
    return jnp.sum(jnp.where(position[..., None, None] >= 0, out, 0) ** 2), out

  def gradients(attend):
    return jax.grad(functools.partial(total, attend), argnums=(0, 1, 2),
                    has_aux=True)

  want, out = gradients(attention.attend_xla)(*arrays)
  monkeypatch.setattr(packed_attention, '_SHORT', 0)
  monkeypatch.setattr(packed_attention, '_BLOCK', 8)
  got, packed = jax.jit(mesh_lib.on_mesh(
      mesh, gradients(packed_attention.attend)))(*arrays)
  assert packed.sharding.shard_shape(packed.shape) == (1, 21, 2, 8)
  for a, b in zip((*got, packed), (*want, out)):
    np.testing.assert_allclose(
        np.asarray(a)[position >= 0], b[position >= 0], atol=1e-5)


def _block(q_BSKGH, k_BTKH, v_BTKH):
  return block_attention.attend(
      q_BSKGH, k_BTKH, v_BTKH,
      jnp.ones((len(q_BSKGH), q_BSKGH.shape[1], k_BTKH.shape[1]), bool))


def _packed(q_BSKGH, k_BSKH, v_BSKH):
  layout_BS = jnp.zeros(q_BSKGH.shape[:2], jnp.int32)
  return packed_attention.attend_packed(
      None, q_BSKGH, k_BSKH, v_BSKH, layout_BS, layout_BS)


@pytest.mark.parametrize('attend, columns, scores', [
    (_block, 24, 3 * 10 * 24 * 24), (_packed, 128, 10 * 64 * 64)])
def test_no_product_transposes_the_scores(attend, columns, scores):
  """As compiled for a CPU, with 10 heads; `scores` exist at one time."""
  q_BSKGH = jax.ShapeDtypeStruct((3, columns, 2, 5, 8), jnp.float32)
  k_BSKH = jax.ShapeDtypeStruct((3, columns, 2, 8), jnp.float32)
  program = jax.jit(lambda d_out, *x: jax.vjp(attend, *x)[1](d_out)).lower(
      q_BSKGH, q_BSKGH, k_BSKH, k_BSKH).compile().as_text()
  transposed = [math.prod(map(int, shape.split(','))) for shape in re.findall(
      r' = f32\[([\d,]+)\]\S* (?:transpose|copy)\(', program)]
  assert transposed and scores not in transposed
