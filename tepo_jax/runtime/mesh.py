"""Where arrays live: the device mesh, its rules table, transfers, memory.

Other packages name the axes of their arrays logically ('embed', 'heads',
'batch', ...); a rules table maps these names to mesh axes.

Mesh axes: `data` replicates the parameters; `fsdp` shards parameters and
optimiser state (data and fsdp together shard the batch); `tensor` shards the
vocabulary, heads and feed-forward width.
"""

from collections.abc import Callable, Mapping, Sequence
import functools
import math
from typing import Any

import jax
from jax.experimental import mesh_utils
from jax.experimental import multihost_utils
import jax.numpy as jnp
import numpy as np

from tepo_jax import errors
from tepo_jax.runtime import joining
from tepo_jax.runtime import processes

AXES = ('data', 'fsdp', 'tensor')

# Training: fp32 masters and Adam moments sharded over fsdp x tensor; 'states':
# hidden states that only wait to be used; 'tokens': those between the large
# products of a layer.
RULES = {
    'batch': ('data', 'fsdp'), 'vocab': 'tensor', 'heads': 'tensor',
    'kv_heads': 'tensor', 'mlp': 'tensor', 'states': 'tensor',
    'tokens': 'tensor', 'embed': 'fsdp', 'layers': None, 'norm': None,
    None: None}

# Decoding: every fsdp shard holds complete weights, so that no decode step has
# to gather them.
DECODE_RULES = {**RULES, 'embed': None}


