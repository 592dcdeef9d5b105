"""The ceilings of this machine: matrix products and memory."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import ml_collections

from tepo_jax.measure import timing
from tepo_jax.measure import workload as workload_lib

_SIZE = 2048  # of the square matrices
_BYTES = 1 << 28  # of the array that is read and written


def measure(config: ml_collections.ConfigDict,
            workload: workload_lib.Workload, peers: tuple[str, ...]
            ) -> Iterator[timing.Measurement]:
  """Rate of a large matrix product in the compute dtype; memory bandwidth."""
  del config, peers
  a = jax.random.normal(jax.random.key(0), (_SIZE, _SIZE), workload.model.dtype)
  x = jnp.ones(_BYTES // 4, jnp.float32)
  product, scale = jax.jit(jnp.matmul), jax.jit(lambda x: x * 1.5)
  seconds = timing.interleaved(
      {'matmul': lambda: product(a, a), 'copy': lambda: scale(x)},
      workload.rounds)
  yield timing.summary(
      f'machine/matmul/{workload.model.dtype}',
      [2 * _SIZE ** 3 / s for s in seconds['matmul']], 'FLOP/s')
  yield timing.summary(
      'machine/copy', [2 * _BYTES / s for s in seconds['copy']], 'byte/s')
