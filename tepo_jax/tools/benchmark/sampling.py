"""Sampling: rates, occupancy and memory traffic, compared with transformers.

'uniform' is one batch whose completions all have T tokens. 'geometric' is a
queue of 16 such batches with geometrically distributed lengths, which a table
forces, decoded in as many slots. 'static' is the same engine without refill,
compaction and cache growth: a batch waits for its longest row.
"""

from collections.abc import Callable, Iterator, Sequence
import dataclasses
import functools
import resource
import time
from typing import Any, NamedTuple

import jax
import ml_collections
import numpy as np

from tepo_jax.job import sampling as sampling_lib
from tepo_jax.job import slots as slots_lib
from tepo_jax.policy import pages as pages_lib
from tepo_jax.policy import transformer
from tepo_jax.rollout import draw
from tepo_jax.rollout import engine as engine_lib
from tepo_jax.rollout import groups as groups_lib
from tepo_jax.rollout import paging
from tepo_jax.rollout import schedule as schedule_lib
from tepo_jax.rollout import shapes as shapes_lib
from tepo_jax.runtime import mesh as mesh_lib
from tepo_jax.tools import streaming
from tepo_jax.tools import workload as workload_lib
from tepo_jax.tools.benchmark import registry
from tepo_jax.tools.benchmark import timing
from tepo_jax.tools.plan import cost

_BATCHES = 16  # in the geometric queue
_SHARE = 5  # T as a multiple of the mean geometric length


class _Queue(NamedTuple):
  """Prompts with the length of every completion."""
  token_QP: np.ndarray
  length_QG: np.ndarray


class Engine:
  """Decodes queues."""

  def __init__(self, config, workload):
    self._workload = workload
    mesh = mesh_lib.make(config.mesh)
    self.model, self.mesh = sampling_lib.for_decoding(
        workload.model, mesh, config.rollout.tensor)
    self.cache = config.rollout.cache
    self.programs = sampling_lib.maker(self.cache)(
        self.model, self.mesh, decoding=draw.Decoding(),
        eos_ids=(workload.model.vocab_size,), chunk=config.rollout.chunk)
    params = jax.jit(
        lambda: transformer.init(workload.model, jax.random.key(0)),
        out_shardings=mesh_lib.shardings(
            mesh, transformer.logical_axes(workload.model)))()
    self.weights = sampling_lib.make_decode_cast(
        self.model, self.mesh, config.rollout.weights)(params)
    self.rows = workload.prompts * workload.samples
    self.chunk = config.rollout.chunk

  def schedule(self, work: int) -> schedule_lib.Schedule:
    """Returns the schedule for a queue of `work` completions."""
    workload = self._workload
    return schedule_lib.Schedule(self.programs, slots_lib.sampling_shapes(
        self.model, self.mesh, cache=self.cache, wanted=self.rows, work=work,
        prompt_tokens=workload.prompt_tokens, max_tokens=workload.max_tokens,
        chunk=self.chunk, samples=workload.samples))

  def run_step(self, sample: Callable[..., Iterator[list]],
               known: streaming.Table) -> schedule_lib.Stats:
    """Samples a rollout step by `streaming.stream` or `streaming.batches`."""
    stats = schedule_lib.Stats()
    for _ in sample(self.schedule(self.rows), self.weights, known,
                    self._workload.prompts, jax.random.key(1), stats):
      pass
    return stats

  def run(self, schedule: schedule_lib.Schedule, queue: _Queue
          ) -> schedule_lib.Stats:
    """Decodes the queue."""
    stats = schedule_lib.Stats()
    requests = [groups_lib.Request(tokens, index, lengths)
                for index, (tokens, lengths) in enumerate(zip(*queue))]
    for _ in schedule.run(self.weights, groups_lib.Queue(requests),
                          jax.random.key(1), stats):
      pass
    return stats


