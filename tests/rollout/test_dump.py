"""Rollouts on disk: bit-exact, bounded in size, readable by datasets."""

import dataclasses
import json

import datasets as hf_datasets
import numpy as np
import pytest

from tepo_jax import errors
from tepo_jax.data import problem as problem_lib
from tepo_jax.rollout import dump
from tepo_jax.rollout import groups as groups_lib
from tepo_jax.rollout import reward as reward_lib
from tepo_jax.rollout import sampler

SLOTS = 5


def group(prompt_id, verdicts, seed=0):
  generator = np.random.default_rng((seed, prompt_id))
  size = len(verdicts)
  length_G = generator.integers(1, SLOTS + 1, size).astype(np.int32)
  inside_GT = np.arange(SLOTS) < length_G[:, None]
  return groups_lib.Group(
      prompt=groups_lib.Prompt(
          problem_lib.Problem(
              f'p{prompt_id}', '1 + 1 = ?\n', ('2', '2.0'), 'made'),
          (3, 1, 4), prompt_id),
      token_GT=np.where(inside_GT, generator.integers(
          0, 9, (size, SLOTS)), 0).astype(np.int32),
      logp_GT=np.where(inside_GT, generator.normal(
          size=(size, SLOTS)), 0).astype(np.float32),
      length_G=length_G, ended_G=length_G < SLOTS,
      text_G=tuple(f'\\boxed{{{j}}} <b>' for j in range(size)),
      accuracy_G=np.array(verdicts, np.float32))


SAMPLED = [group(7, [1, 0]), group(9, [1, 1]), group(8, [0, 1])]
REWARD_NG = np.float32([[1, -0.1], [1, 1], [0, 0.3]])
ROLLOUT = sampler.Rollout(
    SAMPLED, [True, False, True], [0, 2], 2, 10,
    reward_lib.Rewards(REWARD_NG, {}, {}), None, {})


def lines(step=12):
  return dump.records(step, ROLLOUT, lambda _: 'made', 'boxed')


@pytest.mark.parametrize('form', dump.FORMATS)
def test_every_function_has_a_column(form, tmp_path):
  parts = {'m:f': np.float32([[0.1, np.nan], [0.2, 0.3], [0.4, 0.7]]),
           'brevity': np.float32([[1, -.5]] * 3)}
  rollout = dataclasses.replace(
      ROLLOUT, rewards=reward_lib.Rewards(REWARD_NG, parts, {}))
  dump.write(tmp_path, 3, dump.records(
      3, rollout, lambda _: 'made', 'boxed'), form)
  read = dump.read(tmp_path, 3)
  assert read[1]['reward/m:f'] is None and read[1]['reward/brevity'] == -.5
  for name, part_NG in parts.items():
    np.testing.assert_array_equal(
        np.array([line[f'reward/{name}'] for line in read], np.float32),
        part_NG.reshape(-1))


@pytest.mark.parametrize('form', dump.FORMATS)
def test_versions_are_written_where_completions_are_carried(form, tmp_path):
  version_NGT = np.array(
      [2 + np.arange(SLOTS) * (g.token_GT != 0) for g in SAMPLED], np.int32)
  carried = [dataclasses.replace(
      g, version_GT=np.where(np.arange(SLOTS) < g.length_G[:, None],
                             version_GT, 0))
             for g, version_GT in zip(SAMPLED, version_NGT)]
  rollout = dataclasses.replace(ROLLOUT, completed=carried)
  dump.write(tmp_path, 3, dump.records(
      3, rollout, lambda _: 'made', 'boxed'), form)
  read = dump.read(tmp_path, 3)
  assert all(len(line['versions']) == line['tokens'] for line in read)
  for back, group_ in zip(dump.to_groups(read, SLOTS), carried):
    np.testing.assert_array_equal(back.version_GT, group_.version_GT)
  dump.write(tmp_path, 4, lines(), form)
  read = dump.read(tmp_path, 4)
  assert 'versions' not in read[0]
  assert dump.to_groups(read, SLOTS)[0].version_GT is None


@pytest.mark.parametrize('form', dump.FORMATS)
def test_groups_come_back_to_the_bit(form, tmp_path):
  dump.write(tmp_path / 'rollouts', 12, lines(), form)
  assert dump.steps(tmp_path / 'rollouts') == [12]
  read = dump.read(tmp_path / 'rollouts', 12)
  assert [r['trained'] for r in read] == [True] * 2 + [False] * 2 + [True] * 2
  assert [r['extracted'] for r in read] == ['0', '1'] * 3
  np.testing.assert_array_equal(dump.rewards(read), REWARD_NG.reshape(-1))
  assert dump.rewards(read).dtype == np.float32
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
    dump.write(tmp_path / 'rollouts', step, lines(step), form)
  read = hf_datasets.load_dataset(
      builder, data_files=str(tmp_path / 'rollouts' / f'*.{form}'),
      split='train', cache_dir=str(tmp_path / 'cache'))
  assert read.column_names == dump.FIELDS
  assert read['step'][:] == [1] * 6 + [2] * 6
  assert read[0]['token_ids'] == SAMPLED[0].token_GT[
      0, :SAMPLED[0].length_G[0]].tolist()


def test_the_oldest_are_deleted_above_the_bound(tmp_path, monkeypatch):
  size = sum(len(json.dumps(line)) + 1 for line in lines())
  monkeypatch.setattr(dump, '_MOST_BYTES', 3.5 * size)
  for step in range(1, 6):
    dump.write(tmp_path, step, lines(), 'jsonl')
  assert dump.steps(tmp_path) == [3, 4, 5]
  monkeypatch.setattr(dump, '_MOST_BYTES', 1)
  dump.write(tmp_path, 6, lines(), 'jsonl')
  assert dump.steps(tmp_path) == [6]  # the newest stays, whatever its size


def test_a_missing_or_damaged_file_is_named(tmp_path):
  dump.write(tmp_path, 3, lines(), 'jsonl')
  with pytest.raises(errors.InputError, match=r'step 4 \(has: 3\)'):
    dump.read(tmp_path, 4)
  path = tmp_path / 'step_000003.jsonl'
  path.write_text(path.read_text()[:-30])
  with pytest.raises(errors.InputError, match='step_000003.jsonl'):
    dump.read(tmp_path, 3)
  assert dump.steps(tmp_path / 'nowhere') == []


@pytest.mark.parametrize('count, named', [
    (0, 'none'), (8, '1, 2, 3, 4, 5, 6, 7, 8'),
    (9, '1, 2, 3, 4, …, 6, 7, 8, 9')])
def test_at_most_eight_steps_are_named(count, named, tmp_path):
  for step in range(1, count + 1):
    (tmp_path / f'step_{step:06}.jsonl').touch()
  with pytest.raises(errors.InputError, match=rf'\(has: {named}\)'):
    dump.read(tmp_path, 10)
