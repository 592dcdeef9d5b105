"""runtime.mesh on four virtual devices."""

import functools
import types

import jax
import numpy as np
import optax
import pytest

from tepo_jax import errors
from tepo_jax.runtime import mesh as mesh_lib

AXES = {'embed': ('vocab', 'embed'), 'q': ('layers', 'embed', 'heads'),
        'scale': ('layers', 'norm'), 'bias': (None, 'mlp'), 'step': ()}


def _abstract(**changes):
  shapes = {'embed': (8, 4), 'q': (2, 4, 8), 'scale': (2, 4),
            'bias': (3, 6), 'step': ()} | changes
  return {k: jax.ShapeDtypeStruct(s, np.float32) for k, s in shapes.items()}


@pytest.mark.parametrize('shape, sizes', [
    ((-1, 1, 1), (4, 1, 1)), ((1, -1, 2), (1, 2, 2)), ((2, 2, 1), (2, 2, 1)),
    ((1, 1, -1), (1, 1, 4))])
def test_make(shape, sizes):
  mesh = mesh_lib.make(dict(zip(mesh_lib.AXES, shape)))
  assert mesh.devices.shape == sizes
  assert mesh.axis_names == mesh_lib.AXES
  assert set(mesh.axis_types) == {jax.sharding.AxisType.Auto}


def test_make_on_chosen_devices():
  mesh = mesh_lib.make({'data': 1, 'fsdp': -1, 'tensor': 1}, jax.devices()[:2])
  assert mesh.devices.ravel().tolist() == jax.devices()[:2]


@pytest.mark.parametrize('shape, said', [
    ((3, -1, 1), '3 does not divide the 4 cpu devices'),
    ((8, 1, 1), '8 does not divide the 4'),
    ((1, 2, 1), 'takes 2 devices, but there are 4'),
    ((-1, -1, 1), 'one may be -1'),
    ((0, 1, -1), 'sizes must be positive'),
    ((-2, 1, 1), 'sizes must be positive')])
def test_make_refuses(shape, said):
  with pytest.raises(errors.InputError, match=said) as error:
    mesh_lib.make(dict(zip(mesh_lib.AXES, shape)))
  assert '\n' not in str(error.value)


