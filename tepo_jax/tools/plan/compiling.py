"""The programs of a rollout step on a slice, ready to be lowered.

They are the jitted functions of a run, from `job.programs` and `job.sampling`,
with shapes as arguments.
"""

import collections
from collections.abc import Iterator
import dataclasses
import functools

import jax
import ml_collections
import numpy as np

from tepo_jax.job import memory as memory_lib
from tepo_jax.job import programs as programs_lib
from tepo_jax.job import sampling as sampling_lib
from tepo_jax.policy import lora
from tepo_jax.rollout import draw
from tepo_jax.rollout import engine
from tepo_jax.rollout import schedule
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
                  brief: bool = False) -> list[phases.PlannedProgram]:
  """Returns every program of a rollout step.

  Args:
    config: of a training run. workload: lengths. programs: on a slice.
    slots: completions decoded at a time, at most.
    brief: only the largest of each kind.
  """
  arguments = programs_lib.update_arguments(programs)
  state, base = arguments.state, arguments.base
  policy = lora.combine(*(base or (None,)), state.params)
  weights = programs.to_decode.eval_shape(policy)
  shapes = sampling_shapes(config, programs.decoding[1], slots)
  devices = list(programs.mesh.devices.flat)  # of both meshes
  return [dataclasses.replace(program, devices=devices) for program in (
      phases.PlannedProgram(
          'reshard', 'reshard',
          functools.partial(programs.to_decode.lower, policy), 1,
          mesh_lib.device_bytes((state.opt_state, state.reference))),
      *_sampling(config, workload, programs, shapes, weights,
                 mesh_lib.device_bytes((state, base)), brief),
      *training.planned(config, workload, programs, arguments))]


def sampling_shapes(config: ml_collections.ConfigDict, mesh: jax.sharding.Mesh,
                    slots: int) -> schedule.Shapes:
  """Returns the array sizes of a run that decodes in `slots` slots."""
  rollout = config.rollout
  return schedule.make_shapes(
      slots=slots, work=rollout.prompts * rollout.samples,
      prompt_tokens=config.data.max_prompt_tokens,
      max_tokens=rollout.max_tokens, chunk=rollout.chunk,
      shards=mesh_lib.batch_shards(mesh))


def _sampling(config, workload, programs, shapes, weights, state_bytes, brief
              ) -> Iterator[phases.PlannedProgram]:
  """Yields the sampler's programs, the largest and those that occur."""
  sampling = sampling_lib.make(
      *programs.decoding,
      decoding=draw.Decoding(config.rollout.temperature), eos_ids=(-1,),  # none
      chunk=config.rollout.chunk)
  arguments = _Arguments(sampling, shapes, weights)
  refill = config.rollout.dynamic_sampling == 'refill'
  share = workload.mixed_share if refill else 1.0
  rollout = traffic.of_rollout(
      workload, shapes, share,
      streaming.stream if refill else streaming.batches)
  largest = _largest(shapes)
  cache = mesh_lib.device_bytes(arguments.cache(*largest[0][1:3]))
  runs_of = functools.partial(_runs, chunk=config.rollout.chunk,
                              arrays=2 * programs.decoding[0].num_layers)
  as_if_largest = functools.partial(
      _as_if_largest, cache=cache, weights=mesh_lib.device_bytes(weights))
  runs = runs_of(rollout.runs)
  by_share = {largest[0]: {
      share: (as_if_largest(runs_of(other.runs), largest[0]),
              other.decode_steps)
      for share in (_SHARES if refill and not brief else ())
      for other in [traffic.of_rollout(workload, shapes, share)]}}
  for shape in dict.fromkeys(
      [*largest, *([] if brief else sorted(rollout.runs))]):
    steps = config.rollout.chunk if shape.name == 'decode' else 1
    held, given = _held_by_sampling(arguments, shape, largest)
    yield phases.PlannedProgram(
        _label(shape), 'rollout', functools.partial(arguments.lower, shape),
        runs[shape], state_bytes + held, shape in largest,
        as_if_largest(runs, shape) if shape in largest else 0, given,
        open_trips=(steps,), by_share=by_share.get(shape, {}),
        syncs=rollout.syncs if shape == largest[0] else 0,
        useful=steps * _useful_of_sampling(workload, shape)
        / programs.mesh.size)


def _held_by_sampling(arguments, shape, largest):
  """Returns `resident`, without the training state, and `given`."""
  held, given = 0, 0
  weights = mesh_lib.device_bytes(arguments.weights)
  if shape.name in ('insert', 'compact'):
    held += weights
  if shape.name != 'insert':  # prefilled prompts that wait for a slot
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
  return [
      traffic.Shape('decode', slots, columns),
      traffic.Shape('insert', slots, columns, width),
      traffic.Shape('compact', slots, columns, (slots, columns)),
      traffic.Shape('prefill', schedule.Schedule(None, shapes).prefill_rows(
          width), width)]


def _runs(counts, *, chunk, arrays):
  """Counts runs of programs: a decode run is a chunk of steps; compact runs
  once per array of the cache."""
  times = {'decode': 1 / chunk, 'compact': arrays}
  return collections.Counter({shape: count * times.get(shape.name, 1)
                              for shape, count in counts.items()})


def _as_if_largest(runs, largest, *, weights, cache):
  """Converts all runs of a kind to runs of its largest call, by the bytes that
  it reads and writes."""
  def size(shape):
    if shape.name == 'insert':  # in place: the columns of the prompts
      return shape.more
    if shape.name == 'compact':  # of the new rows, the wider of both caches
      return shape.more[0] * max(shape.columns, shape.more[1])
    return shape.rows * shape.columns

  def share(shape):
    share = size(shape) / size(largest)
    if shape.name != 'decode':
      return share
    return (weights + cache * share) / (weights + cache)

  return sum(count * share(shape) for shape, count in runs.items()
             if shape.name == largest.name)


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
      rows = schedule.Schedule(None, self._shapes).prefill_rows(shape.more)
      places = _int32(self._shapes.refill)
      return self._sampling.insert.lower(
          cache, self.prompts(rows, shape.more), places, places)
    if shape.name == 'compact':
      rows, columns = shape.more
      return self._sampling.compact.of_array('k', columns).lower(
          cache.k[0], _int32(rows), np.int32(0))
    rows = engine.Slots(*6 * [_int32(shape.rows)],
                        live=jax.ShapeDtypeStruct((shape.rows,), bool))
    return self._sampling.decode.lower(
        self.weights, cache, rows, jax.eval_shape(
            lambda: jax.random.key(0)), _int32(), _int32())


def _int32(*shape):
  return jax.ShapeDtypeStruct(shape, np.int32)
