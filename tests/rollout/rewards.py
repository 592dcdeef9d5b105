"""Reward functions as tests use them."""

from tepo_jax.rollout import reward as reward_lib


def reward_functions(weights=None, **settings):
  """RewardFunctions, by default the accuracy alone."""
  return reward_lib.RewardFunctions(weights or {'accuracy': 1.0}, **dict(
      max_tokens=10, overlong_buffer=0, overlong_factor=1.0, workers=2,
      timeout_s=10) | settings)
