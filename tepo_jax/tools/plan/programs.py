"""The programs of a rollout step on a slice, ready to be lowered.

The very functions that `job.steps` makes for a run, with shapes for
arguments. One list for memory and for time: `of_step`.
"""

import collections
from collections.abc import Callable, Iterator
import dataclasses
import functools
from typing import Any

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
from tepo_jax.tools.benchmark import workload as workload_lib
from tepo_jax.tools.plan import traffic

PHASES = ('reshard', 'rollout', 'score', 'update')
_NO_EOS = (-1,)


@dataclasses.dataclass(frozen=True)
class Program:
  """One program and what it is to a rollout step.

  name: with the shapes that tell it from its sisters. phase: of PHASES.
  lower: traces it. runs: how often it runs in a step.
  resident: bytes a chip that the run holds beside what the program is given.
  given: bytes of that; where it is more than the program's arguments, it does
    not use all.
  largest: whether no other of its kind needs more memory.
  equivalent: runs that take as long as all those of its kind, in about: 0 for
    all but the largest of a kind, None where it is the only one.
  open_trips: turns of its loops of unknown length, in its order, a loop behind
    those inside it.
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


def of_step(config: ml_collections.ConfigDict,
            workload: workload_lib.Workload, mesh: jax.sharding.Mesh,
            slots: int, brief: bool = False) -> list[Program]:
  """Every program of a rollout step with so many slots.

  Args:
    config: of a training run. workload: lengths. mesh: of a slice.
    slots: completions decoded at one time, at most.
    brief: only the largest of each kind.
  """
  programs = programs_lib.make(
      config, programs_lib.prepare_model(workload.model, config, mesh), mesh)
  state = programs_lib.abstract_state(programs)
  frozen = _frozen(config, workload, programs)
  policy = lora.combine(frozen, state.params)
  weights = programs.to_decode.eval_shape(policy)
  shapes = sampling_shapes(config, programs.model, mesh, slots)
  return [
      Program('reshard', 'reshard',
              functools.partial(programs.to_decode.lower, policy), 1,
              chip_bytes(state.opt_state)),
      *_sampling(config, workload, programs, shapes, weights,
                 chip_bytes((state, frozen)), brief),
      *_updating(config, workload, programs, state, frozen)]


def _frozen(config, workload, programs):
  """With LoRA the base, else None: shapes with shardings."""
  if not programs.model.lora:
    return None
  model = programs_lib.execution(workload.model, config.compute, programs.mesh)
  return programs.freeze.eval_shape(
      transformer.abstract_params(model, 'float32'))


def sampling_shapes(config: ml_collections.ConfigDict,
                    model: transformer.ModelConfig, mesh: jax.sharding.Mesh,
                    slots: int) -> schedule.Shapes:
  """The shapes of a run with so many slots."""
  rollout = config.rollout
  return memory_lib.sampling_shapes(
      model, mesh, wanted=slots, work=rollout.prompts * rollout.samples,
      prompt_tokens=config.data.max_prompt_tokens,
      max_tokens=rollout.max_tokens, chunk=rollout.chunk)


def chip_bytes(tree: Any) -> int:
  """What a tree of shapes with shardings takes on one chip."""
  return mesh_lib.device_bytes(tree)


def _sampling(config, workload, programs, shapes, weights, state_bytes, brief
              ) -> Iterator[Program]:
  """The sampler's programs at the shapes that occur and at the widest."""
  sampling = sampling_lib.make(
      programs.model, programs.mesh,
      decoding=draw.Decoding(config.rollout.temperature), eos_ids=_NO_EOS,
      chunk=config.rollout.chunk)
  arguments = _Arguments(sampling, shapes, weights)
  counts = traffic.of_rollout(workload, shapes)
  largest = _largest(shapes)
  cache = chip_bytes(arguments.cache(*largest[0][1:3]))
  waiting = chip_bytes(arguments.prompts(*largest[-1][1:3]))
  equivalent = collections.Counter({
      largest[0]: _as_if_largest(counts, largest[0], chip_bytes(weights),
                                 cache)})
  for shape in dict.fromkeys([*largest, *([] if brief else sorted(counts))]):
    held, runs, given = state_bytes, counts[shape], 0
    if shape.name in ('insert', 'compact'):
      held += chip_bytes(weights)
    if shape.name != 'insert':
      held += waiting
    if shape.name == 'prefill':  # slots are refilled while others are at work
      held, given = held + cache, chip_bytes(weights)
    if shape.name == 'compact':  # one array at a time; v is as large as k
      whole = arguments.cache(shape.rows, shape.columns)
      held += chip_bytes(whole) - chip_bytes(whole.k[0])
      runs *= 2 * len(whole.k)
    yield Program(
        _label(shape), 'rollout', functools.partial(arguments.lower, shape),
        runs, held, shape in largest, equivalent[shape], given)


