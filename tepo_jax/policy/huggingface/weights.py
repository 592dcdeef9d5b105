"""Hugging Face folders <-> params: config.json, safetensors, tokenizer.

`TABLE` declares each weight once. Loading reads only what each device holds,
from memory-mapped files or a bucket, one stacked tensor at a time. Saving
gathers one stacked tensor at a time; the folder is renamed to its name, or
uploaded, when complete.
"""

from collections.abc import Iterator
import contextlib
import dataclasses
import errno
import os
import pathlib
import shutil
import types

from flax import traverse_util
import jax
import numpy as np
import transformers

from tepo_jax import errors
from tepo_jax.policy import padding as padding_lib
from tepo_jax.policy import transformer
from tepo_jax.policy.huggingface import families
from tepo_jax.policy.huggingface import hub
from tepo_jax.policy.huggingface import tensor_files
from tepo_jax.policy.huggingface import tokenizer_checks
from tepo_jax.runtime import disk
from tepo_jax.runtime import files
from tepo_jax.runtime import mesh as mesh_lib
from tepo_jax.runtime import progress

# Hugging Face name, our path, whether to transpose theirs, [out, in].
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

_CONFIG = 'config.json'
_HEAD, _EMBEDDING = 'lm_head.weight', 'model.embed_tokens.weight'
_COMPARED_ROWS = 4096  # at a time
_PROGRESS_BYTES = 10**9  # of files, from which on a progress bar is shown


def model_config(directory) -> transformer.ModelConfig:
  """The ModelConfig of a Hugging Face folder's config.json.

  Raises:
    InputError: no folder, no valid config.json, or an unsupported model.
  """
  file = hub.folder(directory) / _CONFIG
  return families.from_json(tensor_files.read_json(file), str(file))


def saved_dtype(directory) -> str:
  """'bfloat16' if a folder's config.json names it as the weights' dtype, else
  'float32', in which those of every other dtype lose nothing."""
  raw = tensor_files.read_json(hub.folder(directory) / _CONFIG)
  names = raw.get('dtype'), raw.get('torch_dtype')  # of transformers 5, 4
  return 'bfloat16' if 'bfloat16' in names else 'float32'


def load(directory, dtype, mesh=None):
  """(ModelConfig, params) of a Hugging Face folder.

  Args:
    directory: config.json with model.safetensors, or with shards and
      model.safetensors.index.json; or a hub id.
    dtype: of the params, independent of the files' dtype.
    mesh: None: everything on the default device. Else each device reads its
      slices under `mesh_lib.RULES`, and the config and params are those of
      `padding.sharded_over`.

  Raises:
    InputError: names the file or tensor, and the problem.
  """
  config, tensors, rows = _open(directory, dtype, mesh)
  if mesh is None:
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shardings = dict.fromkeys(rows, device)
  else:
    shardings = traverse_util.flatten_dict(
        mesh_lib.shardings(mesh, transformer.logical_axes(config)), sep='/')
  params = {}
  total = sum(tensor.nbytes for tensor in tensors.values())
  for path, (leaf, names, transpose) in (
      progress.track(rows.items(), f'loading {directory}', len(rows))
      if total >= _PROGRESS_BYTES else rows.items()):
    sources = [tensors[name] for name in names]
    params[path] = _read(sources, leaf, transpose, shardings[path])
  return config, traverse_util.unflatten_dict(params, sep='/')


def check(directory, mesh) -> None:
  """Raises the errors of `load`; reads only the files' headers, and a head that
  should equal the embedding."""
  _open(directory, 'float32', mesh)


def _open(directory, dtype, mesh):
  """The config, mapped tensors, and `_rows` of a folder, all checked."""
  config = model_config(directory)
  tensors = tensor_files.open_folder(hub.folder(directory))
  rows = _rows(transformer.abstract_params(config, dtype))
  _check(directory, tensors, rows, config)
  if mesh is not None:
    config = check_mesh(config, mesh)
    rows = _rows(transformer.abstract_params(config, dtype))
  return config, tensors, rows


def check_mesh(config: transformer.ModelConfig, mesh: jax.sharding.Mesh
               ) -> transformer.ModelConfig:
  """`padding.sharded_over` the mesh, if that divides the weights' dimensions;
  else raises InputError."""
  config = padding_lib.sharded_over(config, mesh.shape['tensor'])
  mesh_lib.check(mesh, transformer.logical_axes(config),
                 transformer.abstract_params(config))
  return config


