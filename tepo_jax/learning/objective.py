"""The paper's objective and every baseline, as five independent choices.

    L = sum_it c_it (coef M_it R_it - b_it S(w_it, A_it) + coef' K_it)  (Eq. 4)

    weight     w  importance weight of the policy to the old one    WEIGHTS
    clip       S  surrogate: w times the advantage, bounded         CLIPS
    shape      A  the advantage of each token                       SHAPES
    aggregate  c  how tokens are averaged                           AGGREGATES
    reg        R  a penalty on the tokens M of a region   PENALTIES, REGIONS

A method, a row of configs/methods.py, names one of each; `make_policy_loss`
composes them. b is 1, or the run's behaviour weight (`behaviour`). K, off in
the paper, estimates the KL to a reference policy (`kl`); coef' is
`method.reference.coef`.

d = logp - old_logp of the sampled token; ratio = exp(d); pi = exp(logp); dH =
entropy - old_entropy, nats; m: mask; n_i: tokens of completion i, N: of the
minibatch; sg: stop-gradient. Axes: B completions, T tokens of a completion.
`x`: Tokens with zeros where the mask is 0.
"""

import dataclasses
import functools
import math
from typing import Any

from flax import struct
from jax.lax import stop_gradient as sg
import jax.numpy as jnp

from tepo_jax.learning import advantage
from tepo_jax.learning import choices
from tepo_jax.learning import diagnostics
from tepo_jax.learning import kl
from tepo_jax.learning import numerics


@struct.dataclass
class Tokens:
  """The objective's input; where the mask is 0, the rest may be garbage."""
  logp_BT: Any  # differentiable
  entropy_BT: Any  # differentiable
  old_logp_BT: Any
  old_entropy_BT: Any
  advantage_BT: Any  # mostly one number per completion (`packing.Batch`)
  mask_BT: Any  # completion tokens up to and including EOS
  kl_BT: Any = None  # exact KL(policy || old) at each state, differentiable
  behaviour_BT: Any = None  # b, a constant; None: 1
  reference_logp_BT: Any = None  # of the reference policy


# Weights: tokens -> log w; numerics.exp bounds exponents to +-20.

def log_ratio(x):
  """d. w = ratio, `token`: PPO, GRPO/DAPO (Table 5). Also the penalty k1."""
  return x.logp_BT - x.old_logp_BT


def unit_weight(x):
  """logp - sg(logp). w = 1 with logp's gradient, `none`: GPG (Table 3C)."""
  return x.logp_BT - sg(x.logp_BT)


def sequence_weight(x):
  """w = s_i = exp(sum_t m d / n_i): TEPO 3.3.1, GSPO (2507.18071).

  Differentiated through all tokens; Algorithm 1 line 21 drops cross terms.
  """
  count_B1 = jnp.maximum(jnp.sum(x.mask_BT, axis=1, keepdims=True), 1)
  mean_B1 = jnp.sum(log_ratio(x), axis=1, keepdims=True) / count_B1
  return jnp.broadcast_to(mean_B1, x.logp_BT.shape)


def sequence_token_weight(x):
  """w = sg(s_i) exp(logp - sg(logp)): GSPO-token, and verl's code for GSPO."""
  return sg(sequence_weight(x)) + unit_weight(x)


def prefix_weight(x):
  """w = exp(sum_{j<=t} m d / sum_{j<=t} m): prefix IS (Tables 3C, 5)."""
  count_BT = jnp.maximum(jnp.cumsum(x.mask_BT, axis=1), 1)
  return jnp.cumsum(log_ratio(x), axis=1) / count_BT

WEIGHTS = dict(
    token=log_ratio, sequence=sequence_weight, prefix=prefix_weight,
    sequence_token=sequence_token_weight, none=unit_weight)


# Clips: (w, A, tokens) -> surrogate S, and the bounds that clip w. A clip may
# also drop tokens: (tokens, already clipped, rng) -> those without a surrogate.

def no_clip(w_BT, a_BT, x):
  """S = w A: Algorithm 1; KL-Cov, whose authors' code has no PPO clip."""
  return w_BT * a_BT, -jnp.inf, jnp.inf


def ppo_clip(w_BT, a_BT, x, *, low, high, dual=math.inf):
  """S = min(w A, C(w) A), C = clip(., 1 - low, 1 + high).

  PPO (1707.06347); low .2, high .28 is DAPO's Clip-Higher (2503.14476). Only
  one side binds: above where A > 0, below where A < 0. With `dual` = c
  (1912.09729; verl's code has 3 always on), where A < 0: max(that, c A).
  """
  negative_BT = a_BT < 0
  lower_BT = jnp.where(negative_BT, 1 - low, -jnp.inf)
  upper_BT = jnp.where(negative_BT, dual, 1 + high)
  return numerics.bound(w_BT, lower_BT, upper_BT) * a_BT, lower_BT, upper_BT


