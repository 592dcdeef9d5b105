"""What is measured at a fixed policy: gradients, the mask M, fresh samples.

Axes: B completions · T completion tokens · P prompts · N = 2P halves of prompts
(short and long completions) · G samples of a prompt · E estimators · D
parameters.
"""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from configs import methods
from tepo_jax.learning import objective
from tepo_jax.learning import packing
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
  """The losses whose gradients are compared.

  They divide by a constant: `tokens`, θ_0's mean per completion. So a batch's
  gradient is the mean of one vector per prompt; on θ_0's samples it is the
  gradient of the token mean.
  """
  return {name: objective.make_policy_loss(_SEQUENCE | dict(
      weight=weight, clip=clip,
      aggregate=dict(name='constant_length', length=tokens)))
          for name, (weight, clip) in _ESTIMATORS.items()}


def slopes(loss: objective.PolicyLoss, tokens: objective.Tokens,
           rng: jax.Array | None = None) -> scoring.Scores:
  """∂L/∂ of each score, [B, T], of the whole batch; None of a KL that `tokens`
  lack."""
  statistics = loss.statistics(tokens, rng)
  return jax.device_get(jax.grad(lambda scores: loss.partial(
      tokens.replace(**vars(scores)), statistics))(scoring.Scores(
          tokens.logp_BT, tokens.entropy_BT, tokens.kl_BT)))


def vectors(lab: observe.Lab, params: Any, batch: packing.Batch,
            tokens: objective.Tokens, losses: list[objective.PolicyLoss],
            longest_short: float) -> np.ndarray:
  """One gradient per loss, prompt and half, [E, N, D]: L's gradient is the mean
  over prompts of the halves' sum. longest_short: tokens of a completion."""
  samples = lab.config.rollout.samples
  prompts = len(batch.mask_BT) // samples
  slope_EBT = prompts * np.stack([
      slopes(loss, tokens).logp_BT for loss in losses])
  is_long_B = batch.mask_BT.sum(1) > longest_short
  # Untouched pages of zeros take no memory.
  found_END = np.zeros((len(losses), 2 * prompts, sum(
      x.size for x in jax.tree.leaves(params))), np.float32)
  for part in range(2 * prompts):
    mine = slice(part // 2 * samples, (part // 2 + 1) * samples)
    used_G = slope_EBT[:, mine].any((0, 2)) & (is_long_B[mine] == part % 2)
    if used_G.any():
      group = jax.tree.map(lambda x: x[mine], batch)
      found_END[:, part] = lab.gradients(params, group.replace(
          mask_BT=group.mask_BT * used_G[:, None]), slope_EBT[:, mine])
  return found_END


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
  """Intervals by estimator, half ('all', 'short', 'long') and moment: those of
  `moments.of_gradients`, and variance_ratio, to that of the first estimator.
  off: name -> vectors [N, D]."""
  weight_RP = moments.resample(len(on_ND) // 2)
  on, found, first = inner_products(on_ND, on_ND), {}, {}
  for name, x_ND in off.items():
    own, cross = inner_products(x_ND, x_ND), inner_products(x_ND, on_ND)
    found[name] = {}
    for half in own:
      values = moments.of_gradients(
          weight_RP, own[half], cross[half], on[half])
      values['variance_ratio'] = values['variance'] / first.setdefault(
          half, values['variance'])
      found[name][half] = {
          key: moments.interval(x) for key, x in values.items()}
  return found


def gradients(lab: observe.Lab, params: Any, batch: packing.Batch,
              tokens: objective.Tokens, fresh: packing.Batch
              ) -> dict[str, Any]:
  """`compare` of the estimators at `params`, on a batch of θ_0's with its
  tokens, against the gradient on the `fresh` samples of `params`; at θ_0, where
  all weights are 1, of one estimator."""
  length_B = batch.mask_BT.sum(1)
  losses = estimators(float(length_B.mean()))
  shorter = float(np.median(length_B))
  zeros_BT = np.zeros_like(fresh.mask_BT)
  # With the weight `none`, the slope does not depend on the scores.
  [on_ND] = vectors(lab, params, fresh, observe.tokens(
      fresh, scoring.Scores(zeros_BT, zeros_BT)), [losses['none']], shorter)
  if params is lab.start:
    losses = {'token': losses['token']}
  off_END = vectors(
      lab, params, batch, tokens, list(losses.values()), shorter)
  return compare(dict(zip(losses, off_END)), on_ND)


def drift(x: objective.Tokens, samples: int) -> dict[str, Any]:
  """How a policy differs from θ_0, as means over tokens that θ_0 sampled,
  `samples` completions of each prompt.

  Returns intervals:
    abs_d: |ℓ − ℓ°|. kl: exact, to θ_0. region: the share in TEPO's M.
    kl_region: the KL in M. entropy_change: ΔH. falling: the share with ΔH < 0.
    weights: by estimator, the share of w outside of the paper's bounds, and the
    share that its own bounds clip.
    readings: by name, the correlation of the predicted ΔH with the measured
    one, and the share of tokens on whose sign they agree, where A ≠ 0.
  """
  prompts = len(x.mask_BT) // samples
  weight_RP = moments.resample(prompts)

  def by_prompt(value_BT):
    return np.asarray(value_BT, float).reshape(prompts, -1)

  def mean(value_BT, among_BT=x.mask_BT):
    among_PN = by_prompt(among_BT & x.mask_BT)
    return moments.interval(moments.mean(
        weight_RP, np.sum(by_prompt(value_BT) * among_PN, 1), among_PN.sum(1)))

  def selection(loss):
    return jax.device_get(loss.selection(x, loss.statistics(x)))

  region_BT = selection(_TEPO)['region_BT']
  change_BT, acts_BT = objective.exact_change(x), x.advantage_BT != 0
  readings, weights = {}, {}
  for name in ('covariance', 'npg'):
    predicted_BT = np.asarray(objective.CHANGES[name](x))
    readings[name] = dict(
        correlation=moments.interval(moments.correlation(
            weight_RP, by_prompt(predicted_BT), by_prompt(change_BT),
            by_prompt(acts_BT & x.mask_BT))),
        agreement=mean((predicted_BT < 0) == (change_BT < 0), acts_BT))
  for name, loss in estimators(1.0).items():
    how = selection(loss)
    weights[name] = dict(
        outside=mean((how['weight_BT'] < 1 - _PPO['low'])
                     | (how['weight_BT'] > 1 + _PPO['high'])),
        clipped=mean(how['low_BT'] | how['high_BT']))
  return dict(
      abs_d=mean(np.abs(objective.log_ratio(x))), kl=mean(x.kl_BT),
      region=mean(region_BT), kl_region=mean(x.kl_BT, region_BT),
      entropy_change=mean(change_BT), falling=mean(change_BT < 0),
      weights=weights, readings=readings)


def own_samples(groups: list[groups_lib.Group]) -> dict[str, moments.Interval]:
  """Intervals of a policy's own samples: accuracy, tokens of a completion, and
  entropy, the mean −log π of a token."""
  weight_RP = moments.resample(len(groups))
  right_P, tokens_P, surprise_P, size_P = np.array([
      (g.accuracy_G.sum(), g.length_G.sum(), -g.logp_GT.sum(), len(g.length_G))
      for g in groups]).T
  return {name: moments.interval(moments.mean(weight_RP, *of)) for name, of in (
      ('accuracy', (right_P, size_P)), ('length', (tokens_P, size_P)),
      ('entropy', (surprise_P, tokens_P)))}
