"""The paper's tables: configs, audit, formats."""

import csv
import dataclasses
import importlib
import json
import pathlib

import pytest

from configs import methods
from configs import paper
from tepo_jax import errors
from tepo_jax.tools.report import audit
from tepo_jax.tools.report import overview
from tepo_jax.tools.report import paper_tables
from tepo_jax.tools.report import runs
from tepo_jax.tools.report import tables

_ROOT = pathlib.Path(__file__).parents[3]
_SHARED = _ROOT.parent / 'shared' / 'paper'
COLUMNS = dict(paper.COLUMNS.values())
ROWS = {number: importlib.import_module(f'configs.table{number}').ROWS
        for number in (1, 2, 3, 4)}
ALL_ROWS = sum(ROWS.values(), ())


@pytest.mark.skipif(not _SHARED.is_dir(), reason='the tables are missing')
def test_cells_are_the_papers():
  printed = json.loads((_SHARED / 'tables.json').read_text())['rows']
  assert [tuple(row['cells'].values()) + (row['avg'],) for row in printed] == [
      row.cells + (row.average,) for row in ALL_ROWS]


@pytest.mark.parametrize('number', ROWS)
def test_every_row_is_a_config(number):
  module = importlib.import_module(f'configs.table{number}')
  names = [row.name for row in module.ROWS]
  assert len(names) == len(set(names))
  rows = methods.methods(1e-3)
  for row in module.ROWS:
    if not row.is_change:
      config = module.get_config(row.name)
      assert (config.steps, config.seed) == (row.steps, row.seeds[0])
      assert row.method is None or row.method in rows
      assert config.method_name == (row.method or 'tepo')
      assert tuple(config.eval.sets) == tuple(paper.COLUMNS)
  with pytest.raises(ValueError, match='no row'):
    module.get_config('tepoo')


@pytest.mark.parametrize('percent, samples, wanted', [
    (11.25, 960, [108]), (33.33, 3, [1]), (66.66, 3, [2]), (66.67, 3, [2]),
    (33.34, 3, []), (0.0, 960, [0]), (32.22, 2811, []), (33.22, 2811, [934]),
    (100.0, 5, [5])])
def test_counts(percent, samples, wanted):
  """Percentages are rounded or truncated to two digits."""
  assert audit.counts(percent, samples) == wanted


def _different_rows():
  """Different rows of one run each."""
  return {(row.model, row.cells, row.average): row for row in ALL_ROWS
          if len(row.seeds) == 1 and not row.is_change and any(row.cells)
          }.values()


def test_the_average_is_that_of_all_samples_in_30_of_42_rows():
  rows = list(_different_rows())
  good = [row for row in rows
          if audit.reproduces(row, COLUMNS, paper.GRADED)]
  assert (len(good), len(rows)) == (30, 42)
  # No printed average is the plain mean of the columns.
  assert not [row for row in rows if None not in row.cells and abs(
      sum(row.cells) / 7 - row.average) < 0.005]


def test_the_audit_flags_the_other_rows_and_the_known_cells():
  found = audit.audit(ALL_ROWS, COLUMNS, paper.GRADED)
  bad = {row.name for row in _different_rows()
         if not audit.reproduces(row, COLUMNS, paper.GRADED)}
  assert bad <= {finding.row for finding in found}
  texts = {(finding.row, finding.column): finding.text for finding in found}
  assert '32.22 is not a multiple of 1/2811' in texts[
      'qwen3_14b.gpg', 'OMNI-MATH']
  assert texts['qwen2_5_7b.change', 'AMC'] == (
      'the paper prints 5.68, the rows differ by 0.68')
  assert texts['qwen3_14b.change', 'AIME24'] == (
      'the paper prints 5.21, the rows differ by 2.29; the difference to the '
      'untrained model matches')
  assert 'prints 42.23' in texts['r1_llama_8b.grpo', None]
  assert 'prints 42.76' in texts['r1_llama_8b.tepo', None]
  assert 'prints 45.99' in texts['r1_qwen_7b.grpo', None]
  assert 'prints 26.25' in texts['a.kl_1e-1', None]
  assert 'equal those of w. CLIP-Cov' in texts['a.kl_1e-1', 'AMC']
  assert 'equal those of w. GRPO/DAPO' in texts['b.max_entropy', 'AMC']


