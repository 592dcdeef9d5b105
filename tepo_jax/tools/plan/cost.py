"""Costs of a compiled program on one chip: arithmetic, memory, communication.

The compiler's own cost analysis counts a loop's body once and ignores
communication. Here the body counts times the loop's trip count; the caller
gives trip counts that only the device knows (those of decoding, of the
microbatches in use, of the scored chunks). `timeline` computes the time that
the schedule takes.

FLOPs are those of matrix products. Bytes are what each instruction reads from
and writes to HBM; a slice of an array counts as the slice.
"""

import collections
from collections.abc import Sequence
import dataclasses
import functools
import itertools
import math
import re

import numpy as np

from tepo_jax.tools.plan import collectives
from tepo_jax.tools.plan import hlo
from tepo_jax.tools.plan import kernels
from tepo_jax.tools.plan import timeline

# These cost nothing, or are counted with their other half.
_FREE = frozenset((
    'parameter', 'constant', 'get-tuple-element', 'tuple', 'bitcast', 'iota',
    'partition-id', 'replica-id', 'after-all', 'opt-barrier', 'domain'))
_FREE_CALLS = frozenset((
    'AllocateBuffer', 'ConcatBitcast', 'AssumeGatherIndicesInBound',
    'AsyncCollectiveStart', 'AsyncCollectiveDone'))
_MEGABYTE = 1e6
_SLICES = ('dynamic-slice', 'slice', 'gather')
_IN_PLACE = {'dynamic-update-slice': 1, 'scatter': -1}  # and their updates
_FORMS = ('bitcast', 'convert', 'copy', 'reshape', 'transpose')


@dataclasses.dataclass
class Cost:
  """Costs of one run of a program on one chip.

  flops: of matrix products. hbm_bytes: read and written.
  wire_bytes, collective_counts: bytes a chip sends and number of runs, by kind
    of collective.
  events: the schedule, for `timeline.seconds`.
  uncounted: custom calls of unknown work on more than a megabyte, by name, and
    the bytes of the arrays of all runs, which are all that is counted of them.
  """
  flops: float = 0.0
  hbm_bytes: float = 0.0
  wire_bytes: collections.Counter = dataclasses.field(
      default_factory=collections.Counter)
  collective_counts: collections.Counter = dataclasses.field(
      default_factory=collections.Counter)
  events: list[timeline.Event] = dataclasses.field(default_factory=list)
  uncounted: collections.Counter = dataclasses.field(
      default_factory=collections.Counter)

  def add(self, other: 'Cost', times: float = 1.0) -> None:
    self.flops += times * other.flops
    self.hbm_bytes += times * other.hbm_bytes
    for name, size in other.uncounted.items():
      self.uncounted[name] += times * size
    for kind, value in other.wire_bytes.items():
      self.wire_bytes[kind] += times * value
      self.collective_counts[kind] += times * other.collective_counts[kind]
    self.events += other.events if times == 1 else [
        timeline.Loop(times, tuple(other.events))]


def of(text: str, open_trips: Sequence[float] = (1.0,),
       columns: float | None = None) -> Cost:
  """Returns the cost of a module's text (`compiled.as_text()`).

  open_trips: trip counts of the loops that do not state theirs, in program
  order, inner loops first; repeated if there are more loops.
  columns: of `kernels.work`.
  """
  module = hlo.parse(text)
  return _Analysis(module, open_trips, columns).computation(module.entry)


