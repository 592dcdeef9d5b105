"""A base model θ_0, what policies near it sample, and their scores.

Axes: B completions · T completion tokens · E estimators · D parameters.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax import numpy as jnp
import ml_collections
import numpy as np

from tepo_jax.job import evaluation
from tepo_jax.job import learner as learner_lib
from tepo_jax.job import programs as programs_lib
from tepo_jax.job import session as session_lib
from tepo_jax.job import summaries
from tepo_jax.learning import numerics
from tepo_jax.learning import objective
from tepo_jax.learning import packing
from tepo_jax.learning import update
from tepo_jax.rollout import draw
from tepo_jax.rollout import groups as groups_lib
from tepo_jax.rollout import sampler as sampler_lib
from tepo_jax.rollout import selection
from tepo_jax.runtime import mesh as mesh_lib


class Lab:
  """Policies that updates lead to from θ_0, and samples of any policy.

  learner: of the config's method, at θ_0. start: θ_0's weights. training: the
  training prompts. prompts: held out, of the first evaluation set.
  """

  def __init__(self, config: ml_collections.ConfigDict,
               session: session_lib.Session):
    rollout = config.rollout
    self.config, self.session = config, session
    self.learner = self._learner(config.method)
    self.start = self.learner.state.params
    self.training = session.training_prompts()
    self.prompts = session.evaluation_prompts(config.eval.sets[0])
    self._sampler = session.sampler(
        prompts=max(len(self.prompts), rollout.prompts),
        samples=rollout.samples, max_tokens=rollout.max_tokens,
        decoding=draw.Decoding(rollout.temperature))
    self._begin, self._scores, self._gradients = _jitted(self.learner.programs)

  def _learner(self, method):
    config = self.config.copy_and_resolve_references()
    with config.unlocked():
      config.method = ml_collections.ConfigDict(method)
    learner = learner_lib.Learner(config, self.session)
    learner.state = learner.first_state()
    return learner

  def sample(self, params: Any, draw_number: int) -> list[groups_lib.Group]:
    """A group for every held-out prompt; the random numbers are those of
    `draw_number`, whatever the policy."""
    held_out = evaluation.Evaluation(
        'sampling', self.prompts, self._sampler, self.config.rollout.samples,
        True, self.session.template.style,
        self.session.too_long[self.config.eval.sets[0]])
    return held_out.run(
        self.learner.programs.to_decode(params), jax.random.fold_in(
            programs_lib.stream(self.config.seed, 'eval'), draw_number))[0]

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

  def updates(self, method: Any, groups: list[groups_lib.Group],
              counts: Sequence[int]) -> Iterator[tuple[int, Any, dict]]:
    """Trains θ_0 on a rollout by `method`; yields (number of updates, weights,
    the updates' average metrics so far) at each of the counts."""
    learner = self._learner(method)
    step, history = learner.pack_and_score(1, groups, self._rewards(groups)), []
    for index in range(max(counts)):
      history.append(jax.device_get(learner.make_update(step, index)))
      if index + 1 in counts:
        yield (index + 1, jax.tree.map(jnp.copy, learner.state.params),
               summaries.average(history))

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

  def gradients(self, params: Any, batch: packing.Batch,
                slope_EBT: np.ndarray) -> np.ndarray:
    """Σ_it slope_it ∇ℓ_it of a few completions, [E, D] float32."""
    # One row of several completions at a time.
    programs = self.learner.programs
    columns = programs.pack.row_tokens
    pack = packing.Packer(
        columns, columns, mesh_lib.batch_shards(programs.mesh))
    return self._gradients(params, mesh_lib.put(
        pack(batch), programs.minibatch_sharding), slope_EBT)


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
    return tokens(self.batch, self._lab._scores(
        params, self._minibatch, self._old))


def tokens(batch: packing.Batch, scores: Any) -> objective.Tokens:
  """The objective's input, on the host, with zeros under the mask."""
  return jax.device_get(numerics.clean(update.tokens(batch, scores)))


def _jitted(programs):
  """`Lab._begin`: (θ_0, minibatch) -> ℓ°, H°, θ_0 as the old policy; `_scores`:
  (params, minibatch, old) -> ℓ, H, KL; `_gradients`: see `Lab.gradients`."""
  scorer = programs.scorer

  def begin(params, minibatch):
    return update.score_with_states(scorer, params, minibatch)

  def scores(params, minibatch, old):
    return update.loss_and_gradient(  # of 0, which costs no backward pass
        scorer, lambda tokens, _: jnp.float32(0), params, minibatch, (), old)[2]

  def linear(tokens, slope_BT):
    return jnp.sum(slope_BT * numerics.clean(tokens).logp_BT)

  def gradients(params, minibatch, slope_EBT):
    tree = jax.vmap(lambda slope_BT: update.loss_and_gradient(
        scorer, linear, params, minibatch, slope_BT, None)[1])(slope_EBT)
    return jnp.concatenate(
        [x.reshape(len(x), -1) for x in jax.tree.leaves(tree)], 1)

  return [programs.jit(function) for function in (begin, scores, gradients)]
