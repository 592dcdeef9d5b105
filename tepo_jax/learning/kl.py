"""Estimates of KL(policy || other) from samples of the policy.

Of a sampled token, d = logp - the other's logp. Schulman (2020,
joschu.net/blog/kl-approx.html) has three; their expectations, on policy:

         value        gradient
    k1   the KL       0
    k2   about it     that of KL(policy || other)
    k3   the KL       that of KL(other || policy)

As a loss, k1 is therefore noise; GRPO's paper (2402.03300) has k3. k1+ and k3+,
as verl documents them, have the value of k1 and k3 with the gradient of k2. In
a reward, only the value counts.
"""

from jax.lax import stop_gradient as sg
import jax.numpy as jnp

from tepo_jax.learning import numerics


def k1(d):
  """d."""
  return d


def k2(d):
  """d^2 / 2."""
  return jnp.square(d) / 2


def k3(d):
  """e^-d + d - 1, never negative."""
  return numerics.exp(-d) + d - 1


def k3_is(d):
  """e^d d - e^d + 1 = e^d k3: unbiased on the other policy's samples."""
  ratio = numerics.exp(d)
  return ratio * d - ratio + 1


def distance(d):
  """|d| as d sg(sign d): KL-Cov's authors' code; its paper prints a KL."""
  # jnp.abs has gradient 1 at 0: on policy it would push every token down.
  return d * sg(jnp.sign(d))


def straight_through(estimator):
  """k2 - sg(k2) + sg(the estimator)."""
  return lambda d: k2(d) - sg(k2(d)) + sg(estimator(d))

ESTIMATORS = {'k1': k1, 'k2': k2, 'k3': k3, 'k1+': straight_through(k1),
              'k3+': straight_through(k3)}
