"""Sampling through slots: against full forward passes, and other schedules.

Axes: Q prompts · T tokens of a completion.
"""

import dataclasses
import functools
import types

import jax
import numpy as np
import pytest

from tepo_jax.policy import scoring
from tepo_jax.policy import transformer
from tepo_jax.rollout import draw
from tepo_jax.rollout import engine as engine_lib
from tepo_jax.rollout import groups as groups_lib
from tepo_jax.rollout import rectangle
from tepo_jax.rollout import schedule
from tepo_jax.rollout import shapes as shapes_lib
from tepo_jax.rollout import stopping
from tepo_jax.runtime import mesh as mesh_lib
from tepo_jax.tools import streaming
from tests.rollout import toy

V, T, G = 40, 9, 3
MODEL = transformer.ModelConfig(
    vocab_size=V, d_model=32, num_layers=2, num_heads=8, num_kv_heads=4,
    head_dim=8, d_ff=48, max_position=64, qkv_bias=True)
LENGTHS = (5, 1, 14, 4, 2, 9, 5)
IDS = (7, 0, 123456, 3, 8, 9, 2)
# Several sizes of each array; the tests use all of them.
SHAPES = dict(prompts=(5, 14), columns=(16, 30))


@pytest.fixture(scope='module')
def params():
  """Weights large enough that a token's probability depends on its past."""
  return jax.tree.map(lambda x: 4 * x, jax.jit(functools.partial(
      transformer.init, MODEL))(jax.random.key(0)))


@pytest.fixture(scope='module')
def engine(make_engine, params):
  """engine(**options): cached by its options."""
  @functools.cache
  def make(slots=4, **options):
    return make_engine(
        MODEL, params, slots=slots, prompt_tokens=14, max_tokens=T,
        **(SHAPES | options if 'mesh' not in options else options))

  return make


def _prompts():
  rng = np.random.default_rng(0)
  return [rng.integers(0, V, length) for length in LENGTHS]


def _sample(engine, which=range(7), **options):
  options = dict(group_size=G, max_tokens=T) | options
  prompts = _prompts()
  return engine.sample([prompts[i] for i in which],
                       ids=[IDS[i] for i in which], **options)


@pytest.fixture(scope='module')
def free(engine):
  """Every prompt's samples without EOS, so all have full length."""
  return _sample(engine())[0]


def test_the_shapes_for_given_maxima():
  """By hand: slots in multiples of the shards, columns of 32, then of 128."""
  shapes = functools.partial(
      shapes_lib.make, prompt_tokens=100, max_tokens=500, chunk=4)
  assert shapes(slots=100, work=200, shards=3) == shapes_lib.Shapes(
      slots=(15, 27, 51, 102), prompts=(50, 100),
      columns=(64, 96, 128, 192, 256, 352, 512, 768), chunk=4, shards=3)
  least = shapes(slots=16, work=17, shards=1, prompt_tokens=64)
  assert (least.slots, least.prompts) == ((8, 16), (32, 64))
  after = shapes(slots=16, work=17, shards=1, prompt_tokens=200,
                 prefix=tuple(range(40)))
  assert after.prompts == (80, 120, 200) and after.width(60) == 80
  assert after.shared(80) == 40 and shapes(
      slots=16, work=17, shards=1, prompt_tokens=400,
      prefix=tuple(range(40))).shared(400) == 0
  carried = shapes(slots=16, work=17, shards=1, prefix=(1, 2), carries=True)
  assert carried == shapes(slots=16, work=17, shards=1, carries=True)
  few = shapes(slots=100, work=7, shards=1)  # all at once: no spare columns
  assert few.slots == (7,) and few.columns[-1] == 640
  assert few.refill == 1 and shapes(slots=64, work=65, shards=1).refill == 8


@pytest.mark.parametrize('samples, shards, carries, rows', [
    (1, 1, False, 32), (2, 1, False, 8), (4, 1, False, 4), (6, 1, False, 3),
    (64, 1, False, 1), (4, 3, False, 6), (8, 1, True, 32)])
