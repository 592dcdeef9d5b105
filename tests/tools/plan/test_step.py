"""A plan of the tiny config on a TPU slice."""

import dataclasses
import functools
import json
import pathlib
import re
import types

import numpy as np
import pytest

from tepo_jax import cli
from tepo_jax.job import memory as memory_lib
from tepo_jax.job import programs as programs_lib
from tepo_jax.job import slots as slots_lib
from tepo_jax.policy import scoring
from tepo_jax.runtime import mesh as mesh_lib
from tepo_jax.tools import workload as workload_lib
from tepo_jax.tools.plan import chips
from tepo_jax.tools.plan import compiling
from tepo_jax.tools.plan import cost as cost_lib
from tepo_jax.tools.plan import gpus
from tepo_jax.tools.plan import phases
from tepo_jax.tools.plan import run
from tepo_jax.tools.plan import step
from tepo_jax.tools.plan import table
from tepo_jax.tools.plan import traffic
from tepo_jax.tools.plan import training
from tests.tools.plan import tiny

pytest.importorskip('libtpu')
pytestmark = pytest.mark.usefixtures('optimized')

MODELS = pathlib.Path(__file__).parent / 'models'
_QUICK = {'exec_time_optimization_effort': -1.0}  # the same FLOPs


def _carrying(config, max_versions=2):
  config.rollout.carry.max_versions = max_versions
  config.train.behaviour.weight = 'token'
  return config


def _programs(config, slice_, slots, brief=True, mean_tokens=None):
  """The planned programs on a slice; brief: the largest."""
  workload = workload_lib.of(config, mean_tokens=mean_tokens)
  return compiling.step_programs(
      config, workload, tiny.make_programs(config, slice_, workload), slots,
      brief)


@pytest.fixture(name='plan', scope='module')
def _plan():
  """It trains on 4 x 1 chips and samples on 2 x 2."""
  config = tiny.make_config()
  config.rollout.tensor = 2
  return step.make(config, workload_lib.of(config),
                   chips.topology('v5e:2x2'), config.mesh, brief=True)


@pytest.mark.long
def test_a_plan_has_every_program_of_a_step(plan):
  assert {e.name.split()[0] for e in plan.estimates} == {
      'reshard', 'prefill', 'insert', 'compact', 'decode', 'score',
      'update'}
  assert plan.fits and plan.slots == 32
  for estimate in plan.estimates:
    assert estimate.failure is None and estimate.compile_seconds > 0
    assert estimate.hbm >= estimate.arguments + estimate.resident
    assert estimate.bound in ('compute', 'memory', 'network')
    moves_data = estimate.name.split()[0] in ('reshard', 'insert', 'compact')
    assert (estimate.useful == 0) == moves_data
    if not estimate.name.startswith('decode'):
      # In a decode step, attention's products may be off the matrix units.
      assert estimate.useful <= estimate.flops
    assert 0 <= step.share_of_peak(
        estimate.flops, estimate, plan.slice.chip) <= estimate.efficiency.mid
    assert not estimate.uncounted
  assert set(plan.seconds()) == set(phases.PHASES)
  for phase, seconds in plan.seconds().items():
    assert (0 < plan.seconds('low')[phase] < seconds
            < plan.seconds('high')[phase])


@pytest.mark.long
def test_arguments_are_the_shards(plan):
  """Over four chips: fp32 parameters and two moments; of the old policy the
  head, and hidden states for 2 minibatches of up to 2 microbatches."""
  by_name = {e.name: e for e in plan.estimates}
  config = tiny.make_config()
  model = workload_lib.of(config).model
  hidden = model.num_heads * model.head_dim
  layer = model.d_model * (2 * hidden + 2 * model.num_kv_heads * model.head_dim
                           + 3 * model.d_ff)
  tables = 1 if model.tie_embeddings else 2
  sharded = layer + tables * model.vocab_size * model.d_model
  head = model.vocab_size * model.d_model
  states = 2 * 2 * config.train.microbatch_tokens * model.d_model
  floor = 4 * (3 * sharded + head + states) / 4
  assert floor < by_name['update'].arguments < 1.2 * floor


