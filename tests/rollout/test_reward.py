"""Reward functions: the table's, and own ones that misbehave."""

import os
import signal
import time

import numpy as np
import pytest

from tepo_jax import errors
from tepo_jax.rollout import reward as reward_lib

OWN = '''
import os, sys, time

def words(completions, row, tokens, ended):
  print('a line that must not reach the answers')
  print('another', file=sys.stderr)
  return [len(text.split()) + row['bonus'] + n / 8 + done
          for text, n, done in zip(completions, tokens, ended)]

def raising(completions, row, tokens, ended):
  return [1 / (len(row) - len(row)) for _ in completions]

def hanging(completions, row, tokens, ended):
  while True:
    pass

def sleeping(completions, row, tokens, ended):
  time.sleep(600)

def crashing(completions, row, tokens, ended):
  os._exit(3)

def greedy(completions, row, tokens, ended):
  return [len(bytearray(8 << 30)) for _ in completions]

def forking(completions, row, tokens, ended):
  child = os.fork()
  if not child:
    time.sleep(600)
  return [float(child)] * len(completions)

def not_finite(completions, row, tokens, ended):
  return [0.0, float('nan')]

def too_large(completions, row, tokens, ended):
  return [0.0, 1e39]

def too_few(completions, row, tokens, ended):
  return [0.0]

def no_numbers(completions, row, tokens, ended):
  return ['good', 'bad']

value = 3
'''

GROUP = (('one two', 'three'), {'bonus': 10}, (4, 8), (True, False))


@pytest.fixture(autouse=True)
def own_module(tmp_path, monkeypatch):
  (tmp_path / 'own_rewards.py').write_text(OWN)
  monkeypatch.chdir(tmp_path)
  monkeypatch.syspath_prepend(tmp_path)
  reward_lib.find.cache_clear()


def _score(*names, groups=(('p', GROUP),), timeout_s=10):
  scorer = reward_lib.Scorer(names, 2, timeout_s)
  try:
    return scorer.score(list(groups)), scorer.failures
  finally:
    scorer.close()


def test_own_functions_get_the_whole_row_and_may_print():
  other = (('a',), {'bonus': 0}, (16,), (True,))
  scores, failures = _score(
      'own_rewards:words', 'brevity', groups=[('p', GROUP), ('q', other)])
  assert not failures
  np.testing.assert_array_equal(
      scores[0]['own_rewards:words'], np.float32([13.5, 12]))
  np.testing.assert_array_equal(scores[0]['brevity'], np.float32([.5, -.5]))
  np.testing.assert_array_equal(scores[1]['own_rewards:words'], [4.0])
  assert scores[0]['brevity'].dtype == np.float32


@pytest.mark.parametrize('name, reason', [
    ('raising', 'ZeroDivisionError: division by zero'),
    ('crashing', 'its worker died'), ('greedy', 'MemoryError'),
    ('not_finite', 'not finite'), ('too_large', 'not finite'),
    ('too_few', '1 values for 2 completions'),
    ('no_numbers', 'ValueError')])
def test_a_function_that_fails_is_named_with_its_problem(name, reason):
  """Other functions of the same group are not affected."""
  (scores,), failures = _score(f'own_rewards:{name}', 'brevity')
  failure = failures['p']
  assert failure.startswith(f'own_rewards:{name}: problem p: ')
  assert reason in failure and '\n' not in failure
  assert np.isnan(scores[f'own_rewards:{name}']).all()
  np.testing.assert_array_equal(scores['brevity'], np.float32([.5, -.5]))


def test_a_function_that_waits_is_killed_at_its_deadline():
  """It uses no CPU time; unlike an answer, it is not asked again."""
  _score('own_rewards:words')  # a worker's start is not measured
  start = time.monotonic()
  (scores,), failures = _score('own_rewards:sleeping', timeout_s=3)
  assert 'took more than 3 s' in failures['p']
  assert time.monotonic() - start < 8
  assert np.isnan(scores['own_rewards:sleeping']).all()


def test_importing_a_module_does_not_count(tmp_path):
  (tmp_path / 'slow_rewards.py').write_text(
      'import time\ntime.sleep(3)\n'
      'def f(completions, *_):\n  return [1.0] * len(completions)\n')
  scores, failures = _score('slow_rewards:f', timeout_s=2)
  assert not failures
  np.testing.assert_array_equal(scores[0]['slow_rewards:f'], [1, 1])


@pytest.mark.long
def test_a_function_that_hangs_is_killed():
  start = time.monotonic()
  (scores,), failures = _score('own_rewards:hanging', timeout_s=3)
  assert 'took more than 3 s' in failures['p']
  assert time.monotonic() - start < 60
  assert np.isnan(scores['own_rewards:hanging']).all()


def test_what_a_function_starts_ends_with_its_worker():
  (scores,), failures = _score('own_rewards:forking')
  assert not failures
  child = int(scores['own_rewards:forking'][0])
  deadline = time.monotonic() + 10
  while os.path.exists(f'/proc/{child}/cmdline') and open(
      f'/proc/{child}/cmdline').read() and time.monotonic() < deadline:
    time.sleep(0.05)
  with pytest.raises(ProcessLookupError):
    if not open(f'/proc/{child}/cmdline').read():
      raise ProcessLookupError  # a zombie
    os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize('name, reason', [
    ('nothing', 'one of: accuracy, boxed, brevity, or module:function'),
    ('no_such_module:f', 'No module named'),
    ('own_rewards:absent', 'absent'), ('own_rewards:value', 'not a function')])
def test_an_unknown_function_is_refused(name, reason):
  with pytest.raises(errors.InputError) as error:
    reward_lib.find(name)
  assert name in str(error.value) and reason in str(error.value)


def test_a_module_that_exits_is_refused(tmp_path):
  (tmp_path / 'exiting_rewards.py').write_text('raise SystemExit("usage: no")\n')
  with pytest.raises(errors.InputError, match='exiting_rewards:f: SystemExit: usage'):
    reward_lib.find('exiting_rewards:f')


def test_boxed_is_one_box_that_ended():
  texts = [r'so \boxed{3}', r'\boxed{3} or \boxed{4}', '3', r'\boxed{3}',
           r'\boxed{3']
  assert reward_lib.boxed(texts, {}, [1] * 5, [True, True, True, False, True]
                       ) == [1, 0, 0, 0, 0]


def test_brevity_compares_a_group():
  assert reward_lib.brevity(['a', 'b', 'c'], {}, [10, 20, 15], [True] * 3) == [
      .5, -.5, 0]
  assert reward_lib.brevity(['a', 'b'], {}, [7, 7], [True] * 2) == [0, 0]
