"""Scoring and the updates of a rollout step, as planned programs."""

from collections.abc import Iterator
import dataclasses
import functools

import ml_collections
import numpy as np

from tepo_jax.job import programs as programs_lib
from tepo_jax.learning import packing
from tepo_jax.policy import scoring
from tepo_jax.runtime import mesh as mesh_lib
from tepo_jax.tools import workload as workload_lib
from tepo_jax.tools.plan import phases


@dataclasses.dataclass(frozen=True)
class _Step:
  """What scoring and updates have in common.

  arguments: of an update. minibatches: of a rollout step. size: bytes per chip
  of one. waiting: bytes per chip of the others, which all stay. used: a
  minibatch's microbatches that have tokens. forward: useful FLOPs per chip of
  a forward pass over a minibatch. score_trips, update_trips: `open_trips`.
  """
  programs: programs_lib.TrainingPrograms
  arguments: programs_lib.UpdateArguments
  minibatches: int
  size: int
  waiting: int
  used: int
  forward: float
  score_trips: tuple[float, ...]
  update_trips: tuple[float, ...]


def planned(config: ml_collections.ConfigDict, workload: workload_lib.Workload,
            programs: programs_lib.TrainingPrograms,
            arguments: programs_lib.UpdateArguments
            ) -> Iterator[phases.PlannedProgram]:
  """Yields scoring and the update of one minibatch of the workload."""
  step = _step(config, workload, programs, arguments)
  yield from _scoring(step)
  updates = step.minibatches * config.train.epochs
  states, old_params = arguments.old, None
  if states is not None and (
      step.minibatches * step.used > programs.old_states.shape[1]):
    old_params = programs.to_old_policy.eval_shape(arguments.state.params)
    states = programs.old_policy.eval_shape(
        old_params, arguments.minibatch, *arguments.base)
    yield from _old_policy(step, old_params, updates)
  scoring_trips = (
      step.score_trips if programs.policy_loss.whole_minibatch else ())
  yield phases.PlannedProgram(
      name='update', phase='update', runs=updates, lower=functools.partial(
          programs.train_step.lower,
          *arguments._replace(old=states).in_order()),
      resident=step.waiting + mesh_lib.device_bytes(old_params),
      open_trips=scoring_trips + step.update_trips, useful=3 * step.forward,
      remat=programs.model.remat)


def _step(config, workload, programs, arguments):
  settings = config.train
  minibatches = config.rollout.prompts // settings.minibatch_prompts
  workload = dataclasses.replace(workload, prompts=settings.minibatch_prompts)
  minibatch = programs.pack(workload.random_batch())
  size = mesh_lib.device_bytes(arguments.minibatch)
  forward = workload.forward_flops(
      settings.packing == 'shared') / programs.mesh.size
  score_trips, update_trips = (
      tuple(trip_counts(minibatch, programs.scorer.chunk_size, passes))
      for passes in (1, 2))
  return _Step(programs, arguments, minibatches, size, (minibatches - 1) * size,
               minibatch.used, forward, score_trips, update_trips)


def _scoring(step):
  """Yields scoring by the policy, and by a reference policy if there is one."""
  programs, (state, minibatch, _, _, base) = step.programs, step.arguments

  def scoring_by(params, name, lower, resident):
    return phases.PlannedProgram(
        name=name, phase='score', runs=step.minibatches, lower=lower,
        resident=mesh_lib.device_bytes(resident) + step.waiting,
        given=mesh_lib.device_bytes((params, base)) + step.size,
        open_trips=step.score_trips, useful=step.forward)

  lower = functools.partial(
      programs.score.lower, state.params, minibatch, *base)
  if programs.old_states is not None:
    lower = functools.partial(
        programs.score_and_keep.lower, state.params, minibatch,
        programs.old_states, 0, *base)
  yield scoring_by(
      state.params, 'score', lower, (state.opt_state, state.reference))
  if state.reference is not None:
    yield scoring_by(
        state.reference, 'score by reference', functools.partial(
            programs.score.lower, state.reference, minibatch, *base),
        (state.params, state.opt_state, programs.old_states))


def _old_policy(step, old_params, updates):
  """Yields what gives each update its exact KL's old policy anew: its weights,
  once, and its states in the minibatch."""
  programs, (state, minibatch, _, _, base) = step.programs, step.arguments
  yield phases.PlannedProgram(
      name='old policy', phase='update', runs=1,
      lower=functools.partial(programs.to_old_policy.lower, state.params),
      resident=mesh_lib.device_bytes((state.opt_state, state.reference, base))
      + step.waiting + step.size)
  yield phases.PlannedProgram(
      name='old states', phase='update', runs=updates, lower=functools.partial(
          programs.old_policy.lower, old_params, minibatch, *base),
      resident=mesh_lib.device_bytes(state) + step.waiting,
      given=mesh_lib.device_bytes(base) + step.size,
      open_trips=step.score_trips[-1:], useful=step.forward)


def trip_counts(minibatch: packing.Minibatch, chunk_size: int, passes: int
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
