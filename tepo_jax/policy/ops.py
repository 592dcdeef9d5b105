"""The operations of the model that have a second form, here in the plain one.

`ModelConfig.ops` holds the functions that a program uses. `PLAIN` serves TPUs
and GPUs; `policy.cpu.ops` has a table of the same names for CPUs, and
`job.programs.execution` chooses between them.

Axes: M tokens, D model, V vocabulary.
"""

from collections.abc import Callable
import dataclasses

import jax
import jax.numpy as jnp

from tepo_jax.policy import attention


def logits(hidden_MD, weight, tied: bool):
  """The head's product, float32 [M, V].

  `weight` is [V, D] if the head is tied to the embedding, else [D, V].
  """
  return jax.lax.dot_general(
      hidden_MD, weight, (((1,), (1 if tied else 0,)), ((), ())),
      preferred_element_type=jnp.float32)


@dataclasses.dataclass(frozen=True)
class Ops:
  """The functions that a model calls, with the signatures of this module's.

  attend_block: `attention.attend_block`.
  decoding_logits: `logits` of one token a row.
  transposed_linear: x @ kernel.T for kernels stored as [O, I]. If there is
    one, `cache.convert` transposes the kernels for decoding.
  """

  attend_block: Callable = attention.attend_block
  decoding_logits: Callable = logits
  transposed_linear: Callable | None = None


PLAIN = Ops()
