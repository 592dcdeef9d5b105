"""Training with a reward function of one's own, as the recipe says."""

import json

import numpy as np
import pytest

from tests import runs

pytestmark = pytest.mark.long

OWN = '''
def few_words(completions, row, tokens, ended):
  return [1 / (1 + len(text.split())) for text in completions]

def sometimes_bad(completions, row, tokens, ended):
  odd = sum(map(ord, row['problem'])) % 2
  tried_out = len(completions) < 4
  return [0.5] * (len(completions) if odd or tried_out else 0)
'''


@pytest.fixture
def train(programs, untrained_model):
  def run(folder, *arguments, status=0):
    (folder / 'own_reward.py').write_text(OWN)
    return programs.run(
        'train', *runs.train_arguments(untrained_model, folder / 'run'),
        '--config.steps=2', '--config.rollout.overlong_buffer=0', *arguments,
        status=status, PYTHONPATH=str(folder))
  return run


def _dumped(folder, step):
  return [json.loads(line) for line in (
      folder / f'run/rollouts/step_{step:06d}.jsonl').open()]


def test_the_reward_is_what_the_functions_gave(train, tmp_path):
  train(tmp_path,
        "--config.reward.functions=('accuracy','own_reward:few_words')",
        '--config.reward.weights=(1.0,0.25)')
  for record in runs.records(tmp_path / 'run')[1:]:  # 0 is an evaluation
    rows = _dumped(tmp_path, record['step'])
    given = np.array([row['reward/own_reward:few_words'] for row in rows])
    np.testing.assert_allclose(
        given, [1 / (1 + len(r['completion'].split())) for r in rows],
        rtol=1e-6)
    assert len(set(given)) > 2
    np.testing.assert_allclose(
        [r['reward'] for r in rows],
        [r['correct'] + 0.25 * x for r, x in zip(rows, given)], rtol=1e-6)
    np.testing.assert_allclose(
        record['reward/own_reward:few_words'], given.mean(), rtol=1e-6)
    assert record['grad_norm'] > 0


def test_a_failing_function_stops_the_run_or_counts_as_zero(train, tmp_path):
  bad = "--config.reward.functions=('own_reward:sometimes_bad',)"
  done = train(tmp_path, bad, status=1)
  (line,) = [x for x in done.stderr.splitlines() if 'error:' in x]
  for part in ('own_reward:sometimes_bad: problem ',
               '0 values for 4 completions', 'completions are in rollouts/'):
    assert part in line
  assert None in {r['reward/own_reward:sometimes_bad']
                  for r in _dumped(tmp_path, 1)}
  dropping = tmp_path / 'dropping'  # no group is mixed: none is learned from
  dropping.mkdir()
  done = train(dropping, bad,
               '--config.rollout.dynamic_sampling=drop', status=1)
  assert '0 values for 4 completions' in done.stderr
  other = tmp_path / 'other'
  other.mkdir()
  done = train(other, bad,
               '--config.reward.on_failure=zero')
  assert 'counted as 0' in done.stderr
  rows = _dumped(other, 2)
  assert {r['reward'] for r in rows} == {0.0, 0.5}
