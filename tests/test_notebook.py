"""launch/tepo.ipynb, run from top to bottom on a CPU."""

import json
import os
import pathlib
import subprocess
import types

import pytest

from tepo_jax import cli
from tepo_jax.job import configuration
from tepo_jax.tools.plan import gpus
from tests import recipes
from tests import runs

NOTEBOOK = runs.ROOT / 'launch' / 'tepo.ipynb'


@pytest.mark.parametrize('device, said, topology', [
    ('cpu', '', None), ('tpu', '', 'v5e:1x1'), ('tpu', 'Kaggle', 'v5e:2x4'),
    ('gpu', 'Tesla T4\n', None), ('gpu', 'NVIDIA L4\n', None),
    ('gpu', 'NVIDIA A100-SXM4-40GB\n', None),
    *(('gpu', f'{gpu.name}\n', f'{kind}x1')
      for kind, gpu in gpus.GPUS.items()),
    ('gpu', 'NVIDIA L40S\n' * 4, 'l40sx4'),
    ('gpu', 'NVIDIA H200\n' * 3, None)])
def test_the_row_and_the_plan_of_each_machine(
    monkeypatch, device, said, topology):
  """A row that is a config, and a machine of the planner if it knows it."""
  monkeypatch.setattr(subprocess, 'run', lambda *_, **__: types.SimpleNamespace(
      stdout=said))
  if said == 'Kaggle':
    monkeypatch.setenv('KAGGLE_KERNEL_RUN_TYPE', 'Batch')
  cells = {cell['id']: ''.join(cell['source']) for cell in json.loads(
      NOTEBOOK.read_text('utf-8'))['cells']}
  names = {'DEVICE': device, 'os': os, 'subprocess': subprocess}
  exec(cells['row'], names)  # pylint: disable=exec-used
  assert names['TOPOLOGY'] == topology
  config = cli.load_config(names['ROW'])
  with config.unlocked():
    for field in names['MORE']:
      name, _, value = field.removeprefix('--config.').partition('=')
      config.update_from_flattened_dict({
          name: int(value) if value.isdigit() else value})
  configuration.check(config, ())


@pytest.mark.long
@pytest.mark.nightly
@pytest.mark.usefixtures('optimized')
def test_from_top_to_bottom(tmp_path, monkeypatch):
  """In a copy of the repository, with the laptop's task and this Python."""
  import nbclient  # of nightly tests only
  import nbformat
  monkeypatch.setenv('JAX_PLATFORMS', 'cpu')
  monkeypatch.setenv('PATH', '/usr/bin:/bin')  # without nvidia-smi
  monkeypatch.delenv('XLA_FLAGS')
  recipes.copy(tmp_path, 'tepo_jax', 'configs')
  notebook = nbformat.read(NOTEBOOK, nbformat.NO_CONVERT)
  nbclient.NotebookClient(
      notebook, timeout=1800, kernel_name='python3',
      resources={'metadata': {'path': str(tmp_path)}}).execute()
  nbformat.write(notebook, tmp_path / 'executed.ipynb')
  shown = {cell['id']: cell['outputs'] for cell in notebook.cells
           if cell['cell_type'] == 'code'}
  assert any('image/png' in output.get('data', {}) for output in shown['curve'])
  (table,) = (output['data']['text/html'] for output in shown['completions'])
  assert '✓' in table and '✗' in table
  assert 'runs/notebook: done' in _text(shown['train'])
  assert 'correct' in _text(shown['ask']) or 'wrong' in _text(shown['ask'])
  exported = tmp_path / 'runs' / 'notebook' / 'exported'
  assert 'model.safetensors' in _text(shown['export'])
  assert pathlib.Path(exported, 'config.json').is_file()


def _text(outputs):
  return ''.join(output.get('text', '') for output in outputs)
