"""Breaks the code in small ways; the tests of its package must notice.

  python -m tests.faults.mutants --out=FILE.jsonl [--count=150] [--seed=0]

Draws --count lines of six packages, uniformly over those that can be changed,
and for each a change: of an operator, number, bound or return value, or a
deleted statement. Tests run in a copy of the repository with one change until
one fails: the quick ones of the module, then of the package, then CI's tier.
A test that takes too long fails. The same command continues after an
interruption; with --again, changes that survived run once more. A field
"equivalent" in a line of FILE is the reason why no test can notice the change.
"""

import argparse
import ast
import collections
import difflib
import importlib
import json
import os
import pathlib
import random
import re
import shutil
import signal
import sys
import tempfile
import time

import pytest

from tests import runs

_PACKAGES = 'learning', 'policy', 'rollout', 'tasks', 'runtime', 'job'
# Tests of modules that have no test file of their own name.
_MODULES = {
    'test_objective.py': 'aggregation diagnostics method numerics ranges',
    'test_objective_reference.py': 'aggregation numerics',
    'test_update.py': 'batch optimizer', 'test_shared_packing.py': 'packing',
    'test_lora.py': 'adapters', 'test_weights.py': 'tensor_files',
    'test_transformer.py': 'cache layers padding prompt_sharing',
    'test_sharding.py': 'padding prompt_sharing',
    'test_attention.py': 'block_attention',
    'test_packed_attention.py': 'block_attention',
    'test_schedule.py': 'engine requests', 'test_selection.py': 'sampler',
    'test_group_sampler.py': 'requests sampler',
    'test_equivalence.py': 'comparison structures units values verifying',
    'test_expressions.py': 'comparison structures values',
    'test_grading.py': 'comparison verifying',
    'test_spellings.py': 'structures units',
    'test_datasets.py': 'problem rows sources',
    'test_checkpoint.py': 'files', 'test_metrics.py': 'progress',
    'test_learner.py': 'minibatches sampling', 'test_session.py': 'restore',
    'test_training_programs.py': 'programs'}
_PROGRAMS = [f'tests/{name}' for name in (
    'test_programs.py', 'test_bad_input.py', 'test_cli.py', 'test_layouts.py',
    'test_lora_run.py', 'test_own_data.py', 'test_own_reward.py', 'faults')]
# Imported once, before the forks that run the tests.
_IMPORTED = (
    'flax.linen', 'hypothesis', 'jax', 'math_verify', 'ml_collections', 'optax',
    'orbax.checkpoint', 'safetensors.numpy', 'sympy', 'torch', 'transformers')
_PATIENCE_S = {'not long': 150, 'long': 900, '': 900}  # for a test, by mark

# A name, and what replaces it.
_OPERATORS = {name: others for name, *others in map(str.split, (
    'Lt LtE GtE, LtE Lt Gt, Gt GtE LtE, GtE Gt Lt, Eq NotEq, NotEq Eq, '
    'Is IsNot, IsNot Is, In NotIn, NotIn In, And Or, Or And, Add Sub, Sub Add, '
    'Mult Div, Div Mult, FloorDiv Mult, Mod FloorDiv, Pow Mult, '
    'BitAnd BitOr, BitOr BitAnd').split(', '))}
_NAMES = dict(map(str.split, (
    'min max, max min, minimum maximum, maximum minimum, any all, all any, '
    'floor ceil, ceil floor, argmin argmax, argmax argmin, cumsum cumprod, '
    'sum max, zeros ones, ones zeros, zeros_like ones_like').split(', ')))
_SPEAKING = re.compile(r'print|log|info|warning|error|exception|debug')


