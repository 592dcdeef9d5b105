"""Texts for --table, --commands and --compare."""

from collections.abc import Sequence
import importlib
import shlex

from configs import paper
from tepo_jax import errors
from tepo_jax.tools.report import audit
from tepo_jax.tools.report import comparison as comparison_lib
from tepo_jax.tools.report import tables

TABLES = ('1', '2', '3', '4')
_HEAD = """# The paper's tables, audited

Accuracies in per cent as the paper prints them; ± is half the 95 % interval of
the binomial error of the samples. An asterisk marks a cell that is no share of
its samples, that its row's cells contradict, or that equals the cell of another
method; the lines below a table say which. Made by
`python -m tepo_jax.report --audit --out=launch/study/audit.md`."""


def comparison(folders: Sequence[str], form: str) -> str:
  """Formats the second evaluation minus the first, on the same problems; names
  the settings in which they differ on stderr."""
  if differing := comparison_lib.settings_that_differ(*folders):
    errors.note(f'note: the evaluations differ in {errors.listed(differing)}')
  return tables.of_comparison(
      comparison_lib.compare(*map(comparison_lib.read, folders)), form)


def commands(number: str, runs: str) -> str:
  """Returns the command lines that a table still needs."""
  return '\n'.join(map(shlex.join, tables.commands(
      _rows(number), int(number), runs)))


def table(number: str, runs: str, form: str) -> str:
  """Formats a table of the paper with our results and the audit's findings.

  Args:
    number: one of TABLES. runs: the folder that contains the runs.
    form: one of `tables.FORMATS`. In 'markdown', a table without any result
      of ours is replaced by the commands that it needs.
  """
  rows, columns, findings, lines = _audited(number, runs)
  if form == 'markdown' and not any(
      cell.value is not None for line in lines if line.is_ours
      for cell in line.cells):
    return '\n'.join([
        f'Table {number}: no run of its {len(rows)} rows in {runs}. They need '
        'these commands:', *(f'python -m {line}' for line in commands(
            number, runs).splitlines()),
        '--csv and --latex print the paper\'s rows.'])
  text = tables.FORMATS[form](lines, list(columns))
  if form == 'csv':
    return text
  comment = '% ' if form == 'latex' else ''
  return '\n'.join([text, '', *(
      comment + note for note in (
          *_notes(rows, columns, findings), *_numbers(lines, columns)))])


def audited() -> str:
  """A page in Markdown: the paper's tables as printed, and what is inconsistent
  in each."""
  everything = sum(map(_rows, TABLES), ())
  parts = [_HEAD, *_notes(everything, dict(paper.COLUMNS.values()), ())]
  for number in TABLES:
    rows, columns, findings, lines = _audited(number, None)
    _, *notes = _notes(rows, columns, findings)
    parts += [f'## Table {number}', tables.markdown(lines, list(columns)),
              '\n'.join('- ' + note.removeprefix('* ') for note in notes)]
  return '\n\n'.join(parts)


def _audited(number, runs):
  """Rows, columns, findings and lines of a table; see `tables.compared`."""
  everything = {n: _rows(n) for n in TABLES}  # with which it is compared
  rows = everything[number]
  columns = dict(paper.COLUMNS.values())
  names = {row.name for row in rows}
  others = [row for row in sum(everything.values(), ())
            if row.name not in names]
  findings = [f for f in audit.audit([*rows, *others], columns, paper.GRADED)
              if f.row in names]
  marks = {(f.row, f.column): '*' for f in findings}
  return rows, columns, findings, tables.compared(
      rows, paper.COLUMNS, paper.GRADED, runs, marks)


def _numbers(lines, columns):
  if any('(n=' in cell.mark for line in lines for cell in line.cells):
    papers = ', '.join(f'{name} {n}' for name, n in columns.items())
    yield ('(n=...): over so many samples. The paper\'s cells are over: '
           f'{papers}, {tables.AVERAGE} {paper.GRADED}. Its Omni-Math is a '
           'part of the hub\'s: give a file, as tepo_jax/data/README.md says.')


def _rows(number):
  return importlib.import_module(f'configs.table{number}').ROWS


def _notes(rows, columns, findings):
  named = {row.name: row for row in rows}
  averaged = {(row.model, row.cells, row.average): row for row in rows
              if len(row.seeds) == 1 and not row.is_change and any(row.cells)}
  reproduced = sum(audit.reproduces(row, columns, paper.GRADED)
                   for row in averaged.values())
  yield (f'Audit of the paper: the average over its {paper.GRADED:,} samples '
         f'reproduces {reproduced} of {len(averaged)} different rows to the '
         'last digit.')
  for finding in findings:
    row = named[finding.row]
    yield (f'* {row.model}, {row.label}, '
           f'{finding.column or tables.AVERAGE}: {finding.text}')