def _rows(abstract):
  """path -> (leaf, its names in the files, transpose), from the TABLE."""
  leaves = traverse_util.flatten_dict(abstract, sep='/')
  rows = {}
  for name, path, transpose in TABLE:
    if path in leaves:
      leaf = leaves.pop(path)
      layers = leaf.shape[0] if '{}' in name else 1
      rows[path] = (leaf, [name.format(i) for i in range(layers)], transpose)
  if leaves:
    raise ValueError(f'no row of TABLE for {sorted(leaves)}')
  return rows


def _is_stacked(path):
  return path.startswith('layers/')


def _file_shape(path, leaf, transpose):
  """The shape of one of a row's tensors in the files."""
  shape = leaf.shape[1:] if _is_stacked(path) else leaf.shape
  return shape[::-1] if transpose else shape


def _check(directory, tensors, rows, config):
  """Raises InputError for a missing, misshapen or unexpected tensor."""
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
  # Older exports contain rotary frequencies; tied ones may contain the head.
  extra = sorted(
      name for name in set(tensors) - expected
      if not name.endswith('rotary_emb.inv_freq')
      and not (config.tie_embeddings and name == _HEAD))
  if extra:
    raise errors.InputError(
        f'{directory}: {len(extra)} unexpected tensors, such as {extra[0]}')
  if config.tie_embeddings and _HEAD in tensors and not _are_equal(
      tensors[_HEAD], tensors[_EMBEDDING]):
    raise errors.InputError(
        f'{directory}: {_HEAD} is not the embedding, but {_CONFIG} ties the '
        'two; set tie_word_embeddings to false there, and this head is loaded')


def _are_equal(head, embedding):
  if head.shape != embedding.shape:
    return False
  for start in range(0, head.shape[0], _COMPARED_ROWS):
    rows = slice(start, start + _COMPARED_ROWS)
    if not np.array_equal(head[rows,], embedding[rows,]):
      return False
    tensor_files.forget(head)
    tensor_files.forget(embedding)
  return True


def _read(sources, leaf, transpose, sharding):
  """One leaf; each device's slice is copied from the files.

  An object is read by whole rows, each once in all processes, which then send
  each other their slices.
  """
  by_rows = sharding
  if isinstance(sources[0], tensor_files.RemoteTensor):
    by_rows = _by_rows(sources[0], leaf, transpose, sharding)
  slices = {}  # Replicas request the same slice one after another.

  def read(index):
    key = str(index)
    if key not in slices:
      slices[key] = _slice(sources, leaf, transpose, index)
    return slices[key]

  # Blocks, so that a tensor's host copy is freed before the next is read.
  return jax.block_until_ready(jax.device_put(
      jax.make_array_from_callback(leaf.shape, by_rows, read), sharding))


def _by_rows(source, leaf, transpose, sharding):
  """Cuts the rows of a file's matrices over all devices, if that is even."""
  axis = leaf.ndim - (1 if transpose else 2)
  if (source.ndim < 2 or isinstance(sharding, jax.sharding.SingleDeviceSharding)
      or leaf.shape[axis] % sharding.mesh.size):
    return sharding
  return jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec(
      *axis * [None], sharding.mesh.axis_names))


def _slice(sources, leaf, transpose, index):
  """A slice of a leaf, with zeros as vocabulary padding."""
  out = np.zeros([len(range(*part.indices(size)))
                  for part, size in zip(index, leaf.shape)], leaf.dtype)
  stacked = out.ndim > sources[0].ndim
  layers, inner = (index[0], index[1:]) if stacked else (slice(0, 1), index)
  for target, source in zip(out if stacked else [out], sources[layers]):
    view = source[inner[::-1]].T if transpose else source[inner]
    target[_corner(view.shape)] = view
    tensor_files.forget(source)
  return out


def _corner(shape):
  """The index of the first entries of every dimension."""
  return tuple(slice(size) for size in shape)


