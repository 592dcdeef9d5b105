"""Sampling: rates, occupancy, memory traffic, and transformers beside it.

'uniform' is a batch whose completions all have the most tokens; 'geometric' a
queue of 16 times as much work with lengths of a geometric distribution, forced
by a table, through as many slots. 'static' is the same engine with one size of
everything and no refill: a batch waits for its longest row.
"""

from collections.abc import Callable, Iterator
import dataclasses
import time

import jax
import ml_collections
import numpy as np

from tepo_jax.job import memory as memory_lib
from tepo_jax.job import sampling as sampling_lib
from tepo_jax.policy import transformer
from tepo_jax.rollout import draw
from tepo_jax.rollout import schedule
from tepo_jax.runtime import mesh as mesh_lib
from tepo_jax.tools.benchmark import peers as peers_lib
from tepo_jax.tools.benchmark import timing
from tepo_jax.tools.benchmark import workload as workload_lib

_QUEUE = 16  # times the prompts of a step, in the geometric queue
_SHARE = 5  # the cap is so many times the mean of the geometric lengths


@dataclasses.dataclass
class _Case:
  """A queue of prompts with the length of every sample."""
  token_QP: np.ndarray
  length_QG: np.ndarray

  @property
  def tokens(self) -> int:
    return int(self.length_QG.sum())


class Engine:
  """Runs cases, in one or many sizes, and remembers the last Stats."""

  def __init__(self, config, workload):
    self._workload = workload
    self.mesh = mesh_lib.make(config.mesh)
    self.programs = sampling_lib.make(
        workload.model, self.mesh, decoding=draw.Decoding(),
        eos_ids=(workload.model.vocab_size,), chunk=config.rollout.chunk)
    params = jax.jit(
        lambda: transformer.init(workload.model, jax.random.key(0)),
        out_shardings=mesh_lib.shardings(
            self.mesh, transformer.logical_axes(workload.model)))()
    self.weights = sampling_lib.make_decode_cast(workload.model, self.mesh)(params)
    self.rows = workload.prompts * workload.samples
    self.chunk = config.rollout.chunk
    self.stats = schedule.Stats()

  def plan(self, work: int) -> schedule.Schedule:
    workload = self._workload
    return schedule.Schedule(self.programs, memory_lib.sampling_shapes(
        workload.model, self.mesh, wanted=self.rows, work=work,
        prompt_tokens=workload.prompt_tokens, max_tokens=workload.max_tokens,
        chunk=self.chunk))

  def static_plan(self) -> schedule.Schedule:
    """One size of everything: nothing is compacted, no cache grows."""
    full = self.plan(self.rows)
    return dataclasses.replace(full, shapes=dataclasses.replace(
        full.shapes, slots=full.shapes.slots[-1:],
        columns=full.shapes.columns[-1:]))

  def run(self, plan: schedule.Schedule, case: _Case) -> None:
    """All of the case as one queue."""
    self.stats = schedule.Stats()
    requests = [schedule.Request(tokens, index, lengths)
                for index, (tokens, lengths) in enumerate(
                    zip(case.token_QP, case.length_QG))]
    for _ in plan.run(self.weights, requests, jax.random.key(1), self.stats):
      pass


def measure(config: ml_collections.ConfigDict,
            workload: workload_lib.Workload, peers: tuple[str, ...]
            ) -> Iterator[timing.Measurement]:
  """Everything of the engine, and transformers where it is a peer."""
  engine = Engine(config, workload)
  cases = {'uniform': uniform(workload), 'geometric': _geometric(workload)}
  yield from _compile(engine, workload)
  for name, case in cases.items():
    functions, stats = _functions(engine, name, case, workload, peers)
    seconds = timing.interleaved(functions, workload.rounds)
    for who, times in seconds.items():
      yield timing.summary(f'sampling/{name}/{who}/tokens',
                           [case.tokens / s for s in times], 'token/s')
    for who in set(seconds) - {'engine'}:
      yield timing.summary(
          f'sampling/{name}/engine_over_{who}',
          [b / a for a, b in zip(seconds['engine'], seconds[who])], '1')
    last = stats[-1]
    yield timing.Measurement(
        f'sampling/{name}/occupancy', last.occupancy, '1')
    yield timing.Measurement(
        f'sampling/{name}/share_of_slot_steps', last.tokens / last.slot_steps,
        '1')
  yield from _prefill(engine, workload)
  yield from _decode_steps(engine, workload)
  yield from _memory()


def uniform(workload):
  generator = np.random.default_rng(0)
  return _Case(
      generator.integers(0, workload.model.vocab_size, (
          workload.prompts, workload.prompt_tokens)).astype(np.int32),
      np.full((workload.prompts, workload.samples), workload.max_tokens))


