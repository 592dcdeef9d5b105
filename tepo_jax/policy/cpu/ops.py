"""The table of operations for CPUs: see `policy.ops`.

A form is switched off by removing its line: the plain form then serves.
"""

from tepo_jax.policy.cpu import packed_attention
from tepo_jax.policy.cpu import products
from tepo_jax.policy.cpu import reductions
from tepo_jax.policy import ops

OPS = ops.Ops(
    decoding_logits=products.decoding_logits,
    row_max=reductions.row_max,
    row_sum=reductions.row_sum,
    transposed_linear=products.transposed_linear,
    attend=packed_attention.attend,
)
