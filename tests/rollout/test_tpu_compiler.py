"""Decoding by the TPU's own compiler, without a TPU (needs libtpu)."""

import dataclasses
import functools
import re

import jax
import numpy as np
import pytest

from tepo_jax.job import sampling as sampling_lib
from tepo_jax.job import slots as slots_lib
from tepo_jax.policy import cache as cache_lib
from tepo_jax.policy import padding
from tepo_jax.policy import pages
from tepo_jax.policy import transformer
from tepo_jax.rollout import draw
from tepo_jax.rollout import engine
from tepo_jax.runtime import mesh as mesh_lib
from tepo_jax.tools.plan import chips
from tepo_jax.tools.plan import cost

pytest.importorskip('libtpu')
pytestmark = pytest.mark.usefixtures('optimized')

SLOTS, COLUMNS = 128, 1280
PAGE, PAGES = 64, 16384  # of a shard; a layer's are larger than a v6e's VMEM
# Two layers of Qwen2.5-7B, on about a quarter of its vocabulary.
MODEL = transformer.ModelConfig(
    vocab_size=38400, d_model=3584, num_layers=2, num_heads=28,
    num_kv_heads=4, head_dim=128, d_ff=18944, max_position=32768,
    qkv_bias=True, dtype='bfloat16')
# 12 layers of Llama-3.1-8B and as much of its vocabulary: eight chips cannot
# share the heads of MODEL.
FOR_EIGHT = dataclasses.replace(
    MODEL, vocab_size=48096, d_model=4096, num_layers=12, num_heads=32,
    num_kv_heads=8, d_ff=14336, qkv_bias=False)


@pytest.fixture(scope='module')
def compiled():
  """A chunk of decoding on four chips of v5p, tensor-parallel."""
  return _compiled('v5p:2x2x1', 1)


@pytest.fixture(scope='module')
def two_shards():
  """The same for twice the slots, on twice the chips."""
  return _compiled('v5p:2x2x2', 2)


def _compiled(slice_, shards, weights_as='compute'):
  """SLOTS slots for each group of four chips."""
  mesh = _mesh(slice_, shards)
  programs = sampling_lib.make(
      MODEL, mesh, decoding=draw.Decoding(), eos_ids=(0,), chunk=32)
  cache = jax.eval_shape(lambda: cache_lib.init_cache(
      MODEL, shards * SLOTS, COLUMNS, MODEL.dtype))
  return _decode(
      programs, MODEL, mesh, engine.idle_slots(shards * SLOTS),
      (cache, sampling_lib.cache_shardings(MODEL, mesh)), weights_as)


def _mesh(slice_, shards):
  return mesh_lib.make({'data': 1, 'fsdp': shards, 'tensor': 4},
                       chips.topology(slice_).devices)


def _decode(programs, model, mesh, slots, cache, weights_as='compute'):
  """The compiled chunk; cache: with its shardings."""
  host = (slots, jax.eval_shape(jax.random.key, 0), np.int32(0), np.int32(0))
  return programs.decode.lower(
      _weights(model, mesh, weights_as), _abstract(*cache), *_abstract(
          host, jax.tree.map(
              lambda _: mesh_lib.replicated(mesh), host))).compile()


def _weights(model, mesh, weights_as='compute'):
  """Those for decoding."""
  return _abstract(
      jax.eval_shape(lambda p: cache_lib.convert(
          model, p, weights_as == 'int8'),
                     transformer.abstract_params(model, 'bfloat16')),
      sampling_lib.decode_shardings(model, mesh, weights_as))


def _abstract(tree, shardings):
  return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(
      x.shape, x.dtype, sharding=s), tree, shardings)


@functools.cache
def _with_pages(slice_, tensor, window):
  """PAGES for each shard of the batch: the programs, the model and the mesh of
  decoding, and the pages; window: whether the second layer has one."""
  devices = chips.topology(slice_).devices
  mesh = mesh_lib.make({'data': 1, 'fsdp': len(devices) // tensor,
                        'tensor': tensor}, devices)
  model = padding.sharded_over(dataclasses.replace(
      FOR_EIGHT if tensor == 8 else MODEL, attention='splash',
      num_full_layers=1 if window else 0,
      sliding_window=512 if window else None), tensor)
  programs = sampling_lib.make_paged(
      model, mesh, decoding=draw.Decoding(), eos_ids=(0,), chunk=32)
  shards = len(devices) // tensor
  return programs, model, mesh, _abstract(
      jax.eval_shape(lambda: pages.init_pages(model, shards * PAGES, PAGE)),
      sampling_lib.paged_shardings(model, mesh).kv)


