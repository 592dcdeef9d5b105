"""Costs of programs compiled for a TPU, against counts by hand."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tepo_jax import errors
from tepo_jax.job import programs
from tepo_jax.runtime import mesh as mesh_lib
from tepo_jax.tools.plan import chips
from tepo_jax.tools.plan import collectives
from tepo_jax.tools.plan import cost
from tepo_jax.tools.plan import timeline

pytest.importorskip('libtpu')
pytestmark = pytest.mark.usefixtures('optimized')

L, M, D = 6, 512, 256
P = jax.sharding.PartitionSpec


@pytest.fixture(name='mesh', scope='module')
def _mesh():
  devices = np.array(chips.topology('v5e:2x2').devices)
  return jax.sharding.Mesh(devices, ('x',))


def _cost(mesh, function, shapes, specs, out=P(), open_trips=(1,)):
  def sharding(spec):
    return jax.sharding.NamedSharding(mesh, spec)

  arguments = [
      jax.ShapeDtypeStruct(shape, dtype, sharding=sharding(spec))
      for (shape, dtype), spec in zip(shapes, specs)]
  lowered = jax.jit(function, out_shardings=sharding(out)).lower(*arguments)
  return cost.of(lowered.compile().as_text(), open_trips)


def _layers(x_MD, w_LDD):
  return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x_MD, w_LDD)[0]


def test_a_scan_counts_times_its_trip_count(mesh):
  found = _cost(mesh, _layers, [((M, D), jnp.bfloat16),
                                ((L, D, D), jnp.bfloat16)],
                [P('x'), P()], P('x'))
  assert found.flops == 2 * M / 4 * D * D * L
  assert not found.wire_bytes
  # Each layer is read once; activations may stay in on-chip memory.
  weights = 2 * L * D * D
  assert weights <= found.hbm_bytes <= 1.5 * weights + 6 * 2 * M // 4 * D


def test_the_gradient_adds_twice_the_flops(mesh):
  def loss(x, w):
    return jnp.sum(_layers(x, w).astype(jnp.float32))

  found = _cost(mesh, jax.grad(loss, (0, 1)), [
      ((M, D), jnp.bfloat16), ((L, D, D), jnp.bfloat16)], [P('x'), P()],
                P())
  assert found.flops == pytest.approx(3 * 2 * M / 4 * D * D * L)
  # The weights' gradient is reduced over the chips.
  gradient = L * D * D
  assert 2 * 2 * gradient * 3 / 4 <= found.wire_bytes['all-reduce'] + (
      found.wire_bytes['reduce-scatter'] + found.wire_bytes['all-gather'])


def test_batched_products(mesh):
  """A TPU computes them as convolutions with dilations."""
  def attend(q_BTNH, k_BSNH):
    return jnp.einsum('BTNH,BSNH->BNTS', q_BTNH, k_BSNH)

  found = _cost(mesh, attend, [((4, 128, 3, 64), jnp.bfloat16),
                               ((4, 256, 3, 64), jnp.bfloat16)],
                [P('x'), P('x')], P('x'))
  assert found.flops == 2 * 128 * 256 * 3 * 64


def test_a_loop_of_unknown_length_counts_as_the_caller_says(mesh):
  def loop(x_MD, w_DD, trips):
    return jax.lax.fori_loop(0, trips, lambda _, x: jnp.tanh(x @ w_DD), x_MD)

  flops = [_cost(mesh, loop, [
      ((M, D), jnp.bfloat16), ((D, D), jnp.bfloat16), ((), jnp.int32)],
                 [P('x'), P(), P()], P('x'), (trips,)).flops
           for trips in (1, 7)]
  assert flops == [2 * M / 4 * D * D, 7 * 2 * M / 4 * D * D]


def test_open_loops_inside_open_loops(mesh):
  """The inner loop's trip count comes first."""
  def loops(x_MD, w_DD, trips):
    def outer(_, x_MD):
      return jnp.tanh(jax.lax.fori_loop(
          0, trips[0], lambda _, x: jnp.tanh(x @ w_DD), x_MD @ w_DD))
    return jax.lax.fori_loop(0, trips[1], outer, x_MD)

  found = _cost(mesh, loops, [
      ((M, D), jnp.bfloat16), ((D, D), jnp.bfloat16), ((2,), jnp.int32)],
                [P('x'), P(), P()], P('x'), (3, 5))
  assert found.flops == 5 * (1 + 3) * 2 * M / 4 * D * D


