"""Rewards of graded groups. Axes: B completions."""

from collections.abc import Mapping, Sequence

import numpy as np

from tepo_jax.learning import advantage
from tepo_jax.rollout import groups as groups_lib
from tepo_jax.rollout import reward as reward_lib


def rewards(groups: Sequence[groups_lib.Group], weights: Mapping[str, float],
            max_tokens: int, overlong_buffer: int, overlong_factor: float
            ) -> np.ndarray:
  """The weighted sum of the reward functions, plus DAPO's soft overlong penalty
  (off at buffer 0): [B].

  weights: {function, or 'accuracy': its weight}. A function that failed counts
  as 0.
  """
  reward_B = sum(
      (np.float32(weight) * np.nan_to_num(component(groups, name))
       for name, weight in weights.items()), np.float32(0))
  if overlong_buffer:
    length_B = np.concatenate([g.length_G for g in groups])
    reward_B = reward_B + np.asarray(advantage.overlong_penalty(
        length_B, max_tokens, overlong_buffer, overlong_factor))
  return reward_B


def component(groups: Sequence[groups_lib.Group], name: str) -> np.ndarray:
  """What one reward function gave, or the accuracy: [B]."""
  return np.concatenate([
      g.accuracy_G if name == reward_lib.ACCURACY else g.scores[name]
      for g in groups])
