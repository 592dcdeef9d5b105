"""Parses the parts of a compiled program's text that determine its costs.

The text is an optimised, scheduled, partitioned HLO module, for one chip.
https://openxla.org/xla/operation_semantics
"""

import collections
import dataclasses
import functools
import math
import re

_BITS = {'pred': 8, 'bf16': 16, 's4': 4, 'u4': 4}

_ARRAY = re.compile(r'(pred|bf16|[a-z]\d\w*)\[([\d,]*)\](?:\{([^}]*)\})?')
_SPACE = re.compile(r'S\((\d+)\)')
_HEADER = re.compile(r'(ENTRY )?%(\S+) \(.*\{$')
_LINE = re.compile(r'  (ROOT )?%(\S+) = (.*)$')
_OPCODE = re.compile(r'([a-z][\w-]*)\(')
_OPERAND = re.compile(r'%([\w.-]+)')


@dataclasses.dataclass(frozen=True)
class Array:
  """An array in the text. in_hbm: not in a chip's smaller memories."""
  dtype: str
  shape: tuple[int, ...]
  in_hbm: bool

  @property
  def bytes(self) -> int:
    bits = _BITS.get(self.dtype) or int(re.search(r'\d+', self.dtype)[0])
    return math.prod(self.shape) * bits // 8


@dataclasses.dataclass(frozen=True)
class Instruction:
  """name = arrays opcode(operands), attributes; a tuple has several arrays."""
  name: str
  arrays: tuple[Array, ...]
  opcode: str
  operands: tuple[str, ...]
  text: str  # operands, with their parentheses, and attributes

  def attribute(self, name: str) -> str | None:
    """Returns the word after `name=`, without a leading %."""
    found = re.search(rf'[ ,]{name}=%?([^\s,}}]+)', self.text)
    return found and found[1]

  @property
  def target(self) -> str:
    """What a custom call calls; else ''."""
    return (self.attribute('custom_call_target') or '').strip('"')

  @property
  def number(self) -> int:
    """A parameter's number; the value of an integer constant."""
    return int(self.text[1:self.text.index(')')])

  @property
  def hbm_bytes(self) -> int:
    """Bytes of its arrays in the chip's main memory."""
    return sum(a.bytes for a in self.arrays if a.in_hbm)


@dataclasses.dataclass(frozen=True)
class Computation:
  """Instructions by name, in order; root: the name of the result."""
  instructions: dict[str, Instruction]
  root: str

  @property
  def result(self) -> Instruction:
    return self.instructions[self.root]

  @functools.cached_property
  def users(self) -> dict[str, list[Instruction]]:
    """For each name, the instructions that take it as an operand."""
    users = collections.defaultdict(list)
    for instruction in self.instructions.values():
      for operand in instruction.operands:
        users[operand].append(instruction)
    return users

  @functools.cached_property
  def parameters(self) -> dict[int, Instruction]:
    """Parameters by number."""
    return {i.number: i for i in self.instructions.values()
            if i.opcode == 'parameter'}

  def operands(self, instruction: Instruction) -> list[Instruction]:
    return [self.instructions[name] for name in instruction.operands]

  def origin(self, name: str) -> Instruction:
    """Finds the source of a value through copies and reshapes."""
    instruction = self.instructions[name]
    while instruction.opcode in ('bitcast', 'copy', 'reshape', 'convert'):
      instruction = self.instructions[instruction.operands[0]]
    return instruction


@dataclasses.dataclass(frozen=True)
class Module:
  """Computations by name; entry: the name of the one that runs."""
  computations: dict[str, Computation]
  entry: str


def parse(text: str) -> Module:
  """Parses `compiled.as_text()`."""
  computations, entry = {}, None
  name, instructions, root, last = None, {}, None, None
  for line in text.splitlines():
    if header := _HEADER.match(line):
      name, instructions, root = header[2], {}, None
      entry = name if header[1] else entry
    elif found := _LINE.match(line):
      last = found[2]
      instructions[last] = _instruction(last, found[3])
      root = last if found[1] else root
    elif re.match(r'\}(?!\})', line):
      computations[name] = Computation(instructions, root)
    elif line.strip() and last in instructions:  # a kernel's metadata has lines
      instructions[last] = dataclasses.replace(
          instructions[last], text=instructions[last].text + line)
  return Module(computations, entry)


def _instruction(name, rest):
  end = _end_of_group(rest) if rest[0] == '(' else rest.index(' ')
  shape, rest = rest[:end], rest[end:].lstrip()
  opcode = _OPCODE.match(rest)[1]
  text = rest[len(opcode):]
  operands = _OPERAND.findall(text[:_end_of_group(text)])
  arrays = []
  for dtype, sizes, layout in _ARRAY.findall(shape):
    space = _SPACE.search(layout)
    arrays.append(Array(dtype, tuple(int(n) for n in sizes.split(',') if n),
                        in_hbm=space is None or space[1] == '0'))
  return Instruction(name, tuple(arrays), opcode, tuple(operands), text)


def _end_of_group(text):
  """Returns the index after the parenthesis that closes the first character."""
  depth = 0
  for place, character in enumerate(text):
    depth += (character == '(') - (character == ')')
    if not depth:
      return place + 1
  raise ValueError(f'no closing parenthesis: {text[:80]}')
