"""Every row of configs/reference.py."""

import pytest

from configs import reference
from tepo_jax import cli
from tepo_jax import errors
from tepo_jax.data import datasets
from tepo_jax.job import configuration
from tests import recipes
from tests import runs

# A row's run at a size for a test. A random model solves nothing: the penalty
# makes the rewards of a group differ.
_SMALL = (
    '--config.steps=2', '--config.rollout.prompts=2',
    '--config.rollout.samples=4', '--config.rollout.max_tokens=16',
    '--config.rollout.overlong_buffer=15',
    '--config.train.minibatch_prompts=2',
    '--config.train.microbatch_tokens=512',
    '--config.data.max_prompt_tokens=200', '--config.eval.max_tokens=16',
    '--config.eval.limit=2', '--config.compute.dtype=float32',
    '--config.grading.workers=1')


@pytest.mark.parametrize('name', reference.ROWS)
def test_every_row_is_a_config(name):
  """Which measures what was published, with a row of tokens on each device."""
  row = reference.ROWS[name]
  config = cli.load_config(f'configs/reference.py:{name}')
  configuration.check(config, ())
  (evaluated,) = config.eval.sets
  samples, _ = datasets.decoding(
      evaluated, config.eval.samples, config.eval.temperature)
  assert row.metric == f'eval/{evaluated}/avg@{samples}'
  assert config.train.microbatch_tokens >= row.devices * (
      config.data.max_prompt_tokens + config.rollout.max_tokens)
  assert 0 < (row.before or 0.1) < row.value < 1
  assert row.source.startswith('https://') and row.differs


def test_another_row_is_refused():
  with pytest.raises(errors.InputError, match="no 'slime' in slime_0_5b, verl"):
    cli.load_config('configs/reference.py:slime')


@pytest.mark.long_after_first
@pytest.mark.parametrize('name', reference.ROWS)
def test_two_steps(name, programs, tmp_path):
  recipes.save_tokenizer(tmp_path / 'tokenizer')
  recipes.save_model(
      tmp_path / 'model', tmp_path / 'tokenizer', num_layers=2)
  data = tmp_path / 'sums.jsonl'
  data.write_text('{"problem": "1 + 1", "answer": "2"}\n'
                  '{"problem": "2 + 1", "answer": "3"}\n')
  evaluated = reference.ROWS[name].metric.split('/')[1]
  done = programs.run(
      'train', f'--config=configs/reference.py:{name}',
      f'--config.model={tmp_path / "model"}', f'--config.data.name={data}',
      f"--config.eval.sets=('{evaluated}:{data}',)",
      f'--workdir={tmp_path / "run"}', *_SMALL)
  assert not done.returncode, done.stderr[-3000:]
  assert 'after step 2; published: ' in done.stdout
  _, *steps = runs.records(tmp_path / 'run')
  assert [record['step'] for record in steps] == [1, 2]
  assert all(record['grad_norm'] > 0 for record in steps)
