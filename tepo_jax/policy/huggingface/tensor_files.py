"""Safetensors files: single, or shards with an index; memory-mapped, or read in
ranges of bytes from a bucket.

The format: 8 bytes little-endian length n, n bytes of JSON (name -> dtype,
shape, data_offsets), the tensors' bytes. The safetensors package supports
neither bfloat16 in numpy nor writing in place.
"""

import dataclasses
import json
import math
import mmap
import os
import pathlib
import sys

import ml_dtypes
import numpy as np

from tepo_jax import errors
from tepo_jax.runtime import disk
from tepo_jax.runtime import files
from tepo_jax.runtime import mistaken

_DTYPES = {
    'F64': np.dtype(np.float64), 'F32': np.dtype(np.float32),
    'F16': np.dtype(np.float16), 'BF16': np.dtype(ml_dtypes.bfloat16),
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
SINGLE = 'model.safetensors'
INDEX = 'model.safetensors.index.json'
_MAX_FILE_BYTES = 5 * 10**9


@dataclasses.dataclass(frozen=True)
class RemoteTensor:
  """A tensor in an object of a bucket; `start`: its first byte there."""
  file: files.BucketPath
  start: int
  dtype: np.dtype
  shape: tuple[int, ...]

  @property
  def ndim(self) -> int:
    return len(self.shape)

  @property
  def nbytes(self) -> int:
    return self.dtype.itemsize * math.prod(self.shape)

  def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
    """A slice. Whole rows are read: the range of the first dimension."""
    first, last, _ = index[0].indices(self.shape[0])
    row = self.nbytes // max(self.shape[0], 1)
    data = files.read_range(
        self.file, self.start + first * row, (last - first) * row)
    rows = np.frombuffer(data, self.dtype).reshape(-1, *self.shape[1:])
    return rows[(slice(None), *index[1:])]


Tensor = np.ndarray | RemoteTensor


def open_folder(folder: files.Path) -> dict[str, Tensor]:
  """name -> tensor, not yet read, from a single file or from all shards.

  Raises:
    InputError: names the file or tensor, and the problem.
  """
  if (folder / SINGLE).is_file():
    return _open_file(folder / SINGLE)
  index = folder / INDEX
  if not index.is_file():
    raise errors.InputError(
        f'{folder}: neither {SINGLE} nor {INDEX} (only safetensors are read)'
        f'{_instead(folder / SINGLE)}')
  shard_of = read_index(index)
  tensors = {}
  for shard in sorted(set(shard_of.values())):
    if pathlib.PurePath(shard).name != shard:
      raise errors.InputError(
          f'{index}: names {shard!r}, which is not a file of the folder')
    if not (folder / shard).is_file():
      raise errors.InputError(f'{index}: names {shard}, which is missing')
    found = _open_file(folder / shard)
    if twice := tensors.keys() & found.keys():
      raise errors.InputError(
          f'{folder / shard}: tensor {min(twice)} is also in another file')
    tensors |= found
  for name, shard in shard_of.items():
    if name not in tensors:
      raise errors.InputError(f'{folder / shard}: tensor {name} is missing')
  return tensors


def read_index(file: files.Path) -> dict[str, str]:
  """name of a tensor -> its file, of a folder's INDEX; or InputError."""
  shard_of = read_json(file).get('weight_map')
  if not isinstance(shard_of, dict) or not all(
      isinstance(shard, str) for shard in shard_of.values()):
    raise errors.InputError(f'{file}: weight_map is not a map to file names')
  return shard_of


def create(folder: pathlib.Path, entries) -> dict[str, np.ndarray]:
  """New files of at most 5 GB in an existing folder: one, or shards and index.

  `entries` are (name, dtype, shape) in the order of the files. Returns name ->
  writable mapped array.
  """
  parts = _split(entries)
  places, shard_of = {}, {}
  for number, part in enumerate(parts, 1):
    file = SINGLE if len(parts) == 1 else (
        f'model-{number:05d}-of-{len(parts):05d}.safetensors')
    places |= create_file(folder / file, part)
    shard_of |= {name: file for name, _, _ in part}
  if len(parts) > 1:
    total = sum(place.nbytes for place in places.values())
    write_json(folder / INDEX, {
        'metadata': {'total_size': total}, 'weight_map': shard_of})
  return places


def forget(tensor: Tensor) -> None:
  """Releases the resident pages of a mapped tensor's file.

  Pages that were read or written count as this process's memory until then.
  """
  if isinstance(tensor, RemoteTensor):
    return
  while not isinstance(tensor, mmap.mmap):
    tensor = tensor.base
  tensor.madvise(mmap.MADV_DONTNEED)


def read_json(file: files.Path) -> dict:
  """The object in a JSON file; raises InputError if there is none."""
  if not file.is_file():
    raise errors.InputError(f'{file}: missing{_instead(file)}')
  try:
    # As transformers reads it: not in UTF-16, without a byte order mark.
    content = json.loads(file.read_bytes().decode('utf-8'))
  except (ValueError, RecursionError) as error:
    raise errors.InputError(
        f'{file}: not JSON ({error}){mistaken.hint(file)}') from error
  if not isinstance(content, dict):
    raise errors.InputError(f'{file}: not a JSON object')
  return content


def _instead(file):
  """What is there in place of a file of a model folder."""
  if file.is_symlink():
    return '; it is a link to nothing'
  if file.is_dir():
    return f'; {file.name} is a folder'
  if (file.parent / 'adapter_config.json').is_file():
    return ('; the folder holds an adapter: merge it into its base model, with '
            'merge_and_unload of peft')
  if below := files.below(file.parent, file.name):
    return f'; did you mean {below[0].parent}?'
  return ''


def write_json(file: pathlib.Path, content: dict):
  """Writes JSON in transformers' format: indented, sorted."""
  with disk.naming(file):
    file.write_text(json.dumps(content, indent=2, sort_keys=True) + '\n')


def _open_file(file):
  size = file.stat().st_size
  length = int.from_bytes(files.read_range(file, 0, 8), 'little')
  if size < 8 or length > size - 8:
    raise errors.InputError(
        f'{file}: truncated or not safetensors ({size} bytes)'
        f'{mistaken.hint(file)}')
  try:
    header = json.loads(files.read_range(file, 8, length))
    header.pop('__metadata__', None)
    entries = {name: _entry(entry) for name, entry in header.items()}
  except (ValueError, KeyError, TypeError, AttributeError,
          RecursionError) as error:
    raise errors.InputError(f'{file}: bad safetensors header') from error
  start = 8 + length
  ranges = sorted(entry[2:] for entry in entries.values())
  # Each tensor begins where the one before it ends, and the file ends the last.
  if [*(begin for begin, _ in ranges), size - start] != [
      0, *(end for _, end in ranges)]:
    raise errors.InputError(
        f'{file}: truncated or corrupt: the tensors of its header do not take '
        f'each of its {size} bytes once')
  if files.is_remote(file):
    return {name: RemoteTensor(
        file, start + entry[2], _dtype(entry, f'{file}: tensor {name}'),
        entry[1]) for name, entry in entries.items()}
  data = np.memmap(file, np.uint8, 'r')[start:]
  return {
      name: _view(data, entry, f'{file}: tensor {name}')
      for name, entry in entries.items()}


def _entry(entry):
  """(dtype name, shape, begin, end) of one header entry."""
  begin, end = entry['data_offsets']
  shape = tuple(entry['shape'])
  if not all(type(n) is int and n >= 0 for n in (*shape, begin, end)):
    raise ValueError(entry)
  return entry['dtype'], shape, begin, end


def _view(data, entry, where):
  dtype = _dtype(entry, where)
  _, shape, begin, end = entry
  return data[begin:end].view(dtype).reshape(shape)


def _dtype(entry, where):
  """The dtype of an entry, after a check of its size."""
  kind, shape, begin, end = entry
  if kind not in _DTYPES:
    raise errors.InputError(f'{where} is {kind}, not one of {list(_DTYPES)}')
  dtype = _DTYPES[kind]
  if end - begin != dtype.itemsize * math.prod(shape):
    raise errors.InputError(
        f'{where}: {end - begin} bytes for {kind} {list(shape)}')
  return dtype


def _split(entries):
  """Groups the entries into files within the limit, or of one tensor."""
  parts, capacity = [], 0
  for name, dtype, shape in entries:
    size = math.prod(shape) * dtype.itemsize
    if not parts or size > capacity:
      parts.append([])
      capacity = _MAX_FILE_BYTES
    parts[-1].append((name, dtype, shape))
    capacity -= size
  return parts


def create_file(file: pathlib.Path, entries) -> dict[str, np.ndarray]:
  """As `create`, for one file of any size."""
  header, end = {'__metadata__': {'format': 'pt'}}, 0
  for name, dtype, shape in entries:
    begin, end = end, end + math.prod(shape) * dtype.itemsize
    header[name] = {'dtype': _NAMES[dtype], 'shape': list(shape),
                    'data_offsets': [begin, end]}
  text = json.dumps(header).encode()
  text += b' ' * (-len(text) % 8)
  with disk.naming(file), file.open('wb') as stream:
    stream.write(len(text).to_bytes(8, 'little') + text)
    stream.flush()
    if sys.platform == 'linux':
      # Writing to a mapped page for which the disk has no space is a SIGBUS.
      os.posix_fallocate(stream.fileno(), 0, 8 + len(text) + end)
    stream.truncate(8 + len(text) + end)
  data = np.memmap(file, np.uint8, 'r+')[8 + len(text):]
  return {
      name: _view(data, _entry(header[name]), name) for name, _, _ in entries}
