"""The paper's objective and every baseline, as five independent choices.

    L = sum_it c_it * (coef * M_it * R_it - b_it * S(w_it, A_it))   (Eq. 4)

    weight     w  how far the policy moved from the old one   WEIGHTS
    clip       S  the surrogate: how w meets the advantage    CLIPS
    shape      A  the advantage that a token sees             SHAPES
    aggregate  c  how tokens are averaged          aggregation.AGGREGATES
    reg        R  a penalty on the tokens M of a region       PENALTIES, REGIONS

A method (a row of configs/methods.py) names one of each; `make_policy_loss`
composes them. A new method is a function here, annotated with the ranges of its
numbers (`ranges`), an entry of a table, a row, and a test entry. b is no choice
of a method: it is 1, or the run's behaviour weight (`behaviour`).

l, l0: log pi of the sampled token under the policy and the old policy;
d = l - l0; H, H0: entropies in nats, dH = H - H0; m: mask; n_i: tokens of
completion i, N: of the minibatch; sg: stop-gradient. Axes: B completions, T
tokens of a completion. `x` is Tokens with zeros under the mask.
"""

import dataclasses
import math
from typing import Any

from flax import struct
from jax.lax import stop_gradient as sg
import jax.numpy as jnp

from tepo_jax.learning import advantage
from tepo_jax.learning import aggregation
from tepo_jax.learning import diagnostics
from tepo_jax.learning import method as method_lib
from tepo_jax.learning import numerics
from tepo_jax.learning import ranges


@struct.dataclass
class Tokens:
  """The objective's input; where the mask is 0, the rest may be garbage."""
  logp_BT: Any  # l, differentiable
  entropy_BT: Any  # H, differentiable
  old_logp_BT: Any  # l0
  old_entropy_BT: Any  # H0
  advantage_BT: Any  # one number per completion, spread over its tokens
  mask_BT: Any  # completion tokens up to and including EOS
  kl_BT: Any = None  # exact KL(policy || old) at each state, differentiable
  behaviour_BT: Any = None  # b, a constant; None: 1


@struct.dataclass
class Statistics:
  """Of the whole minibatch, without gradient; None where not needed."""
  coefficient_BT: Any  # c
  advantage_BT: Any = None  # shaped
  region_BT: Any = None  # M, bool
  keep_BT: Any = None  # bool: False where Clip-Cov drops the surrogate


def covariance(x):
  """(A - mean A)(l - mean l), means over the minibatch (2505.22617, Eq. 19)."""
  return sg((x.advantage_BT - numerics.mean(x.advantage_BT, x.mask_BT))
            * (x.logp_BT - numerics.mean(x.logp_BT, x.mask_BT)))


# Weights: tokens -> log w; numerics.exp bounds exponents to +-20.

def log_ratio(x):
  """d. w = exp(d), `token`: PPO, GRPO/DAPO (Table 5). Also the penalty k1."""
  return x.logp_BT - x.old_logp_BT


def score(x):
  """l - sg(l). w = 1 with the gradient of l, `none`: GPG (Table 3C)."""
  return x.logp_BT - sg(x.logp_BT)


def sequence_weight(x):
  """w = s_i = exp(sum_t m d / n_i): TEPO 3.3.1, GSPO (2507.18071).

  Differentiated through all tokens; Algorithm 1 line 21 drops cross terms.
  """
  count_B1 = jnp.maximum(jnp.sum(x.mask_BT, axis=1, keepdims=True), 1)
  mean_B1 = jnp.sum(log_ratio(x), axis=1, keepdims=True) / count_B1
  return jnp.broadcast_to(mean_B1, x.logp_BT.shape)


def sequence_token_weight(x):
  """w = exp(sg(log s_i) + l - sg(l)): GSPO-token, and verl's code for GSPO."""
  return sg(sequence_weight(x)) + score(x)


def prefix_weight(x):
  """w = exp(sum_{j<=t} m d / sum_{j<=t} m): prefix IS (Tables 3C, 5)."""
  count_BT = jnp.maximum(jnp.cumsum(x.mask_BT, axis=1), 1)
  return jnp.cumsum(log_ratio(x), axis=1) / count_BT

WEIGHTS = dict(
    token=log_ratio, sequence=sequence_weight, prefix=prefix_weight,
    sequence_token=sequence_token_weight, none=score)


# Clips: (w, A, tokens) -> surrogate S, and the bounds that clip w.

