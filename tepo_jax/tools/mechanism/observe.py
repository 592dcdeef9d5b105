"""A base model θ_0, what policies near it sample, and their scores.

Axes: B completions · T completion tokens · G samples of a prompt · N parts of
the completions · E estimators · D parameters.
"""

from collections.abc import Iterator, Sequence
import dataclasses
import functools
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
from tepo_jax.learning import batch as batch_lib
from tepo_jax.learning import numerics
from tepo_jax.learning import objective
from tepo_jax.learning import packing
from tepo_jax.learning import update
from tepo_jax.policy import lora
from tepo_jax.rollout import draw
from tepo_jax.rollout import groups as groups_lib
from tepo_jax.rollout import selection
from tepo_jax.runtime import mesh as mesh_lib


class Lab:
  """Policies that updates lead to from θ_0, and samples of any policy.

  Attributes:
    learner: of the config's method, at θ_0. start: θ_0's trained weights.
    prompts: held out, of the first evaluation set.
  """

  def __init__(self, config: ml_collections.ConfigDict,
               session: session_lib.Session):
    rollout = config.rollout
    self.config, self.session = config, session
    self.learner = self._learner(config.method)
    self.start = self.learner.state.params
    self.prompts = session.evaluation_prompts(config.eval.sets[0])
    self._sampler = session.sampler(
        prompts=max(len(self.prompts), rollout.prompts),
        samples=rollout.samples, max_tokens=rollout.max_tokens,
        decoding=draw.Decoding(rollout.temperature))
    self._jitted = _programs(self.learner)

  def _learner(self, method):
    config = self.config.copy_and_resolve_references()
    with config.unlocked():
      config.method = ml_collections.ConfigDict(method)
    learner = learner_lib.Learner(config, self.session)
    learner.load_base()
    learner.state = learner.first_state()
    return learner

  def sample(self, params: Any, draw_number: int) -> list[groups_lib.Group]:
    """A group for every held-out prompt; the same numbers are drawn for every
    policy."""
    held_out = evaluation.Evaluation(
        'sampling', self.prompts, self._sampler, self.config.rollout.samples,
        True, self.session.template.style)
    return held_out.run(self._to_decode(params), jax.random.fold_in(
        programs_lib.stream(self.config.seed, 'eval'), draw_number))[0]

  def rollout(self) -> list[groups_lib.Group]:
    """The groups of θ_0 that a rollout step trains on."""
    settings, prompts = self.config.rollout, self.session.training_prompts()
    order = groups_lib.DataOrder(len(prompts), self.config.seed)
    return self._sampler.select(
        self._to_decode(self.start),
        lambda cursor: dataclasses.replace(
            prompts[order[cursor]], cursor=cursor),
        selection.Selection(
            cursor=0, wanted=settings.prompts, group_size=settings.samples,
            mode=settings.dynamic_sampling,
            max_batches=settings.max_generation_batches),
        programs_lib.stream(self.config.seed, 'rollout')).groups

  def updates(self, method: Any, groups: list[groups_lib.Group],
              counts: Sequence[int]) -> Iterator[tuple[int, Any, dict]]:
    """Trains θ_0 on a rollout by `method`.

    Yields (number of updates, weights, the updates' average metrics so far).
    """
    learner = self._learner(method)
    plan, history = learner.plan_updates(1, groups), []
    for index in range(max(counts)):
      history.append(jax.device_get(learner.make_update(plan, index)))
      if index + 1 in counts:
        yield (index + 1, jax.tree.map(jnp.copy, learner.state.params),
               summaries.average(history))

  def batch(self, groups: list[groups_lib.Group]) -> batch_lib.Batch:
    """Host arrays of the groups, without filler."""
    return self.learner.to_batch(
        groups, self.learner.programs.policy_loss.method.estimator,
        len(groups) * self.config.rollout.samples)

  def gradients(self, params: Any, batch: batch_lib.Batch,
                slope_EBT: np.ndarray, part_B: np.ndarray, parts: int
                ) -> np.ndarray:
    """Σ_it slope_it ∇ℓ_it over the completions of each part, [E, N, D] float32.

    A slope is ∂L/∂ℓ of the whole batch, so the parts' gradients add up to L's.

    Args:
      part_B: the part 0 … N − 1 of each completion; at most G are in one.
      parts: N.
    """
    size, row = self.config.rollout.samples, self._row_packer()
    # Untouched pages of zeros take no memory.
    found_END = np.zeros((len(slope_EBT), parts, sum(
        x.size for x in jax.tree.leaves(params))), np.float32)
    used_B = slope_EBT.any((0, 2))
    for part in np.unique(part_B[used_B]):
      members = np.flatnonzero((part_B == part) & used_B)
      members = np.pad(members, (0, size - len(members)), 'edge')
      alone_B = np.arange(size) < len(np.unique(members))
      mine = _rows(batch, members)
      mine = mine.replace(mask_BT=mine.mask_BT * alone_B[:, None])
      found_END[:, part] = self._jitted.gradients(
          params, mesh_lib.put(
              row(mine), self.learner.programs.minibatch_sharding),
          slope_EBT[:, members], *self.learner.base())
    return found_END

  def _row_packer(self):
    """One row of several completions at a time: parts are small."""
    train, data = self.config.train, self.config.data
    columns = train.row_tokens or (
        data.max_prompt_tokens + self.config.rollout.max_tokens)
    return packing.Packer(
        columns, columns, mesh_lib.batch_shards(self.learner.programs.mesh))

  def _to_decode(self, params):
    return self.learner.programs.to_decode(
        lora.combine(self.learner.frozen, params))


