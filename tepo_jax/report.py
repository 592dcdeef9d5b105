r"""Reports on runs: an HTML page with figures and tokens; the paper's tables.

  python -m tepo_jax.report --runs=runs/a,runs/b --out=DIR \
      [--inspect=STEP] [--replay=STEP]
  python -m tepo_jax.report --runs=runs/a,runs/b --csv|--latex [--out=FILE]
  python -m tepo_jax.report --table=3 --runs=runs [--csv|--latex] [--out=FILE]
  python -m tepo_jax.report --audit [--out=FILE]
  python -m tepo_jax.report --compare=DIR,DIR [--csv|--latex] [--out=FILE]
  python -m tepo_jax.report --map=FILE [--runs=runs/a,runs/b] --out=DIR

The first form writes DIR/report.html, which needs no network, and its figures
as PNG and SVG. Runs may be finished, still running or broken; a folder that
contains runs, or a pattern such as 'runs/study/*', selects several. Copies of a
run count once. --inspect replays a rollout step and shows every
sampled token with its ratio, entropy, mask and other values. --replay evaluates
every method of the paper on the step's first and last minibatch. Both need the
step's rollout and the checkpoint of the step before it (for step 1: the model);
if these are missing, the error lists the steps that have both. On several hosts
(TEPO_MULTIHOST=1) all take part in these two, and the first writes.

--csv and --latex print a table instead of making the page: of runs, the mean,
the interval and the number of seeds n of each method's first, last and best
evaluation, and the difference from grpo (without it, from the first method),
paired by seed, with its interval.

--table prints each row of the paper with its 95 % interval, our result below it
("not run" if there is none; if there is none at all, only the commands), and an
audit of the paper's cells. ± is the binomial error of the samples for the
paper's numbers, the bootstrap over problems for ours. --commands prints the
runs that a table still needs. --audit prints the audit of all tables, as
Markdown, and needs no run. --compare subtracts the first evaluation from the
second, on the same problems. --map adds runs that differ in method, learning
rate and updates per rollout step to FILE (.jsonl.gz), and writes DIR/map.md,
map.png and map.svg: where each ends, and how far from the model it started
from. DIR/verdicts.md compares each method with grpo, tepo_no_kl and gspo, claim
by claim, by the seeds that chose no learning rate, and DIR/differences_N.svg
draws that for N updates. launch/sweep.sh own makes such runs, with --grid.
"""

import contextlib

from absl import flags

from configs import methods
from tepo_jax import cli
from tepo_jax import errors
from tepo_jax.runtime import disk
from tepo_jax.runtime import files
from tepo_jax.runtime import processes
from tepo_jax.tools.report import overview
from tepo_jax.tools.report import paper_tables
from tepo_jax.tools.report import regimes
from tepo_jax.tools.report import runs as runs_lib
from tepo_jax.tools.report import sections
from tepo_jax.tools.report import study
from tepo_jax.tools.report import verdicts

_RUNS = flags.DEFINE_list(
    'runs', None, 'Folders of runs, or folders that contain runs, '
    'comma-separated; patterns are expanded. With --table: the folder that '
    'contains the runs (default: runs).')
_OUT = flags.DEFINE_string(
    'out', None, 'Folder for report.html and the figures. For a table: file '
    'to write to instead of stdout.')
_INSPECT = flags.DEFINE_integer(
    'inspect', None, 'Rollout step to show token by token.', lower_bound=1)
_REPLAY = flags.DEFINE_integer(
    'replay', None, 'Rollout step on which to evaluate every method.',
    lower_bound=1)
_TABLE = flags.DEFINE_enum(
    'table', None, paper_tables.TABLES, 'Table of the paper to print.')
_CSV = flags.DEFINE_bool('csv', False, 'Print the table as CSV.')
_LATEX = flags.DEFINE_bool(
    'latex', False, 'Print the table as a LaTeX tabular.')
_COMMANDS = flags.DEFINE_bool(
    'commands', False, 'Print the commands that --table still needs.')
_AUDIT = flags.DEFINE_bool(
    'audit', False, 'Print the paper\'s tables and what is wrong in them.')
_COMPARE = flags.DEFINE_list(
    'compare', None, 'Two folders of evaluations: prints second minus first.')
_MAP = flags.DEFINE_string(
    'map', None, 'Map of methods over learning rates and updates: a .jsonl.gz '
    'file, to which the runs are added.')
