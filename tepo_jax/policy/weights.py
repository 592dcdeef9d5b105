"""Hugging Face folders <-> params: config.json, safetensors, tokenizer.

`TABLE` declares each weight once. Loading reads only what each device holds,
from memory-mapped files, one stacked tensor at a time; saving gathers one
stacked tensor at a time and appears under its name only when complete.

The safetensors format, read and written here because its numpy reader knows
no bfloat16: 8 bytes little-endian length n, n bytes of JSON (name -> dtype,
shape, data_offsets), the tensors' bytes.
"""

import json
import math
import os
import pathlib
import shutil

import jax
import ml_dtypes
import numpy as np
import tqdm
import transformers

from tepo_jax import errors
from tepo_jax.policy import families
from tepo_jax.policy import transformer
from tepo_jax.runtime import mesh as mesh_lib

# Hugging Face name, our path, whether theirs is [out, in] and ours [in, out].
TABLE = (
    ('model.embed_tokens.weight', 'embed/embedding', False),
    ('model.layers.{}.input_layernorm.weight',
     'layers/attention_norm/scale', False),
    ('model.layers.{}.self_attn.q_proj.weight', 'layers/q/kernel', True),
    ('model.layers.{}.self_attn.q_proj.bias', 'layers/q/bias', False),
    ('model.layers.{}.self_attn.k_proj.weight', 'layers/k/kernel', True),
    ('model.layers.{}.self_attn.k_proj.bias', 'layers/k/bias', False),
    ('model.layers.{}.self_attn.v_proj.weight', 'layers/v/kernel', True),
    ('model.layers.{}.self_attn.v_proj.bias', 'layers/v/bias', False),
    ('model.layers.{}.self_attn.o_proj.weight', 'layers/o/kernel', True),
    ('model.layers.{}.self_attn.q_norm.weight', 'layers/q_norm/scale', False),
    ('model.layers.{}.self_attn.k_norm.weight', 'layers/k_norm/scale', False),
    ('model.layers.{}.post_attention_layernorm.weight',
     'layers/mlp_norm/scale', False),
    ('model.layers.{}.mlp.gate_proj.weight', 'layers/gate/kernel', True),
    ('model.layers.{}.mlp.up_proj.weight', 'layers/up/kernel', True),
    ('model.layers.{}.mlp.down_proj.weight', 'layers/down/kernel', True),
    ('model.norm.weight', 'final_norm/scale', False),
    ('lm_head.weight', 'head/kernel', True),
)

