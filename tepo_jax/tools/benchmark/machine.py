"""This machine's peak rates: matrix products and memory bandwidth."""

from collections.abc import Callable, Iterator, Sequence
import functools

import jax
import jax.numpy as jnp
import ml_collections

from tepo_jax.tools import workload as workload_lib
from tepo_jax.tools.benchmark import registry
from tepo_jax.tools.benchmark import timing
from tepo_jax.tools.plan import published

_PRODUCTS = 8  # in one program
_BYTES = 1 << 28  # size of the array that is copied


def product_of(dtype: str) -> tuple[Callable[[], jax.Array], float]:
  """Returns a function that multiplies large matrices, and its FLOPs.

  One program makes several products, each on the result of the last, so that
  dispatch and page faults on fresh memory do not count.
  """
  size = 2048 if jax.default_backend() == 'cpu' else 8192
  a = (jax.random.normal(jax.random.key(0), (size, size)) * size ** -0.5
       ).astype(dtype)
  products = jax.jit(lambda a: jax.lax.fori_loop(
      0, _PRODUCTS, lambda _, x: x @ a, a))
  return functools.partial(products, a), 2.0 * _PRODUCTS * size ** 3


def peak(devices: Sequence[jax.Device], dtype: str) -> float | None:
  """Returns the devices' FLOP/s by their data sheet; None if not known."""
  name = published.name_of(devices[0].device_kind)
  if dtype != 'bfloat16' or name is None:
    return None
  return published.chip_of(name).flops * len(devices)


def measure(config: ml_collections.ConfigDict,
            workload: workload_lib.Workload, peers: registry.Peers
            ) -> Iterator[timing.Measurement]:
  """Measures large matrix products in the compute dtype, and copying."""
  del config, peers
  x = jnp.ones(_BYTES // 4, jnp.float32)
  product, flops = product_of(workload.model.dtype)
  scale = jax.jit(lambda x: x * 1.5)
  seconds = timing.interleaved(
      {'matmul': product, 'copy': lambda: scale(x)}, workload.rounds)
  yield timing.summary(
      f'machine/matmul/{workload.model.dtype}',
      [flops / s for s in seconds['matmul']], 'FLOP/s')
  yield timing.summary(
      'machine/copy', [2 * _BYTES / s for s in seconds['copy']], 'byte/s')
