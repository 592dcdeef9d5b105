"""The gradients of many methods on one rollout of a large model, as sketches.

A method's gradient is linear in the slopes of its loss: ∂L/∂ of each token's ℓ,
H and KL, which `of_loss` takes from the method's own `PolicyLoss`. So a
group of completions is scored once, and pulled back once for each *independent*
direction among the slopes of all methods: those that no token tells apart, as
GRPO, CISPO and TEPO at the rollout's own policy, cost one pullback together.
Each gradient becomes a `sketch.sketch` at once; one exists at a time.

A minibatch's losses have its own statistics (N, covariances, top-k), as in an
update. A group's vector is the gradient of its part of the loss, times the
number of groups in the minibatch. Their mean is the minibatch's gradient: an
independent draw, which the vectors of its groups are not.

Axes: B completions of a minibatch · T tokens · E slopes: methods and parts of
methods · K independent slopes · N = 3BT entries of a slope: ℓ, H, KL · C
entries of a sketch · G groups of a minibatch · J minibatches.
"""

from collections.abc import Iterable, Mapping
import dataclasses
from typing import Any

import jax
from jax import numpy as jnp
import numpy as np

from configs import methods
from tepo_jax.learning import objective
from tepo_jax.learning import packing
from tepo_jax.learning import update
from tepo_jax.policy import scoring
from tepo_jax.runtime import mesh as mesh_lib
from tepo_jax.tools.mechanism import observe
from tepo_jax.tools.mechanism import sketch

BETA = 1e-3
_ROWS = methods.methods(BETA)
METHODS = ('tepo_no_kl', 'grpo', 'gspo', 'cispo', 'gpg', 'kl_cov', 'clip_cov',
           'entropy_advantage')
WHOLE, KL = METHODS[0], 'tepo_kl'  # tepo is WHOLE + BETA KL
_LOSSES = {name: objective.make_policy_loss(_ROWS[name]) for name in METHODS}
ESTIMATORS = {loss.method.estimator for loss in _LOSSES.values()}
_KL_LOSS = objective.make_policy_loss(methods.methods(1.0)['tepo'])
# Of the advantages in M, in the policy gradient and in the classes of tokens,
# whatever the config's method.
ESTIMATOR = _KL_LOSS.method.estimator
# ∇ of the token mean of A ℓ, the policy gradient without importance weights.
POLICY_GRADIENT = objective.make_policy_loss(
    _ROWS['grpo'] | dict(weight='none', clip=dict(name='none')))
# How the tokens of a completion are divided: names of the classes.
CLASSES = {
    'advantage': ('A > 0', 'A < 0'),
    'position': tuple(f'quarter {n}' for n in (1, 2, 3, 4)),
    'entropy': tuple(f'quartile {n}' for n in (1, 2, 3, 4))}
_SAME = 1e-5  # of a slope's length: the rest of it is rounding


@dataclasses.dataclass(frozen=True)
class Vectors:
  """The gradients of the groups of a minibatch, by their slopes.

  sketch_GKC: of independent slopes, 0 beyond a group's own. coef_GEK: slope
  e's gradient is the sum of coef times these. square_GK: their exact |x|².
  """
  sketch_GKC: np.ndarray
  coef_GEK: np.ndarray
  square_GK: np.ndarray