def printed_clip(w_BT, a_BT, x, *, low, high):
  """S = min(w, C(w)) A, Eq. 4 as typeset, where `low` never binds."""
  return numerics.bound(w_BT, -jnp.inf, 1 + high) * a_BT, -jnp.inf, 1 + high


def detached_clip(w_BT, a_BT, x, *, low, high):
  """S = sg(C(w)) A exp(logp - sg(logp)): CISPO (2506.13585; Table 3C).

  No token loses its gradient. `low=inf`, no bound, is its authors' setting.
  """
  bounded_BT = sg(numerics.bound(w_BT, 1 - low, 1 + high))
  return bounded_BT * a_BT * jnp.exp(unit_weight(x)), 1 - low, 1 + high


def covariance(x):
  """(A - mean A)(logp - mean logp), means over the minibatch (2505.22617)."""
  return ((x.advantage_BT - numerics.mean(x.advantage_BT, x.mask_BT))
          * (x.logp_BT - numerics.mean(x.logp_BT, x.mask_BT)))


def drop_in_band(x, clipped_BT, rng, *, fraction, band):
  """min(max(floor(fraction N), 1), candidates) tokens, at random: Clip-Cov.

  Candidates: covariance strictly inside the band, not clipped already. In its
  paper (2505.22617; Tables 1, 3B) there is no PPO clip; its authors' code has
  low = high = 1, and draws in each microbatch; here, in the minibatch.
  """
  if rng is None:
    raise ValueError("clip 'covariance' draws tokens at random: pass rng")
  inside_BT = (covariance(x) > band[0]) & (covariance(x) < band[1])
  return numerics.largest(
      numerics.draw(rng, x.mask_BT.shape), x.mask_BT & inside_BT & ~clipped_BT,
      numerics.share(fraction, x.mask_BT))

_BOUNDS = dict(low=choices.LOW, high=choices.HIGH)
CLIPS = dict(
    none=no_clip,
    ppo=choices.Choice(ppo_clip, _BOUNDS, dict(dual=choices.ABOVE_ONE)),
    printed=choices.Choice(printed_clip, _BOUNDS),
    detached=choices.Choice(detached_clip, _BOUNDS),
    covariance=choices.Choice(
        ppo_clip, _BOUNDS, whole_minibatch=True, drop=choices.Choice(
            drop_in_band, dict(fraction=choices.SHARE, band=choices.BAND))))


# Shapes: tokens without gradient -> the advantage of each token.

def entropy_shape(x, *, alpha, kappa):
  """A + min(alpha sg(entropy), |A| / kappa): 2506.14758 (Tables 1, 3B).

  The paper prints alpha = 4e-4; the method's own value with GRPO is 0.4.
  """
  return x.advantage_BT + jnp.minimum(
      alpha * x.entropy_BT, jnp.abs(x.advantage_BT) / kappa)


def steer_shape(x, *, floor):
  """sg(lambda) A, lambda = exp(log(floor) |W| / max(max |W|, 0.02)).

  STEER (2510.10150; "STEEL" in Table 3B): W = ratio A (1 - pi) (logp +
  old_entropy) predicts dH; the token with the largest |W| keeps `floor` A.
  """
  change_BT = jnp.abs(
      x.advantage_BT * numerics.exp(log_ratio(x)) * jnp.expm1(x.logp_BT)
      * (x.logp_BT + x.old_entropy_BT))
  relative_BT = change_BT / jnp.maximum(jnp.max(change_BT), 0.02)
  return jnp.exp(math.log(floor) * relative_BT) * x.advantage_BT

SHAPES = dict(
    none=lambda x: x.advantage_BT,
    entropy=choices.Choice(
        entropy_shape, dict(alpha=choices.AMOUNT, kappa=choices.POSITIVE)),
    steer=choices.Choice(
        steer_shape, dict(floor=choices.SHARE), whole_minibatch=True))


# Aggregates: the mask as floats -> c, for all tokens of a minibatch.

def token_mean(mask_BT):
  """m / N, the same for every token: TEPO (Eq. 4), DAPO (Table 5)."""
  return mask_BT / jnp.maximum(jnp.sum(mask_BT), 1)


def seq_mean_token_sum(mask_BT):
  """m / number of non-empty completions (Tables 3D, 5)."""
  return mask_BT / jnp.maximum(jnp.sum(jnp.max(mask_BT, axis=1)), 1)


