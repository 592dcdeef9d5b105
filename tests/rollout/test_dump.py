"""Rollouts on disk: bit-exact, bounded in size, readable by datasets."""

import dataclasses
import json

import datasets as hf_datasets
import numpy as np
import pytest

from tepo_jax import errors
from tepo_jax.rollout import dump
from tepo_jax.rollout import groups as groups_lib
from tepo_jax.rollout import selection
from tepo_jax.data import problem as problem_lib

SLOTS = 5


def group(cursor, verdicts, seed=0):
  generator = np.random.default_rng((seed, cursor))
  size = len(verdicts)
  length_G = generator.integers(1, SLOTS + 1, size).astype(np.int32)
  inside_GT = np.arange(SLOTS) < length_G[:, None]
  return groups_lib.Group(
      prompt=groups_lib.Prompt(
          problem_lib.Problem(
              f'p{cursor}', '1 + 1 = ?\n', ('2', '2.0'), 'made'),
          (3, 1, 4), cursor),
      token_GT=np.where(inside_GT, generator.integers(
          0, 9, (size, SLOTS)), 0).astype(np.int32),
      logp_GT=np.where(inside_GT, generator.normal(
          size=(size, SLOTS)), 0).astype(np.float32),
      length_G=length_G, ended_G=length_G < SLOTS,
      text_G=tuple(f'\\boxed{{{j}}} <b>' for j in range(size)),
      accuracy_G=np.array(verdicts, np.float32))


SAMPLED = [group(7, [1, 0]), group(9, [1, 1]), group(8, [0, 1])]
ROLLOUT = selection.Rollout(
    [SAMPLED[0], SAMPLED[2]], SAMPLED[:2], SAMPLED[2:], 10)
REWARDS = [np.float32([1, -0.1]), np.float32([1, 1]), np.float32([0, 0.3])]


def rows(step=12):
  return dump.records(step, ROLLOUT, REWARDS, 'made', 'boxed')


@pytest.mark.parametrize('form', dump.FORMATS)
def test_scores_come_back(form, tmp_path):
  groups = [dataclasses.replace(g, scores={
      'm:f': np.float32([0.1, np.nan]), 'brevity': np.float32([1, -.5])})
            for g in SAMPLED]
  rollout = selection.Rollout(groups, groups, [], 10)
  dump.write(tmp_path, 3, dump.records(3, rollout, REWARDS, 'made', 'boxed'),
             form)
  read = dump.read(tmp_path, 3)
  assert read[1]['reward/m:f'] is None and read[1]['reward/brevity'] == -.5
  for before, after in zip(groups, dump.to_groups(read, SLOTS), strict=True):
    assert after.scores.keys() == before.scores.keys()
    for name, score_G in before.scores.items():
      np.testing.assert_array_equal(after.scores[name], score_G)
      assert after.scores[name].dtype == np.float32


@pytest.mark.parametrize('form', dump.FORMATS)
def test_groups_come_back_to_the_bit(form, tmp_path):
  dump.write(tmp_path / 'rollouts', 12, rows(), form)
  assert dump.steps(tmp_path / 'rollouts') == [12]
  read = dump.read(tmp_path / 'rollouts', 12)
  assert [r['trained'] for r in read] == [True] * 2 + [False] * 2 + [True] * 2
  assert [r['extracted'] for r in read] == ['0', '1'] * 3
  assert np.float32([r['reward'] for r in read]).tolist() == (
      np.concatenate(REWARDS).tolist())
  for before, after in zip(SAMPLED, dump.to_groups(read, SLOTS), strict=True):
    assert after.prompt == dataclasses.replace(
        before.prompt, problem=after.prompt.problem)
    assert after.prompt.problem.answers == before.prompt.problem.answers
    assert after.text_G == before.text_G
    for name in ('token_GT', 'logp_GT', 'length_G', 'ended_G', 'accuracy_G'):
      a, b = getattr(before, name), getattr(after, name)
      assert a.dtype == b.dtype and (a == b).all(), name


@pytest.mark.parametrize('form, builder', [
    ('jsonl', 'json'), ('parquet', 'parquet')])
def test_datasets_reads_them(form, builder, tmp_path):
  for step in (1, 2):
    dump.write(tmp_path / 'rollouts', step, rows(step), form)
  read = hf_datasets.load_dataset(
      builder, data_files=str(tmp_path / 'rollouts' / f'*.{form}'),
      split='train', cache_dir=str(tmp_path / 'cache'))
  assert read.column_names == dump.FIELDS
  assert read['step'][:] == [1] * 6 + [2] * 6
  assert read[0]['token_ids'] == SAMPLED[0].token_GT[
      0, :SAMPLED[0].length_G[0]].tolist()


def test_the_oldest_are_deleted_above_the_bound(tmp_path, monkeypatch):
  size = sum(len(json.dumps(row)) + 1 for row in rows())
  monkeypatch.setattr(dump, '_MOST_BYTES', 3.5 * size)
  for step in range(1, 6):
    dump.write(tmp_path, step, rows(), 'jsonl')
  assert dump.steps(tmp_path) == [3, 4, 5]
  monkeypatch.setattr(dump, '_MOST_BYTES', 1)
  dump.write(tmp_path, 6, rows(), 'jsonl')
  assert dump.steps(tmp_path) == [6]  # the newest stays, whatever its size


def test_a_missing_or_damaged_file_is_named(tmp_path):
  dump.write(tmp_path, 3, rows(), 'jsonl')
  with pytest.raises(errors.InputError, match=r'step 4 \(has: 3\)'):
    dump.read(tmp_path, 4)
  path = tmp_path / 'step_000003.jsonl'
  path.write_text(path.read_text()[:-30])
  with pytest.raises(errors.InputError, match='step_000003.jsonl'):
    dump.read(tmp_path, 3)
  assert dump.steps(tmp_path / 'nowhere') == []


@pytest.mark.parametrize('count, named', [
    (0, 'none'), (8, '1, 2, 3, 4, 5, 6, 7, 8'), (9, '1, 2, 3, 4, …, 6, 7, 8, 9')])
def test_at_most_eight_steps_are_named(count, named, tmp_path):
  for step in range(1, count + 1):
    (tmp_path / f'step_{step:06}.jsonl').touch()
  with pytest.raises(errors.InputError, match=rf'\(has: {named}\)'):
    dump.read(tmp_path, 10)
