"""TPU chips, and descriptions of slices to compile for; GPUs are in `gpus`.

libtpu compiles for a slice without a TPU: it needs only the slice's shape.
"""

from collections.abc import Iterator, Sequence
import contextlib
import dataclasses
from importlib import metadata
import math
import os
from typing import Any

import jax
from jax.experimental import topologies
import numpy as np

from tepo_jax import errors

GIB = 1 << 30
# The plan reads the text of compiled programs, which changes with the compiler;
# that of later versions hides what the SparseCores do.
LIBTPU = '0.0.42.1'
# A group of chips that spans two axes of the torus, both with wrap-around,
# sends this many times as fast as over one: an all-reduce over v6e:16x16 moves
# 236 GB/s. https://github.com/AI-Hypercomputer/tpu-recipes, microbenchmarks
TWO_AXES = 1.31


@dataclasses.dataclass(frozen=True)
class Chip:
  """One chip's datasheet.

  kind: as jax names the device. flops: bf16 FLOP/s of the matrix units.
  hbm_bytes: memory that a program may use. hbm_bandwidth: byte/s.
  link_bandwidth: byte/s of a ring, on a TPU over both directions of one torus
  axis. directions: 2 if a transfer in one direction has half of it, else 1.
  latency: seconds of a collective besides its bytes, an assumption: 5 to 10 µs
  are usual.
  https://cloud.google.com/tpu/docs/v5e, v5p, v6e;
  https://jax-ml.github.io/scaling-book/tpus
  """
  kind: str
  flops: float
  hbm_bytes: float
  hbm_bandwidth: float
  link_bandwidth: float
  directions: int = 2
  latency: float = 0.0


_LATENCY = 5e-6
CHIPS = {
    'v5e': Chip('TPU v5 lite', 197e12, 15.75 * GIB, 819e9, 90e9,
                latency=_LATENCY),
    'v5p': Chip('TPU v5', 459e12, 95.74 * GIB, 2765e9, 180e9,
                latency=_LATENCY),
    'v6e': Chip('TPU v6 lite', 918e12, 31.25 * GIB, 1640e9, 180e9,
                latency=_LATENCY),
}


@dataclasses.dataclass(frozen=True)
class Slice:
  """Chips to compile for.

  name: such as 'v5p:4x4x4' or 'h100x8'. devices: one per chip. options: of the
  compiler. is_here: they are devices of this machine, not descriptions.
  """
  name: str
  chip: Chip
  devices: list[jax.Device]
  options: dict[str, Any] = dataclasses.field(default_factory=dict)
  is_here: bool = False
  target: str = ''

  def ordered(self, mesh: jax.sharding.Mesh) -> 'Slice':
    """The same chips in a mesh's order, by which programs number them."""
    return dataclasses.replace(self, devices=list(mesh.devices.flat))

  def is_ring(self, group: Sequence[int]) -> bool:
    """Whether links join these chips to a ring: a box of an even number of
    chips with two sides or more, or a whole axis that wraps around. Chips
    behind a switch always are one. group: places in `devices`.
    """
    if self.chip.directions == 1 or len(group) == 1:
      return True
    sides_X = self._sides(group)
    if math.prod(sides_X) != len(group):
      return False
    if np.sum(sides_X > 1) > 1:
      return len(group) % 2 == 0
    return bool(np.all((sides_X == 1) | (sides_X == self._wrapped)))

  def bandwidth(self, group: Sequence[int]) -> float:
    """byte/s that each of these chips sends to the others."""
    if not self.is_ring(group):
      return self.chip.link_bandwidth / 2
    if self.chip.directions == 1 or len(group) == 1:
      return self.chip.link_bandwidth
    sides_X = self._sides(group)
    whole = np.sum((sides_X > 1) & (sides_X == self._wrapped))
    return self.chip.link_bandwidth * (TWO_AXES if whole > 1 else 1)

  def _sides(self, group):
    """The sides of the smallest box of the torus with these chips."""
    return np.ptp([self.devices[i].coords for i in group], axis=0) + 1

  @property
  def _wrapped(self):
    """The size of each axis of the torus that wraps around, else 0."""
    size_X = np.max([d.coords for d in self.devices], axis=0) + 1
    if self.name.startswith('v5p'):  # cubes of 4 chips a side
      return size_X * np.all(size_X % 4 == 0)
    return size_X * (size_X == 16)


def topology(name: str) -> Slice:
  """Describes a slice named by a chip of CHIPS and its torus: 'v5e:4x4'.

  Raises:
    errors.InputError: there is no such slice, or libtpu is not installed, or
      not of the version LIBTPU.
  """
  generation, _, torus = name.partition(':')
  if generation not in CHIPS or not torus:
    raise errors.InputError(
        f'--topology={name}: must be CHIP:TORUS, such as v5e:4x4 or '
        f'v5p:2x2x2; the chips are {", ".join(CHIPS)}')
  _check_version()
  # Without a metadata server and other hosts; several processes may load it.
  os.environ.setdefault('TPU_SKIP_MDS_QUERY', '1')
  os.environ.setdefault('TPU_WORKER_HOSTNAMES', 'localhost')
  os.environ.setdefault('ALLOW_MULTIPLE_LIBTPU_LOAD', '1')
  bounds = {'chips_per_host_bounds': (1, 1, 1)} if torus == '1x1' else {}
  with refusing(name, 'TPU'):
    description = topologies.get_topology_desc(
        platform='tpu', topology_name=name, **bounds)
  return Slice(name, CHIPS[generation], list(description.devices))


@contextlib.contextmanager
def refusing(name: str, kind: str) -> Iterator[None]:
  """Explains why the compiler for a kind of chip cannot describe a slice."""
  try:
    yield
  except jax.errors.JaxRuntimeError as error:
    raise errors.InputError(f'--topology={name}: {error}') from error
  except (RuntimeError, ImportError) as error:
    raise errors.InputError(
        f'the {kind} compiler is missing; `launch/setup.sh cpu plan` installs '
        f'it ({error})') from error


def _check_version():
  try:
    found = metadata.version('libtpu')
  except metadata.PackageNotFoundError:
    return  # jax says so
  if found != LIBTPU:
    raise errors.InputError(
        f'plans read what libtpu {LIBTPU} compiles, and libtpu {found} is '
        'installed: run `launch/setup.sh cpu plan`')