def _largest(shapes) -> list[traffic.Shape]:
  """Of each kind the shape that needs the most memory; decode first."""
  slots, columns = shapes.slots[-1], shapes.columns[-1]
  width = shapes.prompts[-1]
  return [
      traffic.Shape('decode', slots, columns),
      traffic.Shape('insert', slots, columns, width),
      traffic.Shape('compact', slots, columns, (slots, columns)),
      traffic.Shape('prefill', schedule.Schedule(None, shapes).prefill_rows(
          width), width)]


def _as_if_largest(counts, largest, weights, cache):
  """All decode steps as steps of the largest shape, by the bytes they read."""
  slots = largest.rows * largest.columns
  return sum(
      count * (weights + cache * shape.rows * shape.columns / slots)
      for shape, count in counts.items() if shape.name == 'decode') / (
          weights + cache)


def _label(shape):
  name = f'{shape.name} {shape.rows}x{shape.columns}'
  if shape.name == 'compact':
    return f'{name} to {shape.more[0]}x{shape.more[1]}'
  return name if shape.more is None else f'{name} of {shape.more}'


def _updating(config, workload, programs, state, frozen
              ) -> Iterator[Program]:
  """Scoring and the update of one minibatch, at the mean lengths."""
  settings = config.train
  minibatches = config.rollout.prompts // settings.minibatch_prompts
  host = programs.pack(_batch(config, workload))
  minibatch = _placed(host, programs.minibatch_sharding)
  size = chip_bytes(minibatch)  # those of the first epoch stay
  score, step = (tuple(_turns(host, programs.scorer.chunk_size, passes))
                 for passes in (1, 2))
  scalar = jax.ShapeDtypeStruct((), np.float32)
  key = jax.eval_shape(lambda: jax.random.key(0))
  base, old_params = () if frozen is None else (frozen,), None
  if programs.policy_loss.needs_kl:
    old_params = programs.to_old_policy.eval_shape(state.params)
    yield Program(
        'old policy', 'update',
        functools.partial(programs.to_old_policy.lower, state.params), 1,
        chip_bytes((state.opt_state, base)) + minibatches * size)
  yield Program(  # once more, to measure the noise floor
      'score', 'score', functools.partial(
          programs.score.lower, state.params, minibatch, *base),
      minibatches + 1, chip_bytes(state.opt_state) + minibatches * size,
      given=chip_bytes((state.params, base)) + size, open_trips=score)
  yield Program(
      'update', 'update', functools.partial(
          programs.train_step.lower, state, minibatch, key, scalar,
          old_params, *base), minibatches * settings.epochs,
      minibatches * size, open_trips=(
          (score if programs.policy_loss.needs_scoring else ()) + step))


