"""What an update is computed from: graded completions, and packed rows of them.

`job.learner` makes a `Batch` of graded groups; a packer (`packing`) lays some
of its completions out as a `Minibatch`, which `update` trains on.

Axes: B completions · T completion tokens · S tokens of a prompt and its
completion; in packed rows, M microbatches · R rows · S columns.
"""

import flax.struct
import jax
from jax import numpy as jnp
import numpy as np

from tepo_jax.policy import scoring


@flax.struct.dataclass
class Batch:
  """Graded completions on the host. Filler rows have an empty mask.

  token_BS, position_BS: int32 prompt (left-padded) and completion; position
    −1 is padding.
  mask_BT: float32, 1 on completion tokens up to and including EOS.
  advantage_B: float32; [B, T] where each token has its own.
  old_logp_BT, old_entropy_BT: of π_old by the training forward, nats; zeros in
    a run, which scores minibatches.
  sampler_logp_BT: the sampler's own log-probability, nats.
  behaviour_BT: float32 behaviour weights (`behaviour`); None if they are off.
  reference_logp_BT: of a reference policy; None in a run, which scores
    minibatches.
  version_BT: int32, the rollout step that drew each token; None unless
    completions are carried.
  """
  token_BS: np.ndarray
  position_BS: np.ndarray
  mask_BT: np.ndarray
  advantage_B: np.ndarray
  old_logp_BT: np.ndarray
  old_entropy_BT: np.ndarray
  sampler_logp_BT: np.ndarray
  behaviour_BT: np.ndarray | None = None
  reference_logp_BT: np.ndarray | None = None
  version_BT: np.ndarray | None = None


@flax.struct.dataclass
class Minibatch:
  """The completions of one update, and the packed rows that hold their tokens.

  mask_BT, advantage_B, old_logp_BT, old_entropy_BT, behaviour_BT: as in
    `Batch`.
  microbatch_B, row_B, column_B: int32, where a completion's scores begin in
    the scores [M, R, C] of the rows (`scoring.Scores`); microbatch −1 is
    filler, which has none.
  reference_logp_BT: of the reference policy by the training forward, nats;
    None without one.
  used: int32 scalar, the number of microbatches that hold tokens; the first.
  rows: arrays [M, R, S].
  rate_share: float32 scalar, the update's share of the learning rate
    (`optimizer.share`); None: 1.
  """
  mask_BT: jax.Array | np.ndarray
  advantage_B: jax.Array | np.ndarray
  old_logp_BT: jax.Array | np.ndarray
  old_entropy_BT: jax.Array | np.ndarray
  microbatch_B: jax.Array | np.ndarray
  row_B: jax.Array | np.ndarray
  column_B: jax.Array | np.ndarray
  used: jax.Array | np.int32
  rows: scoring.PackedRows
  behaviour_BT: jax.Array | np.ndarray | None = None
  reference_logp_BT: jax.Array | np.ndarray | None = None
  rate_share: jax.Array | np.float32 | None = None


def by_token(advantage_B, mask_BT):
  """`advantage_B` for each token, [B, T]."""
  if advantage_B.ndim == 1:
    advantage_B = advantage_B[:, None]
  return jnp.broadcast_to(advantage_B, mask_BT.shape)
