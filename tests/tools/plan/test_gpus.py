"""Programs compiled for GPUs that are not there, against counts by hand."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tepo_jax import errors
from tepo_jax.policy import attention
from tepo_jax.runtime import mesh as mesh_lib
from tepo_jax.tools import workload as workload_lib
from tepo_jax.tools.plan import check
from tepo_jax.tools.plan import chips
from tepo_jax.tools.plan import compiling
from tepo_jax.tools.plan import cost
from tepo_jax.tools.plan import gpus
from tepo_jax.tools.plan import kernels
from tepo_jax.tools.plan import phases
from tepo_jax.tools.plan import step
from tepo_jax.tools.plan import table
from tepo_jax.tools.plan import timeline
from tests.tools.plan import tiny

pytestmark = pytest.mark.usefixtures('optimized')

compiled_for_gpus = pytest.mark.skipif(
    not gpus.FOLDER.exists(), reason='the GPU compiler is not installed')
P = jax.sharding.PartitionSpec
M, D = 512, 256


def _compiled(function, shapes, specs, out=P(), by_shard=False):
  """Compiles for h100x8. by_shard: `function` is that of each device."""
  slice_ = gpus.topology('h100x8')
  mesh = jax.sharding.Mesh(np.array(slice_.devices), ('x',))
  if by_shard:
    function = jax.shard_map(function, mesh=mesh, in_specs=tuple(specs),
                             out_specs=out, check_vma=False)

  def sharding(spec):
    return jax.sharding.NamedSharding(mesh, spec)

  arguments = [jax.ShapeDtypeStruct(shape, dtype, sharding=sharding(spec))
               for (shape, dtype), spec in zip(shapes, specs)]
  return jax.jit(function, out_shardings=sharding(out)).lower(
      *arguments).compile(slice_.options)


@compiled_for_gpus
@pytest.mark.parametrize('name, count', [
    ('rtx4090x1', 1), ('a100-80x4', 4), ('l40sx8', 8), ('h200x2x8', 16)])
def test_machines(name, count):
  slice_ = gpus.topology(name)
  gpu = gpus.GPUS[name.rpartition('x')[0].removesuffix('x2')]
  assert len(slice_.devices) == count
  assert {d.platform for d in slice_.devices} == {'gpu'}
  assert {d.device_kind for d in slice_.devices} == {gpu.name}
  assert slice_.chip.hbm_bytes == gpus.USABLE * gpu.memory
  hosts = {d.process_index for d in slice_.devices}
  assert len(hosts) == (2 if '2x8' in name else 1)
  assert slice_.chip.link_bandwidth == (
      gpu.network if '2x8' in name else gpu.link)


@pytest.mark.parametrize('name', ['h100', 'h100x3', 'v100x8', 'rtx4090x2x4'])
def test_unknown_machines_are_refused(name):
  with pytest.raises(errors.InputError, match='GPUxN, such as h100x8'):
    gpus.topology(name)


@compiled_for_gpus
def test_a_product_has_the_workspace_and_flops_of_cublas():
  """Untuned, it would be a Triton kernel, without a workspace."""
  compiled = _compiled(lambda x, w: x @ w, 2 * [((M, M), jnp.bfloat16)],
                       [P(), P()])
  assert compiled.memory_analysis().temp_size_in_bytes >= 32 << 20
  found = cost.of(compiled.as_text())
  assert found.flops == 2 * M ** 3
  assert found.hbm_bytes == 3 * 2 * M * M


@compiled_for_gpus
def test_nested_loops_count_times_their_trip_counts():
  def loops(x_MD, w_DD):
    def inner(x_MD, _):
      return jnp.tanh(x_MD @ w_DD), None

    def outer(x_MD, _):
      return 2 * jax.lax.scan(inner, x_MD, None, length=3)[0], None

    return jax.lax.scan(outer, x_MD, None, length=5)[0]

  compiled = _compiled(loops, [((M, D), jnp.bfloat16), ((D, D), jnp.bfloat16)],
                       [P('x'), P()], P('x'))
  assert cost.of(compiled.as_text(), (100.,)).flops == (
      15 * 2 * M / 8 * D * D)


@compiled_for_gpus
def test_a_scatter_in_place_costs_its_updates():
  """XLA fuses it; each device reads and writes what it replaces."""
  def put(x_MD, new_RD, row_R):
    return x_MD.at[row_R].set(2 * new_RD, unique_indices=True)

  mesh = jax.sharding.Mesh(np.array(gpus.topology('h100x1').devices), ('x',))
  place = jax.sharding.NamedSharding(mesh, P())
  found = cost.of(jax.jit(put, donate_argnums=0).lower(*(
      jax.ShapeDtypeStruct(shape, dtype, sharding=place) for shape, dtype in (
          ((64 * M, D), jnp.float32), ((4, D), jnp.float32), ((4,), jnp.int32)
      ))).compile(gpus.topology('h100x1').options).as_text())
  updates = 4 * 4 * D
  assert 2 * updates <= found.hbm_bytes < 5 * updates


@pytest.mark.parametrize('target, size', [
    ('parameter(0)', 2 * 4 * 4 * 256), ('broadcast(%zero), dimensions={}',
                                        4 * 4 * 256 + 4 * 65536 * 256)])
def test_a_fused_scatter_costs_its_updates_or_the_array_it_makes(target, size):
  """By hand; the indices take 16 bytes more."""
  number = 1 if 'parameter' in target else 0
  given = '%whole, ' * number + '%at, %values'
  how = ('update_window_dims={1,2}, inserted_window_dims={}, '
         'index_vector_dim=1, scatter_dims_to_operand_dims={0}, to_apply=%add')
  text = f'''HloModule m, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}}

%fused (…) -> f32[65536,256] {{
  %zero = f32[] constant(0)
  %target = f32[65536,256]{{1,0}} {target}
  %rows = s32[4,1]{{1,0}} parameter({number})
  %new = f32[4,1,256]{{2,1,0}} parameter({number + 1})
  ROOT %put = f32[65536,256]{{1,0}} scatter(%target, %rows, %new), {how}
}}

ENTRY %main (…) -> f32[65536,256] {{
  %whole = f32[65536,256]{{1,0}} parameter(0)
  %at = s32[4,1]{{1,0}} parameter(1)
  %values = f32[4,1,256]{{2,1,0}} parameter(2)
  ROOT %all = f32[65536,256]{{1,0}} fusion({given}), kind=kInput, calls=%fused
}}
'''
  assert cost.of(text).hbm_bytes == size + 16


_COLLECTIVES = {  # program, specs of argument and result, bytes sent by byte
    'all-gather': (lambda x: x, P('x'), P(), 7 / 8),
    'reduce-scatter': (lambda x: jax.lax.psum_scatter(
        x, 'x', tiled=True), P(), P('x'), 7 / 8),
    'all-reduce': (lambda x: jax.lax.psum(x, 'x'), P(), P(), 2 * 7 / 8),
    'collective-permute': (lambda x: jax.lax.ppermute(
        x, 'x', [(i, (i + 1) % 8) for i in range(8)]), P('x'), P('x'), 1 / 8)}


@compiled_for_gpus
@pytest.mark.parametrize('kind', _COLLECTIVES)
def test_bytes_sent_by_a_collective(kind):
  function, before, after, share = _COLLECTIVES[kind]
  compiled = _compiled(function, [((M, D), jnp.float32)], [before], after,
                       by_shard=kind != 'all-gather')
  found = cost.of(compiled.as_text())
  assert dict(found.wire_bytes) == {kind: 4 * M * D * share}
  # Nothing hides it.
  slice_ = gpus.topology('h100x8')
  assert timeline.seconds(found.events, slice_)[1] == pytest.approx(
      slice_.chip.latency + 4 * M * D * share / slice_.chip.link_bandwidth)


@compiled_for_gpus
def test_a_gather_proceeds_during_a_product():
  def both(w, x, y):
    return jax.lax.all_gather(w, 'x', tiled=True), x @ y

  compiled = _compiled(
      both, [((64 * D, D), jnp.bfloat16)] + 2 * [((16 * D,) * 2, jnp.bfloat16)],
      [P('x'), P(), P()], P(), by_shard=True)
  found, slice_ = cost.of(compiled.as_text()), gpus.topology('h100x8')
  sent = 2 * 64 * D * D * 7 / 8 / slice_.chip.link_bandwidth
  work, waits = timeline.seconds(found.events, slice_)
  product = 2 * (16 * D) ** 3 / slice_.chip.flops
  assert found.collective_counts == {'all-gather': 1}
  assert work >= product > sent and waits == 0


@compiled_for_gpus
@pytest.mark.parametrize('kind', ['all-gather', 'reduce-scatter'])
def test_bytes_sent_by_combined_collectives(kind):
  """XLA makes one operation of two arrays."""
  function, before, after, share = _COLLECTIVES[kind]

  def both(x, y):
    return function(2 * x), function(3 * y)

  compiled = _compiled(both, [((M, D), jnp.float32), ((M,), jnp.float32)],
                       [before, before], after, kind != 'all-gather')
  found = cost.of(compiled.as_text())
  assert found.collective_counts == {kind: 1}
  assert dict(found.wire_bytes) == {kind: 4 * (M * D + M) * share}


@compiled_for_gpus
@pytest.mark.long_after_first
@pytest.mark.parametrize('kv_heads', [2, 8])
def test_attention_has_the_workspace_and_flops_of_cudnn(kv_heads):
  """5 + 2 products, half of each; the workspace that cuDNN 9.28 stated."""
  rows, length, heads, size = 2, 128, 8, 128

  def loss(q, k, v, position_BS):
    return jnp.sum(attention.attend(
        q, k, v, position_BS, backend='cudnn').astype(jnp.float32))

  compiled = _compiled(
      jax.grad(loss, (0, 1, 2)), [
          ((8 * rows, length, n, size), jnp.bfloat16)
          for n in (heads, kv_heads, kv_heads)] + [
              ((8 * rows, length), jnp.int32)], 4 * [P('x')], P('x'))
  text = compiled.as_text()
  product = 2 * rows * heads * length * length * size
  assert cost.of(text).flops == 7 * product / 2
  of_queries = 4 * rows * heads * length * (size + 1)
  of_keys = 4 * rows * heads * length * size if kv_heads < heads else 0
  assert kernels.cudnn_workspace(text) == of_queries + of_keys


@compiled_for_gpus
@pytest.mark.long
def test_flops_of_scoring_and_update_by_hand():
  """As `test_step` counts them for TPUs, and the attention of xla.

  Four rows of 72 columns in blocks of 64 queries, which see the columns up to
  their last. The update attends forward, and twice as much for the gradient; of
  π_old it computes the head.
  """
  pairs = 4 * (64 * 64 + 8 * 72)
  attend = 2 * 2 * pairs * 64
  layer = 4 * 72 * 2 * (4 * 64 * 64 + 3 * 64 * 192)
  head = 4 * 72 * 2 * 64 * 8192
  config, slice_ = tiny.make_config(), gpus.topology('h100x4')
  programs = tiny.make_programs(config, slice_)
  flops = {
      program.name: step.estimate(program, slice_).flops
      for program in compiling.step_programs(
          config, workload_lib.of(config), programs, 32, brief=True)
      if program.name in ('score', 'update')}
  assert flops == {'score': layer + head + attend,
                   'update': 3 * layer + 4 * head + 3 * attend}


@compiled_for_gpus
def test_the_plan_compares_sizes_itself():
  """XLA refuses no program for a GPU, however large."""
  slice_ = gpus.topology('rtx4090x1')
  x = jax.ShapeDtypeStruct(
      (1 << 18, 1 << 18), jnp.bfloat16,
      sharding=jax.sharding.SingleDeviceSharding(slice_.devices[0]))
  estimate = step.estimate(phases.PlannedProgram(
      name='huge', phase='update', runs=1,
      lower=lambda: jax.jit(lambda x: -x).lower(x)), slice_)
  assert estimate.failure is None and estimate.hbm == 2 * 2 << 36
  plan = step.StepPlan(slice_, {}, {}, 1, 1, [estimate])
  assert not plan.fits
  assert 'does not fit: huge needs 256.00 of 21.68 GiB' in table.verdict(plan)


@pytest.mark.long
def test_predictions_are_compared_with_this_machines_programs():
  """CPU devices stand for the accelerator, and for what was planned."""
  config = tiny.make_config()
  workload = workload_lib.of(config)
  here = chips.Slice('cpux4', chips.Chip(
      'small', 1e12, 1e12, 1e9, 1e9, directions=1), jax.devices())
  mesh = mesh_lib.make(config.mesh, here.devices)
  programs = compiling.make_programs(config, workload, mesh)
  estimates = [
      step.estimate(program, here) for program in compiling.step_programs(
          config, workload, programs, 8, brief=True)
      if program.name.startswith(('reshard', 'insert'))]
  wrong = dataclasses.replace(estimates[1],
                              temporaries=estimates[1].temporaries + 7)
  plan = step.StepPlan(here, *2 * [dict(mesh.shape)], 8, 1,
                       [estimates[0], wrong])
  found = {planned.name: (planned, real) for planned, real in check.compare(
      config, workload, plan, jax.devices())}
  for name, more in (('reshard', 0), (wrong.name, 7)):
    planned, real = found[name]
    assert planned.arguments == real.arguments
    assert planned.temporaries == real.temporaries + more
  text = check.text(list(found.values()))
  assert wrong.name in text and 'temporaries 0.000 and 0.000' in text
  with pytest.raises(errors.InputError, match='the plan is for 4 x cpu'):
    check.require(here, jax.devices()[:2])