def test_a_prefill_has_the_prompts_for_half_of_a_refill(
    samples, shards, carries, rows):
  """256 slots are refilled when 32 are free: by groups in two prefills. A
  carried completion is its own prompt. At most 2^14 tokens: 8 rows of 2,048."""
  shapes = shapes_lib.make(
      slots=256, work=1024, prompt_tokens=2048, max_tokens=500, chunk=4,
      shards=shards, samples=samples, carries=carries)
  assert shapes.prefill_rows(256) == rows
  assert shapes.prefill_rows(2048) == min(rows, 9 if shards == 3 else 8)


@pytest.mark.parametrize('waits, left, used, columns', [
    (0, [2, 1], 28, 32), (0, [9, 5], 28, 64),  # what the longest may need
    (0, [], 28, 64), (3, [2, 1], 28, 64),  # a quarter, for new samples
    (3, [2, 1], 80, 96)])  # there is nothing wider
def test_columns_that_may_be_needed_are_reserved(waits, left, used, columns):
  shapes = shapes_lib.Shapes((8,), (32,), (32, 64, 96), chunk=4)
  assert rectangle.Rectangle(None, shapes).width(
      used, waits, np.array(left, int)) == columns


@pytest.mark.long
def test_every_sample_is_drawn_once_and_whole(free):
  assert set(free) == {(i, j) for i in IDS for j in range(G)}
  assert all(len(c.token_T) == len(c.logp_T) == T and not c.ended
             for c in free.values())


@pytest.mark.long_after_first
@pytest.mark.parametrize('pages', [{}, dict(page=4, pages=1000)], ids=str)
def test_prefills_of_fewer_rows_change_no_completion(engine, pages):
  """16 slots are refilled when two are free: with two rows, or with one."""
  want, several = _sample(engine(16, **pages))
  got, single = _sample(engine(16, samples=G, **pages))
  assert single.prefills == len(IDS) > several.prefills
  toy.assert_same(got, want)


@pytest.mark.long_after_first
@pytest.mark.parametrize('temperature', [1.0, 0.7])
def test_logp_is_the_scoring_functions(params, engine, temperature):
  got, _ = _sample(engine(decoding=draw.Decoding(temperature)))
  names = sorted(got)
  rows = [np.concatenate([_prompts()[IDS.index(i)], got[i, j].token_T])
          for i, j in names]
  token_BS = np.zeros((len(rows), 14 + T), np.int32)
  position_BS = np.full(token_BS.shape, -1, np.int32)
  for b, row in enumerate(rows):
    token_BS[b, -len(row):] = row
    position_BS[b, -len(row):] = np.arange(len(row))
  scores = jax.jit(functools.partial(
      scoring.score, MODEL, num_targets=T, temperature=temperature))(
          params, token_BS, position_BS)
  np.testing.assert_allclose(
      [got[name].logp_T for name in names], scores.logp_BT, rtol=0, atol=1e-4)


@pytest.mark.long_after_first
@pytest.mark.parametrize('options', [
    dict(slots=1), dict(slots=3, chunk=1), dict(slots=64, chunk=32),
    dict(slots=8, columns=(30,), prompts=(14,))], ids=str)
def test_slots_chunks_and_shapes_change_nothing(engine, free, options):
  toy.assert_same(_sample(engine(**options))[0], free)


@pytest.mark.long_after_first
@pytest.mark.parametrize('slots, mesh', [
    (8, dict(data=4)), (8, dict(data=2, tensor=2)),
    (64, dict(fsdp=2, tensor=2)), (64, dict(tensor=4))], ids=str)
def test_the_mesh_changes_nothing(engine, free, mesh, slots):
  got, _ = _sample(_on_mesh(engine, slots, tuple(mesh.items())))
  toy.assert_same(got, free)


@pytest.mark.long_after_first
@pytest.mark.parametrize('options', [
    {}, dict(page=4, pages=1000), dict(attention='splash_interpreted'),
    dict(slots=8, mesh=dict(data=2, fsdp=1, tensor=2))], ids=str)