def measure(config: ml_collections.ConfigDict,
            workload: workload_lib.Workload, peers: registry.Peers
            ) -> Iterator[timing.Measurement]:
  """Measures the engine, and transformers where it is a peer."""
  engine = Engine(config, workload)
  queues = {'uniform': uniform(workload), 'geometric': _queue(
      dataclasses.replace(
          workload, prompts=workload.prompts * _BATCHES,
          mean_tokens=max(1, workload.max_tokens // _SHARE)))}
  yield from _compile(engine, workload)
  for name, queue in queues.items():
    functions, stats = _functions(engine, name, queue, workload, peers)
    seconds = timing.interleaved(functions, workload.rounds)
    for who, times in seconds.items():
      yield timing.summary(f'sampling/{name}/{who}/tokens',
                           [queue.length_QG.sum() / s for s in times],
                           'token/s')
    for who in set(seconds) - {'engine'}:
      yield timing.ratio(f'sampling/{name}/engine_over_{who}', seconds[who],
                         seconds['engine'])
    last = stats[-1]
    yield timing.Measurement(f'sampling/{name}/occupancy', last.occupancy, '1')
    yield timing.Measurement(f'sampling/{name}/share_of_slot_steps',
                             last.tokens / last.slot_steps, '1')
  yield from _prefill(engine, workload)
  yield from _decode_steps(engine, workload)
  yield _memory()


def measure_rollout(config: ml_collections.ConfigDict,
                    workload: workload_lib.Workload, peers: registry.Peers
                    ) -> Iterator[timing.Measurement]:
  """Measures rollout steps with dynamic sampling: as a stream, and in batches.

  A group is mixed with a chance of `workload.mixed_share`; lengths are
  geometric with a mean of T / 5. All rounds sample the same completions.
  """
  del peers
  engine = Engine(config, workload)
  known = streaming.table(dataclasses.replace(
      workload, mean_tokens=max(1, workload.max_tokens // _SHARE)),
                          config.rollout.max_generation_batches,
                          workload.mixed_share)
  stats, forms = {}, {'stream': streaming.stream, 'batches': streaming.batches}

  def step(name):
    stats[name] = engine.run_step(forms[name], known)

  seconds = timing.interleaved(
      {name: functools.partial(step, name) for name in forms}, workload.rounds)
  for name, times in seconds.items():
    yield timing.summary(f'rollout/{name}/seconds', times, 's')
    yield timing.Measurement(f'rollout/{name}/steps', stats[name].steps, '1')
    yield timing.Measurement(f'rollout/{name}/tokens', stats[name].tokens, '1')
  yield timing.ratio('rollout/stream_over_batches', seconds['batches'],
                     seconds['stream'])


def uniform(workload: workload_lib.Workload) -> _Queue:
  """Makes a queue of one step's prompts, each completion of T tokens."""
  return _queue(dataclasses.replace(
      workload, mean_tokens=workload.max_tokens))


def _queue(workload):
  """Makes random prompts, with completions of the workload's lengths."""
  return _Queue(
      np.random.default_rng(0).integers(0, workload.model.vocab_size, (
          workload.prompts, workload.prompt_tokens)).astype(np.int32),
      workload.lengths(workload.prompts * workload.samples).reshape(
          workload.prompts, workload.samples))


def _functions(engine, name, queue, workload, peers):
  """Returns the functions to time, and a list of the engine's Stats by run."""
  stats = []
  dynamic = engine.schedule(queue.length_QG.size)
  functions: dict[str, Callable[[], Any]] = {
      'engine': lambda: stats.append(engine.run(dynamic, queue))}
  batches = [_Queue(*(x[start:start + workload.prompts] for x in queue))
             for start in range(0, len(queue.token_QP), workload.prompts)]
  if name == 'geometric':
    # Neither compacts rows nor grows the cache.
    full = engine.schedule(engine.rows)
    static = dataclasses.replace(full, shapes=dataclasses.replace(
        full.shapes, slots=full.shapes.slots[-1:],
        columns=full.shapes.columns[-1:]))
    functions['static'] = lambda: [engine.run(static, b) for b in batches]
  if 'transformers' in peers:
    from tepo_jax.tools.benchmark import torch_peer  # torch is optional
    peer = torch_peer.TorchGenerator(workload)
    functions['transformers'] = lambda: [
        peer.run(*batch) for batch in batches]
  return functions, stats


def _compile(engine, workload):
  """Measures by how much the first run takes longer than the second."""
  queue, schedule = uniform(workload), engine.schedule(engine.rows)
  times = [time.perf_counter()]
  for _ in range(2):
    engine.run(schedule, queue)
    times.append(time.perf_counter())
  first, second = np.diff(times)
  yield timing.Measurement('sampling/compile', float(first - second), 's')


def _prefill(engine, workload):
  """Measures prefill with each prompt once, and once per sample."""
  shape = (workload.prompts, workload.prompt_tokens)
  once = (np.zeros(shape, np.int32),
          np.tile(np.arange(shape[1], dtype=np.int32), (shape[0], 1)))
  repeated = [np.repeat(x, workload.samples, 0) for x in once]
  seconds = timing.interleaved({
      'shared': lambda: engine.programs.prefill(engine.weights, *once),
      'unshared': lambda: engine.programs.prefill(engine.weights, *repeated),
  }, workload.rounds)
  for name, times in seconds.items():
    yield timing.summary(f'sampling/prefill/{name}', times, 's')


def _decode_steps(engine, workload):
  """Measures decode steps of all sizes: seconds, and bytes accessed on a device
  compared with the least possible, the weights and the cache; of pages, what is
  alive of it in the middle of a chunk."""
  shapes = engine.schedule(engine.rows).shapes
  weights = mesh_lib.device_bytes(engine.weights)
  for count in shapes.slots:
    for columns in step_columns(shapes, count):
      seconds, lowered = decode_step(engine, count, columns, workload.rounds)
      compiled = lowered.compile()
      accessed = compiled.cost_analysis()['bytes accessed']
      if shapes.page:  # XLA does not know what the kernel reads
        accessed = cost.of(compiled.as_text(), columns=columns_read(
            shapes, count, columns)).hbm_bytes
      name = f'sampling/decode_step/{count}_slots_{columns}_columns'
      yield timing.summary(f'{name}/seconds', seconds, 's')
      alive = columns - engine.chunk // 2 if shapes.page else columns
      floor = weights + count // shapes.shards * slots_lib.slot_bytes(
          engine.model, engine.mesh, alive)
      yield timing.Measurement(f'{name}/bytes', float(accessed), 'byte')
      yield timing.Measurement(
          f'{name}/bytes_over_floor', accessed / floor, '1')


def step_columns(shapes: shapes_lib.Shapes, count: int) -> Sequence[int]:
  """The columns with which decode steps of `count` slots are measured: all of a
  rectangle's; with pages as many, up to the most, as all slots can have, each
  with a page free."""
  if not shapes.page:
    return shapes.columns
  own = (shapes.pages - shapes.tails) // (count // shapes.shards) - 1
  return [min(shapes.columns[-1], own * shapes.page)]


def columns_read(shapes: shapes_lib.Shapes, count: int, columns: int) -> int:
  """The columns of pages that a device reads in the middle of the chunk of
  `decode_step`."""
  return count // shapes.shards * pages_lib.columns_read(
      columns - shapes.chunk // 2)


def decode_step(engine: Engine, count: int, columns: int, rounds: int
                ) -> tuple[list[float], jax.stages.Lowered]:
  """Returns seconds a step by round, and the program of a chunk of steps."""
  shapes = engine.schedule(engine.rows).shapes
  rows = engine_lib.idle_slots(count, shapes.page)
  rows = rows.replace(live=~rows.live, limit=rows.limit + 2 ** 30)
  more = rows, jax.random.key(0), engine.chunk, 0
  make_cache = functools.partial(engine.programs.empty, count, columns, 0)
  if shapes.page:
    make_cache = functools.partial(_pages, engine, shapes, rows, columns)

  def timed():
    cache = jax.block_until_ready(make_cache())
    start = time.perf_counter()
    jax.block_until_ready(
        engine.programs.decode(engine.weights, cache, *more)[0])
    return (time.perf_counter() - start) / engine.chunk

  timed()
  lowered = engine.programs.decode.lower(
      engine.weights, make_cache(), *more)
  return [timed() for _ in range(rounds)], lowered


def _pages(engine, shapes, slots, columns):
  """A cache of pages in which each of the slots has a prompt of its own, with
  which a chunk of steps takes up to so many columns."""
  count, tokens = len(slots.live), max(1, columns - engine.chunk)
  store = paging.Paging(engine.programs, shapes)
  store.reserve = 0
  store.fit(engine_lib.idle_slots(0, shapes.page), count, count, tokens)
  for slot in range(count):
    first = store.place(slot, groups_lib.Request((0,) * tokens, slot, [1]))
    if first is None:
      raise ValueError(f'{count} slots of {columns} columns do not fit')
    slots.start[slot], slots.length[slot] = tokens, first + 1 - tokens
  return pages_lib.PagedCache(store.kv, store.table(), np.int32(0))


def _memory():
  """Measures the peak memory of the first device, else of this process."""
  if stats := jax.local_devices()[0].memory_stats():
    return timing.Measurement(
        'sampling/peak_device_memory', stats['peak_bytes_in_use'], 'byte')
  return timing.Measurement(
      'sampling/peak_memory',
      resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, 'byte')
