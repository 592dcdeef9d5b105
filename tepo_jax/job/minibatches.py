"""Graded groups as the arrays of the updates, and their order.

Axes: Q prompts · G samples a prompt · B rows · P prompt slots · T completion
slots.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from tepo_jax.learning import advantage
from tepo_jax.learning import batch as batch_lib
from tepo_jax.rollout import groups as groups_lib

_MINIBATCHES = 2  # of a generator: the data order has another number


def pad_prompts(prompts: Sequence[groups_lib.Prompt], rows: int, width: int):
  """Left-padded [Q, P] int32 token ids and positions, and [Q] prompt ids.

  Rows behind the last prompt are filler: their positions are all −1.
  """
  token_QP = np.zeros((rows, width), np.int32)
  position_QP = np.full((rows, width), -1, np.int32)
  prompt_id_Q = np.zeros(rows, np.int32)
  for row, prompt in enumerate(prompts):
    length = len(prompt.token_ids)
    token_QP[row, width - length:] = prompt.token_ids
    position_QP[row, width - length:] = np.arange(length)
    prompt_id_Q[row] = prompt.cursor
  return token_QP, position_QP, prompt_id_Q


def rewards(groups: Sequence[groups_lib.Group], max_tokens: int,
            overlong_buffer: int, overlong_factor: float) -> np.ndarray:
  """Accuracy plus DAPO's soft overlong penalty (off at buffer 0): [R·G]."""
  reward_B = np.concatenate([g.accuracy_G for g in groups])
  if overlong_buffer:
    length_B = np.concatenate([g.length_G for g in groups])
    reward_B = reward_B + np.asarray(advantage.overlong_penalty(
        length_B, max_tokens, overlong_buffer, overlong_factor))
  return reward_B


def to_batch(groups: Sequence[groups_lib.Group], reward_B: np.ndarray, *,
             rows: int, width: int, estimator: str) -> batch_lib.Batch:
  """Host arrays for the updates; filler rows with an empty mask up to `rows`.

  Args:
    groups: to train on. reward_B: of their completions, in order.
    rows: B, a constant of the run. width: P, prompt slots.
    estimator: of `advantage.group_advantage`.
  """
  group_size, slots = groups[0].token_GT.shape
  prompt_BP, prompt_position_BP, _ = pad_prompts(
      [g.prompt for g in groups for _ in range(group_size)], rows, width)
  token_BT = _stack([g.token_GT for g in groups], rows)
  length_B = _stack([g.length_G for g in groups], rows)
  mask_BT = np.arange(slots) < length_B[:, None]
  start_B1 = prompt_position_BP[:, -1:] + 1
  position_BT = np.where(mask_BT, start_B1 + np.arange(slots), -1)
  advantage_B = advantage.group_advantage(reward_B, group_size, estimator)
  zeros_BT = np.zeros((rows, slots), np.float32)
  return batch_lib.Batch(
      token_BS=np.concatenate([prompt_BP, token_BT], 1),
      position_BS=np.concatenate(
          [prompt_position_BP, position_BT], 1).astype(np.int32),
      mask_BT=mask_BT.astype(np.float32),
      advantage_B=_stack([np.asarray(advantage_B, np.float32)], rows),
      old_logp_BT=zeros_BT, old_entropy_BT=zeros_BT,
      sampler_logp_BT=_stack([g.logp_GT for g in groups], rows))


def minibatch_order(rows: int, group_size: int, minibatch_prompts: int,
                    epochs: int, seed: int, step: int) -> Iterator[np.ndarray]:
  """Row indices of each update: whole groups; epochs after the first shuffle.

  The first epoch keeps the data order, which is random already; the others
  are a function of (seed, rollout step).
  """
  groups = np.arange(rows).reshape(-1, group_size)
  generator = np.random.default_rng((seed, _MINIBATCHES, step))
  for epoch in range(epochs):
    if epoch:
      groups = generator.permutation(groups)
    for start in range(0, len(groups), minibatch_prompts):
      yield groups[start:start + minibatch_prompts].reshape(-1)


def _stack(arrays, rows):
  """Concatenates along axis 0 and fills up with zeros to `rows`."""
  joined = np.concatenate(arrays)
  padding = [(0, rows - len(joined))] + [(0, 0)] * (joined.ndim - 1)
  return np.pad(joined, padding)