def _geometric(workload):
  generator = np.random.default_rng(0)
  prompts = workload.prompts * _QUEUE
  few = dataclasses.replace(
      workload, mean_tokens=max(1, workload.max_tokens // _SHARE))
  return _Case(
      generator.integers(0, workload.model.vocab_size, (
          prompts, workload.prompt_tokens)).astype(np.int32),
      few.lengths(prompts * workload.samples).reshape(prompts, -1))


def _functions(engine, name, case, workload, peers):
  """What is timed in turn, and a list that gets the engine's Stats."""
  stats = []
  dynamic = engine.plan(case.length_QG.size)

  def run():
    engine.run(dynamic, case)
    stats.append(engine.stats)

  functions: dict[str, Callable[[], None]] = {'engine': run}
  batches = [
      _Case(case.token_QP[start:start + workload.prompts],
            case.length_QG[start:start + workload.prompts])
      for start in range(0, len(case.token_QP), workload.prompts)]
  if name == 'geometric':
    static = engine.static_plan()
    functions['static'] = lambda: [engine.run(static, b) for b in batches]
  if 'transformers' in peers:
    peer = peers_lib.TorchGenerator(workload.model)
    functions['transformers'] = lambda: [
        peer.run(batch.token_QP, batch.length_QG) for batch in batches]
  return functions, stats


def _compile(engine, workload):
  """Seconds by which the first run of the uniform case is longer."""
  case, plan, seconds = uniform(workload), engine.plan(engine.rows), []
  for _ in range(2):
    start = time.perf_counter()
    engine.run(plan, case)
    seconds.append(time.perf_counter() - start)
  yield timing.Measurement('sampling/compile', seconds[0] - seconds[1], 's')


def _prefill(engine, workload):
  """A step's prompts once each, and once for every sample."""
  shape = (workload.prompts, workload.prompt_tokens)
  token_QP = np.zeros(shape, np.int32)
  position_QP = np.tile(np.arange(shape[1], dtype=np.int32), (shape[0], 1))
  many = [np.repeat(x, workload.samples, 0) for x in (token_QP, position_QP)]
  seconds = timing.interleaved({
      'shared': lambda: engine.programs.prefill(
          engine.weights, token_QP, position_QP),
      'unshared': lambda: engine.programs.prefill(engine.weights, *many),
  }, workload.rounds)
  for name, times in seconds.items():
    yield timing.summary(f'sampling/prefill/{name}', times, 's')


def _decode_steps(engine, workload):
  """A decode step at several sizes: seconds, and a device's bytes against the
  floor."""
  shapes = engine.plan(engine.rows).shapes
  weights = mesh_lib.device_bytes(engine.weights)
  shards = mesh_lib.batch_shards(engine.mesh)
  for count in shapes.slots:
    for columns in shapes.columns:
      seconds, accessed = _decode_step(engine, count, columns, workload.rounds)
      name = f'sampling/decode_step/{count}_slots_{columns}_columns'
      yield timing.summary(f'{name}/seconds', seconds, 's')
      floor = weights + count // shards * memory_lib.slot_bytes(
          workload.model, engine.mesh, columns)
      yield timing.Measurement(f'{name}/bytes', accessed, 'byte')
      yield timing.Measurement(f'{name}/bytes_over_floor', accessed / floor,
                               '1')


def _decode_step(engine, count, columns, rounds):
  """Seconds a step of each round, and the compiler's bytes of one."""
  rows = schedule.idle_slots(count)
  rows = rows.replace(live=~rows.live, limit=rows.limit + 2 ** 30)
  chunk = engine.chunk

  def step(cache):
    return engine.programs.decode(
        engine.weights, cache, rows, jax.random.key(0), chunk, 0)[0]

  def timed():
    cache = engine.programs.empty(count, columns, 0)
    jax.block_until_ready(cache)
    start = time.perf_counter()
    jax.block_until_ready(step(cache))
    return (time.perf_counter() - start) / chunk

  timed()
  compiled = engine.programs.decode.lower(
      engine.weights, engine.programs.empty(count, columns, 0), rows,
      jax.random.key(0), chunk, 0).compile()
  return ([timed() for _ in range(rounds)],
          float(compiled.cost_analysis()['bytes accessed']))


def _memory():
  """The most that this process, or its first device, has held."""
  stats = jax.local_devices()[0].memory_stats()
  if stats:
    yield timing.Measurement(
        'sampling/peak_device_memory', stats['peak_bytes_in_use'], 'byte')
  else:
    yield timing.Measurement(
        'sampling/peak_memory', timing.peak_resident_bytes(), 'byte')
