"""Arrays of graded groups, and their advantages, on the host.

Axes: B completions · P tokens of a prompt · T tokens of a completion ·
S = P + T · G samples of a prompt.
"""

from collections.abc import Sequence

import numpy as np

from tepo_jax.learning import advantage
from tepo_jax.learning import batch as batch_lib
from tepo_jax.rollout import groups as groups_lib


def to_batch(groups: Sequence[groups_lib.Group], reward_B: np.ndarray, *,
             rows: int, width: int, estimator: str, truncated: str = 'count'
             ) -> batch_lib.Batch:
  """The batch of the groups, with filler rows (an empty mask) up to `rows`.

  Args:
    groups: those to train on. reward_B: of their completions, in order.
    rows: B, a constant of the run. width: P, the longest prompt.
    estimator: see `advantage.group_advantage`.
    truncated: `rollout.truncated`. With 'mask' and 'exclude', truncated
      completions have an empty mask; with 'exclude', they do not count in the
      advantages of their groups either.
  """
  def stacked(arrays):
    joined = np.concatenate(arrays)
    padding = [(0, rows - len(joined))] + [(0, 0)] * (joined.ndim - 1)
    return np.pad(joined, padding)

  group_size, length = groups[0].token_GT.shape
  token_BS = np.zeros((rows, width + length), np.int32)
  position_BS = np.full((rows, width + length), -1, np.int32)
  token_BS[:, width:] = stacked([g.token_GT for g in groups])
  length_B = stacked([g.length_G for g in groups])
  prompts = [g.prompt.token_ids for g in groups for _ in range(group_size)]
  for i, prompt in enumerate(prompts):
    start, end = width - len(prompt), width + length_B[i]
    token_BS[i, start:width] = prompt
    position_BS[i, start:end] = np.arange(end - start)
  mask_BT = np.arange(length) < length_B[:, None]
  if truncated != 'count':
    mask_BT &= stacked([g.ended_G for g in groups])[:, None]
  zeros_BT = np.zeros((rows, length), np.float32)
  return batch_lib.Batch(
      token_BS=token_BS, position_BS=position_BS,
      mask_BT=mask_BT.astype(np.float32),
      advantage_B=advantages(groups, reward_B, mask_BT, estimator, truncated),
      old_logp_BT=zeros_BT, old_entropy_BT=zeros_BT,
      sampler_logp_BT=stacked([g.logp_GT for g in groups]),
      version_BT=None if groups[0].version_GT is None else stacked(
          [g.version_GT for g in groups]))


def advantages(groups: Sequence[groups_lib.Group], reward_B: np.ndarray,
               mask_BT: np.ndarray, estimator: str, truncated: str,
               penalty_BT: np.ndarray | None = None) -> np.ndarray:
  """The advantages of a batch, float32 [B], or [B, T] if the estimator gives
  each token its own; 0 in filler rows.

  Args:
    groups, reward_B, estimator, truncated: as for `to_batch`.
    mask_BT: of the batch.
    penalty_BT: taken from the reward at each token of the mask; the estimators
      that give a completion one advantage take the sum over its tokens.
  """
  padding = 0, len(mask_BT) - len(reward_B)
  kept_BT = mask_BT > 0
  penalty_BT = np.where(
      kept_BT, 0 if penalty_BT is None else penalty_BT, 0).astype(np.float32)
  if advantage.is_by_token(estimator):
    return np.asarray(advantage.of_tokens(
        np.pad(reward_B, padding), penalty_BT, kept_BT), np.float32)
  counted_B = (np.concatenate([g.ended_G for g in groups])
               if truncated == 'exclude' else None)
  advantage_B = advantage.group_advantage(
      reward_B - penalty_BT[:len(reward_B)].sum(1), len(groups[0].length_G),
      estimator, counted_B)
  return np.pad(np.asarray(advantage_B, np.float32), padding)
