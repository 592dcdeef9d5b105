"""Where arrays live: the device mesh, one rules table, host <-> device.

Everything above names the axes of its arrays logically ('embed', 'heads',
'batch', ...); a rules table maps those names to mesh axes.

Mesh axes: `data` copies of the parameters; `fsdp` shards of parameters and
optimiser state (the batch is split over data and fsdp together); `tensor`
shards of the vocabulary, heads and feed-forward width.
"""

from collections.abc import Callable, Mapping, Sequence
import contextlib
import contextvars
import functools
import math
from typing import Any

from flax import linen as nn
import jax
from jax.experimental import multihost_utils
import numpy as np

from tepo_jax import errors

AXES = ('data', 'fsdp', 'tensor')

# Training: fp32 masters and Adam moments sharded over fsdp x tensor.
RULES = {
    'batch': ('data', 'fsdp'),
    'vocab': 'tensor',
    'heads': 'tensor',
    'kv_heads': 'tensor',
    'mlp': 'tensor',
    'embed': 'fsdp',
    'layers': None,
    'norm': None,
    None: None,
}

# Decoding: weights whole on every fsdp shard, so that no decode step has to
# gather them.
DECODE_RULES = {**RULES, 'embed': None}

# (mesh, rules) of the `under_rules` that is being traced.
_IN_FORCE = contextvars.ContextVar('in force', default=None)


