"""Batches of given tokens, for the packers."""

from collections.abc import Iterable

import numpy as np

from tepo_jax.learning import packing

P, T = 4, 7


def of_tokens(completions: Iterable[tuple[np.ndarray, np.ndarray]]
              ) -> packing.Batch:
  """One row for each pair of a prompt (at most P tokens) and a completion (T).

  A completion without tokens is filler.
  """
  completions = list(completions)
  count = len(completions)
  token_BS = np.zeros((count, P + T), np.int32)
  position_BS = np.full((count, P + T), -1, np.int32)
  mask_BT = np.zeros((count, T), np.float32)
  for i, (prompt, completion) in enumerate(completions):
    tokens = np.concatenate([prompt, completion])
    first = P - len(prompt)
    token_BS[i, first:first + len(tokens)] = tokens
    position_BS[i, first:first + len(tokens)] = np.arange(len(tokens))
    mask_BT[i, :len(completion)] = 1
  zeros_BT = np.zeros_like(mask_BT)
  return packing.Batch(
      token_BS, position_BS, mask_BT, np.zeros(count, np.float32), zeros_BT,
      zeros_BT, zeros_BT)
