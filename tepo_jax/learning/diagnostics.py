"""Metrics of an update: scalars computed from the objective's arrays.

Axes: B completions, T tokens of a completion.
"""

import jax.numpy as jnp

from tepo_jax.learning import numerics


def metrics(x, *, weight_BT, low_BT, high_BT, dropped_BT, region_BT,
            covariance_BT, k1_BT, k3_BT, noise_floor):
  """Scalars of a whole minibatch; 0 if it has no valid token.

  Means and shares are over the valid tokens, `_sequences` over the completions
  that have one.

  clip_fraction_low, _high: tokens whose weight is clipped from below and from
    above (the dual clip counts as high); tokens of advantage 0 do not count.
    clip_fraction_low_sequences, _high_sequences: completions with such a
    token (under a sequence weight: the clipped sequences).
  clip_fraction_covariance: tokens that Clip-Cov drops.
  weight_mean, weight_min, weight_max: of w, within exp(+-20).
  kl_k1: mean d. kl_k3: mean e^-d + d - 1. kl_full: exact, where computed.
  entropy: mean H, nats. covariance: mean of (A - mean A)(l - mean l).
  region_share: tokens in the penalty's region M.
  noise_floor_share: tokens with |H - H0| <= noise_floor. With a floor of 0,
    the share of tokens whose entropy is unchanged to the last bit: 1 in the
    first minibatch after a rollout, if H0 comes from the same forward.
  region_noise_share: the same, among the tokens of the region.
  empty_minibatches: 1 if there is no valid token, else 0.
  """
  def share(event_BT, among_BT=x.mask_BT):
    return numerics.mean(event_BT.astype(x.old_logp_BT.dtype), among_BT)

  def rows_share(event_BT):
    return share(jnp.any(event_BT & x.mask_BT, axis=1),
                 jnp.any(x.mask_BT, axis=1))

  quiet_BT = jnp.abs(x.entropy_BT - x.old_entropy_BT) <= noise_floor
  some = jnp.any(x.mask_BT)
  lowest = jnp.min(jnp.where(x.mask_BT, weight_BT, jnp.inf))
  highest = jnp.max(jnp.where(x.mask_BT, weight_BT, -jnp.inf))
  scalars = {
      'clip_fraction_low': share(low_BT),
      'clip_fraction_high': share(high_BT),
      'clip_fraction_low_sequences': rows_share(low_BT),
      'clip_fraction_high_sequences': rows_share(high_BT),
      'clip_fraction_covariance': share(dropped_BT),
      'weight_mean': numerics.mean(weight_BT, x.mask_BT),
      'weight_min': jnp.where(some, lowest, 0),
      'weight_max': jnp.where(some, highest, 0),
      'kl_k1': numerics.mean(k1_BT, x.mask_BT),
      'kl_k3': numerics.mean(k3_BT, x.mask_BT),
      'entropy': numerics.mean(x.entropy_BT, x.mask_BT),
      'covariance': numerics.mean(covariance_BT, x.mask_BT),
      'region_share': share(region_BT),
      'noise_floor_share': share(quiet_BT),
      'region_noise_share': share(quiet_BT, region_BT & x.mask_BT),
      'empty_minibatches': 1 - some.astype(x.old_logp_BT.dtype),
  }
  if x.kl_BT is not None:
    scalars['kl_full'] = numerics.mean(x.kl_BT, x.mask_BT)
  return scalars


def noise_floor(entropy_BT, old_entropies, row_B, mask_BT):
  """How far entropies move by rounding alone, nats: p99 of |H - H0| over tokens.

  entropy_BT: H of completions in another packing than that of H0.
  old_entropies: H0 of minibatches, a list of [b, T]. row_B: where each of the
    completions is in their concatenation. mask_BT: of the completions.
  """
  old_entropy_BT = jnp.concatenate(old_entropies)[row_B]
  moved_BT = jnp.abs(entropy_BT - old_entropy_BT)
  return jnp.nanquantile(jnp.where(mask_BT > 0, moved_BT, jnp.nan), 0.99)
