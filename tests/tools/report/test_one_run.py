"""A single run's page: what was run, the curve, then tables."""

import html
import json
import pathlib
import re

import pytest

from tepo_jax.tools.report import figures
from tepo_jax.tools.report import runs
from tepo_jax.tools.report import study
from tests.tools.report.records import record

COMMAND = ('--config=configs/tiny.py:tepo --workdir=runs/a --config.steps=6 '
           "--config.eval.sets=\"('a b',)\"")


def _page(make_run, tmp_path, monkeypatch, command=None, **changed):
  """The page of one run of TEPO, as HTML."""
  monkeypatch.setattr(figures, 'draw', lambda *_: None)
  lines = [record(s, **({} if s % 3 else {'eval/set/avg@8': 0.1 * s}))
           for s in range(1, 7)]
  path = pathlib.Path(make_run(
      'a', lines, method_name='tepo', method__weight='sequence', **changed))
  (path / 'environment.jsonl').write_text(json.dumps(
      {'step': 0, 'devices': '1 x cpu', 'commit': 'abc123', 'jax': '0.7',
       'parameters': 212345} | ({'command': command} if command else {})))
  return study.write(
      tmp_path, runs.read([str(path)]), {'E': ('tepo',)}).read_text('utf-8')


def _facts(text):
  return {html.unescape(name): html.unescape(re.sub(
      '<[^>]*>', '|', re.sub('</?span>', '', value)))
          for name, value in re.findall('<dt>(.*?)</dt><dd>(.*?)</dd>', text)}


def test_it_begins_with_what_was_run(make_run, tmp_path, monkeypatch):
  facts = _facts(_page(make_run, tmp_path, monkeypatch, COMMAND))
  assert facts.pop('method').startswith(
      'tepo: L = sum_it c_it (coef M_it R_it - b_it S(w_it, A_it))'
      '|weight: sequence: w = s_i = exp(sum_t m d / n_i)')
  assert facts == {
      'state': 'finished', 'model': 'embedded, 212,345 parameters',
      'first fields': 'steps=6, optimizer.learning_rate=1e-05',
      'seed': '0', 'config file': 'configs/tiny.py:tepo',
      'changed on the command line': "steps=6, eval.sets=('a b',)",
      'machine': '1 x cpu', 'duration': '12s',
      'versions': 'commit abc123, jax 0.7',
      'make it again': '|python -m tepo_jax.train --config=configs/tiny.py:tepo'
      " --workdir=DIR --config.steps=6 '--config.eval.sets=('\"'\"'a b'\"'\"'"
      ",)'|"}


@pytest.mark.parametrize('command, changed, again', [
    ('--config configs/tiny.py:tepo --config.steps 5 --workdir runs/a '
     '--config.seed=3', 'steps=5, seed=3',
     '--config=configs/tiny.py:tepo --config.steps=5 --workdir=DIR '
     '--config.seed=3'),
    ('-config=configs/tiny.py:tepo --quiet -workdir runs/a -config.seed 3 '
     "--config.data.system 'a = b'", 'seed=3, data.system=a = b',
     '-config=configs/tiny.py:tepo --quiet -workdir=DIR -config.seed=3 '
     "'--config.data.system=a = b'"),
    ('--config=configs/tiny.py:tepo --noconfig.eval.before '
     '--config.eval.greedy --quiet --workdir runs/a',
     'eval.before=False, eval.greedy=True',
     '--config=configs/tiny.py:tepo --config.eval.before=False '
     '--config.eval.greedy=True --quiet --workdir=DIR'),
    ('--config=configs/tiny.py:tepo --config.method.reg.coef -0.5 '
     "--config.data.system '' --workdir=runs/a --noquiet",
     'method.reg.coef=-0.5, data.system=',
     '--config=configs/tiny.py:tepo --config.method.reg.coef=-0.5 '
     '--config.data.system= --workdir=DIR --noquiet')])
def test_every_spelling_of_a_flag_is_understood(
    make_run, tmp_path, monkeypatch, command, changed, again):
  facts = _facts(_page(make_run, tmp_path, monkeypatch, command))
  assert facts['config file'] == 'configs/tiny.py:tepo'
  assert facts['changed on the command line'] == changed
  assert facts['make it again'] == f'|python -m tepo_jax.train {again}|'


def test_without_the_command_it_says_what_differs_from_base(
    make_run, tmp_path, monkeypatch):
  facts = _facts(_page(make_run, tmp_path, monkeypatch))
  assert facts['differs from configs/base.py'] == (
      'steps=6, optimizer.learning_rate=1e-05')
  assert facts['make it again'] == '–'


def test_its_curve_with_the_evaluations_comes_before_any_table(
    make_run, tmp_path, monkeypatch):
  text = _page(make_run, tmp_path, monkeypatch)
  cards = re.findall('id="panel-(.*?)"', text)
  assert cards[:2] == ['eval_set_avg_8', 'accuracy']
  assert text.index('id="panel-eval_set_avg_8"') < text.index('<table>')


@pytest.mark.parametrize('data, shown', [
    ('dapo_math', True), ('arithmetic', False)])
def test_the_papers_panels_are_those_of_its_data(
    make_run, tmp_path, monkeypatch, data, shown):
  text = _page(make_run, tmp_path, monkeypatch, data={'name': data})
  assert ('The panels of Table 3' in text) == shown