def test_make_refuses_devices_of_several_slices():
  """Also where only Google's metadata names the slices."""
  tpus = [types.SimpleNamespace(platform='tpu', slice_index=i // 2)
          for i in range(4)]
  shape = {'data': 1, 'fsdp': -1, 'tensor': 1}
  with pytest.raises(errors.InputError, match='^2 TPU slices as one job are'):
    mesh_lib.make(shape, tpus)


def test_shardings_follow_the_rules():
  mesh = mesh_lib.make({'data': 1, 'fsdp': 2, 'tensor': 2})
  spec = jax.sharding.PartitionSpec
  train = mesh_lib.shardings(mesh, AXES)
  assert {k: s.spec for k, s in train.items()} == {
      'embed': spec('tensor', 'fsdp'), 'q': spec(None, 'fsdp', 'tensor'),
      'scale': spec(None, None), 'bias': spec(None, 'tensor'), 'step': spec()}
  decode = mesh_lib.shardings(mesh, AXES, mesh_lib.DECODE_RULES)
  assert decode['q'].spec == spec(None, None, 'tensor')
  assert mesh_lib.replicated(mesh).is_fully_replicated


def test_unknown_axis_name_is_an_error():
  mesh = mesh_lib.make({'data': -1, 'fsdp': 1, 'tensor': 1})
  with pytest.raises(KeyError, match='hedas'):
    mesh_lib.shardings(mesh, {'q': ('hedas',)})


def test_shardings_keep_optimiser_states_apart_from_axes():
  mesh = mesh_lib.make({'data': -1, 'fsdp': 1, 'tensor': 1})
  state = (optax.EmptyState(), {'m': ('embed', 'heads')})
  empty, moments = mesh_lib.shardings(mesh, state)
  assert empty == optax.EmptyState() and type(empty) is optax.EmptyState
  assert moments['m'].spec == jax.sharding.PartitionSpec('fsdp', 'tensor')


def test_logical_constraints_hold_under_the_rules():
  mesh = mesh_lib.make({'data': 1, 'fsdp': 2, 'tensor': 2})

  def function(x_MD):
    return mesh_lib.constrain(x_MD + 1, ('batch', None))

  lowered = jax.jit(mesh_lib.on_mesh(mesh, function)).lower(
      jax.ShapeDtypeStruct((8, 4), np.float32))
  constraint, = (line for line in lowered.as_text().splitlines()
                 if 'sharding_constraint' in line)
  assert '[{"data", "fsdp"}, {}]' in constraint


def test_shards_of_the_batch_compute_by_themselves():
  mesh = mesh_lib.make({'data': 2, 'fsdp': 1, 'tensor': 2})
  inside = []

  def function(scale, x_MD):
    inside.append(x_MD.shape)
    x_MD = mesh_lib.constrain(x_MD, ('batch', 'mlp'))
    return scale * x_MD, mesh_lib.total_over_batch(x_MD[0, 0])

  cut = mesh_lib.by_batch_shard(
      mesh, function, in_axes=((), ('batch',)), out_axes=(('batch',), ()))
  x_MD = np.arange(16, dtype=np.float32).reshape(4, 4)
  scaled_MD, total = jax.jit(mesh_lib.on_mesh(mesh, cut))(3., x_MD)
  np.testing.assert_array_equal(scaled_MD, 3 * x_MD)
  assert total == 0 + 8  # the first entries of rows 0 and 2
  assert set(inside) == {(2, 4)}


def test_check_names_the_tensor_the_dimension_and_the_axis():
  mesh = mesh_lib.make({'data': 1, 'fsdp': 1, 'tensor': 4})
  mesh_lib.check(mesh, AXES, _abstract(bias=(3, 4)))
  with pytest.raises(errors.InputError) as error:
    mesh_lib.check(mesh, AXES, _abstract())
  assert 'tensor=4 does not divide dimension 1 (mlp) of bias (3, 6)' in str(
      error.value)
  with pytest.raises(ValueError, match='axes'):
    mesh_lib.check(mesh, AXES, _abstract(bias=(3, 4), step=(2,)))


def test_device_bytes_are_those_of_one_device():
  mesh = mesh_lib.make({'data': 1, 'fsdp': 2, 'tensor': 2})
  abstract = jax.tree.map(
      lambda leaf, sharding: jax.ShapeDtypeStruct(
          leaf.shape, leaf.dtype, sharding=sharding),
      _abstract(), mesh_lib.shardings(mesh, AXES))
  # Floats: embed 32 / 4, q 64 / 4, scale 8, bias 18 / 2, step 1.
  assert mesh_lib.device_bytes(abstract) == 4 * 42
  arrays = jax.tree.map(
      lambda x: jax.device_put(np.zeros(x.shape, x.dtype), x.sharding),
      abstract)
  assert mesh_lib.device_bytes(arrays) == 4 * 42
  assert mesh_lib.device_bytes(None) == 0
  assert mesh_lib.memory_limit(mesh) is None  # CPUs do not report it


def test_batch_goes_and_comes_back(monkeypatch):
  """Without a collective, because this process has all shards."""
  monkeypatch.setattr(mesh_lib.multihost_utils, 'process_allgather', None)
  mesh = mesh_lib.make({'data': 2, 'fsdp': 2, 'tensor': 1})
  batch = {'token_BS': np.arange(24, dtype=np.int32).reshape(8, 3),
           'advantage_B': np.linspace(0, 1, 8, dtype=np.float32)}
  placed = mesh_lib.put(batch, mesh_lib.batch_sharding(mesh))
  shards = placed['token_BS'].addressable_shards
  assert [s.data.shape for s in shards] == [(2, 3)] * 4
  back = mesh_lib.to_host(placed | {'loss': 1.5})
  for name, array in batch.items():
    np.testing.assert_array_equal(back[name], array)
    assert back[name].dtype == array.dtype
  assert back['loss'] == 1.5


def test_compiled_functions_keep_their_name():
  mesh = mesh_lib.make({'data': 1, 'fsdp': -1, 'tensor': 1})

  def decode(model, x):
    return model * x

  partial = functools.partial(functools.partial(decode, 2))
  assert mesh_lib.on_mesh(mesh, partial).__name__ == 'decode'
  shards = mesh_lib.by_batch_shard(mesh, partial, ((),), ())
  assert mesh_lib.on_mesh(mesh, shards).__name__ == 'decode'
