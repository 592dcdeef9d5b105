"""Breaks the code in small ways; the tests of its package must notice.

  python -m tests.faults.mutants --out=FILE.jsonl [--count=150] [--seed=0]

Draws --count lines of the packages that make results and of the modules that
compare them, uniformly over those that can be changed, and for each a change:
of an operator, number, bound or return value, or a deleted statement. Tests run
in a copy of the repository with one change until one fails: the quick ones of
the module, then of the package, then CI's tier.
A test that takes too long fails. The same command continues after an
interruption; with --again, changes that survived run once more. A field
"equivalent" in a line of FILE is the reason why no test can notice the change.
"""

import argparse
import ast
import collections
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

# What is changed of each package.
_PACKAGES = dict.fromkeys((
    'learning', 'policy', 'rollout', 'data', 'grading', 'runtime', 'job'),
    ('*.py',)) | {'tools/report': ('comparison.py', 'significance.py')}
# test_NAME.py also tests these modules, which have no test file of their name.
_MODULES = {
    'objective': 'choices diagnostics numerics',
    'objective_reference': 'numerics', 'update': 'optimizer',
    'shared_packing': 'packing', 'lora': 'adapters', 'weights': 'tensor_files',
    'transformer': 'cache layers padding prompt_sharing',
    'sharding': 'padding prompt_sharing', 'selection': 'sampler',
    'schedule': 'engine groups', 'group_sampler': 'groups sampler',
    'equivalence': 'comparison sentences structures units values verifying',
    'expressions': 'comparison structures values', 'spellings': 'structures',
    'grader': 'comparison verifying',
    'datasets': 'problem references rows sources',
    'checkpoint': 'files', 'session': 'restore',
    'learner_batch': 'advantage learner', 'learner': 'sampling',
    'training_programs': 'memory programs',
    'compilation': 'host', 'prompts': 'chat_templates'}
_PROGRAMS = [f'tests/{name}' for name in (
    'test_programs.py', 'test_bad_input.py', 'test_cli.py', 'test_layouts.py',
    'test_lora_run.py', 'test_own_data.py', 'test_own_reward.py', 'faults')]
# Imported once, before the forks that run the tests.
_IMPORTED = ('flax.linen hypothesis jax math_verify ml_collections optax '
             'orbax.checkpoint safetensors.numpy sympy torch transformers')
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
  """Yields what may replace the node."""
  copy = lambda **fields: type(node)(**dict(ast.iter_fields(node), **fields))
  others = lambda op: [
      getattr(ast, name)() for name in _OPERATORS.get(type(op).__name__, ())]
  match node:
    case ast.BinOp(right=ast.Constant(value=None)):
      pass  # a type: str | None
    case ast.Compare():
      for index, op in enumerate(node.ops):
        for new in others(op):
          yield copy(ops=[*node.ops[:index], new, *node.ops[index + 1:]])
    case ast.BinOp() | ast.BoolOp() | ast.AugAssign():
      for new in others(node.op):
        yield copy(op=new)
    case ast.UnaryOp():
      yield node.operand
    case ast.Constant(value=bool(x)):
      yield copy(value=not x)
    case ast.Constant(value=int(x)):
      yield copy(value=x + 1)
      yield copy(value=x - 1)
    case ast.Constant(value=float(x)):
      yield copy(value=x * 2 or 1.0)
    case ast.Attribute(attr=x) if x in _NAMES:
      yield copy(attr=_NAMES[x])
    case ast.Name(id=x) if x in _NAMES:
      yield copy(id=_NAMES[x])
    case ast.Slice():
      for name in ('lower', 'upper'):
        if bound := getattr(node, name):
          yield copy(**{name: ast.BinOp(bound, ast.Add(), ast.Constant(1))})
    case ast.Return(value=x) if not isinstance(x, (ast.Constant, type(None))):
      yield copy(value=ast.Constant(None))
    case (ast.Raise() | ast.Expr(value=ast.Call())
          | ast.Assign(targets=[ast.Attribute() | ast.Subscript()])):
      yield ast.Pass()


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
    for new in _replacements(node):
      text = ast.unparse(ast.fix_missing_locations(new))
      if isinstance(node, ast.expr) and not isinstance(
          node, (ast.Slice, ast.Name, ast.Attribute)):
        text = f'({text})'
      before = lines[node.lineno - 1:node.end_lineno]
      head = before[0].encode()[:node.col_offset].decode()  # counts bytes
      tail = before[-1].encode()[node.end_col_offset:].decode()
      found[node.lineno].append(dict(
          module=str(path.relative_to(runs.ROOT)), line=node.lineno,
          before='\n'.join(before), after=head + text + tail,
          killed=None, tier=None, equivalent=None))
  return found


def _sources() -> list[pathlib.Path]:
  """The modules that may be changed."""
  return [path for package, patterns in _PACKAGES.items() for path in sorted(
      path for pattern in patterns
      for path in (runs.ROOT / 'tepo_jax' / package).rglob(pattern))]


def _package(module: str) -> str:
  """The package of a module's path in the repository."""
  return next(name for name in _PACKAGES
              if module.startswith(f'tepo_jax/{name}/'))


def draw(count: int, seed: int) -> list[dict]:
  """One change in each of `count` lines, drawn without replacement."""
  places = [of_line for path in _sources()
            for _, of_line in sorted(changes(path).items())]
  rng = random.Random(seed)
  rng.shuffle(places)
  return [rng.choice(of_line) for of_line in places[:count]]