def make(
    shape: Mapping[str, int], devices: Sequence[jax.Device] | None = None
) -> jax.sharding.Mesh:
  """The mesh of `shape`, one size per name of AXES, over all devices.

  One size may be -1: it takes the devices that the others leave. A shape that
  leaves devices idle is refused; pass `devices` to use only some of them.

  Raises:
    InputError: with the numbers, if the shape does not fit the devices, or they
      are of several TPU slices.
  """
  devices = jax.devices() if devices is None else devices
  joining.check_slices(len({  # a GPU's slice is its machine
      getattr(device, 'slice_index', 0) for device in devices
      if device.platform == 'tpu'}))
  sizes = [shape[name] for name in AXES]
  text = ' x '.join(f'{name}={shape[name]}' for name in AXES)
  known = math.prod(size for size in sizes if size != -1)
  if sizes.count(-1) > 1 or any(s < 1 and s != -1 for s in sizes):
    raise errors.InputError(
        f'mesh {text}: sizes must be positive, except that one may be -1')
  if len(devices) % known:
    raise errors.InputError(
        f'mesh {text}: {known} does not divide the {len(devices)} '
        f'{devices[0].platform} devices')
  if -1 not in sizes and known != len(devices):
    raise errors.InputError(
        f'mesh {text} takes {known} devices, but there are {len(devices)}: '
        'set one of the sizes to -1 to use them all')
  sizes = [len(devices) // known if size == -1 else size for size in sizes]
  # jax.make_mesh would refuse tensor=2 on most 4x4 slices, as it splits an axis
  # of the torus.
  placed = mesh_utils.create_device_mesh(
      sizes, devices, allow_split_physical_axes=True)
  # Auto lets XLA propagate shardings.
  return jax.sharding.Mesh(
      placed, AXES, axis_types=(jax.sharding.AxisType.Auto,) * len(AXES))


def with_tensor(mesh: jax.sharding.Mesh, tensor: int) -> jax.sharding.Mesh:
  """The mesh of the same devices in the same order, `tensor` of them in a row
  sharing the vocabulary, heads and feed-forward width; `fsdp` takes the rest.

  One jitted function may take its arguments from one such mesh and leave its
  results on another.

  Raises:
    InputError: `tensor` does not divide the devices.
  """
  if mesh.size % tensor:
    raise errors.InputError(
        f'rollout.tensor={tensor} does not divide the number of devices, '
        f'{mesh.size}: set it to a number that does, such as 1')
  return jax.sharding.Mesh(
      mesh.devices.reshape(1, -1, tensor), AXES, axis_types=mesh.axis_types)


def shardings(mesh: jax.sharding.Mesh, axes_tree, rules=RULES):
  """The tree of NamedShardings for a tree of logical axis names.

  A leaf is a tuple of names, one per dimension; () is a replicated scalar.
  """
  def leaf(axes):
    spec = jax.sharding.PartitionSpec(*(rules[name] for name in axes))
    return jax.sharding.NamedSharding(mesh, spec)

  return jax.tree.map(leaf, axes_tree, is_leaf=_is_axes)


def batch_sharding(mesh: jax.sharding.Mesh) -> jax.sharding.NamedSharding:
  """Axis 0 over data and fsdp, for arrays of any rank."""
  return shardings(mesh, ('batch',))


def batch_shards(mesh: jax.sharding.Mesh) -> int:
  """Number of shards of a batch's axis 0: data x fsdp."""
  return _parts(mesh, RULES['batch'])


def replicated(mesh: jax.sharding.Mesh) -> jax.sharding.NamedSharding:
  """A complete copy on every device."""
  return shardings(mesh, ())


def platform(mesh: jax.sharding.Mesh) -> str:
  """The mesh's kind of device: 'cpu', 'gpu' or 'tpu'."""
  return mesh.devices.flat[0].platform


def on_mesh(mesh: jax.sharding.Mesh, function: Callable,
            dtype: str | None = None) -> Callable:
  """Wraps `function` so that it is traced on this mesh.

  The functions below find it, and what cuts arrays along each of its axes, in
  `jax.sharding.get_abstract_mesh()`: XLA (the axis is Auto), guided by
  `constrain`, or a `shard_map` (Manual). On no mesh, arrays are whole.
  If `dtype` is float32, so are products: a TPU would round their factors to
  bfloat16, a GPU to TF32. A CPU never does.
  """
  exact = dtype == 'float32' and platform(mesh) != 'cpu'
  @functools.wraps(function)
  def wrapped(*args, **kwargs):
    with (jax.sharding.use_abstract_mesh(mesh.abstract_mesh),
          jax.default_matmul_precision('highest' if exact else None)):
      return function(*args, **kwargs)

  wrapped.__name__ = _name(function)
  return wrapped


def _name(function):
  """The function's name, for messages about compilation; partials have none."""
  while isinstance(function, functools.partial):
    function = function.func
  return function.__name__


def by_batch_shard(mesh: jax.sharding.Mesh, function: Callable, in_axes,
                   out_axes) -> Callable:
  """Runs `function` on every shard of the batch in parallel, within `on_mesh`.

  Shards synchronise only in `total_over_batch`; XLA partitions along `tensor`.
  In `in_axes` and `out_axes`, for arguments and results or their subtrees,
  ('batch',) is sharded along axis 0, () is replicated.
  """
  def specs(axes_tree):
    return jax.tree.map(lambda s: s.spec, shardings(mesh, axes_tree))

  by_shard = jax.shard_map(
      function, mesh=mesh, in_specs=specs(in_axes), out_specs=specs(out_axes),
      axis_names=set(RULES['batch']), check_vma=False)
  by_shard.__name__ = _name(function)
  return by_shard


def total_over_batch(x: jax.Array) -> jax.Array:
  """The sum of x over the batch shards, within `by_batch_shard`."""
  return jax.lax.psum(x, RULES['batch'])


def per_device(function: Callable, axes: Sequence[Any], *trees: Any
               ) -> jax.Array:
  """function(*trees), computed by each device on its own shards.

  For custom kernels, which XLA cannot partition, and for functions in which
  devices communicate by `gathered` and `summed`. A plain call on one device,
  and inside itself.

  Args:
    function: of one shard per array; its result is sharded as the first array.
    axes: for each tree, the logical names of its arrays' dimensions. A
      dimension that its mesh axes do not divide is replicated.
  """
  mesh = jax.sharding.get_abstract_mesh()
  if not mesh.auto_axes or mesh.size == 1:
    return function(*trees)

  def spec(names, array):
    return jax.sharding.PartitionSpec(*(
        None if size % shards(name) else _for_xla(name)
        for name, size in zip(names, array.shape)))

  specs = tuple(jax.tree.map(spec, names, tree, is_leaf=_is_axes)
                for names, tree in zip(axes, trees))
  return jax.shard_map(
      function, in_specs=specs, out_specs=specs[0], check_vma=False)(*trees)


def constrain(x: jax.Array, axes: Sequence[str | None]) -> jax.Array:
  """Shards x, where XLA partitions it, by a logical name per dimension."""
  if not jax.sharding.get_abstract_mesh().auto_axes:
    return x
  return jax.lax.with_sharding_constraint(
      x, jax.sharding.PartitionSpec(*(_for_xla(name) for name in axes)))


def shards(name: str | None) -> int:
  """Number of shards into which XLA cuts a logical axis; 1 on no mesh."""
  return _parts(jax.sharding.get_abstract_mesh(), _for_xla(name))


def gathered(x: jax.Array, name: str, axis: int = 0,
             size: int | None = None) -> jax.Array:
  """Inside `per_device`, joins the shards of x along an axis of this name.

  size: of the result, without the padding of `own_part` and `summed`; None:
  there is none. Elsewhere it returns x.
  """
  if (mesh_axes := _cut(name)) is None:
    return x
  x = jax.lax.all_gather(x, mesh_axes, axis=axis, tiled=True)
  return x if size is None else jax.lax.slice_in_dim(x, 0, size, axis=axis)


def summed(x: jax.Array, name: str) -> jax.Array:
  """Inside `per_device`, this device's shard, along axis 0, of the sum of x
  over the devices that share that axis; elsewhere x. Padded to equal shards."""
  if (mesh_axes := _cut(name)) is None:
    return x
  return jax.lax.psum_scatter(
      _padded(x, jax.lax.axis_size(mesh_axes)), mesh_axes, tiled=True)


def own_part(x: jax.Array, name: str, axis: int = 0) -> jax.Array:
  """Inside `per_device`, this device's shard of an x that is whole along an
  axis of this name; elsewhere x. Padded to equal shards."""
  if (mesh_axes := _cut(name)) is None:
    return x
  parts = jax.lax.axis_size(mesh_axes)
  x = _padded(x, parts, axis)
  size = x.shape[axis] // parts
  return jax.lax.dynamic_slice_in_dim(
      x, jax.lax.axis_index(mesh_axes) * size, size, axis)


def _for_xla(name):
  """The mesh axes of a logical axis if XLA partitions the function being traced
  along them; else None."""
  return _if_among(jax.sharding.get_abstract_mesh().auto_axes, RULES[name])


def _cut(name):
  """The mesh axes of a logical axis if a `shard_map` has cut the arrays of the
  function being traced along them; else None."""
  return _if_among(jax.sharding.get_abstract_mesh().manual_axes, RULES[name])


def _if_among(mesh_axes, axes):
  return axes if axes and set(_as_tuple(axes)) <= set(mesh_axes) else None


def _padded(x, parts, axis=0):
  widths = [(0, 0)] * x.ndim
  widths[axis] = 0, -x.shape[axis] % parts
  return jnp.pad(x, widths)


def check(mesh: jax.sharding.Mesh, axes_tree, abstract_tree, rules=RULES):
  """Refuses a mesh that does not divide a dimension of some array.

  Raises:
    InputError: names the first such array and gives the numbers.
  """
  axes_of = dict(
      jax.tree_util.tree_flatten_with_path(axes_tree, is_leaf=_is_axes)[0])
  for path, array in jax.tree_util.tree_flatten_with_path(abstract_tree)[0]:
    name = jax.tree_util.keystr(path, simple=True, separator='/')
    axes = axes_of[path]
    if len(axes) != len(array.shape):
      raise ValueError(f'{name}: axes {axes} for the shape {array.shape}')
    for index, (axis, size) in enumerate(zip(axes, array.shape)):
      parts = _parts(mesh, rules[axis])
      if size % parts:
        raise errors.InputError(
            f'mesh {dict(mesh.shape)}: {rules[axis]}={parts} does not divide '
            f'dimension {index} ({axis}) of {name} {tuple(array.shape)}')


def put(tree, sharding_tree):
  """Copies host arrays to global arrays on the mesh.

  Every process passes the same complete arrays; each device takes its slice.
  `sharding_tree` holds the shardings of the tree or of its subtrees.
  """
  def place(sharding, subtree):
    return jax.tree.map(lambda x: jax.make_array_from_callback(
        np.shape(x), sharding, lambda index: np.asarray(x)[index]), subtree)

  return jax.tree.map(place, sharding_tree, tree)


def to_host(tree):
  """Copies global arrays to complete numpy arrays on every process.

  A collective: with several processes, all of them must call it.
  """
  def get(array):
    if isinstance(array, jax.Array) and not (
        array.is_fully_addressable or array.is_fully_replicated):
      array = multihost_utils.process_allgather(array, tiled=True)
    return np.asarray(array)

  # Copying the result of a failed program would crash jaxlib on a CPU.
  return jax.tree.map(get, jax.block_until_ready(tree))


def device_bytes(tree) -> int:
  """Bytes that one device holds of arrays or sharded ShapeDtypeStructs."""
  return sum(math.prod(leaf.sharding.shard_shape(leaf.shape))
             * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def memory_limit(mesh: jax.sharding.Mesh) -> int | None:
  """Bytes that a device of the mesh may use; None if it reports none."""
  stats = mesh.local_devices[0].memory_stats()
  return stats['bytes_limit'] if stats else None


def free_bytes() -> int | None:
  """Free bytes of the job's fullest device; None if devices report none.

  A collective: with several processes, all of them must call it.
  """
  free = [stats['bytes_limit'] - stats['bytes_in_use']
          for d in jax.local_devices() if (stats := d.memory_stats())]
  return processes.least(min(free)) if free else None


def _is_axes(node) -> bool:
  # Not isinstance: optax states are named tuples, some of them empty.
  return type(node) is tuple and all(
      name is None or isinstance(name, str) for name in node)


def _parts(mesh: jax.sharding.Mesh, axes: str | tuple[str, ...] | None) -> int:
  """Number of shards of a dimension that is mapped to these mesh axes."""
  return math.prod(mesh.shape[axis] for axis in _as_tuple(axes))


def _as_tuple(axes):
  return (axes,) if isinstance(axes, str) else axes or ()