def no_clip(w_BT, a_BT, x):
  """S = w A: Algorithm 1; KL-Cov, whose authors' code has no PPO clip."""
  return w_BT * a_BT, -jnp.inf, jnp.inf


def ppo_clip(w_BT, a_BT, x, *, low: ranges.BELOW, high: ranges.ABOVE,
             dual: ranges.ABOVE_ONE = None):
  """S = min(w A, C(w) A), C = clip(., 1 - low, 1 + high).

  PPO (1707.06347); low .2, high .28 is DAPO's Clip-Higher (2503.14476). Only
  one side binds: above where A > 0, below where A < 0. With `dual` = c
  (1912.09729; verl's code has 3 always on), where A < 0: max(that, c A).
  """
  negative_BT = a_BT < 0
  lower_BT = jnp.where(negative_BT, 1 - low, -jnp.inf)
  above = jnp.inf if dual is None else dual
  upper_BT = jnp.where(negative_BT, above, 1 + high)
  return numerics.bound(w_BT, lower_BT, upper_BT) * a_BT, lower_BT, upper_BT


def printed_clip(w_BT, a_BT, x, *, low: ranges.BELOW, high: ranges.ABOVE):
  """S = min(w, C(w)) A, Eq. 4 as typeset, where `low` never binds."""
  return numerics.bound(w_BT, -jnp.inf, 1 + high) * a_BT, -jnp.inf, 1 + high


def detached_clip(w_BT, a_BT, x, *, low: ranges.BELOW, high: ranges.ABOVE):
  """S = sg(C(w)) A exp(l - sg(l)): CISPO (2506.13585; Table 3C).

  No token loses its gradient. Its paper writes log pi for the exp: the same
  gradient, another value. `low=inf`, no lower bound, is its authors' setting.
  """
  bounded_BT = sg(numerics.bound(w_BT, 1 - low, 1 + high))
  return bounded_BT * a_BT * jnp.exp(score(x)), 1 - low, 1 + high


def covariance_clip(w_BT, a_BT, x, *, low: ranges.BELOW, high: ranges.ABOVE,
                    fraction: ranges.SHARE, band: ranges.BAND):
  """Clip-Cov (2505.22617; Tables 1, 3B): `ppo` without `drop_in_band`'s tokens.

  Its paper has no PPO clip; its authors' code widens it to low = high = 1.
  """
  return ppo_clip(w_BT, a_BT, x, low=low, high=high)


def drop_in_band(x, clipped_BT, rng, *, fraction, band, **_):
  """Clip-Cov's drop: min(max(floor(fraction N), 1), candidates) at random.

  Candidates: covariance strictly inside the band, not clipped already. They
  contribute 0, N unchanged. The draw is a function of (rng, row, column). Its
  authors' code draws in each microbatch; here, in the minibatch.
  """
  if rng is None:
    raise ValueError("clip 'covariance' draws tokens at random: pass rng")
  inside_BT = (covariance(x) > band[0]) & (covariance(x) < band[1])
  return numerics.largest(
      numerics.draw(rng, x.mask_BT.shape), x.mask_BT & inside_BT & ~clipped_BT,
      numerics.share(fraction, x.mask_BT))

CLIPS = dict(none=no_clip, ppo=ppo_clip, printed=printed_clip,
             detached=detached_clip, covariance=covariance_clip)
DROPS = {covariance_clip: drop_in_band}


# Shapes: tokens -> the advantage of each token.

def entropy_shape(x, *, alpha: ranges.AMOUNT, kappa: ranges.POSITIVE):
  """A + min(alpha sg(H), |A| / kappa): 2506.14758 (Tables 1, 3B).

  H is the current forward's. The paper prints alpha = 4e-4; the method's own
  value with GRPO is 0.4.
  """
  return x.advantage_BT + jnp.minimum(
      alpha * sg(x.entropy_BT), jnp.abs(x.advantage_BT) / kappa)


def steer_shape(x, *, floor: ranges.SHARE):
  """sg(lambda) A, lambda = exp(log(floor) |W| / max(max |W|, 0.02)).

  STEER (2510.10150; "STEEL" in Table 3B): W = A / pi_old pi (1 - pi) (l + H0)
  predicts dH; the token that moves it most in the minibatch keeps `floor`.
  """
  change_BT = jnp.abs(
      x.advantage_BT * numerics.exp(log_ratio(x)) * jnp.expm1(x.logp_BT)
      * (x.logp_BT + x.old_entropy_BT))
  relative_BT = change_BT / jnp.maximum(jnp.max(change_BT), 0.02)
  return sg(jnp.exp(math.log(floor) * relative_BT)) * x.advantage_BT

