"""The programs of a rollout step on a slice, ready to be lowered.

They are the jitted functions of a run, from `job.programs` and `job.sampling`,
with shapes as arguments.
"""

import collections
from collections.abc import Iterator
import dataclasses
import functools
from typing import NamedTuple

import jax
import ml_collections
import numpy as np

from tepo_jax.job import carrying
from tepo_jax.job import memory as memory_lib
from tepo_jax.job import programs as programs_lib
from tepo_jax.job import sampling as sampling_lib
from tepo_jax.job import slots as slots_lib
from tepo_jax.policy import lora
from tepo_jax.policy import pages as pages_lib
from tepo_jax.policy import transformer
from tepo_jax.rollout import draw
from tepo_jax.rollout import engine
from tepo_jax.rollout import shapes as shapes_lib
from tepo_jax.runtime import mesh as mesh_lib
from tepo_jax.tools import streaming
from tepo_jax.tools import workload as workload_lib
from tepo_jax.tools.plan import phases
from tepo_jax.tools.plan import traffic
from tepo_jax.tools.plan import training

_SHARES = (1.0, 0.8, 0.6, 0.4)  # of mixed groups, to compare


def make_programs(config: ml_collections.ConfigDict,
                  workload: workload_lib.Workload, mesh: jax.sharding.Mesh,
                  limit: int | None = None, remat: str | None = None
                  ) -> programs_lib.TrainingPrograms:
  """Returns a run's programs on a slice.

  limit: bytes of a device; None: what these devices report. remat: of the
  model; None: the config's, or for 'auto' 'full', see `memory.fitted`.
  """
  model = programs_lib.prepare_model(workload.model, config, mesh)
  return memory_lib.keeping(
      programs_lib.make(config, dataclasses.replace(
          model, remat=remat or model.remat), mesh),
      config.rollout.prompts // config.train.minibatch_prompts, limit)


def step_programs(config: ml_collections.ConfigDict,
                  workload: workload_lib.Workload,
                  programs: programs_lib.TrainingPrograms, slots: int,
                  brief: bool = False, free: float | None = None
                  ) -> list[phases.PlannedProgram]:
  """Returns every program of a rollout step.

  Args:
    config: of a training run. workload: lengths. programs: on a slice.
    slots, free: of `sampling_shapes`.
    brief: only the largest of each kind.
  """
  arguments = programs_lib.update_arguments(programs)
  state, base = arguments.state, arguments.base
  policy = _policy(arguments)
  weights = programs.to_decode.eval_shape(policy)
  shapes = sampling_shapes(config, programs.decoding, slots, free)
  return [
      phases.PlannedProgram(
          name='reshard', phase='reshard', runs=1,
          lower=functools.partial(programs.to_decode.lower, policy),
          resident=mesh_lib.device_bytes((state.opt_state, state.reference))),
      *_sampling(config, workload, programs, shapes, weights,
                 mesh_lib.device_bytes((state, base)), brief),
      *training.planned(config, workload, programs, arguments)]


def held_bytes(programs: programs_lib.TrainingPrograms) -> int:
  """Bytes of a chip that sampling cannot use: the training state and the
  weights for decoding."""
  arguments = programs_lib.update_arguments(programs)
  return mesh_lib.device_bytes((
      arguments.state, arguments.base,
      programs.to_decode.eval_shape(_policy(arguments))))


def _policy(arguments):
  return lora.combine(*(arguments.base or (None,)), arguments.state.params)


def sampling_shapes(config: ml_collections.ConfigDict,
                    decoding: tuple[transformer.ModelConfig, jax.sharding.Mesh],
                    slots: int | None, free: float | None = None
                    ) -> shapes_lib.Shapes:
  """Returns the array sizes of a run that decodes in up to `slots` slots; with
  pages, in `free` bytes of a chip."""
  rollout = config.rollout
  sizes = dict(work=rollout.prompts * rollout.samples, samples=rollout.samples,
               prompt_tokens=config.data.max_prompt_tokens,
               max_tokens=rollout.max_tokens, chunk=rollout.chunk,
               carries=carrying.is_on(config))
  if rollout.cache == 'pages':
    return slots_lib.paged_shapes(*decoding, wanted=slots, free=free, **sizes)
  return shapes_lib.make(
      slots=slots, shards=mesh_lib.batch_shards(decoding[1]), **sizes)


def _sampling(config, workload, programs, shapes, weights, state_bytes, brief
              ) -> Iterator[phases.PlannedProgram]:
  """Yields the sampler's programs, the largest and those that occur."""
  sampling = sampling_lib.maker(config.rollout.cache)(
      *programs.decoding,
      decoding=draw.Decoding(config.rollout.temperature), eos_ids=(-1,),  # none
      chunk=config.rollout.chunk)
  arguments = (_PagedArguments if shapes.page else _Arguments)(
      sampling, shapes, weights)
  refill = config.rollout.dynamic_sampling == 'refill'
  share = workload.mixed_share if refill else 1.0
  rollout, age = _traffic(config, workload, shapes, share)
  largest = _largest(shapes)
  runs_of = functools.partial(_runs, chunk=config.rollout.chunk,
                              arrays=2 * programs.decoding[0].num_layers)
  decoded = _Decoded(
      mesh_lib.device_bytes(weights), slots_lib.slot_bytes(
          *programs.decoding, columns=1), shapes.shards, shapes.page,
      slots_lib.has_kernel(*programs.decoding))
  sizes = decoded.sizes(rollout, largest[0])
  runs = runs_of(rollout.runs)

  def decodes(other):
    return _as_if_largest(
        runs_of(other.runs), largest[0],
        decoded.sizes(other, largest[0]) | {largest[0]: sizes[largest[0]]})

  of_decode = dict(
      syncs=rollout.syncs, age=age, by_share={
          share: (decodes(other), other.decode_steps)
          for share in (_SHARES if refill and not brief else ())
          for other, _ in [_traffic(config, workload, shapes, share)]},
      uncarried=decodes(_traffic(
          config, workload, dataclasses.replace(shapes, carries=False),
          share)[0]) if shapes.carries else None)
  for shape in dict.fromkeys(
      [*largest, *([] if brief else sorted(rollout.runs))]):
    steps = config.rollout.chunk if shape.name == 'decode' else 1
    held, given = _held_by_sampling(arguments, shape, largest)
    yield phases.PlannedProgram(
        name=_label(shape), phase='rollout', runs=runs[shape],
        lower=functools.partial(arguments.lower, shape),
        resident=state_bytes + held, given=given, largest=shape in largest,
        equivalent=(_as_if_largest(runs, shape, sizes) if shape in largest
                    else 0),
        open_trips=(steps,),
        columns=decoded.columns(rollout, shape) if shapes.page else None,
        useful=steps * _useful_of_sampling(workload, shape)
        / programs.mesh.size, **of_decode if shape == largest[0] else {})


def _traffic(config, workload, shapes, share):
  """What a rollout runs, and the mean age of the tokens trained on."""
  rollout = config.rollout
  if shapes.carries:
    return traffic.of_carried(
        workload, shapes, share, rollout.dynamic_sampling,
        rollout.carry.max_versions)
  return traffic.of_rollout(
      workload, shapes, share, streaming.stream
      if rollout.dynamic_sampling == 'refill' else streaming.batches), 0.0


class _Decoded(NamedTuple):
  """What a decode step reads on a chip. weights: bytes. column: bytes of a
  column of one slot. page: as in `shapes_lib.Shapes`. kernel: whether one reads
  the pages that are alive."""
  weights: int
  column: int
  shards: int
  page: int
  kernel: bool

  def columns(self, rollout: traffic.Traffic, shape: traffic.Shape) -> float:
    """The columns that a step reads, of all slots of a shard."""
    if self.page and self.kernel and rollout.runs[shape]:
      return rollout.columns[shape] / rollout.runs[shape] / self.shards
    return shape.rows * shape.columns * (self.page or 1) / self.shards

  def sizes(self, rollout, largest) -> dict[traffic.Shape, float]:
    """The bytes of a step of each shape."""
    return {shape: self.weights + self.column * self.columns(rollout, shape)
            for shape in [largest, *rollout.runs] if shape.name == 'decode'}


def _held_by_sampling(arguments, shape, largest):
  """Returns `resident`, without the training state, and `given`."""
  held, given = 0, 0
  weights = mesh_lib.device_bytes(arguments.weights)
  if shape.name not in ('prefill', 'decode'):
    held += weights
  if shape.name not in ('insert', 'store'):  # prompts that wait for a slot
    held += mesh_lib.device_bytes(arguments.prompts(*largest[-1][1:3]))
  if shape.name == 'prefill':  # slots are refilled while others decode
    held += mesh_lib.device_bytes(arguments.cache(*largest[0][1:3]))
    given = weights
  if shape.name == 'compact':  # an array at a time; keys and values are alike
    whole = arguments.cache(shape.rows, shape.columns)
    held += mesh_lib.device_bytes(whole) - mesh_lib.device_bytes(whole.k[0])
  return held, given


def _useful_of_sampling(workload, shape):
  """Returns `useful` over all chips; a decode step computes a token a slot, and
  half of the mean completion is behind it."""
  model, prompt, rows = workload.model, workload.prompt_tokens, shape.rows
  if shape.name == 'prefill':  # of the last layer only keys and values; no head
    return workload_lib.flops(
        dataclasses.replace(model, num_layers=model.num_layers - 1),
        rows * prompt, rows * prompt ** 2 / 2, 0) + (
            4.0 * rows * prompt * model.d_model
            * model.num_kv_heads * model.head_dim)
  if shape.name == 'decode':
    seen = prompt + workload.lengths(
        workload.prompts * workload.samples).mean() / 2
    return workload_lib.flops(model, rows, rows * seen, rows)
  return 0.0


def _largest(shapes) -> list[traffic.Shape]:
  """Returns each kind's call that needs the most memory, decode first."""
  slots, columns = shapes.slots[-1], shapes.columns[-1]
  width = shapes.prompts[-1]
  rows = shapes.prefill_rows(width)
  prefill = traffic.Shape('prefill', rows, width)
  if shapes.page:
    return [
        traffic.Shape('decode', slots, shapes.table_pages[-1]),
        traffic.Shape('store', rows, width),
        traffic.Shape('copy', shapes.shards, shapes.tails),
        prefill]
  return [
      traffic.Shape('decode', slots, columns),
      traffic.Shape('insert', slots, columns, width),
      traffic.Shape('compact', slots, columns, (slots, columns)), prefill]


def _runs(counts, *, chunk, arrays):
  """Counts runs of programs: a decode run is a chunk of steps; compact runs
  once per array of the cache."""
  times = {'decode': 1 / chunk, 'compact': arrays}
  return collections.Counter({shape: count * times.get(shape.name, 1)
                              for shape, count in counts.items()})


def _as_if_largest(runs, largest, decoded):
  """Converts all runs of a kind to runs of its largest call, by the bytes that
  it reads and writes; decoded: those of decode steps."""
  def size(shape):
    if shape.name == 'decode':
      return decoded[shape]
    if shape.name == 'insert':  # in place: the columns of the prompts
      return shape.more
    if shape.name == 'compact':  # of the new rows, the wider of both caches
      return shape.more[0] * max(shape.columns, shape.more[1])
    return shape.rows * shape.columns

  return sum(count * size(shape) / size(largest)
             for shape, count in runs.items() if shape.name == largest.name)


def _label(shape):
  name = f'{shape.name} {shape.rows}x{shape.columns}'
  if shape.name == 'compact':
    return f'{name} to {shape.more[0]}x{shape.more[1]}'
  return name if shape.more is None else f'{name} of {shape.more}'


class _Arguments:
  """Lowers the sampler's programs for given calls."""

  def __init__(self, sampling, shapes, weights):
    self._sampling, self._shapes, self.weights = sampling, shapes, weights

  @functools.cache
  def cache(self, rows, columns):
    return self._sampling.empty.eval_shape(rows, columns, np.int32(0))

  @functools.cache
  def prompts(self, rows, width):
    tokens = _int32(rows, width)
    return self._sampling.prefill.eval_shape(self.weights, tokens, tokens)

  def lower(self, shape: traffic.Shape) -> jax.stages.Lowered:
    if shape.name == 'prefill':
      tokens = _int32(shape.rows, shape.columns)
      return self._sampling.prefill.lower(self.weights, tokens, tokens)
    cache = self.cache(shape.rows, shape.columns)
    if shape.name == 'insert':
      rows = self._shapes.prefill_rows(shape.more)
      places = _int32(self._shapes.refill)
      return self._sampling.insert.lower(
          cache, self.prompts(rows, shape.more), places, places)
    if shape.name == 'compact':
      rows, columns = shape.more
      return self._sampling.move.of_array('k', columns).lower(
          cache.k[0], _int32(rows), np.int32(0))
    return self._decode(cache, shape.rows)

  def _decode(self, cache, rows):
    slots = jax.eval_shape(functools.partial(
        engine.idle_slots, rows, self._shapes.page, self._shapes.carries))
    return self._sampling.decode.lower(
        self.weights, cache, slots, jax.eval_shape(
            lambda: jax.random.key(0)), _int32(), _int32())


class _PagedArguments(_Arguments):
  """The same with pages."""

  @functools.cache
  def cache(self, *_):
    return self._sampling.empty.eval_shape(
        self._shapes.pages, self._shapes.page)

  def lower(self, shape: traffic.Shape) -> jax.stages.Lowered:
    if shape.name == 'store':
      shapes = self._shapes
      return self._sampling.insert.lower(
          self.cache(), self.prompts(shape.rows, shape.columns), _int32(
              shapes.shards, shape.rows, -(-shape.columns // shapes.page)))
    if shape.name == 'copy':
      pages = _int32(shape.rows, shape.columns)
      return self._sampling.move.lower(self.cache(), pages, pages)
    if shape.name == 'decode':
      return self._decode(pages_lib.PagedCache(
          self.cache(), _int32(shape.rows, shape.columns), _int32()),
                          shape.rows)
    return super().lower(shape)


def _int32(*shape):
  return jax.ShapeDtypeStruct(shape, np.int32)