def test_a_consistent_table_has_no_findings():
  row = paper.Row('x', 'x', 'm', 'tepo', (50.0, 33.33), 41.67)
  assert audit.audit([row], {'a': 6, 'b': 6}, 12) == []
  wrong = dataclasses.replace(row, average=44.0)
  [finding] = audit.audit([wrong], {'a': 6, 'b': 6}, 12)
  assert finding.column is None
  # One sample that no cell counts, correct or not.
  assert audit.reproduces(dataclasses.replace(row, average=46.15),
                          {'a': 6, 'b': 6}, 13)


TOY = {'a': ('A', 100), 'b': ('B', 100)}
TOY_ROWS = (
    paper.Row('base', 'Toy', 'm', None, (10.0, None), 5.0),
    paper.Row('tepo', 'TEPO_1', 'm', 'tepo', (50.0, 40.0), 45.0, seeds=(1, 2)),
    paper.Row('d', 'Δ', 'm', 'tepo', (40.0, 40.0), 40.0, is_change=True))


def _evaluated(runs, name, a, b, problems=25):
  folder = runs / name / tables.EVALUATION
  folder.mkdir(parents=True)
  (folder / 'results.json').write_text(json.dumps({
      'sets': {'a:f.jsonl': {'avg@4': a, 'low': a - .1, 'high': a + .1,
                             'problems': problems},
               'b/greedy': {'avg@1': b, 'low': b - .1, 'high': b + .1,
                            'problems': 100}},
      'first_decodings': ['a:f.jsonl', 'b/greedy'],
      'avg_micro': (a + b) / 2,
      'avg_micro_interval': [(a + b) / 2 - .1, (a + b) / 2 + .1]}))


def _compared(runs):
  return tables.compared(TOY_ROWS, TOY, 200, runs, {('tepo', None): '*'})


def test_our_line_follows_the_papers(tmp_path):
  assert tables.markdown(_compared(tmp_path), ['A', 'B']).splitlines() == [
      '|  | A | B | Avg. |', '| --- | ---: | ---: | ---: |',
      '| Toy | 10.00±5.88 | - | 5.00±3.02 |',
      '| ours | not run | not run | not run |',
      '| TEPO_1 | 50.00±6.93 | 40.00±6.79 | 45.00±4.88* |',
      '| ours | not run | not run | not run |', '| Δ | 40.00 | 40.00 | 40.00 |']
  _evaluated(tmp_path, 'm_tepo_steps72_seed1', .5, .3)
  assert 'not run' in tables.markdown(_compared(tmp_path), 'AB').splitlines()[5]
  _evaluated(tmp_path, 'm_tepo_steps72_seed2', .7, .5)
  assert tables.markdown(_compared(tmp_path), 'AB').splitlines()[5] == (
      '| ours | 60.00±10.00 | 40.00±10.00 | 50.00±10.00 |')


def test_a_cell_over_other_samples_than_the_papers_says_so(tmp_path):
  _evaluated(tmp_path, 'm_base', .5, .3, problems=20)
  assert tables.markdown(_compared(tmp_path), 'AB').splitlines()[3] == (
      '| ours | 50.00±10.00 (n=80) | 30.00±10.00 | 40.00±10.00 (n=180) |')
  row = next(row for row in ROWS[3] if row.method and not row.is_change)
  folder = tmp_path / tables.run_name(row, row.seeds[0]) / tables.EVALUATION
  folder.mkdir(parents=True)
  sets = {name: {'avg@1': .5, 'low': .4, 'high': .6, 'problems': samples}
          for name, (_, samples) in paper.COLUMNS.items()}
  for problems, said in ((2811, False), (4419, True)):
    sets['omni_math']['problems'] = problems
    (folder / 'results.json').write_text(json.dumps({
        'sets': sets, 'first_decodings': list(sets), 'avg_micro': .5,
        'avg_micro_interval': [.4, .6]}))
    text = paper_tables.table('3', str(tmp_path), 'markdown')
    assert ('50.00±10.00 (n=4419)' in text) == said, text
    assert ('(n=10442)' in text) == said
    assert ('OMNI-MATH 2811' in text) == said


