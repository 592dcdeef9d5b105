"""launch/tepo.ipynb, run from top to bottom on a CPU."""

import pathlib

import pytest

from tests import recipes
from tests import runs

pytestmark = [pytest.mark.long, pytest.mark.nightly]


def test_from_top_to_bottom(tmp_path, monkeypatch):
  """In a copy of the repository, with the laptop's task and this Python."""
  import nbclient  # of nightly tests only
  import nbformat
  monkeypatch.setenv('JAX_PLATFORMS', 'cpu')
  monkeypatch.setenv('PATH', '/usr/bin:/bin')  # without nvidia-smi
  monkeypatch.delenv('XLA_FLAGS')
  recipes.copy(tmp_path, 'tepo_jax', 'configs')
  notebook = nbformat.read(
      runs.ROOT / 'launch' / 'tepo.ipynb', nbformat.NO_CONVERT)
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
