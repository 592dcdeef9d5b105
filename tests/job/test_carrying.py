"""Runs whose completions are carried over rollout steps.

Axes: T tokens of a completion.
"""

import collections
import contextlib
import dataclasses
import json

import jax
import numpy as np
import pytest

from configs import tiny
from tepo_jax.job import base_model
from tepo_jax.job import carrying
from tepo_jax.job import fork
from tepo_jax.job import programs as programs_lib
from tepo_jax.job import run_folder
from tepo_jax.job import session as session_lib
from tepo_jax.job import trainer as trainer_lib
from tepo_jax.rollout import draw
from tepo_jax.rollout import dump
from tepo_jax.rollout import schedule
from tepo_jax.runtime import lock as lock_lib
from tepo_jax.runtime import mesh as mesh_lib
from tepo_jax.runtime import processes
from tepo_jax.tools import streaming
from tepo_jax.tools.plan import traffic
from tests import runs

STEPS, T, V = 5, 24, 2


def _config(model, **rollout):
  """An untrained model is never correct; the overlong penalty mixes rewards."""
  config = tiny.get_config('tepo')
  config.model, config.steps, config.data.limit = str(model), STEPS, 64
  config.rollout.update(
      prompts=4, samples=3, max_tokens=T, dynamic_sampling='off',
      overlong_buffer=T - 1, slots=6, chunk=3)
  config.rollout.carry.max_versions = V
  config.rollout.update(rollout)
  config.train.update(minibatch_prompts=2)
  config.train.behaviour.weight = 'token'
  config.optimizer.learning_rate = 2e-3
  config.eval.period = 0
  config.checkpoint.update(period=1, keep=9)
  return config


@contextlib.contextmanager
def _opened(config, workdir, parent=None):
  """The trainer of a run, at its last checkpoint."""
  with (session_lib.open_folder(config, config.model) as session,
        lock_lib.FolderLock(workdir) as lock):
    run_folder.claim(config, workdir, lock)
    trainer = trainer_lib.Trainer(config, session)
    trainer.open(workdir, parent)
    with contextlib.closing(trainer):
      yield trainer


def _train(config, workdir, **options):
  """Trains to the end; returns the trainer."""
  with _opened(config, workdir, **options) as trainer:
    assert trainer.run(processes.StopRequest())
    return trainer


def _extra(workdir, step):
  saved = json.loads(
      (workdir / f'checkpoints/{step}/extra/metadata').read_text())
  return saved['extra'], saved['digests']


def _lines(workdir):
  return {step: dump.read(workdir / 'rollouts', step)
          for step in dump.steps(workdir / 'rollouts')}


@pytest.fixture(name='model', scope='module')
def _model(tmp_path_factory):
  config = tiny.get_config('tepo')
  config.pretrain.update(
      worked_steps=3, mixed_steps=2, demonstrations=64, num_layers=2,
      d_model=32, head_dim=16, d_ff=48, num_kv_heads=1)
  folder = tmp_path_factory.mktemp('model') / 'base'
  base_model.make(config, folder)
  return folder


@pytest.fixture(name='run', scope='module')
def _run(model, tmp_path_factory):
  """The workdir of a run."""
  workdir = tmp_path_factory.mktemp('runs') / 'run'
  _train(_config(model), workdir)
  return workdir


@pytest.mark.long
@pytest.mark.parametrize('cache', [
    'rectangle', pytest.param('pages', marks=pytest.mark.nightly)])
def test_carried_completions_are_those_of_one_policy_sampled_at_once(
    model, tmp_path, cache):
  """With a learning rate that changes no weight, to the token: each is what a
  sampler without carry draws of its prompt in the step that began it."""
  config = _config(model, cache=cache)
  config.optimizer.learning_rate = 1e-30
  born = {}
  with _opened(config, tmp_path / 'run') as trainer:
    start = jax.device_get(trainer.learner.state.params)
    for step in range(1, STEPS + 1):
      first = trainer.cursor
      trainer.rollout_step(processes.StopRequest())
      trainer.step = step
      born |= dict.fromkeys(range(first, trainer.cursor), step)
    jax.tree.map(np.testing.assert_array_equal, start,
                 jax.device_get(trainer.learner.state.params))
    alone = trainer.session.sampler(
        prompts=1, samples=3, max_tokens=T, decoding=draw.Decoding())
    weights = trainer.learner.programs.to_decode(trainer.learner.policy())
    lines, ages = _lines(tmp_path / 'run'), set()
    for prompt_id in {row['cursor'] for rows in lines.values() for row in rows}:
      key = jax.random.fold_in(
          programs_lib.stream(config.seed, 'rollout'), born[prompt_id])
      (group,), = (groups for groups, _ in alone.stream(
          weights, [trainer.prompts.prompt(prompt_id)], key) if groups)
      for step, rows in lines.items():
        for row in (row for row in rows if row['cursor'] == prompt_id):
          length, j = group.length_G[row['sample']], row['sample']
          assert row['token_ids'] == group.token_GT[j, :length].tolist()
          np.testing.assert_allclose(
              row['sampler_logp'], group.logp_GT[j, :length], atol=1e-5)
          assert born[prompt_id] <= row['versions'][0] <= step
          ages |= {step - version for version in row['versions']}
  assert {0, 1} <= ages <= {0, 1, 2}