class _Analysis:
  """Computes the cost of each of a module's computations once."""

  def __init__(self, module: hlo.Module, open_trips: Sequence[float],
               columns: float | None):
    self._module, self._open_trips = module, itertools.cycle(open_trips)
    self._columns, self._known = columns, {}

  def computation(self, name: str) -> Cost:
    if name not in self._known:
      total = Cost()
      computation = self._module.computations[name]
      for instruction in computation.instructions.values():
        total.add(*self._instruction(computation, instruction))
      self._known[name] = total
    return self._known[name]

  def _instruction(self, computation, instruction):
    """Returns the instruction's cost and how often it runs."""
    opcode = instruction.opcode
    if opcode == 'while':
      return (self.computation(instruction.attribute('body')),
              self._trips(computation, instruction))
    if opcode == 'conditional':
      branches = re.findall(r'%([\w.-]+)', re.search(
          r'(branch_computations=\{[^}]*\}|true_computation=.*)',
          instruction.text)[1])
      costs = [self.computation(b) for b in branches
               if b in self._module.computations]
      return max(costs, key=lambda c: (c.flops, c.hbm_bytes)), 1
    if opcode in ('call', 'call-start', 'async-start'):
      cost = self.computation(instruction.attribute('to_apply')
                              or instruction.attribute('calls'))
      if opcode != 'call' and cost.wire_bytes:  # the network runs it
        cost = dataclasses.replace(cost, events=[
            dataclasses.replace(event, name=instruction.name)
            for event in cost.events if isinstance(event, timeline.Send)])
      return cost, 1
    return self._leaf(computation, instruction), 1

  def _leaf(self, computation, instruction):
    sends, waits, carries = collectives.transfers(
        self._module, instruction)
    work = timeline.Work(self._flops(computation, instruction),
                         self._bytes(computation, instruction), carries)
    # The memory's part of a collective is hidden by the network's.
    works = (work.flops or work.hbm_bytes) and not (
        sends and instruction.opcode != 'fusion')
    cost = Cost(work.flops, work.hbm_bytes,
                events=[*([work] if works else ()), *sends, *waits],
                uncounted=self._uncounted(computation, instruction))
    for send in sends:
      cost.wire_bytes[send.kind] += send.size
      cost.collective_counts[send.kind] += 1
    return cost

  def _uncounted(self, computation, instruction):
    """Names a call of unknown work on more than a megabyte."""
    target = instruction.target
    if (instruction.opcode != 'custom-call' or target in _FREE_CALLS
        or kernels.work(computation, instruction, self._columns) is not None):
      return collections.Counter()
    involved = instruction, *computation.operands(instruction)
    size = sum(a.bytes for i in involved for a in i.arrays)
    name = instruction.name if target == 'tpu_custom_call' else target
    return collections.Counter({name: size} if size > _MEGABYTE else {})

  def _flops(self, computation, instruction) -> float:
    if instruction.opcode == 'convolution':
      return _convolution_flops(computation, instruction)
    if instruction.opcode == 'dot':
      return kernels.dot_flops(computation.operands(instruction), instruction)
    if instruction.opcode == 'custom-call':
      work = kernels.work(computation, instruction, self._columns)
      return work.flops if work else 0.0
    if instruction.opcode == 'fusion':
      inside = self._module.computations[instruction.attribute('calls')]
      return sum(self._flops(inside, i) for i in inside.instructions.values())
    return 0.0

  def _bytes(self, computation, instruction) -> float:
    opcode = instruction.opcode
    if opcode in _FREE or opcode.endswith('-done') or (
        instruction.target in _FREE_CALLS):
      return 0.0
    if opcode == 'fusion':
      return self._fusion_bytes(computation, instruction)
    if opcode.endswith('-start'):  # its first arrays: source and copy
      arrays = instruction.arrays[:2]
      return min(a.bytes for a in arrays) * sum(a.in_hbm for a in arrays)
    if work := kernels.work(computation, instruction, self._columns):
      return work.hbm_bytes
    operands = computation.operands(instruction)
    if opcode in _SLICES:
      return instruction.hbm_bytes + (
          operands[0].hbm_bytes and instruction.arrays[0].bytes)
    if opcode in _IN_PLACE:
      update = operands[_IN_PLACE[opcode]]
      return update.hbm_bytes + (
          operands[0].hbm_bytes and update.arrays[0].bytes)
    return instruction.hbm_bytes + sum(o.hbm_bytes for o in operands)

  def _fusion_bytes(self, computation, instruction):
    inside = self._module.computations[instruction.attribute('calls')]
    read = sum(
        min(self._read(inside, number), operand.hbm_bytes)
        for number, operand in enumerate(computation.operands(instruction))
        if operand.hbm_bytes)
    outputs = [inside.result]
    if inside.result.opcode == 'tuple':
      outputs = inside.operands(inside.result)
    if len(outputs) != len(instruction.arrays):
      return read + instruction.hbm_bytes
    return read + sum(
        _written(inside, output, array)
        for output, array in zip(outputs, instruction.arrays) if array.in_hbm)

  def _read(self, inside: hlo.Computation, number: int) -> float:
    """Returns the bytes that a fused computation reads of a parameter."""
    if _is_result(inside, number):
      return math.inf
    total, queue = 0.0, [inside.parameters[number]]
    while queue:
      source = queue.pop()
      for user in inside.users[source.name]:
        first = user.operands[0] == source.name
        if user.opcode in _FORMS:
          queue.append(user)
        elif user.opcode in _SLICES and first:
          total += user.arrays[0].bytes
        elif user.opcode == 'fusion':
          callee = self._module.computations[user.attribute('calls')]
          places = [place for place, name in enumerate(user.operands)
                    if name == source.name]
          if any(_is_result(callee, place) for place in places):
            queue.append(user)
          else:
            total += sum(self._read(callee, place) for place in places)
        elif user.opcode not in _IN_PLACE or not first:
          return math.inf
    return total

  def _trips(self, computation, loop) -> float:
    """Returns the trip count that the compiler states (for a GPU), or of a loop
    start … n − 1; if n is open, the next of `open_trips`."""
    if known := re.search(r'"known_trip_count":{"n":"(\d+)"}', loop.text):
      return float(known[1])
    condition = self._module.computations[loop.attribute('condition')]
    test = condition.result
    if test.opcode == 'compare' and 'direction=LT' in test.text:
      counter, limit = map(condition.origin, test.operands)
      if limit.opcode == 'constant' and counter.opcode == 'get-tuple-element':
        place = int(counter.attribute('index'))
        step = _step(self._module.computations[loop.attribute('body')], place)
        start = _start(computation, loop, place)
        return math.ceil((limit.number - start) / step)
    return next(self._open_trips)


