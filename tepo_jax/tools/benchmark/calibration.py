"""Measures this machine's devices against the planner's roofline.

Yields rows in the form of those in tools/plan/published.py, to add there.
"""

from collections.abc import Iterator

import jax
import ml_collections
import numpy as np

from tepo_jax import errors
from tepo_jax.runtime import mesh as mesh_lib
from tepo_jax.tools import workload as workload_lib
from tepo_jax.tools.benchmark import sampling
from tepo_jax.tools.benchmark import timing
from tepo_jax.tools.benchmark import updating
from tepo_jax.tools.plan import chips
from tepo_jax.tools.plan import cost
from tepo_jax.tools.plan import published
from tepo_jax.tools.plan import timeline
from tepo_jax.tools.plan import training


def measure(config: ml_collections.ConfigDict) -> Iterator[published.Row]:
  """Times scoring and an update of a minibatch, and decode steps.

  Raises:
    errors.RunError: the devices have no data sheet in tools/plan.
  """
  workload = workload_lib.of(config)
  slice_ = _here(jax.devices())
  yield from _training(config, workload, slice_)
  yield _decoding(config, workload, slice_)


def _here(devices):
  """The devices of this machine, with their data sheet."""
  kind = devices[0].device_kind
  name = published.name_of(kind)
  if name is None:
    raise errors.RunError(f'no data sheet of {kind} in tools/plan/chips.py or '
                          'gpus.py')
  return chips.Slice(name, published.chip_of(name), list(devices),
                     is_here=True)


def _training(config, workload, slice_):
  case = updating.case(config, workload, config.train.packing)
  programs, minibatch = case.programs, case.minibatch
  seconds = timing.interleaved(
      {'score': case.score, 'update': case.update}, workload.rounds)
  once = tuple(training.trip_counts(minibatch, programs.scorer.chunk_size, 1))
  twice = tuple(training.trip_counts(minibatch, programs.scorer.chunk_size, 2))
  scoring = once if programs.policy_loss.whole_minibatch else ()
  lowered = {
      'score': (programs.score.lower(case.state.params, minibatch), once),
      'update': (programs.train_step.lower(
          case.state, minibatch, jax.random.key(0), case.old),
                 scoring + twice)}
  for phase, (program, trips) in lowered.items():
    yield _row(phase, workload, slice_, programs.mesh, programs.model.remat,
               seconds[phase], _roofline(program, trips, programs.mesh, slice_))


def _decoding(config, workload, slice_):
  engine = sampling.Engine(config, workload)
  shapes = engine.schedule(engine.rows).shapes
  columns = sampling.step_columns(shapes, engine.rows)[-1]
  seconds, lowered = sampling.decode_step(
      engine, engine.rows, columns, workload.rounds)
  read = sampling.columns_read(shapes, engine.rows, columns)
  roofline = _roofline(lowered, (engine.chunk,), engine.mesh, slice_, read)
  return _row('decode', workload, slice_, engine.mesh, 'nothing', seconds,
              roofline / engine.chunk, columns)


def _roofline(lowered, trips, mesh, slice_, columns=None):
  found = cost.of(lowered.compile().as_text(), trips, columns)
  return sum(timeline.seconds(found.events, slice_.ordered(mesh)))


def _row(phase, workload, slice_, mesh, recomputed, seconds, roofline,
         length=None):
  chip, rows = slice_.name, workload.prompts * workload.samples
  shards = mesh_lib.batch_shards(mesh)
  return published.Row(
      phase, chip, len(slice_.devices), 'selftest --measure', workload.model,
      rows if phase == 'decode' else rows // shards,
      length or workload.prompt_tokens + workload.max_tokens,
      float(np.median(seconds)),
      ', '.join(f'{name} {size}' for name, size in mesh.shape.items()),
      recomputed, f'jax {jax.__version__}', compiled=roofline)
