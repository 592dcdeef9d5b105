"""The layout of the code: which package may import which, sizes, places."""

import ast
import collections
import pathlib
import subprocess
import sys

import pytest

from tests import runs

_PACKAGE = runs.ROOT / 'tepo_jax'

_BELOW_TOOLS = ('errors', 'runtime', 'data', 'grading', 'policy', 'policy.cpu',
                'policy.huggingface', 'learning', 'rollout', 'job')
# What each part may import of the others, besides itself.
_MAY_IMPORT = {
    'errors': (),
    'runtime': ('errors',),
    'grading': (),
    'data': ('errors', 'grading', 'runtime'),
    'policy': ('errors', 'runtime'),
    'policy.cpu': ('runtime', 'policy'),
    'policy.huggingface': ('errors', 'runtime', 'policy'),
    'learning': ('errors', 'runtime', 'policy'),
    'rollout': ('errors', 'runtime', 'policy', 'data', 'grading'),
    'job': ('errors', 'runtime', 'data', 'grading', 'policy', 'policy.cpu',
            'policy.huggingface', 'learning', 'rollout'),
    'cli': ('errors', 'runtime', 'job'),
    'tools': _BELOW_TOOLS,
    'tools.plan': (*_BELOW_TOOLS, 'tools'),
    'tools.benchmark': (*_BELOW_TOOLS, 'tools', 'tools.plan'),
    'tools.report': _BELOW_TOOLS,
    'tools.mechanism': _BELOW_TOOLS,
}
_PROGRAMS = ('train', 'evaluate', 'export', 'pretrain', 'show_prompts', 'plan',
             'report', 'benchmark', 'mechanism', 'selftest',
             'ask')
_WITH_TOOLS = ('plan', 'report', 'benchmark', 'mechanism', 'selftest')
# Where jax.jit and ConfigDict may stand. A checkpoint's digests are computed
# on the devices, in one pass over each array: run without jit, they would need
# several copies of the state.
_EXECUTED_FROM = ('job', 'cli', 'tools', *_PROGRAMS)
_JITTED_BELOW = ('runtime.digests',)


def _modules() -> dict[str, ast.Module]:
  """{'policy.scoring': its syntax tree}; a package's own file by its name."""
  return {
      '.'.join(path.relative_to(_PACKAGE).with_suffix('').parts).removesuffix(
          '.__init__'): ast.parse(path.read_text())
      for path in _PACKAGE.rglob('*.py') if path.parent != _PACKAGE
      or path.name != '__init__.py'}


def _file(module: str) -> pathlib.Path:
  path = _PACKAGE / module.replace('.', '/')
  return path / '__init__.py' if path.is_dir() else path.with_suffix('.py')


_MODULES = _modules()


def _imports(tree: ast.Module) -> set[str]:
  """Modules of tepo_jax that a module imports, function bodies included."""
  found = set()
  for node in ast.walk(tree):
    if isinstance(node, ast.ImportFrom) and (node.module or '').split(
        '.')[0] == 'tepo_jax':
      for alias in node.names:
        name = f'{node.module}.{alias.name}'.removeprefix('tepo_jax.')
        found.add(name if name in _MODULES else name.rpartition('.')[0])
  return found


def _part(module: str) -> str:
  """The longest key of the table that holds the module."""
  parts = module.split('.')
  for length in (2, 1):
    if '.'.join(parts[:length]) in _MAY_IMPORT:
      return '.'.join(parts[:length])
  return parts[0]


def test_packages_import_only_what_they_may():
  wrong = []
  for name, tree in _MODULES.items():
    part = _part(name)
    for other in _imports(tree):
      if part in _PROGRAMS:
        bad = other.startswith('tools.') and part not in _WITH_TOOLS
      else:
        bad = _part(other) not in (part, *_MAY_IMPORT[part])
      if bad:
        wrong.append(f'{name} imports {other}')
  assert not wrong


def test_no_module_imports_itself_in_a_circle():
  imports = {name: _imports(tree) for name, tree in _MODULES.items()}
  floor: dict[str, int] = {}

  def climb(name, path):
    assert name not in path, ' -> '.join([*path, name])
    if name not in floor:
      floor[name] = 1 + max(
          (climb(other, (*path, name)) for other in imports.get(name, ())),
          default=0)
    return floor[name]

  for name in imports:
    climb(name, ())


@pytest.mark.parametrize('what', ['jit', 'ConfigDict'])
def test_only_runs_jit_functions_and_read_configs(what):
  wrong = [
      name for name, tree in _MODULES.items()
      if name.split('.')[0] not in _EXECUTED_FROM
      and not (what == 'jit' and name in _JITTED_BELOW) and any(
          isinstance(node, ast.Attribute) and node.attr == what
          for node in ast.walk(tree))]
  assert not wrong


def test_a_cpu_needs_forms_of_its_own_in_one_place_only():
  """A TPU's reader of the policy meets no form that only a CPU needs."""
  wrong = [
      f'{name}: {node.attr}' for name, tree in _MODULES.items()
      if name.startswith('policy.') and _part(name) != 'policy.cpu'
      for node in ast.walk(tree) if isinstance(node, ast.Attribute)
      and node.attr in ('platform_dependent', 'optimization_barrier')]
  assert collections.Counter(wrong) <= collections.Counter(
      2 * ['policy.scoring: optimization_barrier'])  # one place: in and out


def test_modules_and_functions_stay_short():
  long = [f'{name}: {lines} lines' for name in _MODULES if (lines := len(
      _file(name).read_text().splitlines())) > 400]
  for name, tree in _MODULES.items():
    for node in ast.walk(tree):
      if isinstance(node, ast.FunctionDef):
        lines = node.end_lineno - node.lineno + 1
        if lines > 60:
          long.append(f'{name}.{node.name}: {lines} lines')
  assert not long


@pytest.mark.long
def test_importing_starts_no_device():
  """No array is made and no backend chosen before a program asks for it."""
  names = [f'tepo_jax.{name}' for name in _MODULES
           if name not in _PROGRAMS and not name.endswith('_peer')]
  code = ('import importlib\n'
          f'for name in {names!r}: importlib.import_module(name)\n'
          'from jax._src import xla_bridge\n'
          'assert not xla_bridge.backends_are_initialized()\n')
  done = subprocess.run([sys.executable, '-c', code], cwd=runs.ROOT, text=True,
                        capture_output=True)
  assert done.returncode == 0, done.stderr[-2000:]