def test_a_table_without_any_result_is_one_line_and_the_commands(tmp_path):
  text = paper_tables.table('3', str(tmp_path), 'markdown')
  first, *lines, last = text.splitlines()
  assert first == (f'Table 3: no run of its {len(ROWS[3])} rows in {tmp_path}. '
                   'They need these commands:')
  assert lines == [f'python -m {line}' for line in paper_tables.commands(
      '3', str(tmp_path)).splitlines()]
  assert 'not run' not in text and '--csv' in last
  assert 'not run' in paper_tables.table('3', str(tmp_path), 'csv')
  row = next(row for row in ROWS[3] if row.method and not row.is_change)
  folder = tmp_path / tables.run_name(row, row.seeds[0]) / tables.EVALUATION
  folder.mkdir(parents=True)
  (folder / 'results.json').write_text(json.dumps({
      'sets': {name: {'avg@1': .5, 'low': .4, 'high': .6, 'problems': 1}
               for name in paper.COLUMNS},
      'first_decodings': list(paper.COLUMNS), 'avg_micro': .5,
      'avg_micro_interval': [.4, .6]}))
  assert 'not run' in paper_tables.table('3', str(tmp_path), 'markdown')


def test_the_page_of_the_audit_is_what_its_command_makes():
  page = paper_tables.audited() + '\n'
  assert page == (_ROOT / 'launch/study/audit.md').read_text('utf-8')
  # The printed average 30.30 of Table 4, from which the cells differ.
  assert '30.30±0.96*' in page and 'the paper prints 30.3\n' in page


def test_latex_and_csv(tmp_path):
  _evaluated(tmp_path, 'm_base', .1, .2)
  lines = _compared(tmp_path)
  latex = tables.latex(lines, ['A', 'B']).splitlines()
  assert latex[0].endswith('{booktabs}.')
  assert latex[1] == r'\begin{tabular}{lrrr}'
  assert latex[7] == (r'TEPO\_1 & 50.00$\pm$6.93 & 40.00$\pm$6.79 & '
                      r'45.00$\pm$4.88* \\')
  rows = list(csv.DictReader(
      tables.comma_separated(lines, ['A', 'B']).splitlines()))
  assert len(rows) == 5 * 3
  assert rows[3] == dict(panel='', row='Toy', of='ours', column='A',
                         value='10.0000', low='0.0000', high='20.0000', note='')
  assert rows[1]['note'] == '-' and rows[9]['note'] == 'not run'


def test_commands_that_a_table_still_needs(tmp_path):
  def programs():
    return [(line[0], line[-1].rpartition('/')[2])
            for line in tables.commands(TOY_ROWS, 1, tmp_path)]

  first, second = (f'm_tepo_steps72_seed{seed}' for seed in (1, 2))
  assert programs() == [
      ('tepo_jax.evaluate', 'evaluation'), ('tepo_jax.train', first),
      ('tepo_jax.evaluate', 'evaluation'), ('tepo_jax.train', second),
      ('tepo_jax.evaluate', 'evaluation')]
  _evaluated(tmp_path, first, .5, .5)
  _evaluated(tmp_path, 'm_base', .5, .5)
  assert tables.commands(TOY_ROWS, 1, tmp_path) == [
      ['tepo_jax.train', '--config=configs/table1.py:tepo', '--config.seed=2',
       f'--workdir={tmp_path / second}'],
      ['tepo_jax.evaluate', '--config=configs/table1.py:tepo',
       '--config.seed=2', f'--checkpoint={tmp_path / second}',
       f'--out={tmp_path / second / "evaluation"}']]


