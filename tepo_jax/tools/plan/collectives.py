"""Collectives in a compiled program's text: what they send, and among whom."""

import math
import re

import numpy as np

from tepo_jax.tools.plan import hlo
from tepo_jax.tools.plan import timeline

KINDS = ('all-gather', 'all-reduce', 'reduce-scatter', 'all-to-all',
         'collective-permute')


def transfers(module: hlo.Module, instruction: hlo.Instruction) -> tuple[
    list[timeline.Send], list[timeline.Wait], tuple[str, ...]]:
  """Returns the transfers that an instruction, possibly a fusion, starts, ends
  and carries.

  An all-reduce of which a fusion returns only each chip's slice is a TPU's
  reduce-scatter. A TPU's collective that spans several fusions is in each of
  them, with the number of its chain.
  """
  sends, waits, carries = [], [], []
  inside, found = None, [instruction]
  if instruction.opcode == 'fusion':
    inside = module.computations[instruction.attribute('calls')]
    found = inside.instructions.values()
  elif instruction.opcode.endswith('-done'):
    waits.append(timeline.Wait(instruction.operands[0]))
  for i in found:
    if i.opcode.removesuffix('-start') not in KINDS:
      continue
    kind, size = _sent(i)
    users = inside.users[i.name] if inside else ()
    if kind == 'all-reduce' and {u.opcode for u in users} == {'dynamic-slice'}:
      kind, size = 'reduce-scatter', size / 2
    chain = re.search(r'chain_id="(\d+)"', i.text)
    calls = {u.target for u in users}
    if not chain or 'AsyncCollectiveStart' in calls:
      sends.append(timeline.Send(
          kind, size, chain[0] if chain else
          i.name if i.opcode.endswith('-start') else '',
          fused=bool(chain), direction=_direction(i),
          groups=groups(i.text)))
    elif 'AsyncCollectiveDone' in calls:
      waits.append(timeline.Wait(chain[0]))
    else:
      carries.append(chain[0])
  return sends, waits, tuple(carries)


def _direction(instruction):
  """Returns the direction of a permutation of a ring: 1 if most chips send to
  one of a higher number, −1 if to a lower one; 0 of other collectives."""
  pairs = re.search(r'source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}',
                    instruction.text)
  if not pairs:
    return 0
  up = [int(b) > int(a) for a, b in re.findall(r'(\d+),(\d+)', pairs[1])]
  return 1 if 2 * sum(up) >= len(up) else -1


def _sent(instruction):
  """Returns the kind, and s (n − 1)/n bytes for s bytes on a ring of n chips;
  an all-reduce sends twice as much."""
  kind = instruction.opcode.removesuffix('-start')
  sizes = [a.bytes for a in instruction.arrays]
  if kind == 'collective-permute':
    return kind, float(max(sizes))
  if instruction.opcode.endswith('-start'):
    # It returns operands and results; that of an all-reduce, only results.
    sizes = sizes[len(instruction.operands):] or sizes
  size = sum(sizes)
  chips = len(groups(instruction.text)[0])
  if kind == 'reduce-scatter':
    size *= chips
  share = (chips - 1) / chips
  return kind, size * share * (2 if kind == 'all-reduce' else 1)


def groups(text: str) -> tuple[tuple[int, ...], ...]:
  """Returns the groups of chips of a collective, in any of HLO's three
  notations; none for a permutation."""
  if found := re.search(r'replica_groups=\{(\{[\d,{}]+\})\}', text):
    return tuple(tuple(map(int, group.split(',')))
                 for group in re.findall(r'\{([\d,]+)\}', found[1]))
  if found := re.search(r'replica_groups=\[(\d+),(\d+)\]<=(\S+)', text):
    return _tuples(_ids(found[3]).reshape(int(found[1]), -1))
  found = re.search(
      r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\((\S+)\))?"
      r'[^{]*\{([^}]*)\}', text)
  if not found:
    return ()
  axes = {name: int(size) for name, size in re.findall(
      r"'([^']+)'=(\d+)", found[1])}
  shape, ours = [], []  # the axes, cut into parts; places of the groups' parts
  for axis, size in axes.items():
    done = 1
    for outer, part in sorted(
        (int(outer or 1), int(part or size))
        for name, outer, part in re.findall(
            r"'([^']+)'(?::\((\d+)\)(\d+))?", found[3]) if name == axis):
      shape += [outer // done, part]
      ours.append(len(shape) - 1)
      done = outer * part
    shape.append(size // done)
  ids = _ids(found[2] or f'[{math.prod(shape)}]').reshape(shape)
  ids = np.moveaxis(ids, ours, range(-len(ours), 0))
  return _tuples(ids.reshape(-1, math.prod(shape[i] for i in ours)))


def _tuples(ids):
  return tuple(map(tuple, ids.tolist()))


def _ids(text):
  """Returns the chips of `[4,4]T(1,0)`, in that order."""
  shape, order = re.match(
      r'\[([\d,]+)\](?:T\(([\d,]+)\))?', text).groups()
  shape = [int(size) for size in shape.split(',')]
  ids = np.arange(math.prod(shape)).reshape(shape)
  return ids.transpose([int(i) for i in order.split(',')] if order else None)