SHAPES = dict(
    none=lambda x: x.advantage_BT, entropy=entropy_shape, steer=steer_shape)


# Penalties: tokens -> R. k1, k2, k3 estimate KL(policy || old) from samples
# (Schulman, 2020); used as a loss, on policy, the expected gradient of k1 is 0,
# and that of k2 is the KL's (Table 3A).

def kl_full(x):
  """KL(policy || old) over the whole vocabulary: TEPO, Eq. 4."""
  if x.kl_BT is None:
    raise ValueError("penalty 'kl_full' needs tokens.kl_BT")
  return x.kl_BT


def kl_abs(x):
  """|d| as d sg(sign d): KL-Cov's authors' code; its paper prints a KL."""
  # jnp.abs has gradient 1 at 0: on policy it would push every token down.
  return log_ratio(x) * sg(jnp.sign(log_ratio(x)))


def kl_k2(x):
  """d^2 / 2."""
  return jnp.square(log_ratio(x)) / 2


def kl_k3(x):
  """e^-d + d - 1: GRPO's paper (2402.03300), there against a reference."""
  return numerics.exp(-log_ratio(x)) + log_ratio(x) - 1


def kl_k3_is(x):
  """rho d - rho + 1 = rho k3: unbiased on samples of the old policy."""
  ratio_BT = numerics.exp(log_ratio(x))
  return ratio_BT * log_ratio(x) - ratio_BT + 1

PENALTIES = dict(
    none=lambda x: jnp.zeros_like(x.logp_BT), kl_full=kl_full,
    kl_k1=log_ratio, kl_abs=kl_abs, kl_k2=kl_k2, kl_k3=kl_k3,
    kl_k3_is=kl_k3_is, entropy=lambda x: x.entropy_BT)


# Readings of dH, for the regions.

def exact_change(x):
  """H - H0 at the rollout's states: the default reading of Eq. 4."""
  return x.entropy_BT - x.old_entropy_BT


def covariance_change(x):
  """-(l - mean l)(A - mean A): Eq. 19 token by token."""
  return -covariance(x)


def npg_change(x):
  """-A pi (l + H): Eq. 18 token by token."""
  return -x.advantage_BT * numerics.exp(x.logp_BT) * (x.logp_BT + x.entropy_BT)

CHANGES = dict(exact=exact_change, covariance=covariance_change, npg=npg_change)


# Regions: (tokens, dH) -> M.

def positive_falling(x, change_BT):
  """A > 0 and dH < 0: TEPO's mask, Eq. 4."""
  return (x.advantage_BT > 0) & (change_BT < 0)


def negative_rising(x, change_BT):
  """A < 0 and dH > 0 (Table 3E)."""
  return (x.advantage_BT < 0) & (change_BT > 0)


def misaligned(x, change_BT):
  """Either of the two: the misalignment condition of 3.3.2 (Table 3E)."""
  return positive_falling(x, change_BT) | negative_rising(x, change_BT)


def top_covariance(x, change_BT, *, fraction: ranges.SHARE):
  """The max(1, floor(fraction N)) largest: KL-Cov (2505.22617; Tables 1, 3B).

  The authors' script says 0.2, a percentage, and their code ranks each
  microbatch by itself; here, the minibatch is ranked.
  """
  return numerics.largest(
      covariance(x), x.mask_BT, numerics.share(fraction, x.mask_BT))

REGIONS = dict(
    none=lambda x, change_BT: jnp.zeros_like(x.mask_BT),
    all=lambda x, change_BT: x.mask_BT,
    positive_falling=positive_falling, negative_rising=negative_rising,
    misaligned=misaligned, top_covariance=top_covariance)


# Choices that need l and H of the whole minibatch before any gradient.
WHOLE_MINIBATCH = frozenset(
    {covariance_clip, steer_shape, covariance_change, top_covariance})


