"""Pages: the host's schedule of them, and the completions drawn with them.

Axes: S shards · X pages · Y columns of a page · N slots · C steps of a chunk.
"""

import dataclasses
import functools
import itertools
import types

import jax
from jax import numpy as jnp
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import kernel
import numpy as np
import pytest

from tepo_jax.policy import pages as pages_lib
from tepo_jax.policy import transformer
from tepo_jax.rollout import carry
from tepo_jax.rollout import engine as engine_lib
from tepo_jax.rollout import groups as groups_lib
from tepo_jax.rollout import paging
from tepo_jax.rollout import schedule
from tepo_jax.rollout import shapes as shapes_lib
from tepo_jax.runtime import mesh as mesh_lib
from tests.rollout import toy

V, T, G = 40, 24, 3
MODEL = transformer.ModelConfig(
    vocab_size=V, d_model=32, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=8, d_ff=48, max_position=64, qkv_bias=True)
LENGTHS = (5, 1, 14, 4, 2, 9, 5)


class _Pages:
  """Programs without a model. A column of a page holds the name of its token:
  (prompt, sample, position), and sample -1 for a prompt's. Before each step
  `decode` checks that a slot sees its own sequence, whole and in order."""

  def __init__(self, length, shards):
    self.length, self.shards = length, shards
    self.seen = set()

  def programs(self):
    return shapes_lib.SamplingPrograms(
        lambda count, size: np.full((self.shards, count, size, 3), -9),
        self.prefill, self.store, self.copy, self.decode)

  def prefill(self, _, token_QP, position_QP):
    """The prompt's id is its tokens."""
    rows_QP3 = np.stack(
        [token_QP, np.full_like(token_QP, -1), position_QP], -1)
    return types.SimpleNamespace(position=position_QP, rows=rows_QP3)

  def store(self, pages, prompts, target_SQW):
    size = pages.shape[2]
    for (shard, row, page), target in np.ndenumerate(target_SQW):
      if target < pages.shape[1]:
        part = prompts.rows[row, page * size:(page + 1) * size]
        pages[shard, target, :len(part)] = part
    return pages

  def copy(self, pages, source_SM, target_SM):
    for shard, (source_M, target_M) in enumerate(zip(source_SM, target_SM)):
      kept = target_M < pages.shape[1]
      assert len(set(target_M[kept])) == kept.sum()
      pages[shard, target_M[kept]] = pages[shard, source_M[kept]]
    return pages

  def decode(self, _, cache, slots, __, steps, stop_at_live):
    pages, size = cache.kv, cache.kv.shape[2]
    own, column = len(slots.live) // self.shards, int(cache.column)
    slots = jax.tree.map(np.array, slots)
    before_N, live_N = slots.length.copy(), slots.live
    ended_N = np.zeros_like(live_N)
    token_NC = np.zeros((len(live_N), steps), np.int32)
    done = 0
    while done < steps and live_N.sum() > stop_at_live:
      for slot in np.flatnonzero(live_N):
        name = slots.prompt_id[slot], slots.sample[slot]
        place = slots.start[slot] + slots.length[slot] - 1
        shard, number = divmod(slot, own)
        pages[shard, column // size * own + number, column % size] = (
            name[0], -1 if slots.length[slot] <= 0 else name[1], place)
        if place >= 0:
          self._check(pages[shard], cache.table_NW[slot], name, place,
                      slots.start[slot])
        index = slots.length[slot]
        token_NC[slot, done] = (
            toy.token(*name, index) if index >= 0
            else slots.given_NY[slot, index])
        slots.length[slot] += 1
        ended_N[slot] = slots.length[slot] == self.length(*name)
        live_N[slot] = slots.length[slot] < min(
            slots.limit[slot], self.length(*name))
      done, column = done + 1, column + 1
    return cache, engine_lib.Chunk(
        token_NC, np.where(np.arange(steps) < -before_N[:, None], 0,
                           -token_NC / 7).astype(np.float32),
        slots.length, ended_N, live_N, np.int32(done))

  def _check(self, pages_XY3, table_W, name, place, start):
    size = pages_XY3.shape[1]
    found = pages_XY3[table_W[:place // size + 1]].reshape(-1, 3)[:place + 1]
    position = np.arange(place + 1)
    np.testing.assert_array_equal(found[:, 0], name[0])
    np.testing.assert_array_equal(
        found[:, 1], np.where(position < start, -1, name[1]))
    np.testing.assert_array_equal(found[:, 2], position)
    self.seen.add((*name, place))


class _Requests(groups_lib.Queue):
  """A queue that wants one prompt only in its first chunks of decoding."""

  def __init__(self, requests, cancelled, chunks):
    super().__init__(requests)
    self.cancelled, self.chunks = cancelled, chunks

  def take(self, samples):
    self.chunks -= 1
    return super().take(samples)

  def wanted(self, prompt_id):
    return prompt_id != self.cancelled or self.chunks >= 0


def _stop(token_T):
  """Stops with the first token that 97 divides."""
  found = np.flatnonzero(token_T % 97 == 0)
  return int(found[0]) + 1 if found.size else None


@pytest.mark.parametrize('seed', range(12))
def test_each_slot_sees_its_own_sequence(seed, stores):
  """Over random prompts, lengths, limits, stops, sizes of pages and pools, with
  a prompt that is cancelled. In half of the cases the pool is as small as it
  may be, and completions long: samples are put back, and still drawn once,
  whole."""
  rng = np.random.default_rng(seed)
  page, shards, chunk = (int(rng.choice(sizes)) for sizes in (
      (1, 2, 4, 7, 16), (1, 2), (1, 3, 5, 8)))
  length_QG = rng.integers(15 if seed % 2 else 1, 40, (9, 4))
  fake = _Pages(lambda prompt, sample: length_QG[prompt, sample], shards)
  shapes = shapes_lib.Shapes(
      (4, 8), (8, 24), (32, 54), chunk, shards, page)
  shapes = dataclasses.replace(
      shapes, pages=shapes.least_pages + (0 if seed % 2 else 1000))
  requests = [groups_lib.Request(
      (prompt,) * int(rng.integers(1, 25)), prompt,
      rng.integers(20 if seed % 2 else 1, 31, 4).tolist())
              for prompt in range(9)]
  cancelled, stats = int(rng.integers(9)), schedule.Stats()
  run = schedule.Schedule(fake.programs(), shapes, lambda: _stop).run(
      None, _Requests(requests, cancelled, int(rng.integers(1, 9))), None,
      stats)
  done = {(c.request.prompt_id, c.sample): c for some in run for c in some}
  for name in itertools.product(range(9), range(4)):
    request = requests[name[0]]
    if name in done or name[0] != cancelled:
      want = toy.token(*name, np.arange(
          min(request.limits[name[1]], length_QG[name])))
      want = want[:_stop(want)]
      np.testing.assert_array_equal(done[name].token_T, want)
      assert done[name].ended == bool(
          len(want) == length_QG[name] or want[-1] % 97 == 0)
      first = len(request.token_ids) - 1
      assert fake.seen >= {
          (*name, place) for place in range(first, first + len(want))}
  _check_free(stores)
  if seed % 2:
    assert stats.put_back > 0 and stats.redrawn > 0
  else:
    assert stats.put_back == stats.redrawn == 0


def test_a_pool_without_memory_is_an_error(monkeypatch):
  """Of one that is too small, and of one from which nothing is given."""
  shapes = shapes_lib.Shapes((4,), (8,), (32,), 4, page=4)
  shapes = dataclasses.replace(shapes, pages=shapes.least_pages)
  programs = _Pages(lambda *_: 5, 1).programs()
  request = groups_lib.Request((1, 2), 0, [5])
  def run(shapes):
    return list(schedule.Schedule(programs, shapes).run(
        None, groups_lib.Queue([request]), None))

  assert run(shapes)
  with pytest.raises(ValueError, match=f'{shapes.least_pages - 1} pages'):
    run(dataclasses.replace(shapes, pages=shapes.least_pages - 1))
  monkeypatch.setattr(paging.Paging, 'place', lambda *_: None)
  with pytest.raises(RuntimeError, match='no memory'):
    run(shapes)


@pytest.fixture
def stores(monkeypatch):
  """The caches of pages that schedules make; they reserve little, so that pages
  are missing in small pools."""
  made, real = [], paging.Paging
  monkeypatch.setattr(real, 'reserve', 1)

  def make(*args):
    made.append(real(*args))
    return made[-1]

  monkeypatch.setattr(paging, 'Paging', make)
  return made


def _check_free(stores):
  """At the end of a run every page is free, once."""
  for store in stores:
    for free in store.free:
      assert sorted(free) == list(
          range(store.shapes.tails, store.shapes.pages))
    assert not store.prompts and not any(store.copies)
  assert stores


@pytest.fixture(scope='module')
def params():
  """Weights large enough that a token's probability depends on its past."""
  return jax.tree.map(lambda x: 4 * x, jax.jit(functools.partial(
      transformer.init, MODEL))(jax.random.key(0)))


def _drawn(make_engine, model, params, page, slots, pages=0, **options):
  """Completions of random limits, some of which stop as with a stop string."""
  engine = make_engine(
      model, params, slots=slots, prompt_tokens=14, max_tokens=T, prompts=(14,),
      columns=(14 + T if page else 48,), page=page, pages=pages,
      stop=lambda: _at_26, **options)
  rng = np.random.default_rng(0)
  prompts = [rng.integers(0, V, length) for length in LENGTHS]
  return engine.sample(
      prompts, G, rng.integers(T // 2, T + 1, (len(LENGTHS), G)))


def _at_26(token_T):
  """Stops with the first token 26."""
  found = np.flatnonzero(token_T == 26)
  return int(found[0]) + 1 if found.size else None


@pytest.mark.long_after_first
@pytest.mark.parametrize('page, model, options', [
    (4, {}, {}), (3, dict(sliding_window=6, num_full_layers=1), {}),
    (7, {}, dict(mesh=dict(data=2, tensor=2)))], ids=str)
def test_completions_are_those_of_the_rectangle(
    make_engine, params, stores, page, model, options):
  """With a pool so small that samples are put back; prompts may be shorter
  than a page."""
  if options:
    shape = dict(data=1, fsdp=1, tensor=1) | options['mesh']
    options = dict(mesh=mesh_lib.make(shape, jax.devices()))
  _check_equal(make_engine, dataclasses.replace(MODEL, **model), params, page,
               stores, options)


@pytest.mark.long_after_first
@pytest.mark.parametrize('page, pages, shape', [
    (0, 0, {}), (4, 0, {}), (3, 1000, {}), (7, 0, dict(data=2, tensor=2))],
                         ids=str)
def test_completions_that_are_continued_are_those_drawn_at_once(
    make_engine, params, stores, page, pages, shape):
  """Each is cut at any token and continued from there by another run, alone or,
  where nothing was drawn, with others of its prompt; in a rectangle, and in
  pools in which samples are put back."""
  mesh = mesh_lib.make(dict(data=1, fsdp=1, tensor=1) | shape,
                       jax.devices()[:4 if shape else 1])
  shards = mesh_lib.batch_shards(mesh)
  key, rng, slots = jax.random.key(3), np.random.default_rng(1), 4 * shards
  options = dict(slots=slots, prompt_tokens=14, max_tokens=T, eos_ids=(0,),
                 stop=lambda: _at_26, mesh=mesh)
  whole = make_engine(MODEL, params, **options)
  prompts = [groups_lib.Prompt(None, tuple(rng.integers(0, V, n).tolist()), i)
             for i, n in enumerate(LENGTHS)]
  want = {(c.request.prompt_id, c.sample): c for some in whole.schedule.run(
      whole.weights, groups_lib.Queue([groups_lib.Request(
          p.token_ids, p.prompt_id, [T] * G) for p in prompts]),
      jax.random.fold_in(key, 5)) for c in some}

  def cut(completion):
    count = int(rng.integers(0, len(completion.token_T)))
    count *= int(rng.integers(3) > 0)
    return groups_lib.Drawn(completion.token_T[:count],
                            completion.logp_T[:count], np.full(count, 5))

  carried = [carry.Carried(p.prompt_id, 5, tuple(
      cut(want[p.prompt_id, j]) for j in range(G))) for p in prompts]
  least = shapes_lib.Shapes(
      (slots,), (14, 14 + T), (14 + T,), 4, shards, page or 1).least_pages
  engine = make_engine(
      MODEL, params, prompts=(8, 14, 14 + T),
      columns=(14 + T if page else 64,), page=page,
      pages=page and max(least, pages), carries=True, **options)
  stats = schedule.Stats()
  got = {(c.request.prompt_id, c.sample): c for some in engine.schedule.run(
      engine.weights, groups_lib.Queue([
          request for each, p in zip(carried, prompts)
          for request in each.requests(p, T)]), key, stats) for c in some}
  toy.assert_same(got, want)
  for name, completion in got.items():
    before = len(carried[name[0]].samples[name[1]].token_T)
    assert completion.version_T(9).tolist() == [5] * before + [9] * (
        len(completion.token_T) - before)
  assert (stats.put_back > 0) == bool(page and not pages)
  if page:
    _check_free(stores)


@pytest.mark.long
@pytest.mark.usefixtures('interpreted')
def test_completions_by_the_kernel_are_those_of_the_rectangle(
    make_engine, monkeypatch, stores):
  monkeypatch.setattr(pages_lib, 'has_kernel', lambda *_: True)
  model = dataclasses.replace(MODEL, head_dim=128, num_layers=1)
  params = jax.tree.map(lambda x: 4 * x, transformer.init(
      model, jax.random.key(0)))
  _check_equal(make_engine, model, params, 4, stores, {})


def _check_equal(make_engine, model, params, page, stores, options):
  """Compares all completions of pages with those of the rectangle."""
  options |= dict(eos_ids=(0,))
  shards = mesh_lib.batch_shards(options['mesh']) if 'mesh' in options else 1
  slots = 4 * shards
  least = shapes_lib.Shapes(
      (slots,), (14,), (14 + T,), 4, shards, page).least_pages
  want, _ = _drawn(make_engine, model, params, 0, slots, **options)
  got, stats = _drawn(
      make_engine, model, params, page, slots, least, **options)
  toy.assert_same(got, want)
  assert len(got) == len(LENGTHS) * G
  assert len({completion.ended for completion in got.values()}) == 2
  assert stats.put_back > 0
  _check_free(stores)


@pytest.fixture
def interpreted(monkeypatch):
  """Runs the kernel by Pallas' generic interpreter. That of TPUs does not know
  reshaped references; the generic one does not know masked stores."""
  def store(ref, value, *, mask):
    ref[...] = jnp.where(mask, value, ref[...])

  monkeypatch.setattr(kernel.pl, 'pallas_call', functools.partial(
      kernel.pl.pallas_call, interpret=True))
  monkeypatch.setattr(kernel.pltpu, 'store', store)
  kernel.ragged_paged_attention.clear_cache()
  yield
  kernel.ragged_paged_attention.clear_cache()


@pytest.mark.usefixtures('interpreted')
@pytest.mark.long_after_first
@pytest.mark.parametrize('heads, kv_heads, head_dim, window, dtype, error', [
    (4, 2, 128, 5, 'float32', 1e-5), (4, 2, 128, None, 'float32', 1e-5),
    (7, 1, 128, None, 'float32', 1e-5), (28, 4, 128, None, 'float32', 1e-5),
    (8, 4, 128, 9, 'float32', 1e-5), (8, 1, 256, None, 'float32', 1e-5),
    (8, 8, 128, None, 'float32', 1e-5), (7, 1, 128, None, 'bfloat16', 0.02)])
def test_the_kernel_computes_what_xla_does(
    heads, kv_heads, head_dim, window, dtype, error):
  """JAX's kernel on 12 slots of 1 to 33 tokens on pages of 8, more slots than
  it has in a block; those with position -1 are idle.

  The interpreter starts each block of queries or heads anew, where a TPU takes
  over what the block before has prefetched: that is not tested. With 8 heads of
  keys, two blocks of heads, it is right only if the number of slots is even.
  """
  rng = np.random.default_rng(0)
  q_NAH = rng.normal(size=(12, heads, head_dim)).astype(dtype)
  kv_XYJH = rng.normal(size=(70, 8, 2 * kv_heads, head_dim)).astype(dtype)
  table_NW = rng.permutation(70)[:60].reshape(12, 5).astype(np.int32)
  position_N = np.array([0, -1, 8, 16, 7, 15, -1, 32, 31, 3, 24, 9], np.int32)
  assert pages_lib.has_kernel('splash', 2 * kv_heads, head_dim, dtype)
  want_NAH, got_NAH = (
      np.float32(pages_lib.attend(*map(jnp.asarray, (
          q_NAH, kv_XYJH, position_N, table_NW)), window, backend))
      for backend in ('xla', 'splash'))
  np.testing.assert_allclose(got_NAH, want_NAH, atol=error)
