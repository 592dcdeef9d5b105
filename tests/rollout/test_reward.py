"""Rewards: their sum, and functions, own ones that misbehave among them."""

import os
import signal
import time

import numpy as np
import pytest

from tepo_jax import errors
from tepo_jax.data import problem as problem_lib
from tepo_jax.rollout import groups as groups_lib
from tepo_jax.rollout import reward as reward_lib
from tests.rollout.rewards import reward_functions

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

def colourful(completions, row, tokens, ended):
  raise ValueError('\\x1b[31mred\\nline')

def no_tokens(completions, row):
  return [0.0 for _ in completions]

value = 3
'''


def _group(row, texts, length, ended=None, accuracy=None, prompt_id=0):
  size = len(texts)
  problem = problem_lib.Problem(
      'pqr'[prompt_id], '?', ('1',), 'test', row=row)
  return groups_lib.Group(
      groups_lib.Prompt(problem, (1,), prompt_id),
      np.zeros((size, 10), np.int32), np.zeros((size, 10), np.float32),
      np.array(length, np.int32), np.array(ended or [True] * size), texts,
      np.array(accuracy or [0] * size, np.float32))


GROUP = _group({'bonus': 10}, ('one two', 'three'), (4, 8), (True, False))


@pytest.fixture(autouse=True)
def own_module(tmp_path, monkeypatch):
  (tmp_path / 'own_rewards.py').write_text(OWN)
  monkeypatch.chdir(tmp_path)
  monkeypatch.syspath_prepend(tmp_path)
  reward_lib.find.cache_clear()


def _rewards(*names, groups=(GROUP,), timeout_s=10):
  functions = reward_functions(dict.fromkeys(names, 1.0), timeout_s=timeout_s)
  try:
    return functions.of(groups)
  finally:
    functions.close()


def test_own_functions_get_the_whole_row_and_may_print():
  other = _group({'bonus': 0}, ('a', 'b c'), (16, 8), prompt_id=1)
  rewards = _rewards('own_rewards:words', 'brevity', groups=[GROUP, other])
  assert not rewards.reasons
  np.testing.assert_array_equal(
      rewards.parts['own_rewards:words'], np.float32([[13.5, 12], [4, 4]]))
  np.testing.assert_array_equal(
      rewards.parts['brevity'], np.float32([[.5, -.5], [-.5, .5]]))
  assert rewards.parts['brevity'].dtype == rewards.reward_NG.dtype == np.float32
  np.testing.assert_array_equal(rewards.reward_NG, [[14, 11.5], [3.5, 4.5]])


def test_a_function_is_tried_out_on_made_up_completions():
  for name, row, reason in (
      ('words', {'bonus': 1}, None),
      ('words', {}, "KeyError: 'bonus'"),
      ('too_few', {}, 'returned 1 values for 2 completions'),
      ('no_tokens', {}, 'TypeError: no_tokens() takes 2 positional arguments '
       'but 4 were given')):
    functions = reward_functions({f'own_rewards:{name}': 1.0})
    problem = problem_lib.Problem('p', '?', ('1',), 'test', row=row)
    try:
      if reason is None:
        functions.try_out(problem)
      else:
        with pytest.raises(errors.InputError) as caught:
          functions.try_out(problem)
        assert str(caught.value) == (
            f'config.reward.functions: own_rewards:{name}: on made-up '
            f"completions ['It is \\\\boxed{{1}}.', ''] of problem p: {reason}")
    finally:
      functions.close()


@pytest.mark.parametrize('name, reason', [
    ('raising', 'ZeroDivisionError: division by zero'),
    ('crashing', 'its worker died'), ('greedy', 'MemoryError'),
    ('not_finite', 'not finite'), ('too_large', 'not finite'),
    ('too_few', '1 values for 2 completions'),
    ('no_numbers', 'ValueError'),
    ('colourful', r'ValueError: \x1b[31mred line')])
def test_a_function_that_fails_is_named_with_its_problem(name, reason):
  """Other functions of the same group are not affected."""
  rewards = _rewards(f'own_rewards:{name}', 'brevity')
  failure = rewards.reasons[0]
  assert failure.startswith(f'own_rewards:{name}: problem p: ')
  assert reason in failure and '\n' not in failure
  assert np.isnan(rewards.parts[f'own_rewards:{name}']).all()
  np.testing.assert_array_equal(rewards.reward_NG, [[.5, -.5]])


def test_a_function_that_waits_is_killed_at_its_deadline():
  """It uses no CPU time; unlike an answer, it is not asked again."""
  _rewards('own_rewards:words')  # a worker's start is not measured
  start = time.monotonic()
  rewards = _rewards('own_rewards:sleeping', timeout_s=3)
  assert 'took more than 3 s' in rewards.reasons[0]
  assert time.monotonic() - start < 8
  assert np.isnan(rewards.parts['own_rewards:sleeping']).all()


def test_importing_a_module_does_not_count(tmp_path):
  (tmp_path / 'slow_rewards.py').write_text(
      'import time\ntime.sleep(3)\n'
      'def f(completions, *_):\n  return [1.0] * len(completions)\n')
  rewards = _rewards('slow_rewards:f', timeout_s=2)
  assert not rewards.reasons
  np.testing.assert_array_equal(rewards.reward_NG, [[1, 1]])


@pytest.mark.long
def test_a_function_that_hangs_is_killed():
  start = time.monotonic()
  rewards = _rewards('own_rewards:hanging', timeout_s=3)
  assert 'took more than 3 s' in rewards.reasons[0]
  assert time.monotonic() - start < 60
  assert np.isnan(rewards.parts['own_rewards:hanging']).all()


def test_what_a_function_starts_ends_with_its_worker():
  rewards = _rewards('own_rewards:forking')
  assert not rewards.reasons
  child = int(rewards.reward_NG[0, 0])
  deadline = time.monotonic() + 10
  while os.path.exists(f'/proc/{child}/cmdline') and open(
      f'/proc/{child}/cmdline').read() and time.monotonic() < deadline:
    time.sleep(0.05)
  with pytest.raises(ProcessLookupError):
    if not open(f'/proc/{child}/cmdline').read():
      raise ProcessLookupError  # a zombie
    os.kill(child, signal.SIGKILL)


def test_what_a_module_raises_is_one_line_without_controls(tmp_path):
  (tmp_path / 'colourful_rewards.py').write_text(
      "raise ValueError('\\x1b[31mred\\nline')")
  with pytest.raises(errors.InputError) as error:
    reward_lib.find('colourful_rewards:f')
  assert str(error.value) == (
      r'colourful_rewards:f: ValueError: \x1b[31mred line')


@pytest.mark.parametrize('name, reason', [
    ('nothing', 'one of: accuracy, boxed, brevity, or module:function'),
    ('no_such_module:f', 'No module named'),
    ('own_rewards:absent', 'absent'), ('own_rewards:value', 'not a function')])
def test_an_unknown_function_is_refused(name, reason):
  with pytest.raises(errors.InputError) as error:
    reward_lib.find(name)
  assert name in str(error.value) and reason in str(error.value)


def test_a_module_that_exits_is_refused(tmp_path):
  (tmp_path / 'exiting_rewards.py').write_text(
      'raise SystemExit("usage: no")\n')
  with pytest.raises(errors.InputError,
                     match='exiting_rewards:f: SystemExit: usage'):
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


def test_rewards_are_verdicts_and_the_overlong_penalty():
  groups = [
      _group(None, ('',) * 3, (6, 8, 10), accuracy=(1, 0, 1)),
      _group(None, ('',) * 3, (7, 2, 9), accuracy=(0, 1, 0), prompt_id=1)]
  rewards = reward_functions().of(groups)
  np.testing.assert_array_equal(rewards.reward_NG, [[1, 0, 1], [0, 1, 0]])
  assert not rewards.parts and not rewards.reasons
  # Free up to 10 − 4 tokens, then half a point at the limit.
  np.testing.assert_allclose(
      reward_functions(overlong_buffer=4, overlong_factor=0.5).of(
          groups).reward_NG,
      [[1, -.25, 1 - .5], [-.125, 1, -.375]], rtol=1e-6)


def test_rewards_are_weighted_sums_of_functions():
  """A function that failed counts as 0."""
  group = _group({'bonus': 1}, ('a', 'b c', 'd'), (8, 8, 8),
                 accuracy=(1, 0, 1))
  functions = reward_functions({
      'accuracy': 2.0, 'own_rewards:words': -0.5, 'own_rewards:raising': 9.0})
  np.testing.assert_array_equal(functions.of([group]).reward_NG, [[0, -2.5, 0]])
  functions.close()


def test_the_penalty_does_not_make_a_group_mixed():
  group = _group(None, ('', ''), (1, 10))
  reward_NG = reward_functions(overlong_buffer=4).of([group]).reward_NG
  assert len(set(reward_NG[0])) == 2
  assert not groups_lib.differ(group.accuracy_G)


def test_overlong_penalty():
  """Maximum 100, buffer 20, factor 0.5: free up to 80, then linear."""
  got = reward_lib.overlong_penalty(
      np.array([1, 80, 81, 90, 100]), 100, 20, 0.5)
  np.testing.assert_allclose(got, [0, 0, -0.025, -0.25, -0.5], rtol=1e-6)


def _failed(reasons):
  """Functions f and g for groups 0 … 3; f failed for 1 and 3, g for 3."""
  parts = {'f': np.zeros((4, 2), np.float32), 'g': np.ones((4, 2), np.float32)}
  parts['f'][[1, 3]] = parts['g'][3] = np.nan
  return reward_lib.Rewards(np.zeros((4, 2), np.float32), parts, reasons)


def test_a_failure_stops_the_run_or_is_said(capsys):
  reasons = {1: 'f: problem q: why', 3: 'g: problem s: why'}
  _failed(reasons).check(1, 'stop')  # the others are surplus
  for count, failed in (2, 1), (3, 1), (4, 2):
    with pytest.raises(errors.RunError) as error:
      _failed(reasons).check(count, 'stop')
    assert str(error.value) == (
        f'reward f: problem q: why ({failed} of {count} groups)')
  assert not any(capsys.readouterr())
  _failed(reasons).check(4, 'zero')
  assert capsys.readouterr() == (
      '', 'reward f: problem q: why (2 of 4 groups): counted as 0\n')


def test_another_process_names_its_failures(capsys):
  with pytest.raises(errors.RunError, match='on another process, which names'):
    _failed({}).check(4, 'stop')
  _failed({}).check(4, 'zero')
  assert not any(capsys.readouterr())
