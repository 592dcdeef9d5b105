"""Metrics of an update: scalars computed from the objective's arrays.

Axes: B completions, T tokens of a completion.
"""

import jax.numpy as jnp

from tepo_jax.learning import numerics


def metrics(x, *, weight_BT, low_BT, high_BT, dropped_BT, region_BT,
            covariance_BT, k1_BT, k3_BT, reference_BT):
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
  kl_reference: mean of the estimate of method.reference, if there is one.
  entropy: mean H, nats. covariance: mean of (A - mean A)(l - mean l).
  region_share: tokens in the penalty's region M.
  entropy_unchanged_share: tokens with H = H0 to the last bit; in training 1
    until the weights move, as `update` then takes its own H for H0.
  empty_minibatches: 1 if there is no valid token, else 0.
  """
  def share(event_BT, among_BT=x.mask_BT):
    return numerics.mean(event_BT.astype(x.old_logp_BT.dtype), among_BT)

  def rows_share(event_BT):
    return share(jnp.any(event_BT & x.mask_BT, axis=1),
                 jnp.any(x.mask_BT, axis=1))

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
      'entropy_unchanged_share': share(x.entropy_BT == x.old_entropy_BT),
      'empty_minibatches': 1 - some.astype(x.old_logp_BT.dtype),
  }
  if reference_BT is not None:
    scalars['kl_reference'] = numerics.mean(reference_BT, x.mask_BT)
  if x.kl_BT is not None:
    scalars['kl_full'] = numerics.mean(x.kl_BT, x.mask_BT)
  return scalars