@dataclasses.dataclass(frozen=True, eq=False)
class PolicyLoss:
  """L of one method: `loss(tokens, rng=None) -> (loss, metrics)`.

  The call takes the whole optimiser minibatch. With microbatches: `statistics`
  of the whole, `partial` of some of its completions (the parts add up to L
  however it is split), `metrics` of the whole. Hashable by identity.
  """
  method: method_lib.Method
  needs_kl: bool  # tokens.kl_BT is read
  needs_scoring: bool  # statistics() reads logp_BT and entropy_BT

  def __call__(self, tokens, rng=None):
    statistics = self.statistics(tokens, rng)
    return self.partial(tokens, statistics), self.metrics(tokens, statistics)

  def statistics(self, tokens, rng=None):
    """Statistics of the whole minibatch; ValueError if Clip-Cov gets no rng."""
    x = numerics.clean(tokens)
    decided = self._decide(x, rng=rng) if self.needs_scoring else ()
    mask_BT = x.mask_BT.astype(x.old_logp_BT.dtype)
    return sg(Statistics(self.method.aggregate(mask_BT), *decided))

  def partial(self, tokens, statistics):
    """The part of L that these completions contribute."""
    x = numerics.clean(tokens)
    advantage_BT, region_BT, keep_BT = self._decide(x, statistics)
    surrogate_BT, _, _ = self._surrogate(x, advantage_BT)
    loss_BT = -jnp.where(keep_BT, surrogate_BT, 0)
    if x.behaviour_BT is not None:
      loss_BT *= x.behaviour_BT
    if self.method.regularised:
      penalty_BT = jnp.where(region_BT, self.method.penalty(x), 0)
      loss_BT += self.method.coef * penalty_BT
    return jnp.sum(statistics.coefficient_BT * loss_BT)

  def metrics(self, tokens, statistics):
    """Scalars of the whole minibatch: see diagnostics.metrics."""
    x = sg(numerics.clean(tokens))
    return diagnostics.metrics(
        x, **self.selection(tokens, statistics), covariance_BT=covariance(x),
        k1_BT=log_ratio(x), k3_BT=kl_k3(x))

  def selection(self, tokens, statistics):
    """How the method treats each token, without gradient.

    Returns weight_BT (w); bool low_BT, high_BT (a bound acts on w), dropped_BT
    (by Clip-Cov), region_BT (M).
    """
    x = sg(numerics.clean(tokens))
    advantage_BT, region_BT, keep_BT = self._decide(x, statistics)
    _, low_BT, high_BT = self._surrogate(x, advantage_BT)
    return dict(weight_BT=numerics.exp(self.method.weight(x)), low_BT=low_BT,
                high_BT=high_BT, dropped_BT=~keep_BT, region_BT=region_BT)

  def _surrogate(self, x, advantage_BT):
    """S, and which tokens are clipped below and above."""
    weight_BT = numerics.exp(self.method.weight(x))
    surrogate_BT, lower, upper = self.method.clip(weight_BT, advantage_BT, x)
    pulls_BT = advantage_BT != 0
    low_BT, high_BT = weight_BT < lower, weight_BT > upper
    return surrogate_BT, pulls_BT & low_BT, pulls_BT & high_BT

  def _decide(self, x, statistics=None, rng=None):
    """Shaped advantage, M, and the tokens whose surrogate is kept."""
    method, s = self.method, statistics
    if self.needs_scoring and s is not None:
      return s.advantage_BT, s.region_BT, s.keep_BT
    advantage_BT, change_BT = method.shape(x), method.delta_entropy(x)
    awake_BT = jnp.abs(change_BT) > method.entropy_tolerance
    region_BT = method.region(x, jnp.where(awake_BT, change_BT, 0))
    keep_BT = jnp.ones_like(x.mask_BT)
    if method.clip.func in DROPS:
      _, low_BT, high_BT = self._surrogate(x, advantage_BT)
      keep_BT = ~DROPS[method.clip.func](
          x, low_BT | high_BT, rng, **method.clip.keywords)
    return advantage_BT, region_BT, keep_BT


def make_policy_loss(method):
  """The PolicyLoss of a dict or ConfigDict; errors as in method.read."""
  method = method_lib.read(method, dict(
      weight=WEIGHTS, clip=CLIPS, shape=SHAPES,
      aggregate=aggregation.AGGREGATES, penalty=PENALTIES, region=REGIONS,
      delta_entropy=CHANGES, estimator=advantage.ESTIMATORS))
  return PolicyLoss(
      method, needs_kl=method.regularised and method.penalty is kl_full,
      needs_scoring=not WHOLE_MINIBATCH.isdisjoint((
          method.clip.func, method.shape.func, method.region.func,
          method.delta_entropy)))
