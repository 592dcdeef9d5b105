"""The operations of the model that have a second form, here in the plain one.

`ModelConfig.ops` holds the functions that a program uses. `PLAIN` serves TPUs
and GPUs; `policy.cpu.ops` has a table of the same names for CPUs, and
`job.programs.execution` chooses between them. The plain forms can be
differentiated forward (jvp) and in reverse (vjp).

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


def log_sum_exp_and_entropy(z):
  """log Σ exp z and the entropy of softmax z, over the last axis, which is kept
  with size 1.

  With m = max z, s = Σ exp(z − m) and t = Σ exp(z − m) (m − z) they are
  m + log s and log s + t / s: two passes over z.
  """
  most = jnp.max(z, axis=-1, keepdims=True)
  weight = jnp.exp(z - most)
  s = row_sum(weight)
  log_s = jnp.log(s)
  return most + log_s, log_s + row_sum(weight * (most - z)) / s


def row_sum(*x, term: Callable[..., jax.Array] = lambda x: x):
  """Σ term(*x) over the last axis, which is kept with size 1.

  `term` is elementwise; an array whose last axis has size 1 holds one value
  per row.
  """
  return jnp.sum(term(*x), axis=-1, keepdims=True)


@dataclasses.dataclass(frozen=True)
class Ops:
  """The functions that a model calls, with the signatures of this module's.

  decoding_logits: `logits` of one token a row.
  transposed_linear: x @ kernel.T for kernels stored as [O, I]. If there is
    one, `cache.convert` transposes the kernels for decoding.
  attend: `attention.attend_xla`.
  """

  decoding_logits: Callable = logits
  log_sum_exp_and_entropy: Callable = log_sum_exp_and_entropy
  row_sum: Callable = row_sum
  transposed_linear: Callable | None = None
  attend: Callable = attention.attend_xla


PLAIN = Ops()
