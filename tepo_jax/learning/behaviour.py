"""Behaviour weights: the sampler's tokens, weighted for the trainer. Host code.

The sampler draws tokens with probability μ, the trainer computes π_old for
them: the same weights, but other programs and layouts, so that the two differ
by rounding, in bfloat16 by percents. The behaviour weight

    b = min(r, cap)    r = exp(ℓ° − log μ) = π_old / μ

multiplies a token's surrogate (`objective`). It is a constant of the rollout
step; the weight w = π / π_old stays as it is.

  token     r of each token: truncated importance sampling (FlashRL, verl)
  sequence  r of each completion, the product of its tokens' (TRL's sequence
            form); its noise grows with the completion's length

A token (or completion) whose r is below `reject_below` or above `reject_above`
gets weight 0. It still counts in the aggregate's denominators, as in TRL and
AReaL, so the loss stays a sum over what was sampled. With an infinite cap,
`reject_above` alone is AReaL's decoupled objective (2505.24298).

Where ℓ° = log μ, b is exactly 1. How far apart they may be, `gap` checks.

Axes: B completions · T tokens.
"""

import numpy as np

from tepo_jax import errors

WEIGHTS = ('off', 'token', 'sequence')


def weights(old_logp_BT: np.ndarray, sampler_logp_BT: np.ndarray,
            mask_BT: np.ndarray, *, weight: str, cap: float,
            reject_below: float, reject_above: float) -> np.ndarray:
  """b [B, T], in the dtype of ℓ°; 'off' has the weights of 'token'.

  Args:
    old_logp_BT, sampler_logp_BT: ℓ° and log μ, nats; where the mask is 0, they
      may be garbage.
    weight: of WEIGHTS. cap, reject_below, reject_above: of r, see above.
  """
  log_ratio_BT = np.subtract(
      old_logp_BT, sampler_logp_BT, out=np.zeros_like(old_logp_BT),
      where=mask_BT > 0)
  if weight == 'sequence':
    log_ratio_BT = np.broadcast_to(
        log_ratio_BT.sum(1, keepdims=True), log_ratio_BT.shape)
  ratio_BT = np.exp(np.clip(log_ratio_BT, -20, 20))
  rejected_BT = (ratio_BT < reject_below) | (ratio_BT > reject_above)
  return np.where(rejected_BT, 0, np.minimum(ratio_BT, cap)).astype(
      old_logp_BT.dtype)


def metrics(weight_BT: np.ndarray, old_logp_BT: np.ndarray,
            sampler_logp_BT: np.ndarray, mask_BT: np.ndarray, *, weight: str,
            cap: float) -> dict[str, float]:
  """Scalars of `weights`: over tokens; with 'sequence' over completions.

  behaviour_mean: of b. behaviour_capped_share: b = cap.
  behaviour_rejected_share: b = 0.
  behaviour_ess: effective sample size, (Σ b)² / Σ b², as a share of the number.
  behaviour_kl: KL(sampler ‖ trainer) per token, nats: the mean of
    r − 1 − log r, which is never negative and has no bias.
  """
  valid_BT = mask_BT > 0
  b = (weight_BT.max(1, where=valid_BT, initial=0)[valid_BT.any(1)]
       if weight == 'sequence' else weight_BT[valid_BT]).astype(np.float64)
  log_ratio = np.clip(np.subtract(
      old_logp_BT[valid_BT], sampler_logp_BT[valid_BT], dtype=np.float64),
                      -20, 20)
  squares = len(b) * np.sum(b**2)
  return {
      'behaviour_mean': float(b.mean()), 'behaviour_capped_share': float(
          np.mean(b >= weight_BT.dtype.type(cap))),
      'behaviour_rejected_share': float(np.mean(b == 0)),
      'behaviour_ess': float(b.sum()**2 / squares) if squares else 0.0,
      'behaviour_kl': float(np.mean(np.expm1(log_ratio) - log_ratio))}


def gap(old_logp_BT: np.ndarray, sampler_logp_BT: np.ndarray,
        mask_BT: np.ndarray, limit: float) -> dict[str, float]:
  """Mean and 99th percentile of |ℓ° − log μ| over the mask, nats; {} where it
  is empty.

  Raises:
    errors.RunError: the mean is above `limit`, or NaN.
  """
  valid_BT = mask_BT > 0
  if not valid_BT.any():
    return {}
  gaps = np.abs(sampler_logp_BT - old_logp_BT)[valid_BT]
  if not gaps.mean() <= limit:
    raise errors.RunError(
        f'the sampler\'s log-probabilities are {gaps.mean():.3g} nats from '
        f'the trainer\'s on average, more than rollout.logp_gap_limit='
        f'{limit}: the ratios would be noise')
  return {'logp_gap_mean': float(gaps.mean()),
          'logp_gap_p99': float(np.quantile(gaps, 0.99))}
