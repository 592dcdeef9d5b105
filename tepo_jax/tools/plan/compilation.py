"""Compiles the programs of a plan, and keeps what the plan reads of them.

A program's text and memory are kept on disk under a digest of all that they
depend on, so that a second plan of the same programs compiles nothing.
"""

from collections.abc import Iterator
import contextlib
import dataclasses
import gzip
import hashlib
from importlib import metadata
import json
import os
import pathlib
import re
import threading
import time
import zlib

import jax

from tepo_jax import errors
from tepo_jax.job import memory as memory_lib
from tepo_jax.runtime import files
from tepo_jax.runtime import host
from tepo_jax.tools.plan import chips

# Packages that make a platform's programs; those of GPUs are found only once
# `gpus` has loaded them.
_COMPILERS = {'cpu': ('jaxlib',), 'tpu': ('jaxlib', 'libtpu'),
              'gpu': ('jaxlib', 'jax-cuda12-pjrt', 'nvidia-cuda-nvcc-cu12')}
_FLAGS = ('XLA_FLAGS', 'LIBTPU_INIT_ARGS')
_FORMAT = 3  # of the files; increase it when `Compiled` changes its meaning
_EVERY = 30  # seconds between two lines about a compilation


@dataclasses.dataclass(frozen=True)
class Compiled:
  """What a plan reads of a compiled program.

  text: of its optimised module. memory: `memory.ProgramBytes`. seconds: of its
  compilation. failure: the compiler's message if the program does not fit; then
  the rest is empty.
  """
  text: str = ''
  memory: memory_lib.ProgramBytes = memory_lib.ProgramBytes(0, 0, 0, 0)
  seconds: float = 0.0
  failure: str | None = None


def compiled(name: str, lowered: jax.stages.Lowered, slice_: chips.Slice
             ) -> Compiled:
  """Compiles a program for a slice, or reads what is known of it.

  name: for the lines that report how long it takes. slice_: in the order of the
  program's mesh.
  """
  if not slice_.is_here:
    path = folder() / f'{_digest(lowered, slice_)}.json.gz'
    if (found := _read(path)) is not None:
      errors.note(f'{name}: compiled before, in {found.seconds:.0f} s')
      return found
  start = time.perf_counter()
  with _reporting(name):
    found = _compile(lowered, slice_)
  found = dataclasses.replace(found, seconds=time.perf_counter() - start)
  errors.note(f'{name}: compiled in {found.seconds:.0f} s')
  if not slice_.is_here:
    _write(path, found)
  return found


def folder() -> pathlib.Path:
  """Where programs are kept; may be deleted at any time."""
  return host.cache_folder() / 'plans'


def _digest(lowered, slice_):
  versions = []
  for package in _COMPILERS[slice_.devices[0].platform]:
    with contextlib.suppress(metadata.PackageNotFoundError):
      versions.append(f'{package} {metadata.version(package)}')
  # jax does not show the options that a function was jitted with.
  options = lowered._lowering._compiler_options_kvs  # pylint: disable=protected-access
  places = [str(getattr(d, 'coords', d.id)) for d in slice_.devices]
  digest = hashlib.sha256(json.dumps([
      _FORMAT, versions, [os.environ.get(name) for name in _FLAGS],
      slice_.name, slice_.target, sorted(slice_.options.items()),
      sorted(options), places], default=str).encode())
  digest.update(lowered.as_text().encode())
  return digest.hexdigest()


def _compile(lowered, slice_):
  try:
    program = lowered.compile(slice_.options)
  except jax.errors.JaxRuntimeError as error:
    if 'RESOURCE_EXHAUSTED' not in str(error):
      raise
    return Compiled(failure=_reason(error))
  return Compiled(program.as_text(), memory_lib.program_bytes(
      program, slice_.devices[0].platform))


def _reason(error):
  """Extracts the compiler's numbers: '… 20.1G … exceeds … (15.75G)'."""
  text = ' '.join(str(error).split())
  found = re.search(r'(Ran out of memory|Used \S+ of|total memory required).*?'
                    r'(hbm|HBM)[^.]*(\.\d+\w+[^.]*)*\.', text)
  return found[0] if found else text[:300]


def _read(path):
  """The program at `path`; None if there is none, or no readable one."""
  try:
    kept = json.loads(gzip.decompress(path.read_bytes()))
    return Compiled(**kept | {
        'memory': memory_lib.ProgramBytes(*kept['memory'])})
  except (OSError, EOFError, KeyError, ValueError, TypeError, zlib.error):
    return None


def _write(path, program):
  """Keeps the program. A full or read-only disk costs only the next plan's
  time."""
  data = gzip.compress(json.dumps(dataclasses.asdict(program)).encode())
  with contextlib.suppress(OSError):
    path.parent.mkdir(parents=True, exist_ok=True)
    with files.replacing(path, is_shared=True) as new:
      new.write_bytes(data)


@contextlib.contextmanager
def _reporting(name: str) -> Iterator[None]:
  """Says every _EVERY seconds how long a compilation has taken."""
  ended, start = threading.Event(), time.perf_counter()

  def report():
    while not ended.wait(_EVERY):
      errors.note(f'{name}: compiling, {time.perf_counter() - start:.0f} s')

  thread = threading.Thread(target=report, daemon=True)
  thread.start()
  try:
    yield
  finally:
    ended.set()
    thread.join()
