"""The changes that `python -m tests.faults.mutants` makes."""

import ast

import pytest

from tests import runs
from tests.faults import mutants


def test_every_change_makes_another_program():
  path = runs.ROOT / 'tepo_jax' / 'learning' / 'numerics.py'
  source, found = path.read_text(), mutants.changes(path)
  lines, program = source.splitlines(), ast.dump(ast.parse(source))
  assert len(found) > 10
  for number, of_line in found.items():
    for change in of_line:
      length = len(change['before'].split('\n'))
      assert lines[number - 1:][:length] == change['before'].split('\n')
      changed = lines[:number - 1] + [change['after']] + (
          lines[number - 1 + length:])
      assert ast.dump(ast.parse('\n'.join(changed))) != program, change
  docstring = source[:source.index('import')].count('\n')
  assert min(found) > docstring


@pytest.mark.parametrize('module, test', [
    ('data/chat_templates', 'data/test_prompts'),
    ('tools/report/significance', 'tools/report/test_significance'),
    ('job/evaluation', 'job/test_evaluation')])
def test_the_tests_of_a_module_are_found(module, test):
  module = f'tepo_jax/{module}.py'
  assert runs.ROOT / module in mutants._sources()
  assert mutants._tests({'module': module}, 'module', runs.ROOT) == [
      ([f'tests/{test}.py'], 'not long')]


def test_the_table_of_modules_names_what_there_is():
  modules = {path.stem for path in mutants._sources()}
  tests = {path.stem for path in (runs.ROOT / 'tests').rglob('test_*.py')}
  for test, tested in mutants._MODULES.items():
    assert f'test_{test}' in tests and {*tested.split()} <= modules, test
