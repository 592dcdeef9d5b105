"""What is measured at a fixed policy: gradients, the mask M, fresh samples.

The surrogate's estimators are rows of configs/methods.py with another weight or
clip. Their aggregate divides by a constant, the number of θ_0's tokens, so that
a batch's gradient is the mean of one vector per prompt; on θ_0's samples this
is the token mean.

Axes: B completions · T completion tokens · P prompts · N = 2P halves of prompts
(short and long completions) · D parameters · R resamples.
"""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from configs import methods
from tepo_jax.learning import batch as batch_lib
from tepo_jax.learning import numerics
from tepo_jax.learning import objective
from tepo_jax.policy import scoring
from tepo_jax.rollout import groups as groups_lib
from tepo_jax.tools.mechanism import moments
from tepo_jax.tools.mechanism import observe

COUNTS = (8, 16, 32)  # updates between θ_0 and the policies measured
BETAS = (1e-3, 1e-2, 1e-1, 1.0, 10.0)
_ROWS = methods.methods(1e-3)
_SEQUENCE = _ROWS['tepo_no_kl']
_PPO, _GSPO = _ROWS['grpo']['clip'], _ROWS['gspo_original']['clip']
_ESTIMATORS = {
    'token': ('token', 'none'), 'sequence': ('sequence', 'none'),
    'prefix': ('prefix', 'none'), 'none': ('none', 'none'),
    'token .2/.28': ('token', _PPO), 'sequence .2/.28': ('sequence', _PPO),
    'sequence 3e-4/4e-4': ('sequence', _GSPO)}
_TEPO = objective.make_policy_loss(_ROWS['tepo'])  # for M alone


def rows(name: str, method: Any) -> dict[str, Any]:
  """The methods that update θ_0, the config's first."""
  return {name: method, 'sequence .2/.28': _SEQUENCE,
          'sequence 3e-4/4e-4': _SEQUENCE | dict(clip=_GSPO)} | {
              f'tepo, β = {beta:g}': methods.methods(beta)['tepo']
              for beta in BETAS}


def estimators(tokens: float) -> dict[str, objective.PolicyLoss]:
  """The losses whose gradients are compared; `tokens`: of a completion, the
  constant by which they divide."""
  return {name: objective.make_policy_loss(_SEQUENCE | dict(
      weight=weight, clip=clip,
      aggregate=dict(name='constant_length', length=tokens)))
          for name, (weight, clip) in _ESTIMATORS.items()}


def slope(loss: objective.PolicyLoss, tokens: objective.Tokens) -> np.ndarray:
  """∂L/∂ℓ, [B, T], of the whole batch."""
  statistics = loss.statistics(tokens)
  return np.asarray(jax.grad(lambda logp_BT: loss.partial(
      tokens.replace(logp_BT=logp_BT), statistics))(tokens.logp_BT))


def vectors(lab: observe.Lab, params: Any, batch: batch_lib.Batch,
            tokens: objective.Tokens, losses: list[objective.PolicyLoss],
            longest_short: float) -> np.ndarray:
  """One gradient per loss, prompt and half, [E, N, D], whose sum over the
  halves has L's gradient as its mean over prompts.

  longest_short: completions up to this length are in the first half.
  """
  samples = lab.config.rollout.samples
  prompts = len(batch.mask_BT) // samples
  part_B = 2 * (np.arange(len(batch.mask_BT)) // samples) + (
      batch.mask_BT.sum(1) > longest_short)
  return lab.gradients(
      params, batch, prompts * np.stack([slope(x, tokens) for x in losses]),
      part_B, 2 * prompts)