@pytest.mark.long
def test_metrics_are_those_of_the_dumped_tokens(run):
  for record in runs.records(run):
    extra, _ = _extra(run, record['step'])
    rows = dump.read(run / 'rollouts', record['step'])
    age = record['step'] - np.concatenate([row['versions'] for row in rows])
    assert record['carry/age_mean'] == pytest.approx(age.mean())
    assert record['carry/age_max'] == age.max() <= V
    unfinished = [length for length, ended in zip(
        extra['carried']['length'], extra['carried']['ended'])
                  if ended is None]
    assert record['carry/tokens'] == sum(unfinished) > 0
    assert record['carry/completions'] == len(unfinished)
    assert record['carry/groups'] == len(extra['carried']['born']) > 0
    assert record['sampling/tokens_discarded'] == 0
    assert record['groups_trained'] == 4 and record['behaviour_ess'] > 0.5
  assert max(r['carry/age_max'] for r in runs.records(run)) == V


@pytest.mark.long
def test_the_planners_replay_ages_as_the_run(run, model):
  """From the lengths of the run's completions alone, each step trains on tokens
  of the same age. (What is still in flight is longer than it is.)"""
  length_QG = np.full((64, 3), T)
  for rows in _lines(run).values():
    for row in rows:
      length_QG[row['cursor'], row['sample']] = row['tokens']
  config = _config(model)
  with session_lib.open_folder(config, model) as session:
    shapes = session.sampler(
        prompts=4, samples=3, max_tokens=T, decoding=draw.Decoding(),
        carries=True).schedule().shapes
  known = streaming.Table(
      np.zeros(9, np.int32), length_QG, np.ones((64, 3), bool), T)
  programs = traffic.counting(
      known, shapes, collections.Counter(), collections.Counter(), [])
  ages = [age_T.mean() for age_T in streaming.carried(
      schedule.Schedule(programs, shapes), known, 4, 'off', V, STEPS)]
  measured = [record['carry/age_mean'] for record in runs.records(run)]
  np.testing.assert_allclose(ages, measured, rtol=0.1)
  assert max(ages) > 0.5


@pytest.mark.long
def test_a_resumed_run_continues_what_was_in_flight(model, run, tmp_path):
  """To the bit: what is trained on, what is left in flight, the weights."""
  workdir = tmp_path / 'run'
  config = _config(model)
  config.steps = 2
  _train(config, workdir)
  config.steps = STEPS
  trainer = _train(config, workdir)
  assert trainer.sizes == carrying.Sizes(6, 8, 0, 4)  # on 4 shards
  assert _lines(workdir) == _lines(run)
  for step in (2, STEPS):
    assert _extra(workdir, step) == _extra(run, step)
  assert list(map(runs.untimed, runs.records(workdir))) == list(
      map(runs.untimed, runs.records(run)))


@pytest.mark.long
def test_a_fork_continues_what_was_in_flight_if_it_samples_alike(
    model, run, tmp_path):
  config = _config(model)
  config.optimizer.learning_rate = 1e-3
  parent = fork.Parent(str(run), 2, True, '')
  with _opened(config, tmp_path / 'fork', parent) as trainer:
    saved, _ = _extra(run, 2)
    assert carrying.saved(config, trainer.carried, trainer.sizes) == {
        name: saved[name] for name in ('carried', 'sizes')}
    oldest = trainer.carried[0].prompt_id
    trainer.rollout_step(processes.StopRequest())
    assert trainer.cursor > saved['cursor'] > oldest
  assert oldest == _lines(tmp_path / 'fork')[3][0]['cursor']
  config.rollout.carry.max_versions = 1
  with _opened(config, tmp_path / 'other', parent) as trainer:
    assert (trainer.carried, trainer.sizes) == ((), None)
    assert trainer.cursor == oldest  # Their groups are begun anew.


@pytest.mark.long
def test_a_fork_of_a_run_that_carries_nothing_has_nothing_in_flight(
    model, tmp_path):
  config = _config(model)
  config.steps, config.rollout.carry.max_versions = 1, 0
  trainer = _train(config, tmp_path / 'run')
  extra, _ = _extra(tmp_path / 'run', 1)
  assert 'carried' not in extra and 'sizes' not in extra
  (rows,), (record,) = _lines(tmp_path / 'run').values(), runs.records(
      tmp_path / 'run')
  assert 'versions' not in rows[0] and 'carry/groups' not in record
  config.steps, config.rollout.carry.max_versions = 3, V
  parent = fork.Parent(str(tmp_path / 'run'), 1, True, '')
  trainer = _train(config, tmp_path / 'fork', parent=parent)
  assert trainer.step == 3 and trainer.carried
  assert _lines(tmp_path / 'fork')[2][0]['versions'][0] == 2


@pytest.mark.parametrize('changed, known', [
    ({}, True), ({'slots': 8}, False), ({'slots': None}, False),
    ({'cache': 'pages'}, False)])
def test_a_run_keeps_its_slots_unless_it_is_asked_for_others(
    model, changed, known):
  settings = _config(model).rollout
  settings.update(changed)
  mesh = mesh_lib.make(dict(data=1, fsdp=1, tensor=1), jax.devices()[:1])
  sizes = carrying.Sizes(6, 7, 0, 1)
  assert carrying.kept(sizes, settings, mesh) == (sizes if known else None)
  assert carrying.kept(None, settings, mesh) is None
  assert carrying.kept(
      dataclasses.replace(sizes, shards=2), settings, mesh) is None