def seq_mean_token_mean(mask_BT):
  """m / (n_i * number of non-empty ones): GRPO's paper, GSPO (Tables 3D, 5)."""
  count_B1 = jnp.sum(mask_BT, axis=1, keepdims=True)
  return seq_mean_token_sum(mask_BT) / jnp.maximum(count_B1, 1)


def constant_length(mask_BT, *, length):
  """m / (length * number of non-empty completions): Dr. GRPO (2503.20783).

  `length`: the longest completion allowed, the same for every completion.
  """
  return seq_mean_token_sum(mask_BT) / length

AGGREGATES = dict(
    token_mean=token_mean, seq_mean_token_mean=seq_mean_token_mean,
    seq_mean_token_sum=seq_mean_token_sum,
    constant_length=choices.Choice(
        constant_length, dict(length=choices.POSITIVE)))


# Penalties: tokens -> R. Those of `kl` estimate KL(policy || old) (Table 3A).

def kl_full(x):
  """KL(policy || old) over the whole vocabulary: TEPO, Eq. 4."""
  if x.kl_BT is None:
    raise ValueError("penalty 'kl_full' needs tokens.kl_BT")
  return x.kl_BT


def _of_log_ratio(estimator):
  return functools.wraps(estimator)(lambda x: estimator(log_ratio(x)))

PENALTIES = dict(
    none=lambda x: jnp.zeros_like(x.logp_BT), entropy=lambda x: x.entropy_BT,
    kl_full=kl_full, kl_abs=_of_log_ratio(kl.distance),
    kl_k1=log_ratio, kl_k2=_of_log_ratio(kl.k2), kl_k3=_of_log_ratio(kl.k3),
    kl_k3_is=_of_log_ratio(kl.k3_is))


# Readings of dH, for the regions: tokens without gradient -> dH.

def exact_change(x):
  """entropy - old_entropy at the rollout's states: Eq. 4's default reading."""
  return x.entropy_BT - x.old_entropy_BT


def covariance_change(x):
  """-(logp - mean logp)(A - mean A): Eq. 19 token by token."""
  return -covariance(x)


def npg_change(x):
  """-A pi (logp + entropy): Eq. 18 token by token."""
  return -x.advantage_BT * numerics.exp(x.logp_BT) * (x.logp_BT + x.entropy_BT)

CHANGES = dict(
    exact=exact_change, npg=npg_change,
    covariance=choices.Choice(covariance_change, whole_minibatch=True))


# Regions: (tokens without gradient, dH) -> M.

def positive_falling(x, change_BT):
  """A > 0 and dH < 0: TEPO's mask, Eq. 4."""
  return (x.advantage_BT > 0) & (change_BT < 0)


def negative_rising(x, change_BT):
  """A < 0 and dH > 0 (Table 3E)."""
  return (x.advantage_BT < 0) & (change_BT > 0)


def misaligned(x, change_BT):
  """Either of the two: the misalignment condition of 3.3.2 (Table 3E)."""
  return positive_falling(x, change_BT) | negative_rising(x, change_BT)


def top_covariance(x, change_BT, *, fraction):
  """The max(1, floor(fraction N)) largest: KL-Cov (2505.22617; Tables 1, 3B).

  Its authors' code ranks each microbatch by itself; here, the minibatch.
  """
  return numerics.largest(
      covariance(x), x.mask_BT, numerics.share(fraction, x.mask_BT))

REGIONS = dict(
    none=lambda x, change_BT: jnp.zeros_like(x.mask_BT),
    all=lambda x, change_BT: x.mask_BT,
    positive_falling=positive_falling, negative_rising=negative_rising,
    misaligned=misaligned,
    top_covariance=choices.Choice(
        top_covariance, dict(fraction=choices.SHARE), whole_minibatch=True))


@struct.dataclass
class Statistics:
  """Constants of a minibatch; decisions if `PolicyLoss.whole_minibatch`."""
  coefficient_BT: Any  # c
  advantage_BT: Any = None  # decision: shaped; 0 where the clip drops the token
  region_BT: Any = None  # decision: M, bool
  dropped_BT: Any = None  # decision, bool


