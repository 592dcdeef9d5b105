"""Replays a step of a run from its saved rollout and checkpoint.

It can make the step's updates again, and evaluate every method on them: the
update each would have made. A method's loss depends on the parameters only
through ℓ, H and the exact KL of each token, so one compiled program, their
vector-Jacobian product, serves every method; the objective runs on the scores.

Axes: B completions · T completion tokens.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import contextlib
import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax

from tepo_jax import errors
from tepo_jax.job import configuration
from tepo_jax.job import learner as learner_lib
from tepo_jax.job import programs as programs_lib
from tepo_jax.job import run_folder
from tepo_jax.job import session as session_lib
from tepo_jax.learning import numerics
from tepo_jax.learning import objective
from tepo_jax.learning import packing
from tepo_jax.learning import update
from tepo_jax.policy import scoring
from tepo_jax.rollout import dump
from tepo_jax.runtime import checkpoint
from tepo_jax.runtime import files
from tepo_jax.runtime import mesh as mesh_lib

SAME = 1e-3  # relative distance of gradients that count as the same


@dataclasses.dataclass(frozen=True)
class TokenView:
  """The tokens sampled in a step; arrays are [B, T] on the host.

  batch: of all groups sampled, with the values before the step's updates.
  logp_BT, entropy_BT, kl_BT: after all of them.
  selection: of the run's method, see `PolicyLoss.selection`.
  """
  batch: packing.Batch
  logp_BT: np.ndarray
  entropy_BT: np.ndarray
  kl_BT: np.ndarray
  selection: dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class ReplayPrograms:
  """Jitted functions.

  score: (params, batch) -> ℓ, H; bit-identical to those of the run's updates.
  pull_back: the function `pull_back` below with its scorer bound.
  move: (gradient, opt_state, params, share of the learning rate or None) ->
    the optimiser's change of params.
  """
  score: Callable
  pull_back: Callable
  move: Callable


@dataclasses.dataclass(frozen=True)
class Outcome:
  """One update by a method.

  clip_fraction: share of tokens that a bound clips or that are dropped.
  region_share: share of tokens in M. gradient: on the host.
  entropy_predicted: ⟨∇H̄, Δθ⟩; entropy_measured: H̄(θ + Δθ) − H̄(θ); in nats.
    H̄ is the mean entropy of the minibatch's tokens, Δθ the optimiser's change
    for the method's gradient.
  """
  loss: float
  grad_norm: float
  clip_fraction: float
  region_share: float
  entropy_predicted: float
  entropy_measured: float
  gradient: Any = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True)
class Comparison:
  """Every method on one minibatch of the step.

  where: such as 'update 1 of 4'. tokens: in the minibatch.
  """
  where: str
  tokens: int
  outcomes: dict[str, Outcome]


class Step:
  """A rollout step whose updates can be made again.

  Attributes:
    learner: starts with the policy at the step's start.
    sampled, trained: the groups of the saved rollout, with sampled_reward_B and
      reward_B of their completions.
    scored: by π_old. start: π_old's trained weights.
  """

  def __init__(self, learner: learner_lib.Learner, step: int,
               records: list[dict]):
    """records: see `dump.read`."""
    self.learner = learner
    length = learner.config.rollout.max_tokens
    self.sampled = dump.to_groups(records, length)
    self.sampled_reward_B = dump.rewards(records)
    self._is_trained_B = np.array([record['trained'] for record in records])
    records = [record for record in records if record['trained']]
    self.trained = dump.to_groups(records, length)
    self.reward_B = dump.rewards(records)
    if not self.trained:
      raise errors.InputError(f'step {step} trained on no group')
    learner.renew_reference(step)
    self.scored = learner.pack_and_score(
        step, self.trained, self.reward_B)
    if not self.scored.updates:
      raise errors.InputError(
          f'step {step} made no update: all completions that it could train on '
          f'were truncated, and rollout.truncated='
          f'{learner.config.rollout.truncated}')
    programs = learner.programs
    self.start = jax.tree.map(jnp.copy, learner.state.params)
    like = programs.state_sharding.params
    jitted = programs.jit(
        lambda frozen, *arguments: pull_back(
            dataclasses.replace(programs.scorer, frozen=frozen), *arguments),
        out_shardings=(like, None))
    self.programs = ReplayPrograms(
        lambda params, batch: programs.score(params, batch, *learner.base()),
        functools.partial(jitted, learner.frozen), programs.jit(
            lambda *arguments: update.change(
                programs.optimizer, *arguments)[0],
            out_shardings=like))

  def compare(self, methods: Mapping[str, Any],
              progress: Callable[[str], None] = lambda text: None
              ) -> list[Comparison]:
    """Evaluates the methods at the step's first and last update.

    At the first, the policy equals π_old: all weights are 1 and no penalty to
    π_old acts. π_old is the reference policy where the run has none. In
    between, this makes the run's own updates.
    `progress` is called with what is done next.
    """
    losses = {name: objective.make_policy_loss(method)
              for name, method in methods.items()}
    last, comparisons = self.scored.updates - 1, []
    for index in range(last + 1):
      if index in (0, last):
        comparisons.append(self._compare(losses, index, progress))
      progress(f'making update {index + 1} of {last + 1}')
      self._update(index)
    return comparisons

  def finish(self) -> None:
    """Makes all of the step's updates as the run did."""
    for index in range(self.scored.updates):
      self._update(index)

  def _update(self, index):
    self.learner.make_update(self.scored, index)

  def old_policy(self, minibatch: packing.Minibatch) -> update.OldPolicy:
    """π_old in any minibatch."""
    return self.learner.programs.old_policy(
        self.start, minibatch, *self.learner.base())

  def _compare(self, losses, index, progress):
    mine = self.scored.minibatch_index(index)
    members = self.scored.members[mine]
    minibatch = self.scored.minibatches[mine]
    if minibatch.reference_logp_BT is None:  # a run without a reference policy
      minibatch = minibatch.replace(reference_logp_BT=minibatch.old_logp_BT)
    batches = {name: minibatch.replace(advantage_B=self.learner.advantages(
        self.scored, self.trained, self.reward_B, loss.method)[members])
               for name, loss in losses.items()}
    where = f'update {index + 1} of {self.scored.updates}'
    return Comparison(
        where, int(self.scored.batch.mask_BT[members].sum()),
        evaluate(self.programs, losses, self.learner.state, batches,
                 self.scored.rng(index), self.old_policy(minibatch),
                 lambda text: progress(f'{where}, {text}')))

  def view(self, method: Any) -> TokenView:
    """Returns the sampled tokens under the current policy and under π_old.

    `method` decides which tokens are clipped and in M. The advantages are those
    of the run's updates, 0 in groups that they did not train on.
    """
    loss = objective.make_policy_loss(method)
    size = len(self.scored.members[0])
    group_size = len(self.sampled[0].text_G)
    total = -(-len(self.sampled) * group_size // size) * size
    batch = self.learner.to_batch(self.sampled, self.sampled_reward_B,
                                  loss.method.estimator, total)
    trained_B = self.scored.batch.advantage_B
    advantage_B = np.zeros((total, *trained_B.shape[1:]), np.float32)
    advantage_B[np.flatnonzero(self._is_trained_B)] = trained_B[
        :len(self.reward_B)]
    batch = batch.replace(advantage_B=advantage_B)
    views = [self._view(loss, batch, np.arange(start, start + size))
             for start in range(0, total, size)]
    old_logp_BT, old_entropy_BT, new, selection = (
        jax.tree.map(lambda *x: np.concatenate(x), *part)
        for part in zip(*views))
    return TokenView(
        batch.replace(old_logp_BT=old_logp_BT, old_entropy_BT=old_entropy_BT),
        new.logp_BT, new.entropy_BT, new.kl_BT, selection)

  def _view(self, loss, batch, members):
    mine = self.learner.on_devices(jax.tree.map(lambda x: x[members], batch))
    old_logp_BT, old_entropy_BT = self.programs.score(self.start, mine)
    mine = mine.replace(old_logp_BT=old_logp_BT, old_entropy_BT=old_entropy_BT)
    new = scores(
        self.programs, self.learner.state.params, mine, self.old_policy(mine))
    tokens = update.tokens(mine, new)
    statistics = loss.statistics(tokens, self.scored.rng(0))
    return mesh_lib.to_host((mine.old_logp_BT, mine.old_entropy_BT, new,
                             loss.selection(tokens, statistics)))


def pull_back(scorer: update.Scorer, params: Any, batch: packing.Minibatch,
              cotangents: scoring.Scores, old: update.OldPolicy
              ) -> tuple[Any, scoring.Scores]:
  """Returns Σ_it ⟨cotangents, ∂(ℓ, H, KL)_it/∂θ⟩ and the scores."""
  _, gradient, scores = update.loss_and_gradient(
      scorer, _linear, params, batch, cotangents, old)
  return gradient, scores


def _linear(tokens, cotangents):
  x = numerics.clean(tokens)
  return jnp.sum(cotangents.logp_BT * x.logp_BT
                 + cotangents.entropy_BT * x.entropy_BT
                 + cotangents.kl_BT * x.kl_BT)


def scores(programs: ReplayPrograms, params: Any, batch: packing.Minibatch,
           old: update.OldPolicy) -> scoring.Scores:
  """Returns ℓ, H and the exact KL to π_old of the batch's tokens."""
  logp_BT, entropy_BT = programs.score(params, batch)
  _, whole = programs.pull_back(params, batch, _zeros(batch), old)
  return whole.replace(logp_BT=logp_BT, entropy_BT=entropy_BT)


def _zeros(batch):
  """Returns zero cotangents, with which `pull_back` only scores."""
  zeros_BT = jnp.zeros(batch.mask_BT.shape, jnp.float32)
  return scoring.Scores(zeros_BT, zeros_BT, zeros_BT)


def evaluate(programs: ReplayPrograms,
             losses: Mapping[str, objective.PolicyLoss],
             state: update.TrainState,
             batches: Mapping[str, packing.Minibatch], rng: jax.Array,
             old: update.OldPolicy,
             progress: Callable[[str], None] = lambda text: None
             ) -> dict[str, Outcome]:
  """Returns the outcome of each method at the same parameters.

  Args:
    losses: by method. batches: the minibatch with each method's advantages, on
      the devices, with ℓ° and H°.
    state, rng: before the update, of the update. old: π_old.
    progress: called before each method.
  """
  batch = next(iter(batches.values()))
  now = scores(programs, state.params, batch, old)
  mean_BT = objective.token_mean(batch.mask_BT)
  d_entropy, _ = programs.pull_back(
      state.params, batch, _zeros(batch).replace(entropy_BT=mean_BT), old)

  def outcome(loss, mine):
    value, metrics, cotangents = _slopes(loss, update.tokens(mine, now), rng)
    gradient, _ = programs.pull_back(state.params, mine, cotangents, old)
    change = programs.move(
        gradient, state.opt_state, state.params, mine.rate_share)
    after = optax.apply_updates(state.params, change)
    _, entropy_BT = programs.score(after, batch)
    return Outcome(
        loss=float(value), grad_norm=float(optax.global_norm(gradient)),
        clip_fraction=float(sum(metrics[f'clip_fraction_{part}'] for part in (
            'low', 'high', 'covariance'))),
        region_share=float(metrics['region_share']),
        entropy_predicted=float(optax.tree.vdot(d_entropy, change)),
        entropy_measured=float(jnp.sum(mean_BT * jnp.where(
            batch.mask_BT > 0, entropy_BT - now.entropy_BT, 0))),
        gradient=mesh_lib.to_host(gradient))

  outcomes = {}
  for number, (name, loss) in enumerate(losses.items(), 1):
    progress(f'method {number} of {len(losses)}: {name}')
    outcomes[name] = outcome(loss, batches[name])
  return outcomes


def identical(outcomes: Mapping[str, Outcome]) -> list[list[str]]:
  """Groups the methods that make the same update here, in their order.

  Their gradients differ by at most SAME of their length; loss, clip and M may
  differ.
  """
  groups: list[list[str]] = []
  for name, outcome in outcomes.items():
    for group in groups:
      if _is_same(outcome, outcomes[group[0]]):
        group.append(name)
        break
    else:
      groups.append([name])
  return groups


def _is_same(one, other):
  # The norms decide most pairs without a pass over the gradients.
  return math.isclose(one.grad_norm, other.grad_norm, rel_tol=SAME) and (
      optax.global_norm(jax.tree.map(np.subtract, one.gradient, other.gradient))
      <= SAME * other.grad_norm)


def _slopes(loss, tokens, rng):
  """Returns L, its metrics, and ∂L/∂(ℓ, H, KL) of the whole minibatch."""
  statistics = loss.statistics(tokens, rng)
  total, slopes = jax.value_and_grad(
      lambda scores: loss.partial(tokens.replace(**scores), statistics))(dict(
          logp_BT=tokens.logp_BT, entropy_BT=tokens.entropy_BT,
          kl_BT=tokens.kl_BT))
  return total, loss.metrics(tokens, statistics), scoring.Scores(**slopes)


def cosines(outcomes: Sequence[Outcome]) -> np.ndarray:
  """Returns the cosines [n, n] of the gradients; 0 with a zero gradient."""
  flat = np.stack([np.concatenate(list(map(
      np.ravel, jax.tree.leaves(outcome.gradient)))) for outcome in outcomes
                   ]).astype(np.float64)
  norm = np.linalg.norm(flat, axis=1, keepdims=True)
  unit = flat / np.where(norm > 0, norm, 1)
  return unit @ unit.T


@contextlib.contextmanager
def open_step(workdir: files.Path, step: int) -> Iterator[Step]:
  """Opens rollout step `step` of a run on this machine's devices.

  Raises:
    errors.InputError: the step's rollout or the checkpoint before it is
      missing; lists the steps that have both.
  """
  workdir = files.path(workdir)
  config = run_folder.read_config(workdir)
  configuration.check_saved(config, f'{workdir}/config.json')
  with config.unlocked():
    config.mesh = ml_collections.ConfigDict(dict(data=1, fsdp=-1, tensor=1))
    config.rollout.tensor = None
    config.eval.period = 0
  replayable = available(workdir)
  if step not in replayable:
    raise errors.InputError(
        f'{workdir}: step {step} cannot be replayed: this needs its rollout '
        f'and the checkpoint of step {step - 1}; the steps with both: '
        f'{", ".join(map(str, replayable)) or "none"}')
  records = dump.read(workdir / session_lib.ROLLOUTS, step)
  with session_lib.open_folder(
      config, session_lib.model_folder(config, workdir)) as session:
    learner = learner_lib.Learner(config, session)
    learner.load_base()
    learner.state = _state(learner, workdir, step - 1)
    yield Step(learner, step, records)


def available(workdir: files.Path) -> list[int]:
  """Returns the steps whose rollout and preceding checkpoint exist.

  Step 1 starts from the model's own weights.
  """
  saved = {0, *checkpoint.steps(workdir / session_lib.CHECKPOINTS)}
  return [step for step in dump.steps(workdir / session_lib.ROLLOUTS)
          if step - 1 in saved]


def _state(learner, workdir, step):
  if step == 0:
    return learner.first_state()
  with contextlib.closing(checkpoint.Checkpointer(
      workdir / session_lib.CHECKPOINTS, read_only=True)) as checkpointer:
    return checkpointer.restore(
        step, *programs_lib.restorable(learner.programs),
        learner.check_stands_on)[0]
