"""The ceilings of this machine: matrix products and memory."""

from collections.abc import Callable, Iterator
import functools

import jax
import jax.numpy as jnp
import ml_collections

from tepo_jax.measure import timing
from tepo_jax.measure import workload as workload_lib

_SIZE = 2048  # of the square matrices
_BYTES = 1 << 28  # of the array that is read and written


def product_of(dtype: str) -> tuple[Callable[[], jax.Array], float]:
  """A large matrix product to be timed, and its FLOPs."""
  a = jax.random.normal(jax.random.key(0), (_SIZE, _SIZE), dtype)
  return functools.partial(jax.jit(jnp.matmul), a, a), 2.0 * _SIZE ** 3


def measure(config: ml_collections.ConfigDict,
            workload: workload_lib.Workload, peers: tuple[str, ...]
            ) -> Iterator[timing.Measurement]:
  """Rate of a large matrix product in the compute dtype; memory bandwidth."""
  del config, peers
  x = jnp.ones(_BYTES // 4, jnp.float32)
  product, flops = product_of(workload.model.dtype)
  scale = jax.jit(lambda x: x * 1.5)
  seconds = timing.interleaved(
      {'matmul': product, 'copy': lambda: scale(x)},
      workload.rounds)
  yield timing.summary(
      f'machine/matmul/{workload.model.dtype}',
      [flops / s for s in seconds['matmul']], 'FLOP/s')
  yield timing.summary(
      'machine/copy', [2 * _BYTES / s for s in seconds['copy']], 'byte/s')