def inner_products(x_ND: np.ndarray, y_ND: np.ndarray) -> dict[str, np.ndarray]:
  """x_i . y_j of prompts, [P, P]: of all completions, of short and of long."""
  i, j = (np.flatnonzero(z_ND.any(1)) for z_ND in (x_ND, y_ND))
  whole_NN = np.zeros((len(x_ND), len(y_ND)))
  whole_NN[np.ix_(i, j)] = x_ND[i] @ y_ND[j].T
  by_half = whole_NN.reshape(len(x_ND) // 2, 2, -1, 2)
  return dict(all=by_half.sum((1, 3)), short=by_half[:, 0, :, 0],
              long=by_half[:, 1, :, 1])


def compare(off: Mapping[str, np.ndarray], on_ND: np.ndarray
            ) -> dict[str, dict[str, dict[str, moments.Interval]]]:
  """Intervals by estimator, half ('all', 'short', 'long') and moment.

  off: name -> vectors [N, D]; the first is the reference of the moment
  `variance_ratio`. The others: `moments.of_gradients`.
  """
  weight_RP = moments.resample(len(on_ND) // 2)
  on, values = inner_products(on_ND, on_ND), {}
  for name, x_ND in off.items():
    own, cross = inner_products(x_ND, x_ND), inner_products(x_ND, on_ND)
    values[name] = {half: moments.of_gradients(
        weight_RP, own[half], cross[half], on[half]) for half in own}
  reference = next(iter(values.values()))
  for by_half in values.values():
    for half, value in by_half.items():
      value['variance_ratio'] = (
          value['variance'] / reference[half]['variance'])
  return jax.tree.map(moments.interval, values)


def gradients(lab: observe.Lab, held_out: observe.Observed, params: Any,
              fresh: list[groups_lib.Group]) -> dict[str, Any]:
  """`compare` of the estimators on θ_0's samples, against the gradient on
  `fresh` samples of `params`; at θ_0, where all weights are 1, of one."""
  length_B = held_out.batch.mask_BT.sum(1)
  losses = estimators(float(length_B.mean()))
  shortest = float(np.median(length_B))
  batch = lab.batch(fresh)
  zeros_BT = np.zeros_like(batch.mask_BT)
  # With the weight `none`, the slope does not depend on the scores.
  [on_ND] = vectors(lab, params, batch, observe.tokens(
      batch, scoring.Scores(zeros_BT, zeros_BT)), [losses['none']], shortest)
  if params is lab.start:
    losses = {'token': losses['token']}
  off_END = vectors(lab, params, held_out.batch, held_out.tokens(params),
                    list(losses.values()), shortest)
  return compare(dict(zip(losses, off_END)), on_ND)


def drift(lab: observe.Lab, observed: observe.Observed, params: Any
          ) -> dict[str, Any]:
  """How `params` differ from θ_0 at the tokens that θ_0 sampled.

  Returns intervals of means over tokens:
    abs_d: |ℓ − ℓ°|. kl: exact, to θ_0. region: the share in TEPO's M. kl_region:
    the KL in M. entropy_change, falling: ΔH, and the share where it is < 0.
    weights: by estimator, the share of w outside of the paper's bounds, and the
    share that its own bounds clip.
    readings: by name, the correlation of the predicted ΔH with the measured
    one, and the share of tokens on whose sign they agree, where A ≠ 0.
  """
  given = observed.tokens(params)
  x = numerics.clean(given)
  prompts = len(x.mask_BT) // lab.config.rollout.samples
  weight_RP = moments.resample(prompts)

  def by_prompt(value_BT):
    return np.asarray(value_BT, float).reshape(prompts, -1)

  def mean(value_BT, among_BT=x.mask_BT):
    among_PN = by_prompt(among_BT & x.mask_BT)
    return moments.interval(moments.mean(
        weight_RP, np.sum(by_prompt(value_BT) * among_PN, 1), among_PN.sum(1)))

  region_BT = _selection(_TEPO, given)['region_BT']
  change_BT, acts_BT = objective.exact_change(x), x.advantage_BT != 0
  readings = {}
  for name in ('covariance', 'npg'):
    predicted_BT = objective.CHANGES[name](x)
    readings[name] = dict(
        correlation=moments.interval(moments.correlation(
            weight_RP, *map(by_prompt, (
                predicted_BT, change_BT, acts_BT & x.mask_BT)))),
        agreement=mean((predicted_BT < 0) == (change_BT < 0), acts_BT))
  weights = {}
  for name, loss in estimators(1.0).items():
    chosen = _selection(loss, given)
    weights[name] = dict(
        outside=mean((chosen['weight_BT'] < 1 - _PPO['low'])
                     | (chosen['weight_BT'] > 1 + _PPO['high'])),
        clipped=mean(chosen['low_BT'] | chosen['high_BT']))
  return dict(
      abs_d=mean(np.abs(objective.log_ratio(x))), kl=mean(x.kl_BT),
      region=mean(region_BT), kl_region=mean(x.kl_BT, region_BT),
      entropy_change=mean(change_BT), falling=mean(change_BT < 0),
      weights=weights, readings=readings)


def _selection(loss, given):
  return jax.device_get(loss.selection(given, loss.statistics(given)))


def own_samples(groups: list[groups_lib.Group]) -> dict[str, moments.Interval]:
  """Intervals of a policy's own samples: accuracy, tokens of a completion, and
  entropy, the mean −log π of a token."""
  weight_RP = moments.resample(len(groups))

  def mean(total, count):
    return moments.interval(moments.mean(weight_RP, *(
        np.array([np.sum(x(g)) for g in groups], float)
        for x in (total, count))))

  return dict(
      accuracy=mean(lambda g: g.accuracy_G, lambda g: np.ones(len(g.length_G))),
      length=mean(lambda g: g.length_G, lambda g: np.ones(len(g.length_G))),
      entropy=mean(lambda g: -g.logp_GT, lambda g: g.length_G))


def of_updates(metrics: Mapping[str, Any]) -> dict[str, float]:
  """Averages over the updates so far: tokens clipped, share of M, gradient
  norm, and the number of updates that were skipped."""
  return dict(
      clipped=float(metrics['clip_fraction_low']
                    + metrics['clip_fraction_high']),
      region=float(metrics['region_share']),
      grad_norm=float(metrics['grad_norm']),
      skipped=float(metrics['skipped']))