@pytest.mark.long
def test_the_table_and_the_record_agree(plan):
  config = tiny.make_config()
  whole = run.of(config, workload_lib.of(config), plan)
  text = table.text(plan, workload_lib.of(config), [plan], whole)
  assert ('v5e:2x2: 4 chips of 15.75 GiB, mesh data=1 fsdp=4 tensor=1 '
          'rollout.tensor=2, 32 slots') in text
  assert 'fits: ' in text and 'does not fit' not in text
  assert 'of update on v5e' in text and 'of decode on v6e' in text
  record = json.loads(json.dumps(table.record(plan, [plan], whole)))
  assert record['fits']
  for bound in step.BOUNDS:
    assert record[bound] == plan.seconds(bound)
  assert record['meshes'] == [{
      'mesh': plan.mesh, 'slots': plan.slots, 'fits': True,
      'seconds': plan.seconds(brief=True)}]
  assert len(record['programs']) == len(plan.estimates)


@pytest.mark.parametrize('tensor', [1, 2, 4, 8, 16])
def test_a_mesh_may_split_an_axis_of_the_torus(tensor):
  devices = chips.topology('v6e:4x4').devices
  mesh = mesh_lib.make({'data': 1, 'fsdp': -1, 'tensor': tensor}, devices)
  assert mesh.devices.shape == (1, 16 // tensor, tensor)
  assert set(mesh.devices.flat) == set(devices)


@pytest.mark.parametrize('tensor, sends', [(1, False), (2, True)])
def test_decoding_is_planned_on_its_own_mesh(tensor, sends):
  """Only where chips share the heads do they add up the layers' results."""
  config, slice_ = tiny.make_config(), chips.topology('v5e:2x2')
  config.rollout.tensor, config.mesh.tensor = tensor, 3 - tensor
  decode = next(p for p in _programs(config, slice_, 4)
                if p.name.startswith('decode'))
  sent = step.estimate(decode, slice_).wire_bytes
  assert (sum(sent.values()) > 1e3) == sends, sent


def test_the_largest_programs_stand_for_all_of_their_kind():
  """By the bytes that they read and write; a decode run is 4 steps, and each of
  6 arrays is compacted by itself."""
  Shape = traffic.Shape
  counts = {
      Shape('decode', 8, 100): 40, Shape('decode', 8, 50): 80,
      Shape('prefill', 4, 32): 3, Shape('prefill', 2, 16): 4,
      Shape('insert', 8, 50, 32): 5, Shape('insert', 8, 100, 16): 6,
      Shape('compact', 8, 50, (8, 100)): 2,
      Shape('compact', 8, 100, (4, 50)): 4}
  decoded = compiling._Decoded(
      weights=80, column=.25, shards=1, page=0, kernel=False)
  of = functools.partial(
      compiling._as_if_largest,
      compiling._runs(counts, chunk=4, arrays=6), decoded=decoded.sizes(
          traffic.Traffic(counts, 0, {}), Shape('decode', 8, 100)))
  assert of(Shape('decode', 8, 100)) == (40 + 80 * 180 / 280) / 4
  assert of(Shape('prefill', 4, 32)) == 3 + 4 / 4
  assert of(Shape('insert', 8, 100, 32)) == 5 + 6 / 2
  assert of(Shape('compact', 8, 100, (8, 100))) == 6 * (2 + 4 / 2)


@pytest.mark.long
def test_a_brief_plan_counts_every_kind_of_program(plan):
  counted = {e.name.split()[0] for e in plan.estimates
             if (e.equivalent or 0) * e.roofline > 0}
  assert counted >= {'reshard', 'decode', 'insert', 'prefill', 'score',
                     'update'}


@pytest.mark.parametrize('name, size, heads', [
    ('v5e:1x1', 64, 2), ('h100x1', 128, 1), *(
        pytest.param(*case, marks=pytest.mark.nightly) for case in (
            ('v5e:1x1', 128, 2), ('h100x1', 64, 2)))])
def test_decoding_copies_no_keys_and_pads_none(name, size, heads):
  """With head sizes of a TPU's vector register and less, and the form that XLA
  gives a GPU's program for a single head. A run is a chunk of steps."""
  if name.startswith('h100') and not gpus.FOLDER.exists():
    pytest.skip('the GPU compiler is not installed')
  config = tiny.make_config()
  slice_ = (chips if ':' in name else gpus).topology(name)
  config.compute.dtype, config.rollout.prompts = 'bfloat16', 32
  config.rollout.max_tokens, config.rollout.chunk = 1000, 2
  config.train.microbatch_tokens = 1024
  config.pretrain.update(num_layers=2, num_heads=2 * heads, num_kv_heads=heads,
                         head_dim=size)
  slots, mesh = 256, mesh_lib.make(config.mesh, slice_.devices)
  decode = next(p for p in _programs(config, slice_, slots)
                if p.name == f'decode {slots}x1024')
  estimate = step.estimate(decode, slice_)
  cache = slots * slots_lib.slot_bytes(
      workload_lib.of(config).model, mesh, 1024)
  assert cache < estimate.arguments < 1.05 * cache  # the weights are small
  assert estimate.temporaries < 0.25 * cache  # no key array; workspaces
  # Copies of the keys before and after the two steps would be 2 * cache.
  assert 2 * cache < estimate.hbm_bytes < 3.5 * cache


def _timed(plan, tensor, rollout, update):
  """The plan with one program for sampling and one for updates, in seconds."""
  of_phase = {e.phase: e for e in plan.estimates}
  return dataclasses.replace(
      plan, mesh=plan.mesh | {'tensor': tensor},
      decoding=plan.decoding | {'tensor': tensor}, estimates=[
          dataclasses.replace(
              of_phase[phase], equivalent=1, syncs=0,
              roofline=seconds * of_phase[phase].efficiency.mid)
          for phase, seconds in (('rollout', rollout), ('update', update))])


@pytest.mark.long
def test_the_best_meshes_of_sampling_and_of_updates(plan):
  plans = [_timed(plan, 4, 20, 30), _timed(plan, 8, 10, 50),
           _timed(plan, 2, 40, 28)]
  rollout, update, seconds = step.best_of_two(plans)
  assert (rollout, update) == (plans[1], plans[2])
  assert seconds == pytest.approx(38)
  workload = workload_lib.of(tiny.make_config())
  text = table.text(plans[0], workload, plans,
                    run.of(tiny.make_config(), workload, plans[0]))
  assert text.endswith(
      'data=1 fsdp=4 tensor=2 with rollout.tensor=8: 38 s, if it fits')
  assert re.search(r'tensor=4 +32 slots +50 s \(reshard', text)
  assert step.best_of_two(plans[:1]) is None


@pytest.mark.parametrize('rank', [0, 4])
def test_a_reference_policy_is_scored_and_held(rank):
  """Beside every other program: its share of a chip, two bytes per weight that
  is trained, those of norms apart."""
  config = tiny.make_config('configs/tiny.py:grpo_original')
  config.compute.dtype, config.lora.rank = 'bfloat16', rank
  slice_ = chips.topology('v5e:2x2')
  planned, trained = _scored(config, slice_)
  config.method.reference.coef = 0.0
  without, _ = _scored(config, slice_)
  assert planned.keys() - without.keys() == {'score by reference'}
  for name in 'decode', 'insert':
    assert trained / 2 <= planned[name] - without[name] < 0.51 * trained
  # Minibatches that wait have log-probabilities of it too.
  assert planned['score'] - without['score'] >= trained / 2
  assert planned['score by reference'] > trained


def _scored(config, slice_):
  """({program: bytes that others hold}, bytes of the fp32 weights), a chip's.
  """
  workload = workload_lib.of(config)
  programs = tiny.make_programs(config, slice_)
  return {program.name.split()[0] if program.phase != 'score' else program.name:
          program.resident for program in compiling.step_programs(
              config, workload, programs, 8, brief=True)
          }, mesh_lib.device_bytes(programs_lib.abstract_state(programs).params)


def test_slots_are_those_of_the_planned_chip(monkeypatch):
  """Not those of a device that this machine may have, as with --check."""
  monkeypatch.setattr(mesh_lib, 'free_bytes', lambda: 1)
  config = cli.load_config('configs/tiny.py:tepo')
  slice_ = chips.topology('v6e:1x1')
  programs = tiny.make_programs(config, slice_)
  free = slice_.chip.hbm_bytes - compiling.held_bytes(programs)
  assert step._guess(config, programs, free) == (
      config.rollout.prompts * config.rollout.samples)


def test_a_plan_with_pages_has_their_programs():
  """The heads of the tiny config have no kernel: a step reads whole tables."""
  config = tiny.make_config()
  config.rollout.cache = 'pages'
  programs = [p for p in _programs(config, chips.topology('v5e:2x2'), 8)
              if p.phase == 'rollout']
  names = [p.name.split()[0] for p in programs]
  assert names == ['decode', 'store', 'copy', 'prefill']
  decode, *_, prefill = programs
  slots, pages = map(int, decode.name.split()[1].split('x'))
  assert slots == 8 and decode.columns == slots // 4 * pages * 64
  assert prefill.resident > decode.resident  # other slots have their pages
  for program in programs:
    assert program.equivalent > 0
    program.lower()


def test_a_plan_that_carries_completions_has_their_programs():
  """Prompts of 24 tokens are prefilled with up to 48 that were drawn before.
  """
  widths, decodes = [], []
  for config in tiny.make_config(), _carrying(tiny.make_config()):
    config.rollout.chunk = 8
    programs = _programs(config, chips.topology('v5e:1x1'), 32, brief=False,
                         mean_tokens=8)
    widths.append({int(p.name.split('x')[1]): p.runs for p in programs
                   if p.name.startswith('prefill')})
    decodes.append(next(p for p in programs if p.name.startswith('decode')))
    for program in programs:
      if program.name.startswith(('prefill', 'decode')):
        program.lower()
  without, carrying = decodes
  assert max(widths[0]) == 24 and max(widths[1]) == 24 + 48
  assert sum(runs for width, runs in widths[1].items() if width > 24) > 0
  assert without.age == 0 and without.uncarried is None
  assert 0 < carrying.age < 2
  # Their caches have as many columns.
  assert carrying.name == without.name
  assert carrying.equivalent < carrying.uncarried == pytest.approx(
      without.equivalent)


@pytest.mark.long
def test_a_plan_states_the_age_of_what_it_carries():
  """And its evaluations carry nothing."""
  evaluations, plans = [], []
  for max_versions in 0, 2:
    config = _carrying(tiny.make_config(), max_versions)
    workload = workload_lib.of(config, mean_tokens=8)
    plan = step.make(config, workload, chips.topology('v5e:1x1'), config.mesh,
                     brief=True)
    whole = run.of(config, workload, plan)
    text = table.text(plan, workload, [plan], whole)
    record = json.loads(json.dumps(table.record(plan, [plan], whole)))
    assert record['age_mean'] == plan.age
    evaluations.append(record['run']['evaluations'])
    plans.append((plan, text))
  (without, said), (carrying, says) = plans
  assert without.age == 0 and 'carried' not in said
  assert 0 < carrying.age < 2
  assert (f'completions are carried: a token is trained on {carrying.age:.2f} '
          'rollout steps after it was drawn, on average') in says
  assert carrying.seconds()['rollout'] < without.seconds()['rollout']
  for bound in step.BOUNDS:
    assert evaluations[1][bound] >= evaluations[0][bound]


def test_a_plan_that_does_not_fit_states_its_memory():
  config = tiny.make_config()
  slice_ = chips.topology('v5e:2x2')
  small = chips.Slice(slice_.name, chips.Chip('small', 1e12, 1e4, 1e9, 1e9),
                      slice_.devices)
  config.rollout.slots = 8
  plan = step.make(config, workload_lib.of(config), small, config.mesh)
  assert not plan.fits and plan.slots == 8
  assert [e.name.split()[0] for e in plan.estimates] == ['decode']
  assert 'does not fit: decode' in table.verdict(plan)
  assert 'of 0.00 GiB (arguments' in table.verdict(plan)


@pytest.mark.long
def test_the_update_of_qwen3_14b_fits_a_v5p_64():
  """The largest model of the paper; that of the 7B on v6e:4x4 compiles for four
  minutes."""
  config = cli.load_config('configs/qwen3_14b.py:tepo')
  config.model = str(MODELS / 'qwen3_14b')
  slice_ = chips.topology('v5p:2x4x4')
  _, (estimate,) = step.fitted(
      config, workload_lib.of(config, 81, 2048), slice_,
      mesh_lib.make(config.mesh, slice_.devices))
  assert estimate.failure is None and estimate.hbm < slice_.chip.hbm_bytes
  # 6 FLOPs per weight and token; padding, attention, the head's logits again.
  tokens = 128 * (81 + 2048)
  assert 6 * 14e9 * tokens / 32 < estimate.flops < 13 * 14.8e9 * tokens / 32
  # Waits and attention's products included.
  assert estimate.remat == 'dots' and estimate.roofline < 2.9
  assert 0 < estimate.waits < 0.1 * estimate.roofline
  assert step.share_of_peak(estimate.useful, estimate, slice_.chip) > 0.45


def test_the_choice_begins_with_what_a_chip_can_hold():
  """Of Qwen2.5-7B on v6e:4x4, 10,240 tokens of bf16 a chip. The layers keep 25
  GB by 'dots', 9 by 'mlp' and 2 by 'full', beside 9 GB of arrays."""
  config = cli.load_config('configs/qwen2_5_7b.py:tepo')
  config.model = str(MODELS / 'qwen2_5_7b')
  slice_ = chips.topology('v6e:4x4')
  programs = tiny.make_programs(config, slice_)
  for limit, remat in (64, 'dots'), (25, 'mlp'), (10, 'full'):
    found, size = memory_lib.fitted(
        config, programs, lambda _: 0, limit=limit * chips.GIB)
    assert (found.model.remat, found.scorer.model.remat, size) == (
        remat, remat, 0)
    assert found.old_states == programs.old_states


@pytest.mark.long
def test_hidden_states_that_do_not_fit_are_planned_as_recomputed():
  """Two minibatches at the full length, and no memory to spare."""
  config = tiny.make_config()
  slice_ = chips.topology('v5e:2x2')
  for limit, more in (slice_.chip.hbm_bytes, set()), (1, {
      'old policy', 'old states'}):
    chip = dataclasses.replace(slice_.chip, hbm_bytes=limit)
    programs = _programs(
        config, dataclasses.replace(slice_, chip=chip), 32)
    assert {p.name for p in programs if p.phase == 'update'} == {
        'update'} | more
  states, = (p for p in programs if p.name == 'old states')
  assert states.runs == 4 and states.lower()


def test_trip_counts_of_the_chunk_loops():
  """Chunks of 8 columns; 9 and 17 of 24 are scored in two microbatches."""
  scored_MRS = np.arange(24) < np.array([[9, 2], [16, 17], [24, 24]])[..., None]
  for scored, used, want in (
      (scored_MRS, 2, [1.5, 1.5, 2]), (scored_MRS, 0, [0, 0, 0]),
      (scored_MRS[:, :, :8], 3, [3])):
    minibatch = types.SimpleNamespace(
        rows=scoring.PackedRows(None, None, None, scored), used=used)
    assert [*training.trip_counts(
        minibatch, chunk_size=16, passes=2)] == want


@pytest.mark.long
def test_flops_of_scoring_and_update_by_hand():
  """One microbatch, by chunk size: rows of 2 · (24 + 48) columns.

  A chip has two rows, of which 2 · 48 columns are scored, in whole chunks: one
  of 144, one of 128, or three of 32 tokens a row. Scoring computes the logits;
  the update those of both policies, recomputes all but one chunk, and makes
  two products for the gradient. Each of four sequences attends in a block of
  128 columns, with two heads of 32: two products forward, seven backward.
  """
  of_layer = 2 * 144 * 2 * (4 * 64 * 64 + 3 * 64 * 192)
  of_product = 4 * 2 * 2 * 128 * 128 * 32
  of_column = 2 * 2 * 64 * 8192
  for chunk_size, scored, again in (4096, 144, 0), (256, 128, 0), (64, 96, 64):
    config = tiny.make_config()
    config.train.chunk_size = chunk_size
    flops = {
        program.name: cost_lib.of(
            program.lower().compile(_QUICK).as_text(), program.open_trips).flops
        for program in _programs(config, chips.topology('v5e:2x2'), 32)
        if program.name in ('score', 'update')}
    assert flops == {
        'score': of_layer + 2 * of_product + scored * of_column,
        'update': 3 * of_layer + 9 * of_product
                  + (4 * scored + 2 * again) * of_column}
