"""The prompts of a config's sets, and what is left out of them."""

import json

import pytest

from configs import tiny
from tepo_jax import errors
from tepo_jax.data import embedded
from tepo_jax.data import prompts
from tepo_jax.job import prompt_sets
from tepo_jax.policy.huggingface import weights
from tests import jobs

TEMPLATE = prompts.get('plain')


@pytest.fixture(scope='module')
def tokenizer(tmp_path_factory):
  folder = tmp_path_factory.mktemp('tokenizer')
  embedded.build_tokenizer('arithmetic', folder)
  return weights.load_tokenizer(folder)


def _config(**fields):
  config = tiny.get_config()
  config.update_from_flattened_dict(
      {name.replace('__', '.'): value for name, value in fields.items()})
  return config


def test_evaluation_reads_the_test_split_and_training_does_not(tokenizer):
  config = _config(data__limit=7, eval__limit=5)
  found = prompt_sets.evaluation(config, TEMPLATE, tokenizer, 'arithmetic')
  assert found.problems == embedded.problems('arithmetic', 'test', 5)
  found, = prompt_sets.training(config, tokenizer)
  assert found.problems == embedded.problems('arithmetic', 'train', 7)
  assert [problem for problem, _ in found.short] == found.problems
  assert not found.long


@pytest.mark.parametrize('which', ['training', 'evaluation'])
def test_columns_limits_and_lengths(tokenizer, tmp_path, which):
  path = tmp_path / 'a.jsonl'
  path.write_text(''.join(json.dumps({'q': text, 'a': '1'}) + '\n' for text in (
      'Start with 1.', '123456789 ' * 3, 'Start with 2.', 'Start with 3.')))
  config = _config(
      data__name=str(path), data__columns__problem='q', data__limit=3,
      data__columns__answer='a', eval__sets=(str(path),), eval__limit=3)
  found = (prompt_sets.training(config, tokenizer)[0]
           if which == 'training' else
           prompt_sets.evaluation(config, TEMPLATE, tokenizer, str(path)))
  assert [problem.id for problem, _ in found.short] == ['a/1', 'a/3']
  assert [(problem.id, len(ids)) for problem, ids in found.long] == [
      ('a/2', 35)]
  assert len(found.problems) == 3 and found.loaded.rows == 4


def test_bad_rows_are_skipped_in_training_only(tokenizer, tmp_path):
  path = tmp_path / 'a.jsonl'
  path.write_text('{"problem": "1"}\n{"problem": "1", "answer": "1"}\n')
  config = _config(data__name=str(path), data__skip_bad=1)
  config.data.columns.answer = 'answer'
  found, = prompt_sets.training(config, tokenizer)
  assert [problem.id for problem, _ in found.short] == ['a/2']
  assert len(found.loaded.bad) == 1
  with pytest.raises(errors.InputError, match='row 1: no column'):
    prompt_sets.evaluation(config, TEMPLATE, tokenizer, str(path))


def test_a_token_that_the_embedding_lacks_is_found_in_the_prompts(tokenizer):
  found, = prompt_sets.training(_config(data__limit=3), tokenizer)
  largest = max(max(ids) for _, ids in found.short)
  prompt_sets.check_vocabulary(found, tokenizer, largest + 1, 'folder')
  with pytest.raises(errors.InputError) as error:
    prompt_sets.check_vocabulary(found, tokenizer, largest, 'folder')
  assert str(error.value).startswith(
      f'folder: the tokenizer has {len(tokenizer)} ids, but the embedding '
      f'{largest} rows; in arithmetic, the prompt of arithmetic/')