def test_a_shared_prefix_is_prefilled_once(
    make_engine, params, monkeypatch, options):
  """Nine tokens: the completions are those of whole prompts. Prompts with many
  other tokens are prefilled whole, here from 14 on. A kernel computes attention
  but for prompts after the prefix."""
  monkeypatch.setattr(shapes_lib, '_MOST_AFTER_PREFIX', 5)
  prefix = np.arange(20, 29)
  prompts = [np.concatenate([prefix, prompt]) for prompt in _prompts()]
  sizes = dict(slots=4, prompts=(14, 23), columns=(26, 40)) | options
  model = dataclasses.replace(MODEL, attention=sizes.pop('attention', 'xla'))
  if 'mesh' in options:
    sizes['mesh'] = mesh_lib.make(options['mesh'], jax.devices())

  def sample(prefix):
    engine = make_engine(model, params, prompt_tokens=23, max_tokens=T,
                         prefix=prefix, **sizes)
    programs, shapes = engine.schedule.programs, []

    def prefill(weights, token_QP, *more):
      shapes.append(token_QP.shape)
      return programs.prefill(weights, token_QP, *more)

    watched = dataclasses.replace(engine.schedule, programs=(
        dataclasses.replace(programs, prefill=prefill)))
    found, _ = dataclasses.replace(engine, schedule=watched).sample(
        prompts, G, T)
    return found, shapes

  want, whole = sample(())
  got, shapes = sample(tuple(prefix.tolist()))
  toy.assert_same(got, want)
  expected = [(rows, columns if columns == 23 else 5)
              for rows, columns in whole]
  first = [columns for _, columns in expected].index(5)
  expected.insert(first, (2 if 'mesh' in options else 1, 9))
  assert shapes == expected and expected[0][1] == 23
  with pytest.raises(ValueError, match='prompt 0 lacks the prefix'):
    make_engine(MODEL, params, prompt_tokens=23, max_tokens=T,
                prefix=tuple(range(9)), **sizes).sample(prompts[1:2], G, T)


@functools.cache
def _on_mesh(engine, slots, mesh):
  shape = dict(data=1, fsdp=1, tensor=1) | dict(mesh)
  return engine(slots=slots, mesh=mesh_lib.make(shape, jax.devices()))


class _Table:
  """Prompts of several widths, the widest not first; two of three groups are
  not mixed. See tools.streaming.Table."""

  def __init__(self):
    generator = np.random.default_rng(3)
    self.length_QG = generator.integers(1, T + 1, (40, G))
    self.correct_QG = np.zeros((40, G), bool)
    self.correct_QG[::3, 1] = True

  def request(self, prompt_id):
    return groups_lib.Request(
        tuple(map(int, _prompts()[(prompt_id + 3) % 7])), prompt_id,
        list(self.length_QG[prompt_id]))

  def is_mixed(self, prompt_id):
    return prompt_id % 3 == 0


def _mixed_groups(engine, sample, wanted=4):
  """{(prompt, sample): Completion} of the first mixed groups, and Stats."""
  known, stats = _Table(), schedule.Stats()
  done = [completion for some in sample(
      engine.schedule, engine.weights, known, wanted, jax.random.key(0), stats)
          for completion in some]
  return {(c.request.prompt_id, c.sample): c for c in done
          if known.is_mixed(c.request.prompt_id)
          and c.request.prompt_id < 3 * wanted}, stats


@pytest.mark.long_after_first
@pytest.mark.parametrize('slots, mesh', [
    (8, dict(data=1)), (16, dict(data=2, tensor=2)), (64, dict(fsdp=4))],
                         ids=str)
def test_a_stream_draws_what_whole_batches_draw(engine, slots, mesh):
  """Later prompts may be wider than all before them, and need more slots."""
  one = engine() if mesh == dict(data=1) else _on_mesh(
      engine, slots, tuple(mesh.items()))
  got, stats = _mixed_groups(one, streaming.stream)
  want, more = _mixed_groups(engine(), streaming.batches)
  toy.assert_same(got, want)
  assert len(got) == 4 * G and stats.steps < more.steps