_DTYPES = {
    'F64': np.dtype(np.float64), 'F32': np.dtype(np.float32),
    'F16': np.dtype(np.float16), 'BF16': np.dtype(ml_dtypes.bfloat16),
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_CONFIG = 'config.json'
_SINGLE = 'model.safetensors'
_INDEX = 'model.safetensors.index.json'
_MAX_SHARD_BYTES = 5 * 10**9
_PROGRESS_BYTES = 10**9
_TOKENIZER_FILES = (
    'tokenizer.json', 'tokenizer_config.json', 'tokenizer.model',
    'special_tokens_map.json', 'added_tokens.json', 'vocab.json', 'merges.txt',
    'chat_template.jinja', 'chat_template.json', 'generation_config.json')


def read_config(directory) -> transformer.ModelConfig:
  """The ModelConfig of a Hugging Face folder's config.json.

  Raises:
    InputError: no folder, no or no JSON config.json, unsupported.
  """
  file = _folder(directory) / _CONFIG
  return families.from_json(_read_json(file), str(file))


def load(directory, dtype, mesh=None):
  """(ModelConfig, params) of a Hugging Face folder.

  Args:
    directory: config.json with model.safetensors, or with shards and
      model.safetensors.index.json.
    dtype: of the params, whatever the files hold.
    mesh: None: everything on the default device. Else each device reads its
      slices under `mesh_lib.RULES`.

  Raises:
    InputError: the file or tensor, and what is wrong with it.
  """
  config = read_config(directory)
  tensors = _open_folder(_folder(directory))
  abstract = transformer.abstract_params(config, dtype)
  rows = _rows(abstract)
  _check(directory, tensors, rows, config)
  if mesh is None:
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shardings = jax.tree.map(lambda _: device, abstract)
  else:
    axes = transformer.logical_axes(config)
    mesh_lib.check(mesh, axes, abstract)
    shardings = mesh_lib.shardings(mesh, axes)
  shardings = dict(_leaves(shardings))
  params = {}
  total = sum(tensor.nbytes for tensor in tensors.values())
  for path, (leaf, names, transpose) in tqdm.tqdm(
      rows.items(), desc=f'loading {directory}', unit='tensor',
      disable=total < _PROGRESS_BYTES):
    sources = [tensors[name] for name in names]
    *parents, last = path.split('/')
    node = params
    for parent in parents:
      node = node.setdefault(parent, {})
    node[last] = _read(sources, leaf, transpose, shardings[path])
  return config, params


def _rows(abstract):
  """path -> (leaf, its names in the files, transpose), from the TABLE."""
  leaves = dict(_leaves(abstract))
  rows = {}
  for name, path, transpose in TABLE:
    if path in leaves:
      leaf = leaves.pop(path)
      layers = leaf.shape[0] if '{}' in name else 1
      rows[path] = (leaf, [name.format(i) for i in range(layers)], transpose)
  if leaves:
    raise ValueError(f'no row of TABLE for {sorted(leaves)}')
  return rows


def _leaves(tree):
  """(path, leaf) pairs; a path is 'layers/q/kernel'."""
  return [
      ('/'.join(key.key for key in keys), leaf)
      for keys, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]]


def _is_stacked(path):
  return path.startswith('layers/')


def _file_shape(path, leaf, transpose):
  """The shape of one tensor of a row in the files."""
  shape = leaf.shape[1:] if _is_stacked(path) else leaf.shape
  return shape[::-1] if transpose else shape


def _check(directory, tensors, rows, config):
  """Refuses missing, misshapen and unexpected tensors, each by name."""
  expected = set()
  for path, (leaf, names, transpose) in rows.items():
    shape = _file_shape(path, leaf, transpose)
    for name in names:
      if name not in tensors:
        raise errors.InputError(f'{directory}: tensor {name} is missing')
      if tensors[name].shape != shape:
        raise errors.InputError(
            f'{directory}: tensor {name} has shape '
            f'{list(tensors[name].shape)}, expected {list(shape)}')
    expected.update(names)
  # Older exports hold the rotary frequencies; tied ones may hold the head.
  extra = sorted(
      name for name in set(tensors) - expected
      if not name.endswith('rotary_emb.inv_freq')
      and not (config.tie_embeddings and name == 'lm_head.weight'))
  if extra:
    raise errors.InputError(
        f'{directory}: {len(extra)} unexpected tensors, such as {extra[0]}')


def _read(sources, leaf, transpose, sharding):
  """One leaf, each device's slice copied out of the mapped files."""
  slices = {}  # Replicas ask for the same slice one after another.

  def read(index):
    key = str(index)
    if key not in slices:
      slices[key] = _slice(sources, leaf, transpose, index)
    return slices[key]

  return jax.make_array_from_callback(leaf.shape, sharding, read)


def _slice(sources, leaf, transpose, index):
  stacked = len(leaf.shape) > sources[0].ndim
  layers, inner = (index[0], index[1:]) if stacked else (slice(0, 1), index)
  chosen = sources[layers]
  views = (
      source.T[inner] if transpose else source[inner] for source in chosen)
  first = next(views)
  out = np.empty((len(chosen), *first.shape), leaf.dtype)
  out[0] = first
  for i, view in enumerate(views, 1):
    out[i] = view
  return out if stacked else out[0]


def _folder(directory) -> pathlib.Path:
  folder = pathlib.Path(directory)
  if not folder.is_dir():
    raise errors.InputError(f'{directory}: no such model folder')
  return folder


