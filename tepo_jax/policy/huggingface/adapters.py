"""Saves adapters as a folder that peft's PeftModel.from_pretrained reads."""

from typing import Any

import jax
import numpy as np

from tepo_jax.policy import lora as lora_lib
from tepo_jax.policy.huggingface import tensor_files
from tepo_jax.policy.huggingface import weights
from tepo_jax.runtime import disk
from tepo_jax.runtime import mesh as mesh_lib

_SIDES = {'lora_a': 'lora_A', 'lora_b': 'lora_B'}


def save(directory, lora: lora_lib.Lora, adapters: dict[str, Any],
         base_model: str, card: str) -> None:
  """Writes adapter_config.json, adapter_model.safetensors and README.md.

  Every process of a run must call it; only the first writes. The folder is
  written under a temporary name and renamed when complete.

  Args:
    directory: must not exist, or be empty.
    lora: rank, alpha and targets of the adapters.
    adapters: as from `lora.split`, float32; may be sharded.
    base_model: the folder or hub id of the adapted model.
    card: the text of README.md.

  Raises:
    InputError: the directory exists and is not empty.
  """
  with weights.atomic_folder(directory) as partial:
    entries = {}
    for name, path, _ in weights.TABLE:
      module = path.removesuffix('/kernel').removeprefix('layers/')
      for leaf, array_LIO in adapters['layers'].get(module, {}).items():
        key = f'base_model.model.{name}'.replace(
            '.weight', f'.{_SIDES[leaf]}.weight')
        host_LOI = np.swapaxes(mesh_lib.to_host(array_LIO), 1, 2)
        entries |= {key.format(i): host for i, host in enumerate(host_LOI)}
    if jax.process_index() == 0:
      _write(partial, entries, lora, base_model)
      with disk.naming(partial / 'README.md'):
        (partial / 'README.md').write_text(card, 'utf-8')


def _write(folder, entries, lora, base_model):
  places = tensor_files.create_file(folder / 'adapter_model.safetensors', [
      (name, array.dtype, array.shape) for name, array in entries.items()])
  for name, array in entries.items():
    places[name][...] = array
  tensor_files.write_json(folder / 'adapter_config.json', {
      'peft_type': 'LORA', 'task_type': 'CAUSAL_LM', 'bias': 'none',
      'base_model_name_or_path': base_model, 'inference_mode': True,
      'lora_alpha': lora.alpha, 'lora_dropout': 0.0, 'r': lora.rank,
      'target_modules': list(lora.targets)})
