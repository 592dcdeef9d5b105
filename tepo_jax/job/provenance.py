"""The model folder that a run stands on: its weights, and digests of both.

Checkpoints hold these digests, and a resumed run, an export and a replay
compare them. Found are

- a changed, added or removed byte of config.json, generation_config.json and
  the tokenizer's files (BLAKE2b);
- with LoRA, whose frozen weights come from the folder at every start, a single
  changed weight, and any other change with a probability of 1 − 2^-32 per array
  (see `digests.compute`). The weights are compared as they are loaded, in
  float32, on the devices, which costs no second reading: files that are split
  or typed otherwise but hold the same numbers are the same model.

Without LoRA the weights come from the checkpoint, and the folder's are not
compared.
"""

from collections.abc import Mapping
import hashlib
from typing import Any

from flax import traverse_util
import jax
import jax.numpy as jnp
import numpy as np

from tepo_jax import errors
from tepo_jax.policy import padding as padding_lib
from tepo_jax.policy import transformer
from tepo_jax.policy.huggingface import hub
from tepo_jax.policy.huggingface import weights
from tepo_jax.runtime import digests
from tepo_jax.runtime import files
from tepo_jax.runtime import mesh as mesh_lib

_NAMES = {path: name for name, path, _ in weights.TABLE}


def load(folder: str, mesh: jax.sharding.Mesh
         ) -> tuple[transformer.ModelConfig, Any]:
  """`weights.load` as fp32 in the training layout, of finite weights.

  Raises:
    errors.InputError: as `weights.load`, or a weight is NaN or infinite; names
      the tensor.
  """
  model, params = weights.load(folder, 'float32', mesh)
  finite = mesh_lib.to_host(_finite(params))
  for path, good in traverse_util.flatten_dict(finite, sep='/').items():
    for layer in np.flatnonzero(~np.atleast_1d(good)):
      raise errors.InputError(
          f'{folder}: tensor {_NAMES[path].format(layer)} has weights that are '
          'not finite')
  return model, params


@jax.jit
def _finite(params):
  """Whether each tensor of the files is finite: [L] or [] by leaf."""
  return jax.tree_util.tree_map_with_path(
      lambda path, x: jnp.isfinite(x).all(
          tuple(range(path[0].key == 'layers', x.ndim))), params)


def file_digest(path: files.Path) -> str:
  """Of a file's bytes."""
  return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()


def file_digests(folder: str) -> dict[str, str]:
  """Digests of the folder's small files, by name."""
  folder = hub.folder(folder, hub.TOKENIZER_FILES)
  return {name: file_digest(path) for name in sorted(hub.TOKENIZER_FILES)
          if (path := folder / name).is_file()}


def weight_digests(model: transformer.ModelConfig, params: Any
                   ) -> dict[str, int]:
  """Digests of complete fp32 weights on any mesh, by the files' names."""
  found = digests.compute(params, padding_lib.unpadded(model, params))
  return {_NAMES[path].replace('{}', '*'): digest
          for path, digest in found.items()}


def record(folder: str, weights_here: Mapping[str, int]) -> dict[str, dict]:
  """What a checkpoint holds: the digests of a folder's files and weights."""
  return {'files': file_digests(folder), 'weights': dict(weights_here)}


def check(where: str, saved: Mapping[str, Mapping], folder: str,
          weights_here: Mapping[str, int]) -> None:
  """Compares a folder with the `record` of the checkpoint `where`.

  `weights_here`: digests of the folder's weights with LoRA, else {}.

  Raises:
    errors.InputError: names the file or tensor that has changed.
  """
  there, here = saved['files'], file_digests(folder)
  for name in sorted(there.keys() | here.keys()):
    if there.get(name) != here.get(name):
      what = ('is missing' if name not in here else
              'is new' if name not in there else 'has changed')
      raise errors.InputError(
          f'{where} was made with another model folder: {folder}/{name} {what} '
          'since then')
  for name, digest in weights_here.items():
    if saved['weights'].get(name) != digest:
      raise errors.InputError(
          f'{where} adapts other weights: {name} in the safetensors of '
          f'{folder} has changed since then')