def _read_json(file: pathlib.Path) -> dict:
  if not file.is_file():
    raise errors.InputError(f'{file}: missing')
  try:
    content = json.loads(file.read_bytes())
  except ValueError as error:
    raise errors.InputError(f'{file}: not JSON ({error})') from error
  if not isinstance(content, dict):
    raise errors.InputError(f'{file}: not a JSON object')
  return content


def _open_folder(folder: pathlib.Path) -> dict[str, np.ndarray]:
  """name -> mapped tensor, of the single file or of every shard."""
  if (folder / _SINGLE).is_file():
    return _open_file(folder / _SINGLE)
  index = folder / _INDEX
  if not index.is_file():
    raise errors.InputError(
        f'{folder}: neither {_SINGLE} nor {_INDEX} (only safetensors are read)')
  shard_of = _read_json(index).get('weight_map')
  if not isinstance(shard_of, dict):
    raise errors.InputError(f'{index}: no weight_map')
  tensors = {}
  for shard in sorted(set(shard_of.values())):
    if not (folder / shard).is_file():
      raise errors.InputError(f'{index}: names {shard}, which is missing')
    tensors |= _open_file(folder / shard)
  for name, shard in shard_of.items():
    if name not in tensors:
      raise errors.InputError(f'{folder / shard}: tensor {name} is missing')
  return tensors


