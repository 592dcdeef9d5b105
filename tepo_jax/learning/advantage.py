"""Turns the rewards of groups of completions into advantages (2.2, Eq. 9).

Rewards and advantages are in the order of the groups: completions g*G ..
g*G + G - 1 answer one prompt. Axes: B completions, G group size, N groups
(B = N * G). T tokens of a completion.
"""

import jax.numpy as jnp
import numpy as np

from tepo_jax import errors


def drgrpo(reward_NG, counted_NG):
  """r - mean_g: Dr. GRPO (2503.20783), no division by the std.

  Shifted first, so that equal rewards give exactly 0.
  """
  first_N1 = jnp.argmax(counted_NG, axis=1, keepdims=True)
  shifted_NG = jnp.where(counted_NG, reward_NG - jnp.take_along_axis(
      reward_NG, first_N1, axis=1), 0)
  mean_N1 = _total_over(shifted_NG, _sizes(counted_NG))
  return jnp.where(counted_NG, shifted_NG - mean_N1, 0)


def grpo(reward_NG, counted_NG):
  """(r - mean_g) / (std_g + 1e-6), std with ddof=1 (2402.03300, Eq. 9).

  The paper does not say which std: torch.std, used by the authors' code and
  verl, divides by G - 1. With G = 1, as in verl, A = r / (1 + 1e-6).
  """
  if reward_NG.shape[1] == 1:
    return jnp.where(counted_NG, reward_NG / (1 + 1e-6), 0)
  centred_NG = drgrpo(reward_NG, counted_NG)
  variance_N1 = _total_over(centred_NG**2, _sizes(counted_NG) - 1)
  return centred_NG / (jnp.sqrt(variance_N1) + 1e-6)


def gpg(reward_NG, counted_NG):
  """alpha (r - mean_g), alpha = groups / (groups - degenerate groups).

  GPG (2504.02546): a degenerate group (all rewards equal) has no gradient;
  alpha compensates for it, and is 1 after dynamic sampling. verl counts
  completions of non-zero reward instead of groups.
  """
  centred_NG = drgrpo(reward_NG, counted_NG)
  groups = jnp.sum(jnp.any(counted_NG, axis=1))
  mixed = jnp.sum(jnp.any(centred_NG != 0, axis=1))
  return centred_NG * (groups / jnp.maximum(mixed, 1)).astype(reward_NG.dtype)


def rloo(reward_NG, counted_NG):
  """r - the mean of the group's other rewards: RLOO (2402.14740).

  This is G / (G - 1) (r - mean_g); 0 in a group of one.
  """
  size_N1 = _sizes(counted_NG)
  return drgrpo(reward_NG, counted_NG) * (
      size_N1 / jnp.maximum(size_N1 - 1, 1)).astype(reward_NG.dtype)


def reinforce_pp_baseline(reward_NG, counted_NG):
  """(r - mean_g) / (std + 1e-6): REINFORCE++ with baseline (2501.03262).

  std is that of r - mean_g over the batch, with ddof=1, so that groups keep
  their relative scale. The batch is the completions that count in a rollout
  step (with rollout.truncated=mask those that are masked too), each once; verl
  and OpenRLHF count each token. The batch's mean, which the paper subtracts
  too, is 0 already.
  """
  centred_NG = drgrpo(reward_NG, counted_NG)
  variance = (jnp.sum(centred_NG**2)
              / jnp.maximum(jnp.sum(counted_NG) - 1, 1))
  return centred_NG / (jnp.sqrt(variance) + 1e-6)


def _total_over(x_NG, count_N1):
  """The sums of the groups, over max(count, 1)."""
  # XLA divides by a scalar by its reciprocal; so does this, to the same bits.
  return jnp.sum(x_NG, axis=1, keepdims=True) * (
      1 / jnp.maximum(count_N1, 1).astype(x_NG.dtype))


def _sizes(counted_NG):
  """G of each group, [N, 1], of the completions that count."""
  return jnp.sum(counted_NG, axis=1, keepdims=True)