def _replacements(node: ast.AST):
  """Yields (kind, what may replace the node)."""
  copy = lambda **fields: type(node)(**dict(ast.iter_fields(node), **fields))
  others = lambda op: [
      getattr(ast, name)() for name in _OPERATORS.get(type(op).__name__, ())]
  match node:
    case ast.BinOp(right=ast.Constant(value=None)):
      pass  # a type: str | None
    case ast.Compare():
      for index, op in enumerate(node.ops):
        for new in others(op):
          yield 'comparison', copy(
              ops=[*node.ops[:index], new, *node.ops[index + 1:]])
    case ast.BinOp() | ast.BoolOp() | ast.AugAssign():
      for new in others(node.op):
        yield 'operator', copy(op=new)
    case ast.UnaryOp():
      yield 'operator removed', node.operand
    case ast.Constant(value=bool(x)):
      yield 'constant', copy(value=not x)
    case ast.Constant(value=int(x)):
      yield 'constant', copy(value=x + 1)
      yield 'constant', copy(value=x - 1)
    case ast.Constant(value=float(x)):
      yield 'constant', copy(value=x * 2 or 1.0)
    case ast.Attribute(attr=x) if x in _NAMES:
      yield 'function', copy(attr=_NAMES[x])
    case ast.Name(id=x) if x in _NAMES:
      yield 'function', copy(id=_NAMES[x])
    case ast.Slice():
      for name in ('lower', 'upper'):
        if bound := getattr(node, name):
          yield 'slice', copy(
              **{name: ast.BinOp(bound, ast.Add(), ast.Constant(1))})
    case ast.Return(value=x) if not isinstance(x, (ast.Constant, type(None))):
      yield 'return value', copy(value=ast.Constant(None))
    case (ast.Raise() | ast.Expr(value=ast.Call())
          | ast.Assign(targets=[ast.Attribute() | ast.Subscript()])):
      yield 'statement deleted', ast.Pass()


def _nodes(node: ast.AST):
  """Yields what may be replaced: no messages, annotations or decorators."""
  called = node.value if isinstance(node, ast.Expr) else node
  function = getattr(called, 'func', None)
  if isinstance(node, (ast.JoinedStr, ast.Assert)) or _SPEAKING.fullmatch(
      getattr(function, 'attr', getattr(function, 'id', ''))):
    return
  yield node
  if isinstance(node, ast.Raise):
    return
  for name, field in ast.iter_fields(node):
    if name not in ('annotation', 'returns', 'decorator_list'):
      for child in field if isinstance(field, list) else [field]:
        if isinstance(child, ast.AST):
          yield from _nodes(child)


def changes(path: pathlib.Path) -> dict[int, list[dict]]:
  """{line: the changes that begin there}, with the lines before and after."""
  lines, found = path.read_text().splitlines(), collections.defaultdict(list)
  for node in _nodes(ast.parse(path.read_text())):
    for kind, new in _replacements(node):
      text = ast.unparse(ast.fix_missing_locations(new))
      if isinstance(node, ast.expr) and not isinstance(
          node, (ast.Slice, ast.Name, ast.Attribute)):
        text = f'({text})'
      before = lines[node.lineno - 1:node.end_lineno]
      head = before[0].encode()[:node.col_offset].decode()  # counts bytes
      tail = before[-1].encode()[node.end_col_offset:].decode()
      found[node.lineno].append(dict(
          module=str(path.relative_to(runs.ROOT)), line=node.lineno, kind=kind,
          before='\n'.join(before), after=head + text + tail,
          killed=None, tier=None))
  return found


def draw(count: int, seed: int) -> list[dict]:
  """One change in each of `count` lines, drawn without replacement."""
  places = [of_line for package in _PACKAGES for path in sorted(
      (runs.ROOT / 'tepo_jax' / package).rglob('*.py'))
            for _, of_line in sorted(changes(path).items())]
  rng = random.Random(seed)
  rng.shuffle(places)
  return [rng.choice(of_line) for of_line in places[:count]]


def _tests(change: dict, tier: str, root: pathlib.Path
           ) -> list[tuple[list[str], str]]:
  """[(files, marks)] for pytest, in the order in which they run."""
  _, package, *_, name = pathlib.Path(change['module']).with_suffix('').parts
  files = [str(path.relative_to(root)) for path in
           sorted((root / 'tests' / package).rglob('test_*.py'))]
  own = [file for file in files if file.endswith(f'/test_{name}.py')
         or name in _MODULES.get(pathlib.Path(file).name, '').split()]
  return {'module': [(own, 'not long')],
          'package': [(sorted({*files} - {*own}), 'not long')],
          'CI': [(files, 'long'), (_PROGRAMS, '')]}[tier]