def _turns(minibatch, chunk_size, passes):
  """Turns of the open loops of scoring or an update, as `open_trips` has them.

  Each of the passes over a microbatch (1: forward, 2: and backward) loops over
  its chunks but for one, on average so many; there is no such loop where a row
  fits into a chunk. Around them is the loop over the microbatches.
  """
  scored_MRS, used = minibatch.rows.scored_RS, minibatch.used
  width = scoring.chunk_width(*scored_MRS.shape[1:], chunk_size)
  if width < scored_MRS.shape[2]:
    columns_M = scored_MRS[:used].sum(-1).max(-1)
    more_M = np.maximum(-(-columns_M // width) - 1, 0)
    yield from passes * (float(more_M.sum() / max(used, 1)),)
  yield float(used)


def _batch(config, workload):
  """A minibatch of the workload's lengths; tokens only tell groups apart."""
  samples = config.rollout.samples
  rows = config.train.minibatch_prompts * samples
  width, slots = config.data.max_prompt_tokens, config.rollout.max_tokens
  length_B = workload.lengths(rows)
  prompt_BP = np.arange(width) - (width - workload.prompt_tokens)
  position_BS = np.concatenate([
      np.broadcast_to(np.maximum(prompt_BP, -1), (rows, width)),
      np.where(np.arange(slots) < length_B[:, None],
               np.arange(slots) + workload.prompt_tokens, -1)], 1)
  zeros_BT = np.zeros((rows, slots), np.float32)
  return batch_lib.Batch(
      token_BS=np.broadcast_to(
          np.arange(rows, dtype=np.int32)[:, None] // samples,
          position_BS.shape),
      position_BS=position_BS.astype(np.int32),
      mask_BT=(np.arange(slots) < length_B[:, None]).astype(np.float32),
      advantage_B=np.zeros(rows, np.float32), old_logp_BT=zeros_BT,
      old_entropy_BT=zeros_BT, sampler_logp_BT=zeros_BT)


class _Arguments:
  """Lowers the sampler's programs at given shapes."""

  def __init__(self, sampling, shapes, weights):
    self._sampling, self._shapes = sampling, shapes
    self._weights = weights

  @functools.cache
  def cache(self, rows, columns):
    return self._sampling.empty.eval_shape(rows, columns, np.int32(0))

  @functools.cache
  def prompts(self, rows, width):
    tokens = jax.ShapeDtypeStruct((rows, width), np.int32)
    return self._sampling.prefill.eval_shape(self._weights, tokens, tokens)

  def lower(self, shape: traffic.Shape) -> jax.stages.Lowered:
    return getattr(self, f'_{shape.name}')(shape)

  def _prefill(self, shape):
    tokens = jax.ShapeDtypeStruct((shape.rows, shape.columns), np.int32)
    return self._sampling.prefill.lower(self._weights, tokens, tokens)

  def _insert(self, shape):
    rows = schedule.Schedule(None, self._shapes).prefill_rows(shape.more)
    places = jax.ShapeDtypeStruct((self._shapes.refill,), np.int32)
    return self._sampling.insert.lower(
        self.cache(shape.rows, shape.columns),
        self.prompts(rows, shape.more), places, places)

  def _compact(self, shape):
    rows, columns = shape.more
    return self._sampling.compact.of_array('k', columns).lower(
        self.cache(shape.rows, shape.columns).k[0],
        jax.ShapeDtypeStruct((rows,), np.int32), np.int32(0))

  def _decode(self, shape):
    def numbers(dtype):
      return jax.ShapeDtypeStruct((shape.rows,), dtype)

    rows = engine.Slots(*6 * [numbers(np.int32)], live=numbers(bool))
    scalar = jax.ShapeDtypeStruct((), np.int32)
    return self._sampling.decode.lower(
        self._weights, self.cache(shape.rows, shape.columns), rows,
        jax.eval_shape(lambda: jax.random.key(0)), scalar, scalar)


def _placed(host, shardings):
  """Shapes of host arrays with shardings, a prefix of their tree."""
  def place(sharding, tree):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(
        x.shape, x.dtype, sharding=sharding), tree)
  return jax.tree.map(place, shardings, host)