def test_bytes_sent_by_a_collective(mesh):
  found = _cost(mesh, lambda x: x, [((M, D), jnp.float32)], [P('x')])
  assert dict(found.wire_bytes) == {'all-gather': 4 * M * D * 3 / 4}
  assert found.collective_counts == {'all-gather': 1}


def test_an_all_reduce_of_which_a_chip_takes_a_slice(mesh):
  """A TPU computes a reduce-scatter so, and sends what that sends."""
  def summed(x_MD, y_MO):
    return jax.shard_map(
        lambda x, y: jax.lax.psum_scatter(x.T @ y, 'x', tiled=True),
        mesh=mesh, in_specs=P('x'), out_specs=P('x'))(x_MD, y_MO)

  found = _cost(mesh, summed, [((M, D), jnp.bfloat16), ((M, 4096), jnp.bfloat16)
                              ], [P('x'), P('x')], P('x'))
  assert dict(found.wire_bytes) == {'reduce-scatter': 2 * D * 4096 * 3 / 4}


def test_an_update_in_place_costs_the_slice(mesh):
  def write(cache, row, place):
    return jax.lax.fori_loop(
        0, 8, lambda i, c: jax.lax.dynamic_update_slice(
            c, row + i, (place + i, 0)), cache)

  shapes = [((65536, D), jnp.float32), ((8, D), jnp.float32), ((), jnp.int32)]
  found = _cost(mesh, write, shapes, [P(), P(), P()])
  whole = 4 * 65536 * D
  assert found.hbm_bytes < 2.2 * whole  # one copy, as nothing is donated


@pytest.mark.parametrize('text, first, last', [
    ('replica_groups=[2,4]<=[8]', (0, 1, 2, 3), (4, 5, 6, 7)),
    ('replica_groups=[2,4]<=[4,2]T(1,0)', (0, 2, 4, 6), (1, 3, 5, 7)),
    ('replica_groups={{0,5},{2,3}}', (0, 5), (2, 3)),
    ("replica_groups=mesh['a'=2,'b'=4] {'b'}", (0, 1, 2, 3), (4, 5, 6, 7)),
    ("replica_groups=mesh['a'=2,'b'=4] {'a'}", (0, 4), (3, 7)),
    ("replica_groups=mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a'}",
     (0, 1, 2, 3), (4, 5, 6, 7)),
    ("replica_groups=mesh['a'=2,'b'=4], device_ids=([2,4]T(1,0)) {'a','b'}",
     (0, 4, 1, 5, 2, 6, 3, 7), (0, 4, 1, 5, 2, 6, 3, 7)),
    ("replica_groups=mesh['a'=8] {'a':(1)2}", (0, 4), (3, 7)),
    ("replica_groups=mesh['a'=8] {'a':(2)2}", (0, 2), (5, 7)),
    ("replica_groups=mesh['a'=8] {'a':(1)2,'a':(4)2}", (0, 1, 4, 5),
     (2, 3, 6, 7))])
def test_groups(text, first, last):
  found = collectives.groups(f'(%x), channel_id=1, {text}, dims')
  assert (found[0], found[-1]) == (first, last)


@pytest.mark.parametrize('slice_, places, ring', [
    ('v6e:4x4', [(0, 0), (1, 0), (2, 0), (3, 0)], False),  # a line
    ('v6e:4x4', [(0, 0), (1, 0)], False),
    ('v6e:4x4', [(0, 0), (1, 0), (0, 1), (1, 1)], True),
    ('v6e:4x4', [(0, 0), (2, 0), (0, 1), (2, 1)], False),  # not neighbours
    ('v6e:16x16', [(i, 3) for i in range(16)], True),  # it wraps around
    ('v5p:4x4x4', [(0, i, 1) for i in range(4)], True),
    ('v5p:2x4x4', [(0, i, 1) for i in range(4)], False),
    ('v5p:2x4x4', [(i, j, k) for i in range(2) for j in range(4)
                   for k in range(4)], True)])