def test_a_prompt_that_cannot_be_rendered_is_named_by_file_and_row(
    tokenizer, tmp_path):
  path = tmp_path / 'a.jsonl'
  turns = [{'role': 'system', 'content': '1'}, {'role': 'user', 'content': '2'}]
  path.write_text('{"problem": "1", "answer": "1"}\n' + json.dumps(
      {'problem': turns, 'answer': '1', 'id': 'x'}) + '\n')
  config = _config(data__name=str(path))
  found, = prompt_sets.training(config, tokenizer)
  assert '1' in tokenizer.decode(found.short[1][1])
  with pytest.raises(errors.InputError) as error:
    prompt_sets.training(_config(
        data__name=str(path), data__system='3'), tokenizer)
  assert str(error.value).startswith(
      f'{path}: row 2 (x) has a system turn, and so has ')


def test_each_set_has_its_own_template(tokenizer, tmp_path):
  path, template = tmp_path / 'a.jsonl', tmp_path / 'mine.jinja'
  path.write_text('{"problem": "1", "answer": "1"}\n')
  template.write_text('Start with {{ problem }}.')
  config = _config(data__limit=2, data__sets=(
      ('arithmetic', 3), (str(path), 1, str(template))))
  first, second = prompt_sets.training(config, tokenizer)
  assert (first.name, len(first.short)) == ('arithmetic', 2)
  (_, ids), = second.short
  assert 'Start with 1.' in tokenizer.decode(ids)
  config.data.sets = (('arithmetic', 3), (str(path), 1, 'dapo_answer'))
  with pytest.raises(errors.InputError) as error:
    prompt_sets.training(config, tokenizer)
  assert f'{path} has the template dapo_answer, of the style ' in str(
      error.value)


# The hub has own/set:main@test, and each process a cache of its own.
_JOB = """
import json, os, pathlib, shutil, sys
root, rank = pathlib.Path(sys.argv[1]), os.environ['JAX_PROCESS_ID']
os.environ['HF_HOME'] = str(root / rank)
import datasets
from configs import tiny
from tepo_jax import errors
from tepo_jax.data import prompts
from tepo_jax.job import prompt_sets
from tepo_jax.runtime import processes, sharing
processes.initialize()
asked = []

def load_dataset(path, subset, split, load=datasets.load_dataset):
  asked.append((path, subset, split))
  if path != 'own/set':
    raise ConnectionError('no such set')
  return load('json', data_files=str(root / 'a.jsonl'), split='train')

datasets.load_dataset = load_dataset
# The other machine: its process does not see the first one's folders.
if rank != '0':
  sharing._has = lambda folder, sizes, has=sharing._has: (
      folder.is_relative_to(root / rank) and has(folder, sizes))
prompts.render_short = lambda *_: ([], [])  # needs no tokenizer

def read(name):
  found = prompt_sets.evaluation(tiny.get_config(), None, None, name)
  return [problem.row for problem in found.problems]

local = [read(name) for name in (f'math500:{root}/a.jsonl', 'arithmetic')][0]
assert not asked
for _ in range(2):
  assert read('own/set:main@test') == local
assert asked == 2 * [('own/set', 'main', 'test')] * (rank == '0'), asked
assert len(list((root / rank / 'datasets/of_first').iterdir())) == 1
try:
  read('own/other')
except errors.InputError as error:
  print(error)
os.chdir(root / rank)
if rank != '0':  # The other machine has a folder of this name.
  kept, = (root / rank / 'datasets/of_first').iterdir()
  shutil.copytree(kept, 'own/set')
assert read('own/set') == local
assert ('own/set', None, 'train') in asked or rank != '0'
print('done')
"""


@pytest.mark.long
def test_the_hub_is_asked_by_a_job_s_first_process_only(tmp_path):
  (tmp_path / 'a.jsonl').write_text(''.join(
      json.dumps({'problem': f'{i} + 1?', 'answer': str(i + 1), 'level': 'é'})
      + '\n' for i in range(99)))
  outcomes = jobs.finish(jobs.start(2, ['-c', _JOB], str(tmp_path), devices=1))
  assert [status for status, *_ in outcomes] == [0, 0], outcomes
  for _, out, _ in outcomes:
    assert 'own/other (train): cannot be loaded: no such set\n' in out
    assert out.endswith('done\n')