def test_methods_for_a_paper(make_run):
  """Mean, interval and n of each, and the difference paired by seed; one run's
  interval is the recorded one."""
  read = runs.read([
      make_run(f'{name}_{seed}', [
          {'step': step, 'eval/a_b/avg@8': value + 0.02 * seed,
           'eval/a_b/low': 0.1, 'eval/a_b/high': 0.9}
          for step, value in ((0, 0.2), (6, 0.4 + gain * (seed + 1)))],
          seed=seed, method_name=name)
      for name, seeds, gain in (
          ('grpo', (0, 1), 0), ('gpg', (0, 1), .03), ('tepo', (1,), -.02))
      for seed in seeds])
  groups = runs.group(read)
  rows = list(csv.DictReader(overview.comparison(groups, 'csv').splitlines()))
  assert [(row['method'], row['point']) for row in rows] == [
      (name, point) for name in ('grpo', 'gpg', 'tepo')
      for point in ('first', 'last', 'best')]
  paired = ['baseline', 'pairs', 'difference', 'difference_low',
            'difference_high']
  assert rows[1] == {
      'method': 'grpo', 'set': 'a_b/avg@8', 'point': 'last', 'steps': '6',
      'n': '2', 'mean': '41.0000', 'low': '40.0000', 'high': '42.0000',
      } | dict.fromkeys(paired, '')
  assert [rows[6][name] for name in ('n', 'mean', 'low', 'high')] == [
      '1', '22.0000', '10.0000', '90.0000']
  assert [[rows[i][name] for name in paired] for i in (3, 4, 5, 7)] == [
      ['grpo', '2', '0.0000', '0.0000', '0.0000'],
      *2 * [['grpo', '2', '4.5000', '3.0000', '6.0000']],
      ['grpo', '1', '-4.0000', '', '']]
  latex = overview.comparison(groups, 'latex').splitlines()
  assert latex[1].startswith('% Last - grpo: paired by seed')
  assert latex[3] == r'\begin{tabular}{llrrrrr}'
  assert latex[5].endswith(r'best & last $-$ grpo \\')
  assert [line.rpartition(' & ')[2] for line in latex[7:10]] == [
      r' \\', r'+4.5 [+3.0, +6.0] \\', r'-4.0 \\']
  assert latex[7] == (r'grpo & a\_b/avg@8 & 2 & 21.0 [20.0, 22.0] & '
                      r'41.0 [40.0, 42.0] & 41.0 [40.0, 42.0] &  \\')
  alone = overview.comparison(groups[:1], 'latex').splitlines()
  assert alone[2] == r'\begin{tabular}{llrrrr}'
  with pytest.raises(errors.InputError, match='no run of --runs has an eval'):
    overview.comparison(runs.group(runs.read([
        make_run('none', [{'step': 1}])])), 'csv')


def test_labels_are_texts_in_latex(make_run):
  """A label may hold any value of a config; it stays on one line."""
  system = 'Please put it in \\boxed{}.\n#1 x^2 $5 ~50% a_b & c|d'
  escaped = (r'Please put it in \textbackslash{}boxed\{\}. \#1 '
             r'x\textasciicircum{}2 \$5 \textasciitilde{}50\% a\_b \& '
             r'c\textbar{}d')
  read = runs.read([
      make_run(name, [{'step': 6, 'eval/set/avg@8': 0.5}],
               data={'system': value}, method_name='gpg')
      for name, value in (('a', system), ('b', 'other'))])
  lines = overview.comparison(runs.group(read), 'latex').splitlines()
  label = f'gpg (data.system={escaped})'
  assert lines[1].startswith(f'% Last - {label}: paired by seed')
  assert lines[3].startswith(r'\begin{tabular}')
  assert lines[5] == (
      rf'method & set & n & first & last & best & last $-$ {label} \\')
  assert lines[7].startswith(f'{label} & set/avg@8 & 1 & 50.0 & ')
  assert len(lines) == 11


def test_two_evaluations_for_a_paper():
  row = {'set': 'math_500', 'problems': 500, 'first': .5, 'second': .625,
         'difference': .125, 'low': .1, 'high': .15, 'p': .0012}
  assert tables.of_comparison([row], 'csv').splitlines()[1] == (
      'math_500,500,0.5,0.625,0.125,0.1,0.15,0.0012')
  assert tables.of_comparison([row], 'latex').splitlines()[5] == (
      r'math\_500 & 500 & 50.0 & 62.5 & +12.5 [+10.0, +15.0] & 0.0012 \\')


@pytest.mark.parametrize('interval, text', [
    ((0.0412, 0.0381, 0.045), '0.0412 [0.0381, 0.0450]'),
    ((123.4, 99.9, 140.0), '123 [100, 140]'), ((0.0,), '0')])
def test_an_interval_has_one_number_of_decimals(interval, text):
  assert overview.with_interval(interval) == text