def test_which_chips_are_on_a_ring(slice_, places, ring):
  slice_ = chips.topology(slice_)
  number = {tuple(d.coords): i for i, d in enumerate(slice_.devices)}
  group = [number[(*place, 0)[:3]] for place in places]
  assert slice_.is_ring(group) == ring


@pytest.mark.parametrize('name, places, share', [
    ('v6e:16x16', [(i, j) for i in range(16) for j in range(16)],
     chips.TWO_AXES),
    ('v6e:16x16', [(i, 3) for i in range(16)], 1),
    ('v6e:4x4', [(i, j) for i in range(4) for j in range(4)], 1),
    ('v6e:4x4', [(0, 0), (1, 0)], 0.5)])
def test_the_bandwidth_of_a_group(name, places, share):
  slice_ = chips.topology(name)
  number = {tuple(d.coords[:2]): i for i, d in enumerate(slice_.devices)}
  group = [number[place] for place in places]
  assert slice_.bandwidth(group) == share * 180e9


def _gathering(x_MD, w_LDF, w_LFD):
  """Layers whose weights are gathered, as in training under fsdp."""
  def gathered(w):
    return jax.lax.all_gather(w, 'fsdp', tiled=True)

  def layer(x_MD, weights):
    w_DF, w_FD = weights
    return jnp.tanh(jnp.tanh(x_MD @ gathered(w_DF)) @ gathered(w_FD)), None

  return jax.lax.scan(layer, x_MD, (w_LDF, w_LFD))[0]


@pytest.mark.long
@pytest.mark.parametrize('name, by_default', [
    ('v5e:2x2', .5),
    pytest.param('v6e:2x2', 1, marks=pytest.mark.nightly)])
def test_weights_are_gathered_during_products(name, by_default):
  """At least those of each layer's second product, which nothing holds up; in
  this program the compiler's default does so too for a v5e."""
  slice_ = chips.topology(name)
  slice_ = dataclasses.replace(
      slice_, chip=dataclasses.replace(slice_.chip, latency=0))
  mesh = mesh_lib.make(dict(data=1, fsdp=4, tensor=1), slice_.devices)
  specs = P('fsdp'), P(None, 'fsdp'), P(None, 'fsdp')
  function = jax.shard_map(_gathering, mesh=mesh, in_specs=specs,
                           out_specs=specs[0], check_vma=False)
  shapes = (4 * 8192, 2048), (L, 2048, 4096), (L, 4096, 2048)
  arguments = [jax.ShapeDtypeStruct(
      shape, jnp.bfloat16, sharding=jax.sharding.NamedSharding(mesh, spec))
               for shape, spec in zip(shapes, specs)]
  sent = 2 * L * 2 * 2048 * 4096 * 3 / 4

  def times(options):
    jitted = jax.jit(function, compiler_options=options)
    found = cost.of(jitted.lower(*arguments).compile().as_text())
    assert dict(found.wire_bytes) == {'all-gather': sent}
    return timeline.seconds(found.events, slice_.ordered(mesh))

  work, waits = times({'xla_allow_excess_precision': False})
  alone = sent / slice_.chip.link_bandwidth
  assert waits == pytest.approx(by_default * alone)
  new_work, new_waits = times(programs.compiler_options(mesh))
  assert .4 * alone < new_waits < .501 * alone
  assert new_work < 1.1 * work


@pytest.mark.parametrize('name, larger', [
    ('v6e:2x2', True), ('v6e:1x1', False), ('v5e:2x2', False),
    ('v5p:2x2x1', False)])
def test_more_vmem_is_for_several_v6e(name, larger):
  """That the compiler takes the option, the test of gathers shows."""
  mesh = mesh_lib.make(dict(data=1, fsdp=-1, tensor=1),
                       chips.topology(name).devices)
  options = programs.compiler_options(mesh)
  assert ('xla_tpu_scoped_vmem_limit_kib' in options) == larger


@pytest.mark.parametrize('name, message', [
    ('v5e', 'CHIP:TORUS'), ('v9:2x2', 'v5e, v5p, v6e'), ('v5e:3x1', 'v5e:3x1')])
def test_unknown_slices_are_refused(name, message):
  with pytest.raises(errors.InputError, match=message):
    chips.topology(name)