def _is_result(inside, number):
  """Whether a computation returns parameter `number`, possibly reshaped."""
  root = inside.result
  while root.opcode in _FORMS:
    root = inside.instructions[root.operands[0]]
  return root is inside.parameters[number]


def _step(body, place):
  """Returns by how much a loop's body increases its counter."""
  addition = body.origin(body.result.operands[place])
  if addition.opcode != 'add':
    raise ValueError(f'a loop\'s counter changes by {addition.opcode}')
  return next(o.number for o in map(body.origin, addition.operands)
              if o.opcode == 'constant')


def _start(computation, loop, place):
  values = computation.instructions[loop.operands[0]]
  if values.opcode == 'tuple':
    start = computation.origin(values.operands[place])
    if start.opcode == 'constant':
      return start.number
  return 0


def _written(inside, output, array):
  """Returns the bytes of a fusion's output that it writes: updates of a
  parameter in place, or all of an array that it makes."""
  written = 0
  while output.opcode in (*_FORMS, *_IN_PLACE) and output.opcode != 'transpose':
    if output.opcode in _IN_PLACE:
      update = inside.instructions[output.operands[_IN_PLACE[output.opcode]]]
      written += update.arrays[0].bytes
    output = inside.instructions[output.operands[0]]
  if written and output.opcode == 'parameter':
    return min(written, array.bytes)
  return array.bytes


def _convolution_flops(computation, instruction):
  """Returns 2 · multiplications, as XLA counts: on a TPU, a batched matrix
  product is a convolution whose windows cover one batch entry each."""
  labels = re.match(r'(\w+)_(\w+)->(\w+)', instruction.attribute('dim_labels'))
  lhs, rhs, result = (
      dict(zip(names, i.arrays[0].shape)) for names, i in zip(
          labels.groups(), (*computation.operands(instruction), instruction)))
  spatial = [d for d in labels[1] if d.isdigit()]
  window = _window(instruction.text, len(spatial))
  valid = math.prod(
      _valid_positions(lhs[d], result[d], *window[int(d)]) for d in spatial)
  groups = int(instruction.attribute('batch_group_count') or 1)
  return 2.0 * valid * rhs['i'] * rhs['o'] * lhs['b'] / groups


def _window(text, count):
  """Returns (size, stride, low pad, left and right dilation) by dimension."""
  found = re.search(r'window=\{([^}]*)\}', text)
  fields = dict(re.findall(r'(\w+)=(\S+)', found[1])) if found else {}

  def numbers(name, default):
    return [int(x.split('_')[0]) for x in fields.get(
        name, 'x'.join([default] * count)).split('x') if x]

  return list(zip(numbers('size', '1'), numbers('stride', '1'),
                  numbers('pad', '0'), numbers('lhs_dilate', '1'),
                  numbers('rhs_dilate', '1')))


@functools.cache
def _valid_positions(inputs, outputs, size, stride, low, dilate, rhs_dilate):
  """Counts the pairs of output and window position that read an input."""
  place = (np.arange(outputs)[:, None] * stride
           + np.arange(size) * rhs_dilate - low)
  return int(np.sum((place >= 0) & (place % dilate == 0)
                    & (place // dilate < inputs)))
