"""Turns graded groups into the host arrays of the updates, and orders them.

Axes: B completions (rows of a `Batch`) · P tokens of a prompt · T tokens of a
completion · S = P + T.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from tepo_jax.learning import advantage
from tepo_jax.learning import batch as batch_lib
from tepo_jax.rollout import groups as groups_lib

_MINIBATCHES = 2  # seeds the generator; the data order uses another number


def to_batch(groups: Sequence[groups_lib.Group], reward_B: np.ndarray, *,
             rows: int, width: int, estimator: str) -> batch_lib.Batch:
  """The batch of the groups, with filler rows (an empty mask) up to `rows`.

  Args:
    groups: those to train on. reward_B: of their completions, in order.
    rows: B, a constant of the run. width: P, the longest prompt.
    estimator: see `advantage.group_advantage`.
  """
  group_size, length = groups[0].token_GT.shape
  token_BS = np.zeros((rows, width + length), np.int32)
  position_BS = np.full((rows, width + length), -1, np.int32)
  token_BS[:, width:] = _stack([g.token_GT for g in groups], rows)
  length_B = _stack([g.length_G for g in groups], rows)
  prompts = [g.prompt.token_ids for g in groups for _ in range(group_size)]
  for i, prompt in enumerate(prompts):
    start, end = width - len(prompt), width + length_B[i]
    token_BS[i, start:width] = prompt
    position_BS[i, start:end] = np.arange(end - start)
  advantage_B = advantage.group_advantage(reward_B, group_size, estimator)
  mask_BT = np.arange(length) < length_B[:, None]
  zeros_BT = np.zeros((rows, length), np.float32)
  return batch_lib.Batch(
      token_BS=token_BS, position_BS=position_BS,
      mask_BT=mask_BT.astype(np.float32),
      advantage_B=_stack([np.asarray(advantage_B, np.float32)], rows),
      old_logp_BT=zeros_BT, old_entropy_BT=zeros_BT,
      sampler_logp_BT=_stack([g.logp_GT for g in groups], rows))


def minibatch_order(rows: int, group_size: int, minibatch_prompts: int,
                    epochs: int, seed: int, step: int) -> Iterator[np.ndarray]:
  """Yields the row indices of each update: whole groups.

  The first epoch keeps the data order, which is random already; the others
  shuffle the groups, as a function of (seed, rollout step).
  """
  groups = np.arange(rows).reshape(-1, group_size)
  generator = np.random.default_rng((seed, _MINIBATCHES, step))
  for epoch in range(epochs):
    if epoch:
      groups = generator.permutation(groups)
    for start in range(0, len(groups), minibatch_prompts):
      yield groups[start:start + minibatch_prompts].reshape(-1)


def _stack(arrays, rows):
  """Concatenates along axis 0 and appends zeros up to `rows` rows."""
  joined = np.concatenate(arrays)
  padding = [(0, rows - len(joined))] + [(0, 0)] * (joined.ndim - 1)
  return np.pad(joined, padding)
