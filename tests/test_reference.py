"""Every row of configs/reference.py."""

import types

import jax
import numpy as np
import pytest

from configs import reference
from tepo_jax import cli
from tepo_jax import errors
from tepo_jax.data import datasets
from tepo_jax.data import problem as problem_lib
from tepo_jax.job import configuration
from tepo_jax.job import learner as learner_lib
from tepo_jax.job import programs as programs_lib
from tepo_jax.policy import transformer
from tepo_jax.rollout import groups as groups_lib
from tepo_jax.runtime import mesh as mesh_lib
from tepo_jax.runtime import progress as progress_lib

_MODEL = transformer.ModelConfig(
    vocab_size=32, d_model=16, num_layers=2, num_heads=2, num_kv_heads=2,
    head_dim=8, d_ff=16, max_position=32, tie_embeddings=True)
_T = 6


@pytest.mark.parametrize('name', reference.ROWS)
def test_every_row_is_a_config(name):
  """Which measures what was published, with a row of tokens on each device."""
  row = reference.ROWS[name]
  config = cli.load_config(f'configs/reference.py:{name}')
  configuration.check(config, ())
  (evaluated,) = config.eval.sets
  samples, temperature = datasets.decoding(
      evaluated, config.eval.samples, config.eval.temperature)
  greedy = '' if temperature else '/greedy'
  assert row.metric == f'eval/{evaluated}{greedy}/avg@{samples}'
  assert config.train.microbatch_tokens >= row.devices * (
      config.data.max_prompt_tokens + config.rollout.max_tokens)
  assert 0 < (row.before or 0.1) < row.after < 1
  assert row.source.startswith('https://') and row.differs


def test_another_row_is_refused():
  with pytest.raises(errors.InputError, match="no 'slime' in slime_0_5b, verl"):
    cli.load_config('configs/reference.py:slime')


def _learner(name):
  """With the row's method, optimiser, adapters, group size and packing."""
  config = reference.get_config(name)
  config.compute.dtype, config.compute.remat = 'float32', 'none'
  config.data.max_prompt_tokens, config.rollout.max_tokens = 4, _T
  config.rollout.prompts = config.train.minibatch_prompts = 2
  config.rollout.logp_gap_limit = 10.0
  config.train.microbatch_tokens = 64
  mesh = mesh_lib.make(config.mesh, jax.devices()[:1])
  learner = learner_lib.Learner(config, types.SimpleNamespace(
      model=programs_lib.prepare_model(_MODEL, config, mesh), mesh=mesh,
      timers=progress_lib.Timers(), load_params=lambda: transformer.init(
          _MODEL, jax.random.key(0))))
  learner.load_base()
  learner.state = learner.first_state()
  return learner


def _groups(count, samples):
  """Random completions, of which the first of each group is right."""
  rng = np.random.default_rng(0)
  problem = problem_lib.Problem('0', '?', ('1',), 'test')
  length_NG = rng.integers(1, _T + 1, (count, samples), np.int32)
  mask_NGT = np.arange(_T) < length_NG[..., None]
  token_NGT = rng.integers(0, 32, mask_NGT.shape, np.int32) * mask_NGT
  return [groups_lib.Group(
      groups_lib.Prompt(problem, (1 + n, 2), n), token_NGT[n],
      np.where(mask_NGT[n], np.float32(-3), 0), length_NG[n],
      np.ones(samples, bool), ('',) * samples,
      np.arange(samples) == np.float32(0)) for n in range(count)]


@pytest.mark.long_after_first
@pytest.mark.parametrize('name', reference.ROWS)
def test_two_steps(name):
  learner = _learner(name)
  groups = _groups(2, learner.config.rollout.samples)
  before = jax.device_get(learner.state.params)
  for step in 1, 2:
    metrics = learner.learn(step, groups, np.concatenate(
        [group.accuracy_G for group in groups]).astype(np.float32))
    assert metrics['grad_norm'] > 0 and metrics['skipped'] == 0
  assert int(learner.state.step) == 2
  assert any(jax.tree.leaves(jax.tree.map(
      lambda a, b: np.any(a != b), before,
      jax.device_get(learner.state.params))))
