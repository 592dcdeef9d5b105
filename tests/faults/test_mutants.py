"""The changes that `python -m tests.faults.mutants` makes."""

import ast

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
