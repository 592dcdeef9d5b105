"""The recipe for data in configs/README.md, carried out in an empty folder."""

import json
import os
import shlex
import subprocess
import sys

import pytest

from tests import recipes
from tests import runs

TITLE = 'Your own data'

# The recipe's run at a size for a test.
_SMALL = (
    '--config.steps=2', '--config.rollout.prompts=2',
    '--config.rollout.samples=2', '--config.rollout.max_tokens=8',
    '--config.rollout.dynamic_sampling=off',
    '--config.train.minibatch_prompts=2',
    '--config.train.microbatch_tokens=512',
    '--config.data.max_prompt_tokens=200', '--config.eval.max_tokens=8',
    '--config.compute.dtype=float32', '--config.grading.workers=1',
    '--config.mesh.tensor=1')


class _Recipe:
  """The section, and a folder with its files and a tokenizer."""

  def __init__(self, folder):
    self.folder = folder
    for name, language in (('pupils.csv', 'csv'), ('test.jsonl', 'json'),
                           ('pupils.jinja', 'jinja')):
      (folder / name).write_text(self.block(language))
    (folder / 'configs').symlink_to(runs.ROOT / 'configs')
    recipes.save_tokenizer(folder / 'FOLDER')

  def block(self, language):
    """The only block of a language."""
    (found,) = recipes.blocks(TITLE, language)
    return found

  def command(self, program):
    """The only command of a program, as words."""
    (found,) = [block for block in recipes.blocks(TITLE, '')
                if f'tepo_jax.{program} ' in block]
    return shlex.split(found.replace('\\\n', ' '))

  def run(self, program, *more, **environment):
    _, *arguments = self.command(program)
    return subprocess.run(
        [sys.executable, *arguments, *more], cwd=self.folder, text=True,
        capture_output=True, env=runs.environment() | environment | {
            'PYTHONPATH': str(runs.ROOT)})


@pytest.fixture
def recipe(tmp_path):
  return _Recipe(tmp_path)


def test_the_number_of_lines(recipe):
  data, template = (
      sum(len(recipe.block(name).splitlines()) for name in names)
      for names in (('csv', 'json'), ('jinja',)))
  flags = max(block.count('\n    --') for block in recipes.blocks(TITLE, ''))
  section = ' '.join(recipes.section(TITLE).split())
  assert (f'in {data + template + flags} lines: {data} of data, {template} of '
          f'template, {flags} of flags') in section


def test_both_commands_have_the_same_fields(recipe):
  fields = [{word for word in recipe.command(program)
             if word.startswith('--config')}
            for program in ('show_prompts', 'train')]
  assert fields[0] == fields[1]


@pytest.mark.long
def test_it_shows_the_prompts(recipe):
  """Without weights, and without a device that JAX could find; with train's
  --workdir, in which it writes nothing."""
  done = recipe.run('show_prompts', '--workdir=DIR', JAX_PLATFORMS='none_such')
  assert done.returncode == 0, done.stderr
  assert done.stdout.startswith(recipe.block('text'))
  rest = done.stdout.removeprefix(recipe.block('text'))
  assert '\ntest.jsonl: 2 rows, 2 prompts of ' in rest
  assert '--- test/1: ' in rest and '--- test/2: ' not in rest
  assert not (recipe.folder / 'DIR').exists()


@pytest.mark.long
def test_it_trains(recipe):
  os.rename(recipe.folder / 'FOLDER', recipe.folder / 'TOKENIZER')
  recipes.save_model(recipe.folder / 'FOLDER', recipe.folder / 'TOKENIZER')
  done = recipe.run('train', *_SMALL)
  assert done.returncode == 0, done.stderr[-3000:]
  assert "skipped: pupils.csv: row 3: 'solution' is empty" in done.stderr
  records = runs.records(recipe.folder / 'DIR')
  assert [record['step'] for record in records] == [0, 1, 2]
  dumped = [json.loads(line) for line in (
      recipe.folder / 'DIR' / 'rollouts' / 'step_000001.jsonl').open()]
  assert {line['id'] for line in dumped} == {'pupils/1', 'pupils/2'}
