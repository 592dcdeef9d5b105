"""What an update is made from: completions, and the rows they are packed into.

Axes: B completions · T completion slots · S = prompt and completion slots ·
K blocks · M microbatches · R rows of a microbatch.
"""

from typing import Any

import flax.struct
import jax

from tepo_jax.policy import scoring


@flax.struct.dataclass
class Batch:
  """Graded completions on the host. Filler rows have an empty mask.

  token_BS, position_BS: int32 prompt (left-padded) and completion; position
    −1 is padding.
  mask_BT: float32, 1 on completion tokens up to and including EOS.
  advantage_B: float32.
  old_logp_BT, old_entropy_BT: of π_old by the training forward, nats.
  sampler_logp_BT: the sampler's own log-probability, nats.
  """
  token_BS: jax.Array
  position_BS: jax.Array
  mask_BT: jax.Array
  advantage_B: jax.Array
  old_logp_BT: jax.Array
  old_entropy_BT: jax.Array
  sampler_logp_BT: jax.Array


@flax.struct.dataclass
class Minibatch:
  """The completions of an update, and the rows they are packed into.

  mask_BT, advantage_B, old_logp_BT, old_entropy_BT: as in `Batch`.
  block_B, microbatch_B, row_B, column_B: int32, where the scores of a
    completion begin; block −1: filler, nowhere.
  used_K: int32, the microbatches of each block that hold anything.
  blocks: K times scoring.PackedRows, arrays [M, R, S] with a shape of their own.
  """
  mask_BT: jax.Array
  advantage_B: jax.Array
  old_logp_BT: jax.Array
  old_entropy_BT: jax.Array
  block_B: jax.Array
  microbatch_B: jax.Array
  row_B: jax.Array
  column_B: jax.Array
  used_K: jax.Array
  blocks: tuple[scoring.PackedRows, ...]

  @classmethod
  def of(cls, batch: Batch, **layout: Any) -> 'Minibatch':
    """The completions of a batch, laid out as the other fields say."""
    return cls(
        mask_BT=batch.mask_BT, advantage_B=batch.advantage_B,
        old_logp_BT=batch.old_logp_BT, old_entropy_BT=batch.old_entropy_BT,
        **layout)
