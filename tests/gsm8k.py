"""GSM8K's job as configs/small.py has it, at a size for a CPU: the shape of
Qwen2.5-0.5B with two layers and random weights, Qwen's tokenizer, real
problems.

  python -m pytest tests/gsm8k.py

Takes six minutes on one busy core, so it runs only if it is named.
"""

import gzip
import json
import pathlib
import shutil

import pytest
import transformers

from tests import runs

_SHARED = pathlib.Path(__file__).parents[2] / 'shared'
_GSM8K = _SHARED / 'benchmarks' / 'gsm8k_{}.jsonl'
_SHAPE = pathlib.Path(__file__).parent / 'tools/plan/models/qwen2_5_0_5b'

pytestmark = pytest.mark.skipif(
    not _SHARED.exists(), reason='needs ../shared')

# A random model solves nothing, so that verdicts alone give no gradient.
REWARD = '''
def few_repeats(completions, row, tokens, ended):
  return [len(set(text)) / (1 + len(text)) for text in completions]
'''


@pytest.fixture
def model(tmp_path):
  config = transformers.Qwen2Config(**{
      **json.loads((_SHAPE / 'config.json').read_text()),
      'num_hidden_layers': 2})
  folder = tmp_path / 'model'
  transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
  tokenizer = _SHARED / 'tokenizer'
  with gzip.open(tokenizer / 'qwen_tokenizer.json.gz') as packed:
    (folder / 'tokenizer.json').write_bytes(packed.read())
  shutil.copy(tokenizer / 'qwen3_tokenizer_config.json',
              folder / 'tokenizer_config.json')
  return folder


def test_three_steps(model, tmp_path, monkeypatch):
  (tmp_path / 'own_reward.py').write_text(REWARD)
  monkeypatch.setenv('PYTHONPATH', str(tmp_path))
  train, test = (str(_GSM8K).format(split) for split in ('train', 'test'))
  done = runs.run(
      'train', '--config=configs/small.py:qwen2_5_0_5b,gpu24',
      f'--config.model={model}', f'--workdir={tmp_path / "run"}',
      f'--config.data.name={train}', f"--config.eval.sets=('gsm8k:{test}',)",
      '--config.steps=3', '--config.rollout.prompts=4',
      '--config.rollout.samples=4', '--config.rollout.max_tokens=32',
      '--config.rollout.dynamic_sampling=off',
      "--config.reward.functions=('accuracy','own_reward:few_repeats')",
      '--config.reward.weights=(1.0,1.0)', '--config.train.minibatch_prompts=2',
      '--config.train.microbatch_tokens=576', '--config.eval.period=3',
      '--config.eval.limit=8', '--config.eval.max_tokens=16')
  assert 'gsm8k' in done.stdout
  _, *steps = runs.records(tmp_path / 'run')
  assert [record['step'] for record in steps] == [1, 2, 3]
  for record in steps:
    assert record['grad_norm'] > 0 and record['skipped'] == 0
    assert record['accuracy'] == 0 < record['reward']
  asked = {json.loads(line)['problem'] for line in open(train)}
  for step in 1, 2, 3:
    rows = [json.loads(line) for line in (
        tmp_path / f'run/rollouts/step_{step:06d}.jsonl').open()]
    assert len(rows) == 16 and {row['problem'] for row in rows} <= asked
