"""π_old in a rollout step: its scores, and its hidden states for the exact KL.

Axes: B completions · T tokens of a completion · M microbatches · R rows · S
columns · D model · K microbatches whose hidden states are kept.
"""

from typing import Any

import jax
from jax import numpy as jnp
import numpy as np

from tepo_jax.job import programs as programs_lib
from tepo_jax.learning import batch as batch_lib
from tepo_jax.learning import packing
from tepo_jax.learning import update
from tepo_jax.runtime import mesh as mesh_lib


class OldPolicy:
  """Scores the minibatches of the first epoch, then serves every update.

  With an exact KL, the hidden states of the first epoch are kept by completion,
  and later epochs take them from there. If they are more than `programs.kept`,
  they are computed anew for each update, from a copy of π_old's weights.
  """

  def __init__(self, programs: programs_lib.TrainingPrograms, params: Any,
               base: tuple):
    self._programs, self._params, self._base = programs, params, base
    kept = programs.kept
    self._states_RKSD = None if kept is None else jnp.zeros(
        kept.shape, kept.dtype, device=kept.sharding)
    self._policy: update.OldPolicy | None = None
    self._used = 0  # microbatches
    self._place_of: dict[int, np.ndarray] = {}  # batch row -> of its columns

  def score(self, minibatch: batch_lib.Minibatch
            ) -> tuple[jax.Array, jax.Array]:
    """ℓ° and H°, [B, T]; the next call overwrites the hidden states."""
    if self._states_RKSD is None:
      return self._programs.score(self._params, minibatch, *self._base)
    *scores, self._policy = self._programs.score_and_keep(
        self._params, minibatch, self._states_RKSD, self._used, *self._base)
    self._states_RKSD = self._policy.states_RKSD
    return tuple(scores)

  def score_and_keep(self, rows: np.ndarray, packed: batch_lib.Minibatch,
                     minibatch: batch_lib.Minibatch
                     ) -> tuple[jax.Array, jax.Array]:
    """As `score`, but keeps the hidden states.

    rows: of the batch. packed, minibatch: these, on the host and the devices.
    """
    scores = self.score(minibatch)
    if self._policy is not None:
      shape, kept = packed.rows.token_RS.shape, self._states_RKSD.shape[1]
      self._place_of.update(zip(rows, (
          update.place(columns, shape, kept, self._used)
          for columns in packing.scored_columns(packed))))
      self._used += int(packed.used)
    return scores

  def start_updates(self) -> None:
    """Drops what the updates do not need of the policy; call it when all
    minibatches are scored."""
    if self._policy is None:
      return
    if self._used > self._programs.kept.shape[1]:
      self._policy = self._states_RKSD = None
      self._place_of.clear()
      self._params = self._programs.to_old_policy(self._params)
      return
    self._params = None
    self._policy = self._policy.replace(place_MRS=None)

  def of_minibatch(self, rows: np.ndarray, packed: batch_lib.Minibatch,
                   minibatch: batch_lib.Minibatch) -> update.OldPolicy | None:
    """The argument of `train_step`; arguments as in `score_and_keep`."""
    if self._programs.kept is None:
      return None
    if self._policy is None:
      return self._programs.old_policy(self._params, minibatch, *self._base)
    place_MRS = np.zeros(packed.rows.token_RS.shape, np.int32)
    for row, columns in zip(rows, packing.scored_columns(packed)):
      if columns.size:  # a filler row may never have been scored
        place_MRS.flat[columns] = self._place_of[row]
    return self._policy.replace(place_MRS=mesh_lib.put(
        place_MRS, self._programs.old_sharding.place_MRS))