def whiten(x, mask):
  """(x - mean) / sqrt(variance + 1e-8) over the mask, 0 elsewhere; ddof=1."""
  count = jnp.sum(mask)
  centred = jnp.where(
      mask, x - jnp.sum(jnp.where(mask, x, 0)) / jnp.maximum(count, 1), 0)
  variance = jnp.sum(centred**2) / jnp.maximum(count - 1, 1)
  return centred / jnp.sqrt(variance + 1e-8)


def of_tokens(reward_B, penalty_BT, mask_BT):
  """whiten(r - sum_{j>=t} penalty_j), by token: REINFORCE++ (2501.03262).

  As in verl's reinforce_plus_plus with discount 1: each token's return is
  whitened once, over all tokens of the mask; rewards are not normalised before,
  and have no baseline. Filler rows have an empty mask.
  """
  penalty_BT = jnp.where(mask_BT, penalty_BT, 0)
  later_BT = jnp.cumsum(penalty_BT[:, ::-1], axis=1)[:, ::-1]
  return whiten(reward_B[:, None] - later_BT, mask_BT)


ESTIMATORS = {'grpo': grpo, 'gpg': gpg, 'drgrpo': drgrpo, 'rloo': rloo,
              'reinforce_pp_baseline': reinforce_pp_baseline,
              'reinforce_pp': of_tokens}


def is_by_token(estimator):
  """Whether each token has an advantage of its own, by `of_tokens`."""
  return ESTIMATORS.get(estimator) is of_tokens


def group_advantage(reward_B, group_size, estimator, counted_B=None):
  """Advantage of each completion from the rewards of its group.

  The rewards, in the order of the groups, keep their dtype (integers become
  floats). `estimator` is a name of ESTIMATORS that is not by token. counted_B:
  bool; a completion that does not count has advantage 0, and its group is one
  smaller; None: all count.

  Raises:
    errors.InputError: unknown estimator.
    ValueError: the estimator is by token, or B is not a multiple of the group
      size.
  """
  if estimator not in ESTIMATORS:
    raise errors.InputError(
        f'method.estimator: {estimator!r} is not one of '
        + ', '.join(ESTIMATORS))
  if is_by_token(estimator):
    raise ValueError(f'{estimator} is by token: call of_tokens')
  reward_B = jnp.asarray(reward_B)
  if reward_B.ndim != 1 or group_size < 1 or reward_B.shape[0] % group_size:
    raise ValueError(
        f'{reward_B.shape} rewards do not form groups of {group_size}')
  reward_NG = reward_B.reshape(-1, group_size).astype(
      jnp.result_type(reward_B, float))
  counted_NG = (jnp.ones(reward_NG.shape, bool) if counted_B is None
                else jnp.asarray(counted_B).reshape(reward_NG.shape))
  return ESTIMATORS[estimator](reward_NG, counted_NG).reshape(-1)


def of_batch(reward_B, group_size, estimator, mask_BT, counted_B=None,
             penalty_BT=None):
  """The advantages of a batch on the host: float32 [B], or [B, T] if the
  estimator is by token; 0 in filler rows.

  Args:
    reward_B: of the completions, without the filler rows after them.
    group_size, estimator, counted_B: as for `group_advantage`.
    mask_BT: of the whole batch.
    penalty_BT: taken from the reward at each token of the mask; the estimators
      that give a completion one advantage take the sum over its tokens.
  """
  filler = 0, len(mask_BT) - len(reward_B)
  kept_BT = mask_BT > 0
  penalty_BT = np.where(
      kept_BT, 0 if penalty_BT is None else penalty_BT, 0).astype(np.float32)
  if is_by_token(estimator):
    return np.asarray(of_tokens(
        np.pad(reward_B, filler), penalty_BT, kept_BT), np.float32)
  advantage_B = group_advantage(
      reward_B - penalty_BT[:len(reward_B)].sum(1), group_size, estimator,
      counted_B)
  return np.pad(np.asarray(advantage_B, np.float32), filler)