def _open_file(file: pathlib.Path) -> dict[str, np.ndarray]:
  """name -> memory-mapped tensor of one safetensors file."""
  size = file.stat().st_size
  with file.open('rb') as stream:
    length = int.from_bytes(stream.read(8), 'little')
    if size < 8 or length > size - 8:
      raise errors.InputError(
          f'{file}: truncated or not safetensors ({size} bytes)')
    try:
      header = json.loads(stream.read(length))
      header.pop('__metadata__', None)
      entries = {
          name: (entry['dtype'], tuple(entry['shape']), *entry['data_offsets'])
          for name, entry in header.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
      raise errors.InputError(f'{file}: bad safetensors header') from error
  start = 8 + length
  end = start + max((entry[3] for entry in entries.values()), default=0)
  if size != end:
    raise errors.InputError(
        f'{file}: truncated or corrupt: {size} bytes, its header says {end}')
  data = np.memmap(file, np.uint8, 'r')[start:] if entries else None
  return {
      name: _view(data, entry, f'{file}: tensor {name}')
      for name, entry in entries.items()}


def _view(data, entry, where):
  kind, shape, begin, end = entry
  if kind not in _DTYPES:
    raise errors.InputError(f'{where} is {kind}, not one of {list(_DTYPES)}')
  dtype = _DTYPES[kind]
  if not 0 <= begin <= end or end - begin != dtype.itemsize * math.prod(shape):
    raise errors.InputError(
        f'{where}: {end - begin} bytes for {kind} {list(shape)}')
  return data[begin:end].view(dtype).reshape(shape)


def save(directory, config: transformer.ModelConfig, params, source=None):
  """Writes a Hugging Face folder that transformers loads.

  Every process of a run calls it (it gathers); the first one writes. The
  folder is a temporary sibling until it is complete.

  Args:
    directory: must not exist, or be empty.
    config: of the model.
    params: float32 or bfloat16, saved as they are; may be sharded.
    source: a folder whose tokenizer, generation_config and the other fields
      of its config.json, where it has one, are taken over.

  Raises:
    InputError: the directory is in use, or no architecture fits the config.
  """
  directory = pathlib.Path(directory)
  if directory.exists() and (
      not directory.is_dir() or any(directory.iterdir())):
    raise errors.InputError(f'{directory}: exists and is not empty')
  leaves = dict(_leaves(params))
  rows = _rows(params)
  dtype = np.dtype(leaves['embed/embedding'].dtype)
  old = None
  if source is not None and (_folder(source) / _CONFIG).is_file():
    old = _read_json(_folder(source) / _CONFIG)
  raw = families.to_json(config, dtype.name, old)
  partial = directory.with_name(f'.{directory.name}.partial-{os.getpid()}')
  if jax.process_index() == 0:
    partial.mkdir(parents=True)
  try:
    _write_tensors(partial, rows)
    if jax.process_index() == 0:
      _write_json(partial / _CONFIG, raw)
      for name in _TOKENIZER_FILES if source is not None else ():
        if (pathlib.Path(source) / name).is_file():
          shutil.copyfile(pathlib.Path(source) / name, partial / name)
      os.replace(partial, directory)
  finally:
    shutil.rmtree(partial, ignore_errors=True)


def _write_tensors(folder, rows):
  """The files, laid out first and then filled one stacked tensor at a time."""
  layout = _layout(rows)
  writer = jax.process_index() == 0
  if writer:
    places = _create_files(folder, layout)
  for path, (leaf, names, transpose) in rows.items():
    array = mesh_lib.to_host(leaf)
    if writer:
      slices = array if _is_stacked(path) else array[None]
      for name, tensor in zip(names, slices):
        places[name][...] = tensor.T if transpose else tensor


def _layout(rows):
  """Files in order, each a list of (name, dtype, shape) of <= 5 GB."""
  files, room = [], 0
  for path, (leaf, names, transpose) in rows.items():
    shape, dtype = _file_shape(path, leaf, transpose), np.dtype(leaf.dtype)
    size = math.prod(shape) * dtype.itemsize
    for name in names:
      if not files or size > room:
        files.append([])
        room = _MAX_SHARD_BYTES
      files[-1].append((name, dtype, shape))
      room -= size
  return files


def _create_files(folder, layout):
  """Headers, room and (for several files) the index; name -> mapped room."""
  places, shard_of, total = {}, {}, 0
  for number, entries in enumerate(layout, 1):
    file = _SINGLE
    if len(layout) > 1:
      file = f'model-{number:05d}-of-{len(layout):05d}.safetensors'
    header, begin = {'__metadata__': {'format': 'pt'}}, 0
    for name, dtype, shape in entries:
      end = begin + math.prod(shape) * dtype.itemsize
      header[name] = {'dtype': _NAMES[dtype], 'shape': list(shape),
                      'data_offsets': [begin, end]}
      begin = end
      shard_of[name] = file
    text = json.dumps(header).encode()
    text += b' ' * (-len(text) % 8)
    with (folder / file).open('wb') as stream:
      stream.write(len(text).to_bytes(8, 'little') + text)
      stream.truncate(8 + len(text) + begin)
    data = np.memmap(folder / file, np.uint8, 'r+')[8 + len(text):]
    for name, dtype, shape in entries:
      begin, end = header[name]['data_offsets']
      places[name] = data[begin:end].view(dtype).reshape(shape)
    total += begin
  if len(layout) > 1:
    _write_json(folder / _INDEX, {
        'metadata': {'total_size': total}, 'weight_map': shard_of})
  return places


def _write_json(file, content):
  file.write_text(json.dumps(content, indent=2, sort_keys=True) + '\n')


def load_tokenizer(directory):
  """The folder's tokenizer; never runs code that came with it.

  Raises:
    InputError: no usable tokenizer, or none of its tokens ends a text.
  """
  folder = _folder(directory)
  try:
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        folder, trust_remote_code=False, local_files_only=True)
  except Exception as error:  # transformers raises whatever a parser raised
    reason = str(error).strip().split('\n')[0]
    raise errors.InputError(
        f'{directory}: no usable tokenizer ({reason})') from error
  if tokenizer.eos_token_id is None:
    raise errors.InputError(f'{directory}: the tokenizer has no EOS token')
  return tokenizer


def eos_ids(directory, tokenizer) -> tuple[int, ...]:
  """Every id that ends a completion, sorted.

  The tokenizer's, and those of generation_config.json and config.json: chat
  models name there the end of a turn beside the end of a text.
  """
  ids = {tokenizer.eos_token_id}
  for name in ('generation_config.json', _CONFIG):
    file = _folder(directory) / name
    if file.is_file():
      found = _read_json(file).get('eos_token_id')
      ids.update(found if isinstance(found, list) else [found])
  return tuple(sorted(ids - {None}))