class Observed:
  """Completions that θ_0 sampled, and their scores under any policy.

  batch: host arrays, with ℓ° and H°.
  """

  def __init__(self, lab: Lab, groups: list[groups_lib.Group]):
    self._lab, base = lab, lab.learner.base()
    batch = lab.batch(groups)
    size = lab.config.train.minibatch_prompts * lab.config.rollout.samples
    self._count = len(batch.mask_BT)
    rows = np.arange(-(-self._count // size) * size).reshape(-1, size)
    filled = jax.tree.map(lambda x: np.pad(
        x, [(0, rows.size - len(x))] + [(0, 0)] * (x.ndim - 1)), batch)
    self._chunks, scores = [], []
    for mine in rows:
      minibatch = lab.learner.on_devices(_rows(filled, mine))
      logp_BT, entropy_BT, old = lab._jitted.begin(lab.start, minibatch, *base)
      scores.append((logp_BT, entropy_BT))
      self._chunks.append((minibatch, old))
    logp_BT, entropy_BT = self._whole(scores)
    self.batch = batch.replace(
        old_logp_BT=logp_BT, old_entropy_BT=entropy_BT)

  def tokens(self, params: Any) -> objective.Tokens:
    """ℓ, H and the exact KL to θ_0 under `params`; zeros under the mask."""
    scores = self._whole([
        self._lab._jitted.scores(
            params, minibatch, old, *self._lab.learner.base())
        for minibatch, old in self._chunks])
    return tokens(self.batch, scores)

  def _whole(self, chunks):
    return jax.tree.map(
        lambda *x: np.concatenate(x)[:self._count], *jax.device_get(chunks))


def tokens(batch: batch_lib.Batch, scores: Any) -> objective.Tokens:
  """The objective's input of a host batch; zeros under the mask."""
  clean = jax.device_get(numerics.clean(update.tokens(batch, scores)))
  return clean.replace(mask_BT=clean.mask_BT.astype(np.float32))


@dataclasses.dataclass(frozen=True)
class _Programs:
  """Jitted functions; with LoRA, the frozen base is their last argument.

  begin: (θ_0, minibatch) -> ℓ°, H°, θ_0 as the old policy.
  scores: (params, minibatch, old) -> ℓ, H, KL.
  gradients: (params, minibatch, slope_EBT) -> Σ_it slope_it ∇ℓ_it, [E, D].
  """
  begin: Any
  scores: Any
  gradients: Any


def _programs(learner):
  programs = learner.programs
  model = programs.model

  def on(frozen):
    return dataclasses.replace(programs.scorer, frozen=frozen)

  def begin(params, minibatch, frozen=None):
    microbatches, rows, columns = minibatch.rows.token_RS.shape
    return update.score(on(frozen), params, minibatch, jnp.zeros(
        (rows, microbatches, columns, model.d_model), model.dtype))

  def scores(params, minibatch, old, frozen=None):
    return update.loss_and_gradient(  # of 0, which costs no backward pass
        on(frozen), lambda tokens, _: jnp.float32(0), params, minibatch, (),
        old)[2]

  def gradients(params, minibatch, slope_EBT, frozen=None):
    tree = jax.vmap(lambda slope_BT: update.loss_and_gradient(
        on(frozen), _linear, params, minibatch, slope_BT, None)[1])(slope_EBT)
    return jnp.concatenate(
        [x.reshape(len(x), -1) for x in jax.tree.leaves(tree)], 1)

  compiled = functools.partial(
      programs_lib.compiled, programs.mesh, dtype=model.dtype)
  return _Programs(*map(compiled, (begin, scores, gradients)))


def _linear(tokens, slope_BT):
  return jnp.sum(slope_BT * numerics.clean(tokens).logp_BT)


def _rows(batch, rows):
  return jax.tree.map(lambda x: x[rows], batch)
