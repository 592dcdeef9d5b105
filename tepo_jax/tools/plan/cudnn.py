"""cuDNN's attention in a compiled program: what its calls do not state.

Axes: B rows, T queries, S keys, N query heads, K key/value heads, H head size.
"""

from tepo_jax.tools.plan import hlo


def is_attention(instruction: hlo.Instruction) -> bool:
  """Whether it calls cuDNN's attention, forward or backward."""
  return (instruction.attribute('custom_call_target') or '').startswith(
      '"__cudnn$fmha')


def flops(computation: hlo.Computation, instruction: hlo.Instruction) -> float:
  """Returns 2 · products · B N T S H, half of it if causal.

  There are two products forward, and five backward.
  """
  (rows, queries, heads, size), (_, keys, *_) = _shapes(
      computation, instruction)
  products = 5 if _is_backward(instruction) else 2
  share = .5 if '"CAUSAL"' in instruction.text else 1
  return 2.0 * products * share * rows * heads * queries * keys * size


def workspace(text: str) -> int:
  """Returns the bytes of the largest workspace in a module's text.

  cuDNN states it on a device; a program compiled without one reserves nothing.
  As cuDNN 9.28 stated it for H = 128: none forward; backward 4 B N T (H + 1),
  and 4 B N S H more if K < N.
  """
  return max((
      _workspace(*_shapes(computation, instruction))
      for computation in hlo.parse(text).computations.values()
      for instruction in computation.instructions.values()
      if is_attention(instruction) and _is_backward(instruction)), default=0)


def _workspace(shape_BTNH, shape_BSKH):
  rows, queries, heads, size = shape_BTNH
  _, keys, kv_heads, _ = shape_BSKH
  return 4 * rows * heads * (
      queries * (size + 1) + keys * size * (kv_heads < heads))


def _is_backward(instruction):
  return 'Backward"' in instruction.text


def _shapes(computation, instruction):
  """Returns the shapes of queries and keys, [B, T, N, H] and [B, S, K, H]."""
  return [o.arrays[0].shape for o in computation.operands(instruction)[:2]]
