"""The programs of a rollout step on a slice, ready to be lowered.

They are the jitted functions of a run, from `job.programs` and `job.sampling`,
with shapes as arguments.
"""

import collections
from collections.abc import Callable, Iterator
import dataclasses
import functools

import jax
import ml_collections
import numpy as np

from tepo_jax.job import memory as memory_lib
from tepo_jax.job import programs as programs_lib
from tepo_jax.job import sampling as sampling_lib
from tepo_jax.learning import batch as batch_lib
from tepo_jax.policy import lora
from tepo_jax.policy import scoring
from tepo_jax.policy import transformer
from tepo_jax.rollout import draw
from tepo_jax.rollout import engine
from tepo_jax.rollout import schedule
from tepo_jax.runtime import mesh as mesh_lib
from tepo_jax.tools import streaming
from tepo_jax.tools import workload as workload_lib
from tepo_jax.tools.plan import traffic

PHASES = ('reshard', 'rollout', 'score', 'update')
_SHARES = (1.0, 0.8, 0.6, 0.4)  # of mixed groups, to compare


@dataclasses.dataclass(frozen=True)
class PlannedProgram:
  """A program and its part in a rollout step.

  name: its kind and array sizes. phase: one of PHASES. lower: traces it.
  runs: how often it runs in a step.
  resident: bytes per chip of arrays that are allocated while it runs and are
    not passed to it. given: bytes passed to it; XLA drops unused ones.
  largest: whether it needs the most memory of its kind.
  equivalent: how many runs of it take about as long as all programs of its
    kind; 0 if it is not the largest of its kind, None if it is the only one.
  open_trips: trip counts of its loops of unknown length, in program order,
    inner loops first.
  by_share: for the largest decode program under dynamic sampling, {share of
    mixed groups: (equivalent, decode steps of a rollout)}.
  syncs: for the largest decode program, how often a rollout returns to the
    host.
  devices: of the mesh, in its order.
  useful: FLOPs per chip that a run must make: 2 per weight and real token,
    forward, and 4 backward, and attention; 0 if it only moves data.
  remat: of an update, what it recomputes.
  """
  name: str
  phase: str
  lower: Callable[[], jax.stages.Lowered]
  runs: float
  resident: int
  largest: bool = True
  equivalent: float | None = None
  given: int = 0
  open_trips: tuple[float, ...] = (1.0,)
  by_share: dict[float, tuple[float, int]] = dataclasses.field(
      default_factory=dict)
  syncs: int = 0
  useful: float = 0.0
  remat: str = ''
  devices: list[jax.Device] = dataclasses.field(default_factory=list)


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
                  brief: bool = False) -> list[PlannedProgram]:
  """Returns every program of a rollout step.

  Args:
    config: of a training run. workload: lengths. programs: on a slice.
    slots: completions decoded at a time, at most.
    brief: only the largest of each kind.
  """
  state = programs_lib.abstract_state(programs)
  frozen = None  # LoRA's base
  if programs.model.lora:
    frozen = programs.freeze.eval_shape(transformer.abstract_params(
        dataclasses.replace(programs.model, lora=None), 'float32'))
  policy = lora.combine(frozen, state.params)
  weights = programs.to_decode.eval_shape(policy)
  shapes = sampling_shapes(config, programs.decoding[1], slots)
  devices = list(programs.mesh.devices.flat)  # of both meshes
  return [dataclasses.replace(program, devices=devices) for program in (
      PlannedProgram(
          'reshard', 'reshard',
          functools.partial(programs.to_decode.lower, policy), 1,
          mesh_lib.device_bytes((state.opt_state, state.reference))),
      *_sampling(config, workload, programs, shapes, weights,
                 mesh_lib.device_bytes((state, frozen)), brief),
      *_updating(config, workload, programs, state, frozen))]


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
              ) -> Iterator[PlannedProgram]:
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
    yield PlannedProgram(
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


def _updating(config, workload, programs, state, frozen
              ) -> Iterator[PlannedProgram]:
  """Yields scoring and the update of one minibatch of the workload."""
  settings = config.train
  minibatches = config.rollout.prompts // settings.minibatch_prompts
  host = programs.pack(_batch(config, workload))
  minibatch = _placed(host, programs.minibatch_sharding).replace(
      reference_logp_BT=programs.minibatch.reference_logp_BT)
  size = mesh_lib.device_bytes(minibatch)
  others = (minibatches - 1) * size  # all minibatches stay
  forward = dataclasses.replace(
      workload, prompts=settings.minibatch_prompts).forward_flops(
          settings.packing == 'shared') / programs.mesh.size
  score, step = (tuple(trip_counts(host, programs.scorer.chunk_size, passes))
                 for passes in (1, 2))
  key = jax.eval_shape(lambda: jax.random.key(0))
  base, old = () if frozen is None else (frozen,), None
  lower_score = functools.partial(
      programs.score.lower, state.params, minibatch, *base)
  if programs.kept is not None:
    *_, old = programs.score_and_keep.eval_shape(
        state.params, minibatch, programs.kept, 0, *base)
    lower_score = functools.partial(
        programs.score_and_keep.lower, state.params, minibatch, programs.kept,
        0, *base)
  yield PlannedProgram(
      'score', 'score', lower_score, minibatches,
      mesh_lib.device_bytes((state.opt_state, state.reference)) + others,
      given=mesh_lib.device_bytes((state.params, base)) + size,
      open_trips=score, useful=forward)
  if state.reference is not None:
    yield PlannedProgram(
        'score by reference', 'score', functools.partial(
            programs.score.lower, state.reference, minibatch, *base),
        minibatches, mesh_lib.device_bytes(
            (state.params, state.opt_state, programs.kept)) + others,
        given=mesh_lib.device_bytes((state.reference, base)) + size,
        open_trips=score, useful=forward)
  updates = minibatches * settings.epochs
  if old is not None and minibatches * host.used > programs.kept.shape[1]:
    params = programs.to_old_policy.eval_shape(state.params)
    old = programs.old_policy.eval_shape(params, minibatch, *base)
    yield PlannedProgram(
        'old policy', 'update',
        functools.partial(programs.to_old_policy.lower, state.params), 1,
        mesh_lib.device_bytes((state.opt_state, state.reference, base))
        + others + size)
    yield PlannedProgram(
        'old states', 'update', functools.partial(
            programs.old_policy.lower, params, minibatch, *base), updates,
        mesh_lib.device_bytes(state) + others,
        given=mesh_lib.device_bytes(base) + size, open_trips=score[-1:],
        useful=forward)
    others += mesh_lib.device_bytes(params)
  yield PlannedProgram(
      'update', 'update', functools.partial(
          programs.train_step.lower, state, minibatch, key, old, *base),
      updates, others, open_trips=(
          (score if programs.policy_loss.needs_scoring else ()) + step),
      useful=3 * forward, remat=programs.model.remat)


def trip_counts(minibatch: batch_lib.Minibatch, chunk_size: int, passes: int
                ) -> Iterator[float]:
  """Yields `open_trips` of scoring (1 pass) or an update (2 passes).

  The forward and the backward pass over a microbatch each loop over all of its
  chunks except one; the trip count is the mean over microbatches. A row that
  fits into one chunk needs no such loop. The outer loop is over the
  microbatches.
  """
  scored_MRS, used = minibatch.rows.scored_RS, minibatch.used
  width = scoring.chunk_width(*scored_MRS.shape[1:], chunk_size)
  if width < scored_MRS.shape[2]:
    columns_M = scored_MRS[:used].sum(-1).max(-1)
    more_M = np.maximum(-(-columns_M // width) - 1, 0)
    yield from passes * (float(more_M.sum() / max(used, 1)),)
  yield float(used)


def _batch(config, workload):
  """Makes a minibatch of the workload's lengths, one token id per group."""
  samples = config.rollout.samples
  rows = config.train.minibatch_prompts * samples
  width, tokens = config.data.max_prompt_tokens, config.rollout.max_tokens
  mask_BT = np.arange(tokens) < workload.lengths(rows)[:, None]
  prompt_P = np.maximum(np.arange(width) - width + workload.prompt_tokens, -1)
  position_BS = np.concatenate([
      np.broadcast_to(prompt_P, (rows, width)), np.where(
          mask_BT, np.arange(tokens) + workload.prompt_tokens, -1)], 1)
  zeros_BT = np.zeros((rows, tokens), np.float32)
  group_B1 = np.arange(rows, dtype=np.int32)[:, None] // samples
  return batch_lib.Batch(
      token_BS=np.broadcast_to(group_B1, position_BS.shape),
      position_BS=position_BS.astype(np.int32),
      mask_BT=mask_BT.astype(np.float32),
      advantage_B=np.zeros(rows, np.float32), old_logp_BT=zeros_BT,
      old_entropy_BT=zeros_BT, sampler_logp_BT=zeros_BT)


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


def _placed(host, shardings):
  """Returns the arrays' shapes with `shardings`, a prefix of their tree."""
  return jax.tree.map(lambda sharding, tree: jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
      tree), shardings, host)