@functools.cache
def _compiled_with_pages(slice_, tensor, window=False):
  """SLOTS slots a shard: the compiled chunk, and the model and the mesh."""
  programs, model, mesh, kv = _with_pages(slice_, tensor, window)
  slots = mesh_lib.batch_shards(mesh) * SLOTS
  cache = pages.PagedCache(
      kv, jax.ShapeDtypeStruct((slots, 2 * COLUMNS // PAGE), np.int32),
      jax.ShapeDtypeStruct((), np.int32))
  return _decode(programs, model, mesh, engine.idle_slots(slots, PAGE), (
      cache, sampling_lib.paged_shardings(model, mesh))), model, mesh


@pytest.mark.long
def test_no_weights_are_gathered(compiled):
  """Only the logits of a step are gathered: far fewer bytes than a weight."""
  gathered = re.findall(
      r'= \(?(\w+)\[([\d,]*)\]\S* all-gather(?:-start)?\(', compiled.as_text())
  sizes = [np.prod([int(n) for n in shape.split(',')]) for _, shape in gathered]
  assert max(sizes, default=0) <= SLOTS * MODEL.vocab_size / 4
  assert 'all-to-all' not in compiled.as_text()


@pytest.mark.long
def test_a_step_reads_the_weights_and_the_cache_once(compiled):
  """By the plan's count, which includes activations and logits."""
  layer = 2 * MODEL.d_model * (
      2 * 28 * 128 + 2 * 4 * 128 + 3 * MODEL.d_ff) / 4
  head = 2 * MODEL.d_model * MODEL.vocab_size / 4
  cache = 2 * MODEL.num_layers * SLOTS * COLUMNS * 128 * 2
  least = MODEL.num_layers * layer + head + cache
  read = cost.of(compiled.as_text()).hbm_bytes
  assert least < read < 1.3 * least


@pytest.mark.nightly
def test_int8_weights_are_read_as_int8(compiled):
  """Half of the layers' bytes: no copy of them in bfloat16 is made."""
  layer = 2 * MODEL.d_model * (
      2 * 28 * 128 + 2 * 4 * 128 + 3 * MODEL.d_ff) / 4
  program = _compiled('v5p:2x2x1', 1, 'int8')
  before, after = (cost.of(x.as_text()).hbm_bytes for x in (compiled, program))
  assert before - after > 0.95 * MODEL.num_layers * layer / 2
  assert program.memory_analysis().temp_size_in_bytes < layer / 10


@pytest.mark.long
@pytest.mark.parametrize('program', ['compiled', 'two_shards'])
def test_the_cache_is_updated_in_place(program, request):
  """There is no second copy of the keys, nor of one layer's keys."""
  memory = request.getfixturevalue(program).memory_analysis()
  cache = 2 * MODEL.num_layers * SLOTS * COLUMNS * 128 * 2
  assert memory.alias_size_in_bytes >= cache
  assert memory.temp_size_in_bytes < cache / 2 / MODEL.num_layers * 2


@pytest.mark.long
def test_a_shard_of_the_batch_costs_what_it_costs_alone(compiled, two_shards):
  """A chip reads the same bytes, and sends only a count and the draws."""
  alone, shard = (cost.of(program.as_text())
                  for program in (compiled, two_shards))
  assert shard.hbm_bytes == pytest.approx(alone.hbm_bytes, rel=0.01)
  for kind, sent in {
      'all-reduce': 2 * 4,  # the count, before the loop and in it
      'all-gather': SLOTS * (32 * (4 + 4) + 4 + 1 + 1),  # Chunk, at its end
      'collective-permute': 0, 'all-to-all': 0}.items():
    assert shard.wire_bytes[kind] - alone.wire_bytes[kind] == sent


@pytest.mark.long
def test_a_prefill_after_a_prefix_computes_only_the_other_tokens():
  """896 of 1,024: an eighth of the products. Attention's, at most 1,024 keys
  for each of 128 tokens, are about 3 % more."""
  model = dataclasses.replace(MODEL, attention='splash')
  mesh = _mesh('v5p:2x2x2', 2)
  programs = sampling_lib.make(
      model, mesh, decoding=draw.Decoding(), eos_ids=(0,), chunk=32)

  def compiled(columns, *prefix):
    tokens = jax.ShapeDtypeStruct(
        (8, columns), np.int32, sharding=mesh_lib.replicated(mesh))
    return cost.of(programs.prefill.lower(
        _weights(model, mesh), tokens, tokens, *prefix).compile().as_text())

  prefix = _abstract(
      jax.eval_shape(lambda: cache_lib.init_cache(model, 1, 896, model.dtype)),
      sampling_lib.cache_shardings(model, mesh, None))
  assert compiled(128, prefix).flops == pytest.approx(
      compiled(1024).flops / 8, rel=0.06)


_SLICES = [pytest.param('v6e:4x4', 4, marks=pytest.mark.long), *(
    pytest.param(slice_, tensor, marks=(pytest.mark.long, pytest.mark.nightly))
    for slice_ in ('v5e:2x4', 'v5p:2x2x2', 'v6e:4x4') for tensor in (1, 4, 8)
    if (slice_, tensor) != ('v6e:4x4', 4))]


_WINDOW = pytest.param(
    'v6e:4x4', 4, True, marks=(pytest.mark.long, pytest.mark.nightly))


@pytest.mark.parametrize('slice_, tensor, window', [*(
    pytest.param(*p.values, False, marks=p.marks) for p in _SLICES), _WINDOW])
def test_pages_are_written_in_place_and_read_by_the_kernel(
    slice_, tensor, window):
  """A step scatters nothing, and there is no second copy of the pages, nor of
  one layer's."""
  program, model, mesh = _compiled_with_pages(slice_, tensor, window)
  text = program.as_text()
  assert text.count('ragged_paged_attention_kernel') >= model.num_layers
  assert not re.search(r' scatter\(', text)
  _check_in_place(program, model, mesh)


def _check_in_place(program, model, mesh):
  memory = program.memory_analysis()
  cache = PAGES * slots_lib.slot_bytes(model, mesh, PAGE)
  assert memory.alias_size_in_bytes >= cache
  assert memory.temp_size_in_bytes < cache / model.num_layers
  of_layer = ','.join(map(str, (
      PAGES, PAGE, 2 * model.cache_heads // mesh.shape['tensor'], 128)))
  assert not re.search(
      rf'= \(?bf16\[{of_layer}\]\S* copy(-start)?\(', program.as_text())


@pytest.mark.long
@pytest.mark.parametrize('name', ['insert', 'move'])
def test_pages_are_stored_and_moved_in_place(name):
  """16 prompts of 1,024 tokens; all pages of the tails."""
  programs, model, mesh, kv = _with_pages('v6e:4x4', 4, False)
  shards = mesh_lib.batch_shards(mesh)

  def of_host(*shape):
    return jax.ShapeDtypeStruct(
        shape, np.int32, sharding=mesh_lib.replicated(mesh))

  if name == 'move':
    arguments = (of_host(shards, 2 * SLOTS),) * 2
  else:
    prompts = jax.eval_shape(
        lambda: cache_lib.init_cache(model, 16, 1024, model.dtype))
    arguments = (_abstract(prompts, sampling_lib.cache_shardings(
        model, mesh, None)), of_host(shards, 16, 1024 // PAGE))
  _check_in_place(getattr(programs, name).lower(kv, *arguments).compile(),
                  model, mesh)


@pytest.mark.parametrize('slice_, tensor', _SLICES)
def test_a_step_with_pages_reads_the_weights_and_what_is_alive(slice_, tensor):
  """Within 15 %, with 1,200 tokens a sequence. What the kernel reads is stated
  here, 1,280 columns a sequence: this bounds all other instructions. Of the
  embeddings a step reads the rows of its tokens."""
  program, model, mesh = _compiled_with_pages(slice_, tensor)
  weights = mesh_lib.device_bytes(_weights(model, mesh)) - (
      2 * model.vocab_size * model.d_model // tensor)
  least = weights + SLOTS * slots_lib.slot_bytes(model, mesh, 1200)
  read = cost.of(program.as_text(), columns=SLOTS * pages.columns_read(1200))
  assert least < read.hbm_bytes < 1.15 * least


@pytest.mark.long
def test_the_kernel_takes_the_largest_table():
  """Of 256 pages a slot; XLA refuses a larger one, which has 64 slots more."""
  mesh = mesh_lib.make({'data': 1, 'fsdp': 1, 'tensor': 1},
                       chips.topology('v6e:2x2').devices[:1])

  def compiled(slots):
    shapes = [((slots, 7, 128), 'bfloat16'), ((4096, PAGE, 2, 128), 'bfloat16'),
              ((slots,), 'int32'), ((slots, 256), 'int32')]
    return jax.jit(mesh_lib.on_mesh(mesh, functools.partial(
        pages.attend, window=None, backend='splash'), 'bfloat16')).lower(*(
            jax.ShapeDtypeStruct(shape, dtype, sharding=mesh_lib.replicated(
                mesh)) for shape, dtype in shapes)).compile()

  compiled(pages.most_slots(256))
  with pytest.raises(jax.errors.JaxRuntimeError, match='smem'):
    compiled(pages.most_slots(256) + 64)