def _pytest(root, files, marks) -> str | None:
  """Runs pytest in a fork; the first test that fails, None if all pass."""
  log = root / 'pytest.log'
  log.write_text('')
  if not (pid := os.fork()):
    os.setsid()
    os.chdir(root)
    for number in (1, 2):
      os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND), number)
    sys.path[:] = [str(root), *(
        path for path in sys.path if path not in ('', str(runs.ROOT)))]
    for name in [name for name in sys.modules if name.startswith('tests')]:
      del sys.modules[name]
    os._exit(pytest.main([
        *files, '-n0', '-x', '-m', marks, '-p', 'no:cacheprovider']))
  size, since = 0, time.monotonic()
  while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
    time.sleep(0.05)
    if log.stat().st_size != size:
      size, since = log.stat().st_size, time.monotonic()
    if time.monotonic() - since > _PATIENCE_S[marks]:
      os.killpg(pid, signal.SIGKILL)
      os.waitpid(pid, 0)
      return 'time limit'
  status = os.waitstatus_to_exitcode(ended[1])
  assert status != pytest.ExitCode.USAGE_ERROR, log.read_text()
  failed = re.search(r'^(?:FAILED|ERROR) (.+?)(?: - |$)', log.read_text(),
                     re.MULTILINE)
  return None if status in (0, pytest.ExitCode.NO_TESTS_COLLECTED) else (
      failed[1] if failed else f'pytest ended with {status}')


def run(change: dict, root: pathlib.Path, tier: str) -> dict:
  """Makes the change nearest to its line; adds the diff and what killed it."""
  path, begin, killed = root / change['module'], time.monotonic(), None
  original, times = path.read_text(), path.stat()
  before, after = (f'\n{change[name]}\n' for name in ('before', 'after'))
  source = f'\n{original}'
  at = min((m.start() for m in re.finditer(f'(?={re.escape(before)})', source)),
           key=lambda at: abs(source.count('\n', 0, at) + 1 - change['line']))
  changed = (source[:at] + after + source[at + len(before):])[1:]
  path.write_text(changed)
  for files, marks in _tests(change, tier, root):
    killed = killed or (_pytest(root, files, marks) if files else None)
  path.write_text(original)
  os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # as in its .pyc
  return dict(
      change, killed=killed, tier=tier, seconds=round(time.monotonic() - begin),
      diff=''.join(difflib.unified_diff(
          *(text.splitlines(True) for text in (original, changed)),
          *2 * [change['module']], n=1)))


def _outcome(change: dict) -> str:
  return ('killed' if change['killed'] else
          'equivalent' if 'equivalent' in change else 'survived')


def table(done: list[dict]) -> str:
  """Counts by package; then each change that no test noticed, as a diff."""
  names = 'killed', 'equivalent', 'survived'
  counts = collections.Counter(
      (package, _outcome(change)) for change in done
      for package in (change['module'].split('/')[1], 'all'))
  return '\n'.join('%-10s%12s%12s%12s' % row for row in [('', *names), *(
      (package, *(counts[package, name] for name in names))
      for package in (*_PACKAGES, 'all'))]) + ''.join(
          f'\n\n{change.get("equivalent", "survived")}\n{change["diff"]}'
          for change in done if not change['killed'])


def main() -> None:
  parser = argparse.ArgumentParser(
      description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
  parser.add_argument('--out', type=pathlib.Path, required=True)
  parser.add_argument('--count', type=int, default=150)
  parser.add_argument('--seed', type=int, default=0)
  parser.add_argument('--again', action='store_true')
  settings = parser.parse_args()
  done = draw(settings.count, settings.seed)
  if settings.out.exists():
    done = [json.loads(line) for line in settings.out.open()]
  if settings.again:
    done = [dict(change, tier=None) if _outcome(change) == 'survived'
            else change for change in done]
  os.environ.update(JAX_PLATFORMS='cpu', COLUMNS='200')
  with tempfile.TemporaryDirectory() as scratch:
    os.environ.setdefault('JAX_COMPILATION_CACHE_DIR', f'{scratch}/compiled')
    for name in _IMPORTED:
      importlib.import_module(name)
    root = pathlib.Path(scratch) / 'repository'
    shutil.copytree(runs.ROOT, root, ignore=shutil.ignore_patterns(
        '.*', '__pycache__', 'runs'))
    pathlib.Path(scratch, 'shared').symlink_to(runs.ROOT.parent / 'shared')
    for before, tier in ((None, 'module'), ('module', 'package'),
                         ('package', 'CI')):
      for index, change in enumerate(done):
        if change['tier'] == before and _outcome(change) == 'survived':
          done[index] = run(change, root, tier)
          settings.out.write_text(
              ''.join(json.dumps(change) + '\n' for change in done))
          print(f'{index + 1}/{len(done)} {change["module"]}:{change["line"]}, '
                f'{change["kind"]}: {done[index]["killed"]}', flush=True)
    # Tests that fail without a change kill nothing.
    failing = {c['killed'] for c in done if '::' in (c['killed'] or '')}
    print('fails without a change:', _pytest(root, sorted(failing), ''))
  print(table(done))


if __name__ == '__main__':
  main()