def save(directory, config: transformer.ModelConfig, params, source=None,
         texts=types.MappingProxyType({}), dtype: str | None = None):
  """Writes a Hugging Face folder that transformers loads.

  Every process of a run must call it, as it gathers; only the first writes. The
  folder is written under a temporary name and renamed when complete.

  Args:
    directory: must not exist, or be empty.
    config: of the model.
    params: float32 or bfloat16; may be sharded, and their vocabulary padded
      for a mesh.
    source: a folder to copy the tokenizer, generation_config and the other
      fields of config.json from.
    texts: further files, {name: text}; they replace those of `source`.
    dtype: of the files; None: that of the params. Rounds to nearest, ties to
      even.

  Raises:
    InputError: the directory exists and is not empty, or no architecture fits
      the config.
  """
  rows = _rows(params)
  saved = np.dtype(dtype or params['embed']['embedding'].dtype)
  old = None
  if source is not None:
    source = hub.folder(source)
    if (source / _CONFIG).is_file():
      old = tensor_files.read_json(source / _CONFIG)
  raw = families.to_json(config, saved.name, old)
  with atomic_folder(directory) as partial:
    _write_tensors(partial, config, rows, saved)
    if jax.process_index() == 0:
      tensor_files.write_json(partial / _CONFIG, raw)
      others = set(hub.TOKENIZER_FILES) - {_CONFIG}
      for name in others if source is not None else ():
        if (source / name).is_file():
          with disk.naming(partial / name):
            (partial / name).write_bytes((source / name).read_bytes())
      for name, text in texts.items():
        with disk.naming(partial / name):
          (partial / name).write_text(text, 'utf-8')


@contextlib.contextmanager
def atomic_folder(directory) -> Iterator[pathlib.Path]:
  """Yields a temporary folder, which is renamed to `directory` on success, or
  uploaded.

  The first process makes it; the others get only a name.

  Raises:
    InputError: the directory exists and is not empty.
  """
  directory = files.path(directory).absolute()
  if not files.is_free(directory):
    raise errors.InputError(f'{directory}: exists and is not empty')
  if files.is_remote(directory):
    if jax.process_index() == 0:  # an interrupted export may have other shards
      files.discard_unfinished(directory)
    with (files.local_folder(directory) if jax.process_index() == 0
          else contextlib.nullcontext(pathlib.Path(directory.name))) as partial:
      yield partial
    return
  partial = directory.with_name(f'.{directory.name}.partial-{os.getpid()}')
  if jax.process_index() == 0:
    partial.mkdir(parents=True)
  try:
    yield partial
    if jax.process_index() == 0:
      try:
        os.replace(partial, directory)
      except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
          raise
        raise errors.InputError(
            f'{directory}: another program has filled it meanwhile') from error
  finally:
    if jax.process_index() == 0:  # another's name may be the same
      shutil.rmtree(partial, ignore_errors=True)


def _write_tensors(folder, config, rows, dtype):
  """Creates the files, then writes one tensor at a time."""
  whole = _rows(transformer.abstract_params(
      dataclasses.replace(config, vocab_padding=0)))
  writer = jax.process_index() == 0
  if writer:
    places = tensor_files.create(folder, [
        (name, dtype, _file_shape(path, leaf, transpose))
        for path, (leaf, names, transpose) in whole.items() for name in names])
  for path, (leaf, names, transpose) in rows.items():
    for layer, name in enumerate(names):
      array = mesh_lib.to_host(leaf[layer] if _is_stacked(path) else leaf)
      if writer:
        tensor = array.T if transpose else array
        places[name][...] = tensor[_corner(places[name].shape)]
        tensor_files.forget(places[name])


def load_tokenizer(directory):
  """The tokenizer of a folder or hub id; never runs code of that folder.

  Raises:
    InputError: no usable tokenizer, or as `tokenizer_checks.check`.
  """
  folder = hub.folder(directory, hub.TOKENIZER_FILES)
  try:
    with files.downloaded(folder, hub.TOKENIZER_FILES) as local:
      tokenizer_checks.check_files(local)
      tokenizer = transformers.AutoTokenizer.from_pretrained(
          local, trust_remote_code=False, local_files_only=True)
      tokenizer_checks.check(tokenizer, local, str(directory))
  except errors.InputError:
    raise
  except Exception as error:  # transformers passes on any parser's error
    raise errors.InputError(
        f'{directory}: no usable tokenizer or {_CONFIG} for it '
        f'({errors.one_line(error)[:300]})') from error
  return tokenizer


def eos_ids(directory, tokenizer) -> tuple[int, ...]:
  """Every id that ends a completion, sorted.

  Combines the tokenizer's with those of generation_config.json and config.json,
  where chat models also list the token that ends a message.

  Raises:
    InputError: one of them is not a token id.
  """
  ids = {tokenizer.eos_token_id}
  folder = hub.folder(directory, hub.TOKENIZER_FILES)
  for name in ('generation_config.json', _CONFIG):
    file = folder / name
    if file.is_file():
      ids.update(tokenizer_checks.check_eos_ids(
          tensor_files.read_json(file).get('eos_token_id'), str(file)))
  return tuple(sorted(ids))
