"""The table of operations for CPUs: see `policy.ops`.

A form is switched off by removing its line: the plain form then serves.

Axes: M tokens, I inputs, O outputs, D model, V vocabulary.
"""

import jax

from tepo_jax.policy import ops
from tepo_jax.policy.cpu import packed_attention
from tepo_jax.policy.cpu import reductions


def transposed_linear(x_MI, kernel_OI):
  """x @ kernel.T, [M, O], for few tokens.

  XLA's CPU backend copies the second operand of a product, so that is x and not
  the kernel. The barriers stop XLA from undoing the transposes.
  """
  x_IM = jax.lax.optimization_barrier(x_MI.T)
  return jax.lax.optimization_barrier(kernel_OI @ x_IM).T


def decoding_logits(hidden_MD, weight, tied):
  """As `policy.ops.logits`, for few tokens.

  For an untied head [D, V] the barrier stops XLA from merging the product with
  the transpose in `draw`. The product would then contract the first axis of its
  first operand, for which XLA's CPU backend has no fast form: sampling would
  take 1.6 times as long.
  """
  logits_MV = ops.logits(hidden_MD, weight, tied)
  return logits_MV if tied else jax.lax.optimization_barrier(logits_MV)


OPS = ops.Ops(
    decoding_logits=decoding_logits,
    log_sum_exp_and_entropy=reductions.log_sum_exp_and_entropy,
    row_sum=reductions.row_sum,
    transposed_linear=transposed_linear,
    attend=packed_attention.attend,
)
