"""How methods' gradients on one rollout differ, minibatch by minibatch.

The vectors are the gradients on minibatches: independent draws, while a
minibatch's groups share its token count, covariances and selections. Two kinds
of numbers. *From pairs* of distinct minibatches (`moments`), whose mean inner
products are unbiased: of the expected gradients, without a value where the
minibatches are too few to see these. *Of the sample*, from sums over the
minibatches: they compare two gradients on the same data, whose common noise
cancels. Intervals are bootstraps over minibatches.

Axes: J minibatches · C entries of a vector · R resamples, see
`moments.resample`.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from tepo_jax.learning import objective
from tepo_jax.rollout import groups as groups_lib
from tepo_jax.tools.mechanism import directions
from tepo_jax.tools.mechanism import moments

_SPLITS = 200
_SHOWN = 20  # tokens
_BASELINE = 'grpo'


def compare(x: Mapping[Any, np.ndarray], target_JC: np.ndarray,
            longest: float) -> dict[str, dict[str, Any]]:
  """By method, TEPO included, against an independent policy gradient h.

  x: of `directions.slopes`, [J, C]. target: of as many other minibatches, at
  the policy. longest: `optimizer.max_grad_norm`.

  Returns intervals:
    signal_to_noise: |g|² over tr Cov of one minibatch's gradient.
    cosine, length: from pairs, of g and h: their cosine, and |g| / |h|.
    to_grpo, length_to_grpo: of the sample, against GRPO's gradient.
    clipped, clipped_less_grpo: the signal to noise of the gradients as the
      optimiser scales them down, and that minus GRPO's.
  and numbers:
    halves: the mean cosine of the gradients on two halves.
    norm: the median of one minibatch's.
  """
  weight_RJ = moments.resample(len(target_JC))
  on_JJ, found, whole = target_JC @ target_JC.T, {}, methods(x)
  clipped_R = {name: _clipped_ratio(weight_RJ, x_JC, longest)
               for name, x_JC in whole.items()}
  for name, x_JC in whole.items():
    off_JJ = x_JC @ x_JC.T
    values = moments.of_gradients(
        weight_RJ, off_JJ, x_JC @ target_JC.T, on_JJ)
    to_grpo_R, length_R = same_data(weight_RJ, x_JC, whole[_BASELINE])
    found[name] = {key: moments.interval(value_R) for key, value_R in dict(
        signal_to_noise=values['signal_to_noise'],
        cosine=values['cosine'], length=values['length'], to_grpo=to_grpo_R,
        length_to_grpo=length_R, clipped=clipped_R[name],
        clipped_less_grpo=clipped_R[name] - clipped_R[_BASELINE]).items()} | {
            'halves': halves(off_JJ),
            'norm': float(np.median(np.linalg.norm(x_JC, axis=1)))}
  return found


def _clipped_ratio(weight_RJ, x_JC, longest):
  """Signal to noise, [1 + R], of the vectors scaled down to `longest`."""
  norm_J1 = np.linalg.norm(x_JC, axis=1, keepdims=True)
  short_JC = x_JC * np.minimum(1, longest / np.maximum(norm_J1, 1e-30))
  *_, ratio_R = moments.signal_to_noise(weight_RJ, short_JC @ short_JC.T)
  return ratio_R


def methods(x: Mapping[Any, np.ndarray]) -> dict[str, np.ndarray]:
  """The vectors of the methods, TEPO's composed."""
  return {'tepo': x[directions.WHOLE] + directions.BETA * x[directions.KL]} | {
      name: x[name] for name in directions.METHODS}


def first_update(x: Mapping[Any, np.ndarray]) -> dict[str, dict[str, float]]:
  """Of the first minibatch: each gradient's norm, and its cosine to GRPO's."""
  first = {name: x_JC[0] for name, x_JC in (
      methods(x) | {directions.KL: x[directions.KL]}).items()}
  norm = {name: float(np.linalg.norm(x_C)) for name, x_C in first.items()}
  return {name: dict(norm=norm[name], cosine=float(
      x_C @ first[_BASELINE] / max(norm[name] * norm[_BASELINE], 1e-30)))
          for name, x_C in first.items()}


def same_data(weight_RJ: np.ndarray, x_JC: np.ndarray, y_JC: np.ndarray
              ) -> tuple[np.ndarray, np.ndarray]:
  """Of the sums over minibatches: cosine and |x| / |y|, each [1 + R]."""
  xx_R, xy_R, yy_R = (np.sum(weight_RJ @ (a @ b.T) * weight_RJ, 1) for a, b in (
      (x_JC, x_JC), (x_JC, y_JC), (y_JC, y_JC)))
  with np.errstate(invalid='ignore', divide='ignore'):
    return xy_R / np.sqrt(xx_R * yy_R), np.sqrt(xx_R / yy_R)