@dataclasses.dataclass(frozen=True, eq=False)
class PolicyLoss:
  """L of one method: `loss(tokens, rng=None) -> (loss, metrics)`.

  The call takes the whole optimiser minibatch. With microbatches: `statistics`
  of the whole, `partial` of some of its completions (the parts add up to L
  however it is split), `metrics` of the whole. Hashable by identity.
  """
  method: choices.Method
  needs_kl: bool  # tokens.kl_BT is read
  whole_minibatch: bool  # statistics() reads logp_BT and entropy_BT
  needs_reference: bool  # tokens.reference_logp_BT is read

  def __call__(self, tokens, rng=None):
    statistics = self.statistics(tokens, rng)
    return self.partial(tokens, statistics), self.metrics(tokens, statistics)

  def statistics(self, tokens, rng=None):
    """Statistics of the whole minibatch; ValueError if Clip-Cov gets no rng."""
    x = numerics.clean(tokens)
    mask_BT = x.mask_BT.astype(x.old_logp_BT.dtype)
    return Statistics(self.method.aggregate(mask_BT), **(
        self._decide(x, rng) if self.whole_minibatch else {}))

  def partial(self, tokens, statistics):
    """The part of L that these completions contribute."""
    x = numerics.clean(tokens)
    s = self._decided(x, statistics)
    loss_BT = -self._surrogate(x, s.advantage_BT)[0]
    if x.behaviour_BT is not None:
      loss_BT *= x.behaviour_BT
    if self.method.regularised:
      penalty_BT = jnp.where(s.region_BT, self.method.penalty(x), 0)
      loss_BT += self.method.coef * penalty_BT
    if self.needs_reference and self.method.reference.place == 'loss':
      loss_BT += self.method.reference.coef * self._reference_kl(x)
    return jnp.sum(s.coefficient_BT * loss_BT)

  def metrics(self, tokens, statistics):
    """Scalars of the whole minibatch: see diagnostics.metrics."""
    x = sg(numerics.clean(tokens))
    return diagnostics.metrics(
        x, **self.selection(tokens, statistics), covariance_BT=covariance(x),
        k1_BT=log_ratio(x), k3_BT=kl.k3(log_ratio(x)), reference_BT=(
            self._reference_kl(x) if self.needs_reference else None))

  def selection(self, tokens, statistics):
    """How the method treats each token, without gradient.

    Returns weight_BT (w); bool low_BT, high_BT (a bound acts on w), dropped_BT
    (by Clip-Cov), region_BT (M).
    """
    x = sg(numerics.clean(tokens))
    s = self._decided(x, statistics)
    _, low_BT, high_BT = self._surrogate(x, s.advantage_BT)
    return dict(weight_BT=numerics.exp(self.method.weight(x)), low_BT=low_BT,
                high_BT=high_BT, dropped_BT=s.dropped_BT, region_BT=s.region_BT)

  def _reference_kl(self, x):
    if x.reference_logp_BT is None:
      raise ValueError('method.reference needs tokens.reference_logp_BT')
    return self.method.reference.estimator(x.logp_BT - x.reference_logp_BT)

  def _decided(self, x, statistics):
    """The statistics with the decisions about x."""
    return statistics if self.whole_minibatch else statistics.replace(
        **self._decide(x))

  def _surrogate(self, x, advantage_BT):
    """S, and which tokens are clipped below and above."""
    weight_BT = numerics.exp(self.method.weight(x))
    surrogate_BT, lower, upper = self.method.clip(weight_BT, advantage_BT, x)
    pulls_BT = advantage_BT != 0
    low_BT, high_BT = weight_BT < lower, weight_BT > upper
    return surrogate_BT, pulls_BT & low_BT, pulls_BT & high_BT

  def _decide(self, x, rng=None):
    """Decisions about x, all completions if `whole_minibatch`: no gradient."""
    x, method = sg(x), self.method
    advantage_BT, change_BT = method.shape(x), method.delta_entropy(x)
    awake_BT = jnp.abs(change_BT) > method.entropy_tolerance
    dropped_BT = jnp.zeros_like(x.mask_BT)
    if method.clip.drop:
      _, low_BT, high_BT = self._surrogate(x, advantage_BT)
      dropped_BT = method.clip.drop(x, low_BT | high_BT, rng)
    return dict(advantage_BT=jnp.where(dropped_BT, 0, advantage_BT),
                region_BT=method.region(x, jnp.where(awake_BT, change_BT, 0)),
                dropped_BT=dropped_BT)


def make_policy_loss(method):
  """The PolicyLoss of a dict or ConfigDict; errors as in choices.read."""
  method = choices.read(method, dict(
      weight=WEIGHTS, clip=CLIPS, shape=SHAPES, aggregate=AGGREGATES,
      penalty=PENALTIES, region=REGIONS, delta_entropy=CHANGES,
      estimator=advantage.ESTIMATORS, reference=kl.ESTIMATORS))
  return PolicyLoss(
      method, whole_minibatch=method.compares_minibatch(),
      needs_kl=method.regularised and method.penalty.function is kl_full,
      needs_reference=method.reference.coef != 0)
