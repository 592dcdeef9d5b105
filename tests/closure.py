"""Counts what a reader of training meets; prints, and fails nothing.

  python -m tests.closure

The import closure of train.py: the files of tepo_jax that starting
a run imports, and their lines. The core path: the files that the tour of
tepo_jax/README.md names in its stops.
"""

import ast
import pathlib
import re

ROOT = pathlib.Path(__file__).parents[1]
START = 'tepo_jax/train.py'
TOUR = 'tepo_jax/README.md'


def imported(path: pathlib.Path) -> set[pathlib.Path]:
  """The project's files that a file imports, function bodies included."""
  found = set()
  for node in ast.walk(ast.parse(path.read_text('utf-8'))):
    if isinstance(node, ast.ImportFrom) and node.module:
      names = [f'{node.module}.{alias.name}' for alias in node.names]
      found |= {file for name in (node.module, *names)
                for file in (_file(name),) if file}
  return found


def _file(module: str) -> pathlib.Path | None:
  path = ROOT / module.replace('.', '/')
  for file in (path.with_suffix('.py'), path / '__init__.py'):
    if file.is_file() and module.split('.')[0] == 'tepo_jax':
      return file
  return None


def closure(start: pathlib.Path) -> set[pathlib.Path]:
  """The file and all that it imports, directly or through others."""
  found, todo = set(), {start}
  while todo:
    found |= todo
    todo = set().union(*map(imported, todo)) - found
  return found


def tour() -> set[pathlib.Path]:
  """The files that the tour's stops link to."""
  text = (ROOT / TOUR).read_text('utf-8')
  stops = text.partition('## The stops')[2].partition('\n## ')[0]
  return {(ROOT / TOUR).parent.joinpath(link).resolve()
          for link in re.findall(r'\]\(([^)#]+\.py)\)', stops)}


def lines(paths: set[pathlib.Path]) -> int:
  return sum(len(path.read_text('utf-8').splitlines()) for path in paths)


def main() -> None:
  for name, paths in (('everything that train.py imports',
                       closure(ROOT / START)), ('the tour', tour())):
    # A package's own file may hold no more than its docstring.
    counted = {path for path in paths if len(
        path.read_text('utf-8').splitlines()) > 1}
    print(f'{name}: {len(counted)} files, {lines(counted):,} lines')


if __name__ == '__main__':
  main()