def halves(gram_JJ: np.ndarray) -> float | None:
  """The cosine of the sums over two halves of the minibatches, the mean over
  random splits; None for one minibatch, or if some half has no gradient."""
  count = len(gram_JJ)
  if count < 2:
    return None
  rng, found = np.random.default_rng(0), []
  for _ in range(_SPLITS):
    order = rng.permutation(count)
    a, b = order[:count // 2], order[count // 2:]
    inner, *squares = (gram_JJ[np.ix_(i, j)].sum() for i, j in (
        (a, b), (a, a), (b, b)))
    if min(squares) <= 0:
      return None
    found.append(inner / np.prod(np.sqrt(squares)))
  return float(np.mean(found))


def shares(x: Mapping[Any, np.ndarray]) -> dict[str, dict[str, dict]]:
  """By division and class of tokens, of WHOLE's gradient g, intervals from
  pairs: share: g_class . g / |g|², which add up to 1; length: |g_class| / |g|.
  {} if there are no parts."""
  whole_JC = x[directions.WHOLE]
  weight_RJ = moments.resample(len(whole_JC))
  square_R = moments.pairs(weight_RJ, whole_JC @ whole_JC.T)
  seen_R, found = np.where(square_R > 0, square_R, np.nan), {}
  for division, names in directions.CLASSES.items():
    for name in names:
      if (division, name) in x:
        part_JC = x[division, name]
        own_R = moments.pairs(weight_RJ, part_JC @ part_JC.T)
        found.setdefault(division, {})[name] = dict(
            share=moments.interval(moments.pairs(
                weight_RJ, part_JC @ whole_JC.T) / seen_R),
            length=moments.interval(np.sqrt(
                np.where(own_R > 0, own_R, np.nan) / seen_R)))
  return found


def of_kl(x: Mapping[Any, np.ndarray]) -> dict[str, moments.Interval]:
  """What TEPO's KL, its coefficient 1, adds to WHOLE, of the sample.

  length, cosine: of the sums over minibatches; to have those at β, multiply
  the length. update_length, update_cosine: their means over minibatches, the
  cosine's over those with a KL.
  """
  kl_JC, whole_JC = x[directions.KL], x[directions.WHOLE]
  weight_RJ = moments.resample(len(kl_JC))
  cosine_R, length_R = same_data(weight_RJ, kl_JC, whole_JC)
  inner_J, kl_J, whole_J = (np.sum(a * b, 1) for a, b in (
      (kl_JC, whole_JC), (kl_JC, kl_JC), (whole_JC, whole_JC)))
  has_kl_J = kl_J * whole_J > 0
  with np.errstate(invalid='ignore', divide='ignore'):
    mean = {
        'update_length': (np.sqrt(kl_J / whole_J), whole_J > 0),
        'update_cosine': (inner_J / np.sqrt(kl_J * whole_J), has_kl_J)}
  return dict(length=moments.interval(length_R),
              cosine=moments.interval(cosine_R)) | {
                  name: moments.interval(moments.mean(
                      weight_RJ, np.where(seen_J, value_J, 0), seen_J))
                  for name, (value_J, seen_J) in mean.items()}


def spread(x: objective.Tokens, by_class: Mapping[str, np.ndarray]
           ) -> dict[str, dict[str, list[float]]]:
  """By division and class: its shares of the tokens, of TEPO's M, and of the
  KL in M; 0 of nothing."""
  region_BT = directions.region(x)
  totals = [np.where(mine_BT, value, 0) for mine_BT, value in (
      (x.mask_BT, 1), (region_BT, 1), (region_BT, x.kl_BT))]
  return {division: {
      name: [float(y_BT[class_BT == number].sum() / max(y_BT.sum(), 1e-30))
             for y_BT in totals]
      for number, name in enumerate(directions.CLASSES[division])}
          for division, class_BT in by_class.items()}


def tokens_of_kl(x: objective.Tokens, groups: list[groups_lib.Group],
                 decode: Any) -> list[dict[str, Any]]:
  """The tokens of M with the largest KL, and their completions."""
  kl_BT = np.where(directions.region(x), x.kl_BT, 0)
  samples = len(groups[0].length_G)
  places = np.argsort(-kl_BT, axis=None, kind='stable')[:_SHOWN]
  found = []
  for b, t in zip(*np.unravel_index(places, kl_BT.shape)):
    group, row = groups[b // samples], b % samples
    ids = group.token_GT[row, :group.length_G[row]]
    if kl_BT[b, t] > 0:
      found.append(dict(
          problem=group.prompt.problem.problem, before=decode(ids[:t]),
          token=decode(ids[t:t + 1]), after=decode(ids[t + 1:]),
          kl=float(x.kl_BT[b, t]), advantage=float(x.advantage_BT[b, t]),
          entropy=float(x.old_entropy_BT[b, t]),
          entropy_change=float(objective.exact_change(x)[b, t]),
          log_ratio=float(objective.log_ratio(x)[b, t])))
  return found