@pytest.mark.long_after_first
@pytest.mark.parametrize('shape, stop_at_live, steps', [
    (dict(data=2), 8, 4), (dict(data=2), 7, 8), (dict(data=2, fsdp=2), 8, 4),
    (dict(), 7, 7)], ids=str)
def test_shards_count_their_live_slots_together(
    make_engine, params, shape, stop_at_live, steps):
  """The first 8 slots end at 2 tokens, the others at 7. Several shards count
  every fourth step, a single one every step."""
  shape = dict(data=1, fsdp=1, tensor=1) | shape
  shards = shape['data'] * shape['fsdp']
  engine = make_engine(
      MODEL, params, slots=16, prompt_tokens=4, max_tokens=20, chunk=20,
      mesh=mesh_lib.make(shape, jax.devices()[:shards]))
  programs = engine.schedule.programs
  slots = engine_lib.idle_slots(16)
  slots = slots.replace(live=~slots.live, start=slots.start + 1,
                        limit=np.repeat([2, 7], 8).astype(np.int32))
  _, chunk = programs.decode(
      engine.weights, programs.empty(16, 24, 0), slots, jax.random.key(0), 20,
      stop_at_live)
  assert chunk.steps == steps
  # Each device keeps its own slots: nothing is gathered for the host.
  assert chunk.token_NC.sharding.shard_shape((16, 20)) == (16 // shards, 20)
  np.testing.assert_array_equal(
      chunk.length_N, np.minimum(slots.limit, steps))
  np.testing.assert_array_equal(chunk.live_N, slots.limit > steps)


def test_slots_stay_in_their_shard():
  """Samples go to the two shards in turn. The four long ones are in one shard,
  which shrinks when two of them are left: 4 slots in all."""
  programs, calls = toy.programs(lambda prompt, sample: 99), []

  def decode(_, cache, slots, *rest):
    cache, chunk = programs.decode(_, cache, slots, *rest)
    assert chunk.steps > 0
    calls.append((slots.sample[slots.live].tolist(), len(slots.live),
                  int(chunk.steps)))
    return cache, chunk

  def compact(cache, slot_M, *rest):
    calls.append(slot_M.tolist())
    return programs.move(cache, slot_M, *rest)

  plan = schedule.Schedule(
      dataclasses.replace(programs, decode=decode, move=compact),
      shapes_lib.Shapes((4, 8), (8,), (32,), chunk=4, shards=2))
  limits = [9, 1, 13, 1, 9, 1, 13, 1]
  done = [c for some in plan.run(None, groups_lib.Queue([
      groups_lib.Request((1, 2), 3, limits)]), None) for c in some]
  assert calls == [
      ([0, 2, 4, 6, 1, 3, 5, 7], 8, 1), ([0, 2, 4, 6], 8, 4),
      ([0, 2, 4, 6], 8, 4), [1, 3, 0, 1], ([2, 6], 4, 4)]
  for c in done:
    np.testing.assert_array_equal(
        c.token_T, toy.token(3, c.sample, np.arange(limits[c.sample])))
  assert len(done) == 8


def test_refills_go_to_the_emptiest_shard_first():
  """Of 8 slots each, three of shard 0 are free and one of shard 1: both samples
  of the second prompt go to shard 0."""
  programs, seen = toy.programs(lambda prompt, sample: 99), []

  def decode(_, cache, slots, *rest):
    seen.append(slots.prompt_id[slots.live].tolist())
    return programs.decode(_, cache, slots, *rest)

  plan = schedule.Schedule(
      dataclasses.replace(programs, decode=decode),
      shapes_lib.Shapes((16,), (8,), (32,), chunk=4, shards=2))
  limits = [1, 9, 1, 9, 1, 9, 9, 1] + 8 * [9]  # shard 0 has samples 0, 2, …
  for _ in plan.run(None, groups_lib.Queue([
      groups_lib.Request((1, 2), 3, limits),
      groups_lib.Request((1, 2), 4, [9, 9])]), None):
    pass
  assert seen[:2] == [16 * [3], [4, 4] + 5 * [3] + 7 * [3]]


def test_no_step_is_computed_after_the_last_token(engine):
  _, stats = _sample(_on_mesh(engine, 64, (('data', 4),)), group_size=8)
  assert stats.steps == T


def test_draws_depend_on_key_prompt_and_sample_alone(engine, free):
  """Not on the order or number of prompts, nor on G or the limit."""
  some = {name: c for name, c in free.items() if name[0] in (2, 3, 123456)}
  toy.assert_same(_sample(engine(), which=(6, 2, 3))[0], some)
  fewer, _ = _sample(engine(), group_size=1)
  toy.assert_same(fewer, {name: free[name] for name in fewer})
  for name, completion in _sample(engine(), max_tokens=1)[0].items():
    np.testing.assert_array_equal(completion.token_T, free[name].token_T[:1])


def test_draws_depend_on_each_of_them(engine):
  """With a uniform policy each token shows its random number: all differ."""
  engine = dataclasses.replace(
      engine(), weights=jax.tree.map(np.zeros_like, engine().weights))
  base, other = _sample(engine)[0], _sample(engine, seed=1)[0]
  rows = np.stack([c.token_T for c in (*base.values(), *other.values())])
  np.testing.assert_allclose(
      [c.logp_T for c in base.values()], -np.log(V), rtol=1e-6)
  assert len(np.unique(rows, axis=0)) == len(rows)
  assert len(np.unique(rows.T, axis=0)) == T
  # Any two of them have about one token in V in common.
  first, second = np.split(rows, 2)
  assert (first == second).mean() < 4 / V
  assert (first[1:] == first[:-1]).mean() < 4 / V


def _cut(completion, eos_ids):
  """Length, and number of EOS, of a completion cut at its first EOS id."""
  hits = np.flatnonzero(np.isin(completion.token_T, eos_ids))
  return len(completion.token_T) if not hits.size else hits[0] + 1, hits.size


@pytest.mark.long
def test_ends_at_each_of_several_eos_ids(engine, free):
  """As if cut after the first one: the draws do not depend on the ends."""
  # 0 also pads completions: only lengths mark their ends.
  eos_ids = (0, int(free[7, 0].token_T[3]), int(free[2, 1].token_T[-1]))
  got, stats = _sample(engine(eos_ids=eos_ids))
  lengths = set()
  for name, completion in got.items():
    length, hits = _cut(free[name], eos_ids)
    np.testing.assert_array_equal(
        completion.token_T, free[name].token_T[:length])
    assert completion.ended == bool(hits)
    lengths.add((length, completion.ended))
  assert len(lengths) > 3 and (T, False) in lengths
  assert stats.tokens == sum(len(c.token_T) for c in got.values())


@pytest.mark.long_after_first
@pytest.mark.parametrize('options', [
    dict(slots=3), dict(slots=1, chunk=1), dict(slots=64, chunk=32)], ids=str)
def test_a_string_of_two_tokens_ends_a_completion(engine, free, options):
  """With the token that completes it, in any order of the slots; it is not
  truncated, even if that is the last token allowed."""
  last = free[2, 1].token_T[-2:]
  pairs = {tuple(free[7, 0].token_T[3:5]), tuple(last)}
  strings = tuple(''.join(map(_letter, pair)) for pair in pairs)
  tokenizer = types.SimpleNamespace(
      added_tokens_decoder={}, decode=lambda ids, **_: ''.join(
          map(_letter, ids)))
  got, _ = _sample(engine(**options, stop=stopping.at_strings(
      tokenizer, strings)))
  assert got.keys() == free.keys()
  ends = set()
  for name, completion in got.items():
    whole = free[name].token_T
    length = next((i for i in range(2, T + 1)
                   if tuple(whole[i - 2:i]) in pairs), None)
    np.testing.assert_array_equal(completion.token_T, whole[:length])
    np.testing.assert_allclose(
        completion.logp_T, free[name].logp_T[:length], atol=1e-5)
    assert completion.ended == (length is not None)
    ends.add(length)
  assert {None, 5, T} <= ends


def _letter(token):
  return chr(0x4e00 + token)


def test_limits_are_each_samples_own(engine, free):
  limits = np.random.default_rng(0).integers(1, T + 1, (7, G))
  got, stats = _sample(engine(), max_tokens=limits)
  for (i, j), completion in got.items():
    length = limits[IDS.index(i), j]
    np.testing.assert_array_equal(
        completion.token_T, free[i, j].token_T[:length])
    assert not completion.ended
  assert stats.tokens == limits.sum()


def test_nothing_to_do(engine):
  assert _sample(engine(), which=())[0] == {}


@pytest.mark.long
def test_slots_stay_busy_and_prompts_are_prefilled_once(make_engine, params):
  """By the counts of prefills, tokens and slots times steps."""
  engine = make_engine(
      MODEL, params, slots=32, prompt_tokens=4, max_tokens=48,
      columns=(16, 32, 64))
  rng = np.random.default_rng(0)
  lengths = np.minimum(rng.geometric(1 / 12, (40, 8)), 48)
  _, stats = engine.sample(rng.integers(0, V, (40, 3)), 8, lengths)
  assert stats.prefills == 10  # of 4 prompts each
  assert stats.occupancy > 0.85
  # Nearly every slot is live until the queue is empty; then the live slots are
  # compacted.
  tail = lengths.sum() - stats.busy_tokens
  assert stats.slot_steps - stats.busy_slot_steps < 3 * tail


def _warm_up(shapes, plan, weights):
  """Runs every program at every size that a queue may need."""
  programs, key, prompts = plan.programs, jax.random.key(0), []
  for width in shapes.prompts:
    empty = -np.ones((shapes.prefill_rows(width), width), np.int32)
    prompts.append(programs.prefill(weights, empty, empty))
  nowhere = np.full(shapes.refill, shapes.slots[-1], np.int32)
  for slots in shapes.slots:
    for columns in shapes.columns:
      cache, _ = programs.decode(
          weights, programs.empty(slots, columns, 0),
          engine_lib.idle_slots(slots), key, 0, 0)
      for prompt in prompts:
        cache = programs.insert(cache, prompt, 0 * nowhere, nowhere)
      for others in shapes.slots:
        for other in shapes.columns:
          programs.move(programs.empty(slots, columns, 0),
                        np.zeros(others, int), 0, other)


@pytest.mark.long
def test_nothing_is_compiled_after_the_warm_up(make_engine, params):
  engine = make_engine(
      MODEL, params, slots=16, prompt_tokens=8, max_tokens=24,
      prompts=(4, 8), columns=(20, 40))
  _warm_up(engine.schedule.shapes, engine.schedule, engine.weights)
  compiled = []

  def listen(event, duration, **_):
    if event == '/jax/core/compile/backend_compile_duration':
      compiled.append(duration)

  jax.monitoring.register_event_duration_secs_listener(listen)
  try:
    jax.jit(lambda x: 3 * x)(1.0)
    assert compiled  # the listener works
    compiled.clear()
    for seed in range(3):
      rng = np.random.default_rng(seed)
      prompts = [rng.integers(0, V, n) for n in rng.integers(1, 9, 12)]
      lengths = np.minimum(rng.geometric(1 / 6, (12, 4)), 24)
      engine.sample(prompts, 4, lengths, seed=seed)
    assert not compiled
  finally:
    jax.monitoring.unregister_event_duration_listener(listen)


@pytest.mark.parametrize('temperature', [0.0, 1.0])
def test_logits_that_are_not_finite_name_their_prompt(
    make_engine, params, temperature):
  """NaN in the embedding of a token that only the prompt of id 8 has."""
  prompts = [np.full(4, token) for token in (3, 5, 7)]
  embedding = params['embed']['embedding'].at[5].set(np.nan)
  broken = params | {'embed': {'embedding': embedding}}
  engine = make_engine(
      MODEL, broken, slots=4, prompt_tokens=4, max_tokens=T,
      decoding=draw.Decoding(temperature))
  with pytest.raises(groups_lib.NonFiniteError, match='prompt 8: .*not finite'
                     ) as error:
    engine.sample(prompts, ids=(4, 8, 9), group_size=2, max_tokens=T)
  assert error.value.prompt_id == 8