def make(
    shape: Mapping[str, int], devices: Sequence[jax.Device] | None = None
) -> jax.sharding.Mesh:
  """The mesh of `shape` (one size per name of AXES) over all the devices.

  One size may be -1: what the others leave. Every device is used: a product
  smaller than their number is refused, as leaving devices idle is never meant
  (pass `devices` to choose a part).

  Raises:
    InputError: with the numbers, when the shape does not fit the devices.
  """
  devices = jax.devices() if devices is None else devices
  sizes = [shape[name] for name in AXES]
  text = ' x '.join(f'{name}={shape[name]}' for name in AXES)
  known = math.prod(size for size in sizes if size != -1)
  if sizes.count(-1) > 1 or any(s < 1 and s != -1 for s in sizes):
    raise errors.InputError(
        f'mesh {text}: sizes are positive, and one of them may be -1')
  if len(devices) % known:
    raise errors.InputError(
        f'mesh {text}: {known} does not divide the {len(devices)} '
        f'{devices[0].platform} devices')
  if -1 not in sizes and known != len(devices):
    raise errors.InputError(
        f'mesh {text} takes {known} devices and there are {len(devices)}: '
        'set one of the sizes to -1 to use them all')
  sizes = [len(devices) // known if size == -1 else size for size in sizes]
  # make_mesh defaults to Explicit axes; Auto lets XLA propagate shardings.
  return jax.make_mesh(
      sizes, AXES, (jax.sharding.AxisType.Auto,) * len(AXES), devices=devices)


def shardings(mesh: jax.sharding.Mesh, axes_tree, rules=RULES):
  """The tree of NamedShardings for a tree of logical axis names.

  A leaf is a tuple of names, one per dimension; () is a replicated scalar.
  """
  def leaf(axes):
    spec = jax.sharding.PartitionSpec(*(rules[name] for name in axes))
    return jax.sharding.NamedSharding(mesh, spec)

  return jax.tree.map(leaf, axes_tree, is_leaf=_is_axes)


def batch_sharding(mesh: jax.sharding.Mesh) -> jax.sharding.NamedSharding:
  """Axis 0 over data and fsdp, whatever the rank."""
  return shardings(mesh, ('batch',))


def batch_shards(mesh: jax.sharding.Mesh) -> int:
  """Into how many pieces axis 0 of a batch is cut: data x fsdp."""
  return _parts(mesh, RULES['batch'])


def replicated(mesh: jax.sharding.Mesh) -> jax.sharding.NamedSharding:
  """The whole array on every device."""
  return shardings(mesh, ())


def under_rules(mesh: jax.sharding.Mesh, function: Callable, rules=RULES
                ) -> Callable:
  """`function`, traced with the rules in force.

  The constraints that it puts on logical axes (flax's with_logical_constraint)
  then hold on this mesh, and `per_device` cuts by it; without it neither does
  anything.
  """
  @functools.wraps(function)
  def wrapped(*args, **kwargs):
    # Flax looks for an abstract mesh; without one it drops the constraints.
    with (jax.sharding.use_abstract_mesh(mesh.abstract_mesh),
          _in_force(mesh, rules)):
      return function(*args, **kwargs)

  return wrapped


@contextlib.contextmanager
def _in_force(mesh, rules):
  token = _IN_FORCE.set((mesh, rules))
  try:
    with nn.logical_axis_rules(
        [(name, axes) for name, axes in rules.items() if name is not None]):
      yield
  finally:
    _IN_FORCE.reset(token)


def by_batch_shard(mesh: jax.sharding.Mesh, function: Callable, in_axes,
                   out_axes) -> Callable:
  """`function` of a shard of the batch, on all the shards at one time.

  They do not wait for each other but in `total_over_batch`. To be called under
  `under_rules`; inside a shard its rules hold but for `batch`, which is whole
  there, and there is no `per_device`.

  Args:
    in_axes, out_axes: of arguments and results, or of their subtrees:
      ('batch',) is cut along axis 0, () is whole everywhere.
  """
  def specs(axes_tree):
    return jax.tree.map(
        lambda axes: jax.sharding.PartitionSpec(*(RULES[a] for a in axes)),
        axes_tree, is_leaf=_is_axes)

  def local(*args):
    _, rules = _IN_FORCE.get()
    with _in_force(mesh, {**rules, 'batch': None}):
      return function(*args)

  return jax.shard_map(
      local, mesh=mesh, in_specs=specs(in_axes), out_specs=specs(out_axes),
      axis_names=set(RULES['batch']), check_vma=False)


def total_over_batch(x: jax.Array) -> jax.Array:
  """The sum of what each shard of the batch has, in `by_batch_shard`."""
  return jax.lax.psum(x, RULES['batch'])


def per_device(function: Callable, axes: Sequence[tuple[str | None, ...]],
               *arrays: jax.Array) -> jax.Array:
  """function(*arrays), each device computing on its own pieces.

  For kernels, which XLA cannot cut by itself. Where no rules are in force,
  or on one device, it is the plain call.

  Args:
    function: of one array a piece; its result is cut as the first is.
    axes: logical names of each array's dimensions. One that its mesh axes do
      not divide is whole everywhere.
  """
  if _IN_FORCE.get() is None or _IN_FORCE.get()[0].size == 1:
    return function(*arrays)
  mesh, rules = _IN_FORCE.get()

  def spec(names, array):
    return jax.sharding.PartitionSpec(*(
        None if size % _parts(mesh, rules[name]) else rules[name]
        for name, size in zip(names, array.shape)))

  specs = tuple(map(spec, axes, arrays))
  return jax.shard_map(
      function, mesh=mesh, in_specs=specs, out_specs=specs[0],
      check_vma=False)(*arrays)


def check(mesh: jax.sharding.Mesh, axes_tree, abstract_tree, rules=RULES):
  """Refuses a mesh that does not divide some array's dimension.

  Raises:
    InputError: the first such array, by its path, with the numbers.
  """
  axes_of = dict(
      jax.tree_util.tree_flatten_with_path(axes_tree, is_leaf=_is_axes)[0])
  for path, array in jax.tree_util.tree_flatten_with_path(abstract_tree)[0]:
    name = '/'.join(str(getattr(p, 'key', p)) for p in path)
    axes = axes_of[path]
    if len(axes) != len(array.shape):
      raise ValueError(f'{name}: axes {axes} for the shape {array.shape}')
    for index, (axis, size) in enumerate(zip(axes, array.shape)):
      parts = _parts(mesh, rules[axis])
      if size % parts:
        raise errors.InputError(
            f'mesh {dict(mesh.shape)}: {rules[axis]}={parts} does not divide '
            f'dimension {index} ({axis}) of {name} {tuple(array.shape)}')


def check_memory(mesh: jax.sharding.Mesh, parts: Mapping[str, Any],
                 limit: int | None = None) -> None:
  """Refuses what cannot lie in a device's memory at one time.

  Args:
    mesh: whose devices; those that do not tell their memory hold anything.
    parts: what is there -> its tree of ShapeDtypeStructs with shardings.
    limit: bytes of a device; None: as it says.

  Raises:
    InputError: with the bytes of each part.
  """
  if limit is None:
    stats = mesh.local_devices[0].memory_stats()
    limit = stats['bytes_limit'] if stats else math.inf
  sizes = bytes_on_device(parts)
  if sum(sizes.values()) > limit:
    raise errors.InputError(
        f'mesh {dict(mesh.shape)}: a device has {limit / 1e9:.4g} GB of memory '
        f'and would have to hold {sum(sizes.values()) / 1e9:.4g} GB: '
        f'{in_gigabytes(sizes)}')


def bytes_on_device(parts: Mapping[str, Any]) -> dict[str, int]:
  """What a device holds of each tree of ShapeDtypeStructs with shardings."""
  return {name: sum(map(_bytes_on_device, jax.tree.leaves(tree)))
          for name, tree in parts.items()}


def in_gigabytes(sizes: Mapping[str, float]) -> str:
  """'weights 1.5 GB, gradient 0.5 GB'."""
  return ', '.join(f'{name} {size / 1e9:.4g} GB'
                   for name, size in sizes.items() if size)


def _bytes_on_device(leaf):
  return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


def put(tree, sharding_tree):
  """Host arrays to global arrays on the mesh.

  Every process passes the whole arrays, and the same; each device takes its
  slice of them.

  Args:
    tree: of numpy arrays.
    sharding_tree: shardings, of the whole tree or of its subtrees.
  """
  def place(sharding, subtree):
    return jax.tree.map(lambda x: jax.make_array_from_callback(
        np.shape(x), sharding, lambda index: np.asarray(x)[index]), subtree)

  return jax.tree.map(place, sharding_tree, tree)


def to_host(tree):
  """Global arrays to numpy arrays, whole, on every process.

  A collective when there are several processes: all of them must call it.
  """
  def get(array):
    if isinstance(array, jax.Array) and not (
        array.is_fully_addressable or array.is_fully_replicated):
      array = multihost_utils.process_allgather(array, tiled=True)
    return np.asarray(array)

  return jax.tree.map(get, tree)


def free_bytes() -> int | None:
  """Memory left on the fullest device of the job; None where nobody knows.

  A collective when there are several processes.
  """
  free = [stats['bytes_limit'] - stats['bytes_in_use']
          for stats in (device.memory_stats()
                        for device in jax.local_devices()) if stats]
  if not free:
    return None
  if jax.process_count() == 1:
    return min(free)
  return int(np.min(multihost_utils.process_allgather(np.array(min(free)))))


def _is_axes(node) -> bool:
  # Not isinstance: optax's states are named tuples, some of them empty.
  return type(node) is tuple and all(
      name is None or isinstance(name, str) for name in node)


def _parts(mesh: jax.sharding.Mesh, axes: str | tuple[str, ...] | None) -> int:
  """Into how many pieces a dimension mapped to these mesh axes is cut."""
  axes = (axes,) if isinstance(axes, str) else axes or ()
  return math.prod(mesh.shape[axis] for axis in axes)


def platform(mesh: jax.sharding.Mesh) -> str:
  """'cpu', 'gpu' or 'tpu': of the mesh's devices."""
  return mesh.devices.flat[0].platform