def classes(x: objective.Tokens, cut_Q: np.ndarray) -> dict[str, np.ndarray]:
  """For each of CLASSES, the number of every token's class, [B, T]; -1 of a
  token in none: one that is masked, or with A = 0, which no gradient has.

  cut_Q: the quartiles of H°. The quarters of a completion are those of its
  length; one of fewer than four tokens lacks some.
  """
  length_B1 = np.maximum(x.mask_BT.sum(1, keepdims=True), 1)
  place_BT = np.broadcast_to(np.arange(x.mask_BT.shape[1]), x.mask_BT.shape)
  found = dict(
      advantage=np.select([x.advantage_BT > 0, x.advantage_BT < 0], [0, 1], -1),
      position=np.minimum(4 * place_BT // length_B1, 3),
      entropy=np.searchsorted(cut_Q, x.old_entropy_BT))
  return {name: np.where(x.mask_BT, class_BT, -1)
          for name, class_BT in found.items()}


def region(x: objective.Tokens) -> np.ndarray:
  """TEPO's M, [B, T], as its loss selects it."""
  return jax.device_get(
      _KL_LOSS.selection(x, _KL_LOSS.statistics(x))['region_BT'])


def names(divisions: Iterable[str]) -> list[Any]:
  """The keys of `slopes` with these divisions, in their order."""
  return [*METHODS, KL, *(
      (division, name) for division in divisions for name in CLASSES[division])]


def of_loss(loss: objective.PolicyLoss, x: objective.Tokens,
            rng: jax.Array | None = None) -> scoring.Scores:
  """∂L/∂ of each score, [B, T]; x: of a minibatch."""
  statistics = loss.statistics(x, rng)
  return jax.device_get(jax.grad(lambda scores: loss.partial(
      x.replace(**vars(scores)), statistics))(scoring.Scores(
          x.logp_BT, x.entropy_BT, x.kl_BT)))


def slopes(x: objective.Tokens, advantages: Mapping[str, np.ndarray],
           rng: jax.Array, by_class: Mapping[str, np.ndarray]
           ) -> dict[str, scoring.Scores]:
  """The slopes of METHODS, of KL, and of WHOLE's parts: (division, class).

  x: of a minibatch. advantages: of ESTIMATORS -> [B, T], in the place of x's.
  rng: for Clip-Cov. by_class: `classes`, or {}: no parts.
  """
  found = {
      name: of_loss(loss, x.replace(
          advantage_BT=advantages[loss.method.estimator]), rng)
      for name, loss in _LOSSES.items()}
  kl = of_loss(_KL_LOSS, x.replace(advantage_BT=advantages[ESTIMATOR]))
  found[KL] = kl.replace(logp_BT=np.zeros_like(kl.logp_BT))
  for division, class_BT in by_class.items():
    for number, name in enumerate(CLASSES[division]):
      found[division, name] = jax.tree.map(
          lambda slope_BT, mine_BT=class_BT == number: slope_BT * mine_BT,
          found[WHOLE])
  return found


def independent(slope_EN: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Orthonormal slopes [K, N], and coefficients [E, K] of the given ones.

  By Gram and Schmidt, twice: slopes of the KL stay apart from those of ℓ, whose
  gradients are larger by orders of magnitude.
  """
  basis_KN = np.zeros((0, slope_EN.shape[1]))
  for slope_N in slope_EN.astype(float):
    length, rest_N = np.linalg.norm(slope_N), slope_N
    for _ in range(2):
      rest_N = rest_N - basis_KN.T @ (basis_KN @ rest_N)
    rest = np.linalg.norm(rest_N)
    if rest > _SAME * length:
      basis_KN = np.concatenate([basis_KN, rest_N[None] / rest])
  return basis_KN, slope_EN @ basis_KN.T


class PullBack:
  """Gradients of one group after another, by slopes of its tokens."""

  def __init__(self, lab: observe.Lab):
    programs, config = lab.learner.programs, lab.config
    samples, tokens = config.rollout.samples, config.rollout.max_tokens
    self._samples, self._start = samples, lab.start
    self._sharding = programs.minibatch_sharding
    shards = mesh_lib.batch_shards(programs.mesh)
    self._pack = packing.make(  # one microbatch, in each shard, holds a group
        'shared', prompt_tokens=config.data.max_prompt_tokens,
        max_tokens=tokens, samples=samples, microbatch_tokens=shards * (
            config.data.max_prompt_tokens - 1 + samples * (tokens + 1)),
        shards=shards)
    self._run = programs.jit(_pull_back(dataclasses.replace(
        programs.scorer, chunk_size=min(
            programs.scorer.chunk_size, samples * tokens),
        # Only the states of one group are kept.
        model=dataclasses.replace(programs.model, remat='none'))))

  def __call__(self, params: Any, batch: packing.Batch,
               found: Mapping[Any, scoring.Scores]) -> Vectors:
    """The vectors of a minibatch's groups at `params`; found: slopes."""
    flat_EGN = np.stack([np.stack([
        x.reshape(-1, self._samples * x.shape[1])
        for x in vars(slope).values()], 1) for slope in found.values()])
    shape = self._samples, batch.mask_BT.shape[1]
    groups = [self._group(
        params, jax.tree.map(
            lambda x, g=g: x[g * shape[0]:(g + 1) * shape[0]], batch),
        flat_EGN[:, g].reshape(len(found), -1) * flat_EGN.shape[1], shape)
              for g in range(flat_EGN.shape[1])]
    used = max(1, *(len(coef_EK.T) for _, coef_EK, _ in groups))
    return Vectors(
        np.stack([sketch_KC[:used] for sketch_KC, _, _ in groups]),
        np.stack([np.pad(coef_EK, [(0, 0), (0, used - len(coef_EK.T))])
                  for _, coef_EK, _ in groups]),
        np.stack([square_K[:used] for _, _, square_K in groups]))

  def _group(self, params, batch, slope_EN, shape):
    basis_KN, coef_EK = independent(slope_EN)
    padded_EN = np.zeros(slope_EN.shape, np.float32)  # K is at most E
    padded_EN[:len(basis_KN)] = basis_KN
    minibatch = self._pack(batch)
    assert minibatch.used <= 1  # 0 of a group without a token
    sketch_KC, square_K = jax.device_get(self._run(
        params, self._start, mesh_lib.put(minibatch, self._sharding),
        scoring.Scores(*padded_EN.reshape(-1, 3, *shape).swapaxes(0, 1)),
        len(basis_KN)))
    return sketch_KC, coef_EK, square_K


def _pull_back(scorer):
  """(params, θ_0, minibatch of one microbatch, slopes [E, B, T], K) -> the
  sketches [E, C] and squares [E] of the first K slopes' gradients."""
  def run(params, start, minibatch, slope, used):
    old = update.score_with_states(scorer, start, minibatch)[2]
    rows = jax.tree.map(lambda x: x[0], minibatch.rows)
    _, backward = jax.vjp(lambda params: scorer.score(
        params, minibatch, rows, minibatch.microbatch_B == 0,
        old.of_microbatch(0))[0], params)

    def add(e, found):
      [gradient] = backward(jax.tree.map(lambda x: x[e], slope))
      square = sum(jnp.vdot(x, x) for x in jax.tree.leaves(gradient))
      return (found[0].at[e].set(sketch.sketch(gradient)),
              found[1].at[e].set(square))

    count = len(slope.logp_BT)
    return jax.lax.fori_loop(0, used, add, (
        jnp.zeros((count, sketch.SIZE)), jnp.zeros(count)))
  return run


def by_group(x: Vectors) -> np.ndarray:
  """The sketches of every slope and group, [E, G, C]."""
  return np.einsum('gek,gkc->egc', x.coef_GEK, x.sketch_GKC, optimize=True)


def combined(parts: list[Vectors]) -> np.ndarray:
  """The sketches of every slope and minibatch, [E, J, C]."""
  return np.stack([by_group(x).mean(1) for x in parts], 1)


def sketch_error(parts: list[Vectors]) -> float:
  """The relative error of |x|², root mean square over the pulled back."""
  exact, found = (np.concatenate(x) for x in zip(*(
      (x.square_GK[used], np.sum(x.sketch_GKC[used]**2, 1))
      for x in parts for used in [x.square_GK > 0])))
  return float(np.sqrt(np.mean((found / exact - 1)**2)))
