"""The package's source never executes input as code."""

import ast

import pytest

from tests import runs

# Modules that execute what they read, calls that do, arguments that allow it.
_MODULES = {'pickle', 'cPickle', 'dill', 'cloudpickle', 'joblib', 'marshal',
            'shelve', 'code', 'runpy'}
_CALLS = {'eval', 'exec', 'compile', '__import__', 'builtins.eval',
          'builtins.exec', 'os.system', 'os.popen', 'subprocess.getoutput',
          'subprocess.getstatusoutput', 'tempfile.mktemp'}
_ARGUMENTS = {'shell', 'allow_pickle', 'trust_remote_code'}

SOURCES = sorted((runs.ROOT / 'tepo_jax').rglob('*.py')) + sorted(
    (runs.ROOT / 'configs').rglob('*.py'))


def unsafe(source: str) -> list[str]:
  """'LINE: name' of each such import, call and argument."""
  found = []
  for node in ast.walk(ast.parse(source)):
    if isinstance(node, (ast.Import, ast.ImportFrom)):
      names = [alias.name for alias in node.names] + [
          getattr(node, 'module', None) or '']
      found += [f'{node.lineno}: {name}' for name in names
                if name.partition('.')[0] in _MODULES]
    elif isinstance(node, ast.Call):
      found += [f'{node.lineno}: {what}' for what in _unsafe_call(node)]
  return found


def _unsafe_call(node):
  if ast.unparse(node.func) in _CALLS:
    yield ast.unparse(node.func)
  for keyword in node.keywords:
    if keyword.arg in _ARGUMENTS and ast.unparse(keyword.value) != 'False':
      yield keyword.arg


@pytest.mark.parametrize('code', [
    'import pickle', 'from pickle import load', 'import a, marshal.b',
    'eval(x)', 'os.system(x)', 'run(x, shell=True)', 'run(x, shell=y)',
    'np.load(x, allow_pickle=True)', 'f(trust_remote_code=True)'])
def test_the_check_finds(code):
  assert len(unsafe('x = 1\n' + code)) == 1


@pytest.mark.parametrize('code', [
    'import json', 'run(x, shell=False)', 'model.eval()', 're.compile(x)'])
def test_the_check_passes(code):
  assert unsafe(code) == []


def test_no_source_runs_text_from_outside():
  assert len(SOURCES) > 100
  found = {str(path.relative_to(runs.ROOT)): lines for path in SOURCES
           if (lines := unsafe(path.read_text()))}
  assert not found
