r"""The paper's tables with our numbers beside them; two evaluations compared.

  python -m tepo_jax.report --table=3 --runs=runs [--format=latex] [--out=FILE]
  python -m tepo_jax.report --compare=DIR,DIR

--table: each row of the paper with its 95 % interval, ours below it ("not
run" where it was not), and what an audit of the paper's cells finds. ±, of the
paper's numbers, is the binomial error of their samples; of ours, it is the
bootstrap over problems. --compare: the second evaluation minus the first, on
the same problems. --commands prints what a table still needs to be run.
"""

import importlib
import pathlib
import shlex

from absl import flags

from configs import paper
from tepo_jax import cli
from tepo_jax import errors
from tepo_jax.analysis import audit
from tepo_jax.analysis import results
from tepo_jax.analysis import tables

TABLES = ('1', '2', '3', '4')

_TABLE = flags.DEFINE_enum('table', None, TABLES, 'Which table of the paper.')
_RUNS = flags.DEFINE_string('runs', 'runs', 'Folder of the runs\' folders.')
_FORMAT = flags.DEFINE_enum(
    'format', 'markdown', list(tables.FORMATS), 'What the table is printed as.')
_OUT = flags.DEFINE_string('out', None, 'A file to write instead of stdout.')
_COMMANDS = flags.DEFINE_bool(
    'commands', False, 'Print what is to be run for the table, a line each.')
_COMPARE = flags.DEFINE_list(
    'compare', None, 'Two folders of evaluations: the second minus the first.')


def main() -> None:
  if (_TABLE.value is None) == (_COMPARE.value is None):
    raise errors.InputError('either --table or --compare is wanted')
  text = _comparison() if _COMPARE.value is not None else _table()
  if _OUT.value is None:
    print(text)
  else:
    _write(pathlib.Path(_OUT.value), text + '\n')


def _write(path, text):
  try:
    path.write_text(text, 'utf-8')
  except OSError as error:
    raise errors.InputError(
        f'--out={path}: {error.strerror or error}') from error


def _comparison():
  if len(_COMPARE.value) != 2:
    raise errors.InputError('--compare wants two folders: --compare=DIR,DIR')
  first, second = (results.read(folder)[1] for folder in _COMPARE.value)
  return tables.of_comparison(results.compare(first, second))


def _table():
  everything = {number: _rows(number) for number in TABLES}
  rows = everything[_TABLE.value]
  if _COMMANDS.value:
    return '\n'.join(map(shlex.join, tables.commands(
        rows, int(_TABLE.value), _RUNS.value)))
  columns = dict(paper.COLUMNS.values())
  findings = _findings(rows, sum(everything.values(), ()), columns)
  marks = {(f.row, f.column): '*' for f in findings}
  lines = tables.compared(
      rows, paper.COLUMNS, paper.GRADED, pathlib.Path(_RUNS.value), marks)
  text = tables.FORMATS[_FORMAT.value](lines, list(columns))
  if _FORMAT.value == 'csv':
    return text
  comment = '% ' if _FORMAT.value == 'latex' else ''
  return '\n'.join([text, '', *(
      comment + note for note in _notes(rows, columns, findings))])


def _rows(number):
  return importlib.import_module(f'configs.table{number}').ROWS


def _findings(rows, everything, columns):
  """Of these rows, as seen beside the rows of all the tables."""
  names = {row.name for row in rows}
  others = [row for row in everything if row.name not in names]
  found = audit.audit([*rows, *others], columns, paper.GRADED)
  return [finding for finding in found if finding.row in names]


def _notes(rows, columns, findings):
  labels = {row.name: row.label for row in rows}
  models = {row.name: row.model for row in rows}
  averaged = {(row.model, row.cells, row.average): row for row in rows
              if len(row.seeds) == 1 and not row.is_change and any(row.cells)}
  good = sum(audit.reproduces(row, columns, paper.GRADED)
             for row in averaged.values())
  yield (f'Audit of the paper: the average over its {paper.GRADED:,} samples '
         f'reproduces {good} of {len(averaged)} different rows to the last '
         'digit.')
  for finding in findings:
    yield (f'* {models[finding.row]}, {labels[finding.row]}, '
           f'{finding.column or tables.AVERAGE}: {finding.text}')


if __name__ == '__main__':
  cli.run(main)
