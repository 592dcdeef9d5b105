"""A base model θ_0, what policies near it sample, and their scores.

Axes: B completions · T completion tokens.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax import numpy as jnp
import ml_collections
import numpy as np

from tepo_jax.job import learner as learner_lib
from tepo_jax.job import programs as programs_lib
from tepo_jax.job import session as session_lib
from tepo_jax.learning import numerics
from tepo_jax.learning import objective
from tepo_jax.learning import packing
from tepo_jax.learning import update
from tepo_jax.rollout import draw
from tepo_jax.rollout import groups as groups_lib
from tepo_jax.rollout import sampler as sampler_lib
from tepo_jax.rollout import selection


class Lab:
  """Policies that updates lead to from θ_0, and samples of any policy.

  learner: at θ_0. start: θ_0's weights. training: the training prompts.
  """

  def __init__(self, config: ml_collections.ConfigDict,
               session: session_lib.Session, groups: int):
    """groups: the largest number that is sampled at a time."""
    rollout = config.rollout
    self.config, self.session = config, session
    self.learner = self._learner()
    self.start = self.learner.state.params
    self.training = session.training_prompts()
    self._sampler = session.sampler(
        prompts=groups, samples=rollout.samples, max_tokens=rollout.max_tokens,
        decoding=draw.Decoding(rollout.temperature))
    self._begin, self._scores = _jitted(self.learner.programs)

  def _learner(self):
    learner = learner_lib.Learner(self.config, self.session)
    learner.state = learner.first_state()
    return learner

  def rollout(self) -> list[groups_lib.Group]:
    """The groups of θ_0 that a rollout step trains on."""
    settings = self.config.rollout
    return self.select(self.start, 0, settings.prompts,
                       settings.dynamic_sampling).groups

  def select(self, params: Any, cursor: int, wanted: int, mode: str
             ) -> sampler_lib.Rollout:
    """A rollout of `wanted` groups of the training prompts from the cursor on,
    selected in a mode of `selection.MODES`."""
    settings = self.config.rollout
    return self._sampler.select(
        self.learner.programs.to_decode(params),
        self.training.prompt, selection.Selection(
            cursor=cursor, wanted=wanted, group_size=settings.samples,
            mode=mode, max_batches=settings.max_generation_batches,
            mixed=settings.mixed, truncated=settings.truncated),
        programs_lib.stream(self.config.seed, 'rollout'), self.session.rewards)

  def updates(self, groups: list[groups_lib.Group], counts: Sequence[int]
              ) -> Iterator[tuple[int, Any]]:
    """Trains θ_0 on a rollout; yields (number of updates, weights) at each of
    the counts."""
    learner = self._learner()  # one of its own, whose state changes
    step = learner.pack_and_score(1, groups, self._rewards(groups))
    for index in range(max(counts)):
      learner.make_update(step, index)
      if index + 1 in counts:
        yield index + 1, jax.tree.map(jnp.copy, learner.state.params)

  def batch(self, groups: list[groups_lib.Group],
            estimator: str | None = None) -> packing.Batch:
    """Host arrays of the groups, without filler; estimator: of the advantages,
    by default the method's."""
    return self.learner.to_batch(
        groups, self._rewards(groups), estimator or (
            self.learner.programs.policy_loss.method.estimator),
        len(groups) * self.config.rollout.samples)

  def _rewards(self, groups):
    return self.session.rewards.of(groups).reward_NG.reshape(-1)


class Observed:
  """Completions that θ_0 sampled; batch: host arrays, with ℓ° and H°."""

  def __init__(self, lab: Lab, groups: list[groups_lib.Group],
               estimator: str | None = None):
    """estimator: as of `Lab.batch`."""
    self._lab, batch = lab, lab.batch(groups, estimator)
    minibatch = lab.learner.on_devices(batch)
    logp_BT, entropy_BT, self._old = lab._begin(lab.start, minibatch)
    self._minibatch = minibatch.replace(
        old_logp_BT=logp_BT, old_entropy_BT=entropy_BT)
    self.batch = batch.replace(
        old_logp_BT=np.asarray(logp_BT), old_entropy_BT=np.asarray(entropy_BT))

  def tokens(self, params: Any) -> objective.Tokens:
    """The tokens under `params`: ℓ, H and the exact KL to θ_0."""
    found = tokens(self.batch, self._lab._scores(
        params, self._minibatch, self._old))
    if params is not self._lab.start:
      return found
    return found.replace(  # as in an update, where rounding decides nothing
        old_logp_BT=found.logp_BT, old_entropy_BT=found.entropy_BT)


def tokens(batch: packing.Batch, scores: Any) -> objective.Tokens:
  """The objective's input, on the host, with zeros under the mask."""
  return jax.device_get(numerics.clean(update.tokens(batch, scores)))


def _jitted(programs):
  """`Lab._begin`: (θ_0, minibatch) -> ℓ°, H°, θ_0 as the old policy; `_scores`:
  (params, minibatch, old) -> ℓ, H, KL."""
  scorer = programs.scorer

  def begin(params, minibatch):
    return update.score_with_states(scorer, params, minibatch)

  def scores(params, minibatch, old):
    return update.loss_and_gradient(  # of 0, which costs no backward pass
        scorer, lambda tokens, _: jnp.float32(0), params, minibatch, (), old)[2]

  return [programs.jit(function) for function in (begin, scores)]