def _tests(change: dict, tier: str, root: pathlib.Path
           ) -> list[tuple[list[str], str]]:
  """[(files, marks)] for pytest, in the order in which they run."""
  name = pathlib.Path(change['module']).stem
  package = _package(change['module'])
  files = [str(path.relative_to(root)) for path in
           sorted((root / 'tests' / package).rglob('test_*.py'))]
  own = [file for file in files
         if (tested := pathlib.Path(file).stem.removeprefix('test_')) == name
         or name in _MODULES.get(tested, '').split()]
  return {'module': [(own, 'not long')],
          'package': [(sorted({*files} - {*own}), 'not long')],
          'CI': [(_PROGRAMS, ''), (files, 'long')]}[tier]


def _run_tests(root, log, arguments):
  """Runs pytest in this process, which it ends."""
  os.setsid()
  os.chdir(root)
  for number in (1, 2):
    os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND), number)
  sys.path[:] = [str(root), *(
      path for path in sys.path if path not in ('', str(runs.ROOT)))]
  for name in [name for name in sys.modules if name.startswith('tests')]:
    del sys.modules[name]
  os._exit(pytest.main([
      *arguments, '-n0', '-x', '-p', 'no:cacheprovider']))


def _pytest(root, files, marks) -> str | None:
  """Runs pytest in a fork; the first test that fails, None if all pass."""
  log = root / 'pytest.log'
  log.write_text('')
  if not (pid := os.fork()):
    try:
      _run_tests(root, log, [*files, '-m', marks])
    finally:
      os._exit(1)
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
  failed = re.search(r'^(?:FAILED|ERROR) (tests.+?)(?: - |$)', log.read_text(),
                     re.MULTILINE)
  if status not in (0, pytest.ExitCode.NO_TESTS_COLLECTED):
    return failed[1] if failed else f'pytest ended with {status}'


def run(change: dict, root: pathlib.Path, tier: str) -> dict:
  """Makes the change at the place nearest to its line; adds what killed it."""
  path, killed = root / change['module'], None
  original, times = path.read_text(), path.stat()
  before, after = (f'\n{change[name]}\n' for name in ('before', 'after'))
  source = f'\n{original}'
  at = min((m.start() for m in re.finditer(f'(?={re.escape(before)})', source)),
           key=lambda at: abs(source.count('\n', 0, at) + 1 - change['line']))
  path.write_text((source[:at] + after + source[at + len(before):])[1:])
  for files, marks in _tests(change, tier, root):
    killed = killed or (_pytest(root, files, marks) if files else None)
  path.write_text(original)
  os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # as in its .pyc
  return dict(change, killed=killed, tier=tier)


def table(done: list[dict]) -> str:
  """Counts by package; then each change that no test noticed."""
  names, counts = ('killed', 'equivalent', 'survived'), collections.Counter()
  survived = []
  for change in done:
    outcome = 'killed' if change['killed'] else (
        'equivalent' if change['equivalent'] else 'survived')
    counts.update((package, outcome) for package in (
        _package(change['module']), 'all'))
    if not change['killed']:
      survived += ['', f'{change["module"]}:{change["line"]}: '
                f'{change["equivalent"] or "survived"}',
                *('-' + line for line in change['before'].split('\n')),
                *('+' + line for line in change['after'].split('\n'))]
  return '\n'.join(['%-12s%12s%12s%12s' % ('', *names), *(
      '%-12s%12s%12s%12s' % (package, *(counts[package, n] for n in names))
      for package in (*_PACKAGES, 'all')), *survived])


def _run_all(done, out, root):
  """Runs what is left of each tier and saves each outcome."""
  tiers = None, 'module', 'package', 'CI'
  for before, tier in zip(tiers, tiers[1:]):
    for index, change in enumerate(done):
      if change['tier'] == before and not (
          change['killed'] or change['equivalent']):
        done[index] = run(change, root, tier)
        out.write_text(''.join(json.dumps(change) + '\n' for change in done))
        print(f'{index + 1} {change["module"]}:{change["line"]}, '
              f'{tier}: {done[index]["killed"]}', flush=True)
  # Tests that fail without a change kill nothing.
  failing = {c['killed'] for c in done if '::' in (c['killed'] or '')}
  if failing:
    print('fails without a change:', _pytest(root, sorted(failing), ''))


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
    done = [change if change['killed'] else dict(change, tier=None)
            for change in done]
  os.environ.update(JAX_PLATFORMS='cpu', COLUMNS='200')
  with tempfile.TemporaryDirectory() as scratch:
    os.environ.setdefault('JAX_COMPILATION_CACHE_DIR', f'{scratch}/compiled')
    for name in _IMPORTED.split():
      importlib.import_module(name)
    root = pathlib.Path(scratch) / 'repository'
    shutil.copytree(runs.ROOT, root, ignore=shutil.ignore_patterns(
        '.*', '__pycache__', 'runs'))
    if (shared := runs.ROOT.parent / 'shared').exists():  # as in .ci/run
      pathlib.Path(scratch, 'shared').symlink_to(shared)
    _run_all(done, settings.out, root)
  print(table(done))


if __name__ == '__main__':
  main()
