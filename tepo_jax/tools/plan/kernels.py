"""Custom calls in a compiled program, which do not state their work.

Pallas's splash attention carries no cost estimate, so it is recognised by name.
It works on blocks of queries and keys, computes each block that the causal mask
or the window shows even in part, and passes over the others. Of packed rows it
also passes over blocks that share no segment; which these are only a run knows,
so they are counted here: a plan is too high by them. Ragged paged attention
reads whole blocks of each sequence's keys and values, as many as only a rollout
knows. Other Pallas kernels count as they estimate themselves. A GPU's programs
call cuDNN's attention and cuBLAS's matrix products. What is not known is not
counted, and `cost` names it.

Axes: B rows, T queries, S keys or columns, N query heads, K key/value heads, H
head size.
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
  """Returns a custom call's work; None if it is not known.

  columns: those of pages that decoding reads, in all sequences together; None:
    not known.
  """
  if not instruction.target:
    return None
  operands = computation.operands(instruction)
  read = sum(o.hbm_bytes for o in operands)
  if instruction.target.startswith('__cublas$'):
    # Its second result is a workspace.
    return Work(dot_flops(operands, instruction,
                          r'"lhs_contracting_dimensions":\[([\d",]*)\]'),
                instruction.arrays[0].bytes + read)
  if _is_cudnn(instruction):
    return Work(_cudnn_flops(operands, instruction),
                instruction.hbm_bytes + read)
  if instruction.target != 'tpu_custom_call':
    return None
  phase = re.match(r'splash_m[hq]a_(fwd|dkv|dq)', instruction.name)
  if phase:
    return _splash(operands, instruction, phase[1])
  if columns is not None and instruction.name.startswith(
      'ragged_paged_attention'):
    return _paged(operands, instruction, columns)
  found = re.search(r'"cost_estimate": ?(\{[^}]*\})', instruction.text)
  if not found:
    return None
  estimate = json.loads(found[1])
  return Work(float(estimate.get('flops', 0)),
              float(estimate.get('bytes_accessed', 0)))


def dot_flops(operands: list[hlo.Instruction], instruction: hlo.Instruction,
              contracting: str = r'lhs_contracting_dims=\{([\d,]*)\}') -> float:
  """Returns 2 · multiplications; contracting: a pattern of the dimensions."""
  lhs = operands[0].arrays[0]
  dimensions = re.search(contracting, instruction.text)[1].replace('"', '')
  inner = math.prod(lhs.shape[int(d)] for d in dimensions.split(',') if d)
  return 2.0 * inner * math.prod(instruction.arrays[0].shape)


def _splash(operands, instruction, phase):
  """Arrays are read once, but for those of which each block needs its part
  anew: keys and values, or for their gradients queries and outputs."""
  arrays = [a for o in operands for a in o.arrays]
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
      instruction.hbm_bytes + again + sum(o.hbm_bytes for o in operands))


def _paged(operands, instruction, columns):
  """Of each block of queries, all are multiplied with each sequence's keys and
  values; the pages are the last operand."""
  *others, pages = (a for o in operands for a in o.arrays)
  (_, heads, size), (*_, kv_heads, _) = instruction.arrays[0].shape, pages.shape
  return Work(
      4.0 * pages_lib.BLOCK_QUERIES * columns * heads * size,
      instruction.hbm_bytes + sum(a.bytes * a.in_hbm for a in others)
      + columns * kv_heads * size * pages.bytes / math.prod(pages.shape))


def _is_cudnn(instruction):
  """Whether it calls cuDNN's attention, forward or backward."""
  return instruction.target.startswith('__cudnn$fmha')


def _is_backward(instruction):
  return 'Backward"' in instruction.text


def _cudnn_flops(operands, instruction):
  """2 · products · B N T S H, half of it if causal; there are two products
  forward, and five backward."""
  (rows, queries, heads, size), (_, keys, *_) = _shapes(operands)
  products = 5 if _is_backward(instruction) else 2
  share = .5 if '"CAUSAL"' in instruction.text else 1
  return 2.0 * products * share * rows * heads * queries * keys * size


def _shapes(operands):
  """The shapes of queries and keys, [B, T, N, H] and [B, S, K, H]."""
  return [o.arrays[0].shape for o in operands[:2]]


def cudnn_workspace(text: str) -> int:
  """Returns the bytes of cuDNN's largest workspace in a module's text.

  cuDNN states it on a device; a program compiled without one reserves nothing.
  As cuDNN 9.28 stated it for H = 128: none forward; backward 4 B N T (H + 1),
  and 4 B N S H more if K < N.
  """
  return max((
      _workspace(*_shapes(computation.operands(instruction)))
      for computation in hlo.parse(text).computations.values()
      for instruction in computation.instructions.values()
      if _is_cudnn(instruction) and _is_backward(instruction)), default=0)


def _workspace(shape_BTNH, shape_BSKH):
  rows, queries, heads, size = shape_BTNH
  _, keys, kv_heads, _ = shape_BSKH
  return 4 * rows * heads * (
      queries * (size + 1) + keys * size * (kv_heads < heads))
