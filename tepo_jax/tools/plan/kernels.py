"""Pallas kernels in a compiled program: the work that their calls do not state.

Splash attention carries no cost estimate, so it is recognised by name. It works
on blocks of queries and keys, computes each block that the causal mask or the
window shows even in part, and passes over the others. Of packed rows it also
passes over blocks that share no segment; which these are only a run knows, so
they are counted here: a plan is too high by them. Ragged paged attention reads
whole blocks of each sequence's keys and values, as many as only a rollout
knows. Other kernels count as they estimate themselves; what has no estimate is
not counted, and `cost` names it.

Axes: B rows, N query heads, K key/value heads, S columns, H head size.
"""

import json
import math
import re
from typing import NamedTuple

from tepo_jax.policy import pages as pages_lib
from tepo_jax.tools.plan import hlo

# Matrix products of a block: forward; gradients of the keys and values, with
# the scores and their gradients computed again; of the queries, the same.
_PRODUCTS = {'fwd': 2, 'dkv': 4, 'dq': 3}


class Work(NamedTuple):
  """flops: of matrix products. hbm_bytes: read and written."""
  flops: float
  hbm_bytes: float


def work(computation: hlo.Computation, instruction: hlo.Instruction,
         columns: float | None = None) -> Work | None:
  """Returns a kernel's work; None if the instruction is no kernel, or one of
  unknown work.

  columns: those of pages that decoding reads, in all sequences together; None:
    not known.
  """
  if instruction.attribute('custom_call_target') != '"tpu_custom_call"':
    return None
  phase = re.match(r'splash_m[hq]a_(fwd|dkv|dq)', instruction.name)
  if phase:
    return _splash(computation, instruction, phase[1])
  if columns is not None and instruction.name.startswith(
      'ragged_paged_attention'):
    return _paged(computation, instruction, columns)
  found = re.search(r'"cost_estimate": ?(\{[^}]*\})', instruction.text)
  if not found:
    return None
  estimate = json.loads(found[1])
  return Work(float(estimate.get('flops', 0)),
              float(estimate.get('bytes_accessed', 0)))


def _splash(computation, instruction, phase):
  """Arrays are read once, but for those of which each block needs its part
  anew: keys and values, or for their gradients queries and outputs."""
  arrays = [a for o in computation.operands(instruction) for a in o.arrays]
  q, k = [a for a in arrays if a.dtype in ('bf16', 'f32')][:2]
  *rows, heads, length, size = q.shape
  # The first operand has the place of each block: of queries in rows, of keys
  # in columns, of which a window needs fewer than there are.
  *_, queries, keys = arrays[0].shape
  block = length // (keys if phase == 'dkv' else queries)
  shown = sum(min(place + 1, keys if phase != 'dkv' else queries)
              for place in range(length // block))
  count = math.prod(rows) * heads * shown
  products = _PRODUCTS[phase]
  if phase == 'dkv' and any(len(a.shape) == len(q.shape) + 1
                            for a in instruction.arrays):
    products += 1  # the fused kernel, which also returns parts of dQ
  streamed = q if phase == 'dkv' else k
  again = streamed.in_hbm * 2 * (count * block * size * streamed.bytes
                                 / math.prod(streamed.shape) - streamed.bytes)
  return Work(
      2.0 * products * count * block ** 2 * size,
      instruction.hbm_bytes + again + sum(
          o.hbm_bytes for o in computation.operands(instruction)))


def _paged(computation, instruction, columns):
  """Of each block of queries, all are multiplied with each sequence's keys and
  values; the pages are the last operand."""
  *others, pages = (a for o in computation.operands(instruction)
                    for a in o.arrays)
  (_, heads, size), (*_, kv_heads, _) = instruction.arrays[0].shape, pages.shape
  return Work(
      4.0 * pages_lib.BLOCK_QUERIES * columns * heads * size,
      instruction.hbm_bytes + sum(a.bytes * a.in_hbm for a in others)
      + columns * kv_heads * size * pages.bytes / math.prod(pages.shape))
