"""Turns the rewards of groups of completions into advantages (2.2, Eq. 9).

Rewards and advantages are in the order of the groups: completions g*G ..
g*G + G - 1 answer one prompt. Axes: B completions, G group size, N groups
(B = N * G).
"""

import jax.numpy as jnp

from tepo_jax import errors


def drgrpo(reward_NG):
  """r - mean_g: Dr. GRPO (2503.20783), no division by the std.

  Shifted first, so that equal rewards give exactly 0.
  """
  shifted_NG = reward_NG - reward_NG[:, :1]
  return shifted_NG - jnp.mean(shifted_NG, axis=1, keepdims=True)


def grpo(reward_NG):
  """(r - mean_g) / (std_g + 1e-6), std with ddof=1 (2402.03300, Eq. 9).

  The paper does not say which std: torch.std, used by the authors' code and
  verl, divides by G - 1. In a group of one, as in verl, A = r / (1 + 1e-6).
  """
  size = reward_NG.shape[1]
  if size == 1:
    return reward_NG / (1 + 1e-6)
  centred_NG = drgrpo(reward_NG)
  variance_N1 = jnp.sum(centred_NG**2, axis=1, keepdims=True) / (size - 1)
  return centred_NG / (jnp.sqrt(variance_N1) + 1e-6)


def gpg(reward_NG):
  """alpha (r - mean_g), alpha = groups / (groups - degenerate groups).

  GPG (2504.02546): a degenerate group (all rewards equal) has no gradient;
  alpha compensates for it, and is 1 after dynamic sampling. verl counts
  completions of non-zero reward instead of groups.
  """
  mixed = jnp.sum(jnp.max(reward_NG, axis=1) != jnp.min(reward_NG, axis=1))
  return drgrpo(reward_NG) * (reward_NG.shape[0] / jnp.maximum(mixed, 1))


def rloo(reward_NG):
  """r - the mean of the group's other rewards: RLOO (2402.14740).

  This is G / (G - 1) (r - mean_g); 0 in a group of one.
  """
  size = reward_NG.shape[1]
  return drgrpo(reward_NG) * (size / max(size - 1, 1))


def reinforce_pp_baseline(reward_NG):
  """(r - mean_g) / (std + 1e-6): REINFORCE++ with baseline (2501.03262).

  std is that of r - mean_g over the batch, with ddof=1, so that groups keep
  their relative scale. The batch is the completions that a rollout step trains
  on, each counted once; verl and OpenRLHF count each token. The batch's mean,
  which the paper subtracts too, is 0 already.
  """
  centred_NG = drgrpo(reward_NG)
  variance = jnp.sum(centred_NG**2) / max(centred_NG.size - 1, 1)
  return centred_NG / (jnp.sqrt(variance) + 1e-6)


ESTIMATORS = {'grpo': grpo, 'gpg': gpg, 'drgrpo': drgrpo, 'rloo': rloo,
              'reinforce_pp_baseline': reinforce_pp_baseline}


def group_advantage(reward_B, group_size, estimator):
  """Advantage of each completion from the rewards of its group.

  The rewards, in the order of the groups, keep their dtype (integers become
  floats). `estimator` is a name of ESTIMATORS.

  Raises:
    errors.InputError: unknown estimator.
    ValueError: B is not a multiple of the group size.
  """
  if estimator not in ESTIMATORS:
    raise errors.InputError(
        f'method.estimator: {estimator!r} is not one of '
        + ', '.join(ESTIMATORS))
  reward_B = jnp.asarray(reward_B)
  if reward_B.ndim != 1 or group_size < 1 or reward_B.shape[0] % group_size:
    raise ValueError(
        f'{reward_B.shape} rewards do not form groups of {group_size}')
  reward_NG = reward_B.reshape(-1, group_size).astype(
      jnp.result_type(reward_B, float))
  return ESTIMATORS[estimator](reward_NG).reshape(-1)