# By the flag that selects a form of the report: the flags that it takes.
_FORMS = {
    'table': ('runs', 'out', 'csv', 'latex', 'commands'), 'audit': ('out',),
    'compare': ('out', 'csv', 'latex'), 'map': ('runs', 'out'),
    'csv': ('runs', 'out'), 'latex': ('runs', 'out')}


def main() -> None:
  _check_flags()
  if _TABLE.value or _AUDIT.value or _COMPARE.value or _MAP.value:
    cli.refuse_job()
  if _TABLE.value is not None:
    _write(_table())
  elif _AUDIT.value:
    _write(paper_tables.audited())
  elif _COMPARE.value is not None:
    if len(_COMPARE.value) != 2:
      raise errors.InputError('--compare needs two folders: --compare=DIR,DIR')
    _write(paper_tables.comparison(_COMPARE.value, _form()))
  elif _MAP.value is not None:
    _write_map()
  elif _form() != 'markdown':
    cli.refuse_job()
    _require(_RUNS)
    _write(overview.comparison(
        runs_lib.group(runs_lib.read(_RUNS.value)), _form()))
  else:
    _write_page()


def _check_flags():
  """Refuses flags that the form of the report would ignore."""
  given = [flag.name for flag in (
      _TABLE, _AUDIT, _COMPARE, _MAP, _RUNS, _INSPECT, _REPLAY, _CSV, _LATEX,
      _COMMANDS) if flag.value]
  form = next(filter(given.__contains__, _FORMS), None)
  if form is None:
    if _COMMANDS.value:
      raise errors.InputError('--commands needs --table')
    return
  for name in given:
    if name != form and name not in _FORMS[form]:
      raise errors.InputError(f'--{form} and --{name} exclude each other')


def _form():
  """The format of a table, one of `tables.FORMATS`."""
  if _CSV.value and _LATEX.value:
    raise errors.InputError('--csv and --latex exclude each other')
  return 'csv' if _CSV.value else 'latex' if _LATEX.value else 'markdown'


def _require(*required):
  for flag in required:
    if not flag.value:
      raise errors.InputError(f'--{flag.name} is required')


def _table():
  runs = _RUNS.value or ['runs']
  if len(runs) > 1:
    raise errors.InputError('--runs: give one folder with --table')
  if _COMMANDS.value:
    return paper_tables.commands(_TABLE.value, runs[0])
  return paper_tables.table(_TABLE.value, runs[0], _form())


def _write(text):
  if _OUT.value is None:
    print(errors.printable(text))
  else:
    with _writing(), disk.naming(_OUT.value):
      files.path(_OUT.value).write_text(text + '\n', 'utf-8')


def _write_page():
  _require(_RUNS, _OUT)
  if _INSPECT.value is None and _REPLAY.value is None:
    cli.refuse_job()
    _make_page(_OUT.value)
    return
  processes.initialize()
  with (processes.ending_together(),
        processes.first_writes(_OUT.value) as folder):
    _make_page(folder)


def _make_page(folder):
  runs, out = runs_lib.read(_RUNS.value), files.path(folder)
  with contextlib.ExitStack() as uploading:
    with _writing():
      local = uploading.enter_context(files.local_folder(out))
    inspectors = sections.inspectors(runs, _INSPECT.value, local)
    replays = sections.replays(runs, _REPLAY.value, local, methods.paper)
    page = study.write(local, runs, methods.PANELS, inspectors, replays, out)
  print(f'wrote {out / page.name}')


def _write_map():
  _require(_OUT)
  runs = runs_lib.read(_RUNS.value) if _RUNS.value else []
  with _writing(), files.local_folder(files.path(_OUT.value)) as out:
    entries = regimes.update(files.path(_MAP.value), runs)
    text = regimes.table(entries)
    files.replace_text(out / 'map.md', text + '\n')
    regimes.draw(entries, out)
    found = verdicts.markdown(entries)
    if found:
      files.replace_text(out / 'verdicts.md', found + '\n')
      verdicts.draw(entries, out)
  print(errors.printable(text))


@contextlib.contextmanager
def _writing():
  try:
    yield
  except OSError as error:
    if disk.failure(error) is not None:  # names the file and what is free
      raise
    raise errors.InputError(
        f'--out={_OUT.value}: {error.strerror or error}') from error


if __name__ == '__main__':
  cli.run(main, joins_job=True)
