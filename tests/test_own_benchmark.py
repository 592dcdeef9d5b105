"""The recipe for a benchmark in configs/README.md, carried out in a copy."""

import json
import shlex
import subprocess
import sys

import pytest

from tests import recipes
from tests import runs

TITLE = 'Your own benchmark'

# The recipe's evaluation at a size for a test.
_SMALL = (
    '--config.rollout.max_tokens=8', '--config.eval.max_tokens=8',
    '--config.data.max_prompt_tokens=200', '--config.compute.dtype=float32',
    '--config.grading.workers=1')


@pytest.mark.long
def test_the_recipe(tmp_path):
  (row,) = recipes.blocks(TITLE, 'python')
  (command,) = recipes.blocks(TITLE, '')
  recipes.copy(tmp_path, 'tepo_jax', 'configs')
  recipes.insert(tmp_path / 'tepo_jax' / 'data' / 'datasets.py', row,
                 after='SETS = {\n')
  recipes.save_tokenizer(tmp_path / 'TOKENIZER')
  recipes.save_model(tmp_path / 'FOLDER', tmp_path / 'TOKENIZER')
  (tmp_path / 'hmmt.jsonl').write_text(''.join(
      json.dumps({'problem_idx': i, 'problem': f'What is {i} + {i}?',
                  'answer': str(2 * i), 'problem_type': ['Algebra']}) + '\n'
      for i in (1, 2)))
  _, *arguments = shlex.split(command.replace('\\\n', ' '))
  done = subprocess.run(
      [sys.executable, *arguments, *_SMALL], cwd=tmp_path, text=True,
      capture_output=True,
      env=runs.environment() | {'PYTHONPATH': str(tmp_path)})
  assert done.returncode == 0, done.stderr[-3000:]
  assert 'hmmt.jsonl: 2 rows, expected 30' in done.stderr
  result = json.loads((tmp_path / 'DIR' / 'results.json').read_text())
  assert list(result['sets']) == ['hmmt25']
  assert result['sets']['hmmt25']['problems'] == 2
  assert 'avg@32' in result['sets']['hmmt25']
  lines = [json.loads(line) for line in (
      tmp_path / 'DIR' / 'samples.jsonl').open()]
  assert [line['answers'] for line in lines] == 32 * [['2']] + 32 * [['4']]
  assert len({line['completion'] for line in lines}) > 32  # not greedy


def test_the_number_of_lines():
  (row,) = recipes.blocks(TITLE, 'python')
  assert f'in {len(row.splitlines())} lines' in recipes.section(TITLE)
