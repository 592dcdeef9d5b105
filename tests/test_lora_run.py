"""A run with LoRA: train, resume, export for peft."""

import json
import shutil

import jax
import numpy as np
import peft
import pytest
from safetensors import numpy as safetensors_numpy
import torch
import transformers

from tepo_jax.job import restore
from tepo_jax.runtime import mesh as mesh_lib
from tests import runs

pytestmark = pytest.mark.long


def test_train_continue_and_export_with_lora(tmp_path, monkeypatch):
  monkeypatch.setenv('JAX_COMPILATION_CACHE_DIR', str(tmp_path / 'compiled'))
  monkeypatch.setenv('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', '0')
  base, workdir = tmp_path / 'base', tmp_path / 'run'
  runs.make_model(base)
  arguments = (*runs.train_arguments(base, workdir, 'grpo'),
               '--config.lora.rank=4', '--config.steps=2',
               '--config.eval.period=0', '--config.optimizer.learning_rate=.01')
  arguments = [a for a in arguments if not a.startswith('--config.eval.')
               or 'period=0' in a]
  runs.run('train', *arguments)
  first = runs.records(workdir)
  assert all(record['grad_norm'] > 0 for record in first[-2:])
  # Resumed from step 1, on the base of the model folder: the same metrics.
  shutil.rmtree(workdir / 'checkpoints' / '2')
  assert 'after step 1' in runs.run('train', *arguments).stdout
  assert list(map(runs.untimed, runs.records(workdir))) == list(
      map(runs.untimed, first))

  out = tmp_path / 'adapter'
  runs.run('export', f'--workdir={workdir}', '--adapter', f'--out={out}')
  assert json.loads((out / 'adapter_config.json').read_text())['r'] == 4
  assert sorted(file.name for file in out.iterdir()) == [
      'README.md', 'adapter_config.json', 'adapter_model.safetensors']
  model = peft.PeftModel.from_pretrained(
      transformers.AutoModelForCausalLM.from_pretrained(
          base, dtype=torch.float32), out).merge_and_unload()
  # Compared with the weights of `export` without --adapter and `evaluate`.
  mesh = mesh_lib.make(
      {'data': 1, 'fsdp': 1, 'tensor': 1}, jax.devices()[:1])
  _, params = restore.restore_params(workdir, mesh)
  for name, side in (('gate', 'mlp.gate'), ('q', 'self_attn.q')):
    merged = model.get_parameter(f'model.layers.1.{side}_proj.weight')
    np.testing.assert_allclose(
        params['layers'][name]['kernel'][1], merged.detach().T, atol=1e-6)
  norm = model.get_parameter('model.norm.weight').detach()
  np.testing.assert_array_equal(params['final_norm']['scale'], norm)

  # Another base under the same name: neither resumed nor exported.
  weights = safetensors_numpy.load_file(base / 'model.safetensors')
  weights['model.norm.weight'][0] += 1e-3
  safetensors_numpy.save_file(weights, base / 'model.safetensors')
  for program, *rest in (
      ('train', *arguments[:1], '--config.steps=3', *(
          a for a in arguments[1:] if 'steps' not in a)),
      ('export', f'--workdir={workdir}', f'--out={tmp_path / "merged"}'),
      ('export', f'--workdir={workdir}', '--adapter',
       f'--out={tmp_path / "again"}')):
    said = runs.run(program, *rest, status=2).stderr.splitlines()[-1]
    assert f'model.norm.weight in the safetensors of {base} has changed' in said
    assert f'{workdir}/checkpoints/2' in said
