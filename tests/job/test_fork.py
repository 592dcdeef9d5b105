"""What a fork takes from its parent, and which forks are refused."""

import json
import types

import jax
from jax import numpy as jnp
import numpy as np
import pytest

from configs import tiny
from tepo_jax import errors
from tepo_jax.job import carrying
from tepo_jax.job import fork
from tepo_jax.job import programs as programs_lib
from tepo_jax.job import run_folder
from tepo_jax.runtime import checkpoint
from tests.job import learners


def _write_config(config, folder):
  folder.mkdir(exist_ok=True)
  lock = types.SimpleNamespace(acquire=lambda: None)
  run_folder.claim(config, folder, lock)


@pytest.fixture(name='parent', scope='module')
def _parent(tmp_path_factory):
  """(its folder, state after step 2) of a run with a reference policy."""
  folder = tmp_path_factory.mktemp('parent')
  learner = learners.make_learner('grpo_original')
  _write_config(learner.config, folder)
  first = learner.first_state()
  learner.state = jax.tree.map(lambda x: x + 1, first).replace(
      reference=first.reference)
  keep = checkpoint.Checkpointer(folder / 'checkpoints', 1)
  keep.save(2, learner.state, {
      'cursor': 8, 'unrecorded': {}, 'left_out_in_a_row': 3,
      'skipped_in_a_row': 2},
            unpadded=programs_lib.restorable(learner.programs)[1])
  keep.close()
  return folder, jax.device_get(learner.state)


def _restored(parent, keeps_optimizer=True, changed=None, **settings):
  folder, saved = parent
  learner = learners.make_learner('grpo_original', **settings)
  learner.check_stands_on = lambda *_: None
  learner.config.update_from_flattened_dict(changed or {})
  step, state, extra = fork.restore(
      fork.Parent(str(folder), 2, keeps_optimizer, 'digest'), learner)
  assert step == 2
  jax.tree.map(np.testing.assert_array_equal, state.params, saved.params)
  return state, extra


def test_moments_that_are_not_kept_may_be_of_another_dtype(parent):
  state, extra = _restored(parent, False, momentum_dtype='bfloat16')
  moments = [x for x in jax.tree.leaves(state.opt_state) if x.ndim]
  assert not any(jnp.any(x) for x in moments)
  assert {x.dtype.name for x in moments} == {'bfloat16', 'float32'}
  assert extra['began'] == {'step': 2, 'updates': 0}
  jax.tree.map(
      np.testing.assert_array_equal, state.reference, parent[1].reference)


def test_a_reference_is_cast_to_the_fork_s_dtype(parent):
  state, extra = _restored(parent, dtype='bfloat16')
  jax.tree.map(
      lambda mine, theirs: np.testing.assert_array_equal(
          mine, theirs.astype(mine.dtype)),
      state.reference, parent[1].reference)
  assert 'bfloat16' in {x.dtype.name for x in jax.tree.leaves(state.reference)}
  jax.tree.map(
      np.testing.assert_array_equal, state.opt_state, parent[1].opt_state)
  assert extra['began'] == {'step': 2, 'updates': 1}


@pytest.mark.parametrize('changed, cursor, left_out, skipped', [
    ({}, 8, 3, 2), ({'rollout.max_left_out': 1}, 8, 0, 0),
    ({'seed': 7}, 0, 0, 0), ({'compute.remat': 'full'}, 8, 3, 0),
    ({'optimizer.learning_rate': 1.0}, 8, 3, 0)])
def test_what_counts_on_in_a_fork(parent, changed, cursor, left_out, skipped):
  _, extra = _restored(parent, changed=changed)
  assert (extra['cursor'], extra['left_out_in_a_row'],
          extra['skipped_in_a_row']) == (cursor, left_out, skipped)
  _, extra = _restored(parent, keeps_optimizer=False, changed=changed)
  assert extra['skipped_in_a_row'] == 0


@pytest.mark.parametrize('changed, carried', [
    ({}, [3]), ({'grading.workers': 3}, [3]),
    ({'grading.verifier': 'math_verify'}, None)])
def test_another_grader_begins_the_groups_in_flight_anew(changed, carried):
  parents = tiny.get_config('tepo')
  config = tiny.get_config('tepo')
  config.update_from_flattened_dict(changed)
  extra = carrying.forked(
      {'cursor': 8, 'carried': {'prompt_id': [3]}, 'sizes': None},
      fork.continues(config, parents), fits=True)
  assert extra.get('carried', {}).get('prompt_id') == carried
  assert extra['cursor'] == (8 if carried else 3)


@pytest.mark.parametrize('changed, said', [
    ({'steps': 2}, 'parent.json: step 2 is done'),
    ({'lora.alpha': 64.0}, 'parent.json: a fork trains its parent\'s weights, '
                           'but in config.lora.alpha they differ'),
    ({'lora.targets': ('q',)}, 'in config.lora.targets they'),
    ({'lora.rank': 0}, 'in config.lora.rank they')])
def test_a_fork_that_was_stopped_before_its_first_checkpoint_is_checked_again(
    tmp_path, monkeypatch, changed, said):
  config = tiny.get_config('grpo')
  config.lora.rank = 4
  old, workdir = tmp_path / 'old', tmp_path / 'new'
  _write_config(config, old)
  _write_config(config, workdir)
  monkeypatch.setattr(checkpoint, 'steps', lambda _: [2])
  begun = fork.choose(config, workdir, str(old), False)
  assert (begun.step, str(begun)) == (2, f'a fork of {old} after step 2')
  fork.write(begun, workdir)
  config.optimizer.learning_rate = 1.0
  assert fork.choose(config, workdir, None, True) == begun
  config.update_from_flattened_dict(changed)
  with pytest.raises(errors.InputError, match=said):
    fork.choose(config, workdir, None, True)
  assert json.loads((workdir / 'parent.json').read_text())['step'] == 2
