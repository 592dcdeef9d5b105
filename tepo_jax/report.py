r"""Looks at runs: one page with figures and tokens; the paper's tables.

  python -m tepo_jax.report --runs=runs/a,runs/b --out=DIR \
      [--inspect=STEP] [--replay=STEP]
  python -m tepo_jax.report --table=3 --runs=runs [--format=latex] [--out=FILE]
  python -m tepo_jax.report --compare=DIR,DIR

The first: DIR/report.html needs no network; the figures lie beside it as PNG
and SVG. Finished, running and broken runs do. A pattern such as 'runs/study/*'
stands for the runs that it matches. --inspect goes through a rollout step
again and shows every sampled token with its ratio, entropy, mask and the like.
--replay evaluates every row of the paper on that step's first and last
minibatch. Both take the step's rollout and the checkpoint of the step before
it (step 1: the model), and name the steps that have them where this one has
not.

--table: each row of the paper with its 95 % interval, ours below it ("not
run" where it was not), and what an audit of the paper's cells finds. ±, of the
paper's numbers, is the binomial error of their samples; of ours, it is the
bootstrap over problems. --compare: the second evaluation minus the first, on
the same problems. --commands prints what a table still needs to be run.
"""

import contextlib
import pathlib

from absl import flags

from configs import methods
from tepo_jax import cli
from tepo_jax import errors
from tepo_jax.tools.report import paper_tables
from tepo_jax.tools.report import runs as runs_lib
from tepo_jax.tools.report import sections
from tepo_jax.tools.report import study
from tepo_jax.tools.report import tables

_RUNS = flags.DEFINE_list(
    'runs', None, 'Folders of runs, by commas; patterns are expanded. With '
    '--table: the folder that holds them, runs if it is not given.')
_OUT = flags.DEFINE_string(
    'out', None, 'Folder for report.html and the figures. With --table or '
    '--compare: a file to write instead of stdout.')
_INSPECT = flags.DEFINE_integer(
    'inspect', None, 'Rollout step to show token by token.', lower_bound=1)
_REPLAY = flags.DEFINE_integer(
    'replay', None, 'Rollout step to replay with every row.', lower_bound=1)
_TABLE = flags.DEFINE_enum(
    'table', None, paper_tables.TABLES, 'Which table of the paper.')
_FORMAT = flags.DEFINE_enum(
    'format', 'markdown', list(tables.FORMATS), 'What the table is printed as.')
_COMMANDS = flags.DEFINE_bool(
    'commands', False, 'Print what is to be run for the table, a line each.')
_COMPARE = flags.DEFINE_list(
    'compare', None, 'Two folders of evaluations: the second minus the first.')


def main() -> None:
  if _TABLE.value is not None and _COMPARE.value is not None:
    raise errors.InputError('either --table or --compare, not both')
  if _TABLE.value is not None:
    _tell(_table())
  elif _COMPARE.value is not None:
    if len(_COMPARE.value) != 2:
      raise errors.InputError('--compare wants two folders: --compare=DIR,DIR')
    _tell(paper_tables.comparison(_COMPARE.value))
  else:
    _write_page()


def _table():
  runs = _RUNS.value or ['runs']
  if len(runs) > 1:
    raise errors.InputError('--runs: with --table, the one folder of the runs')
  if _COMMANDS.value:
    return paper_tables.commands(_TABLE.value, runs[0])
  return paper_tables.table(_TABLE.value, runs[0], _FORMAT.value)


def _tell(text):
  if _OUT.value is None:
    print(text)
    return
  with _writing():
    pathlib.Path(_OUT.value).write_text(text + '\n', 'utf-8')


def _write_page():
  for flag in (_RUNS, _OUT):
    if not flag.value:
      raise errors.InputError(f'--{flag.name} is required')
  runs, out = runs_lib.read(_RUNS.value), pathlib.Path(_OUT.value)
  with _writing():
    out.mkdir(parents=True, exist_ok=True)
  inspectors = sections.inspectors(runs, _INSPECT.value, out)
  replays = sections.replays(runs, _REPLAY.value, out, methods.paper)
  print(f'wrote {study.write(out, runs, methods.PANELS, inspectors, replays)}')


@contextlib.contextmanager
def _writing():
  try:
    yield
  except OSError as error:
    raise errors.InputError(
        f'--out={_OUT.value}: {error.strerror or error}') from error


if __name__ == '__main__':
  cli.run(main)
