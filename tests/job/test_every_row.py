"""Every row of the paper makes updates with the jitted programs of a run."""

import jax
import numpy as np
import pytest

from configs import methods
from configs import tiny
from tepo_jax.job import programs as programs_lib
from tepo_jax.learning import batch as batch_lib
from tepo_jax.policy import transformer
from tepo_jax.runtime import mesh as mesh_lib

pytestmark = pytest.mark.usefixtures('quick_compile')

MODEL = transformer.ModelConfig(
    vocab_size=32, d_model=16, num_layers=1, num_heads=2, num_kv_heads=1,
    head_dim=8, d_ff=16, max_position=32, tie_embeddings=True)
ROWS, PROMPT, SLOTS = 8, 4, 6


def random_batch(seed):
  generator = np.random.default_rng(seed)
  length_B = generator.integers(1, SLOTS + 1, ROWS)
  mask_BT = np.arange(SLOTS) < length_B[:, None]
  position_BS = np.concatenate([
      np.tile(np.arange(PROMPT), (ROWS, 1)),
      np.where(mask_BT, PROMPT + np.arange(SLOTS), -1)], 1)
  return batch_lib.Batch(
      token_BS=generator.integers(0, 32, (ROWS, PROMPT + SLOTS), np.int32),
      position_BS=position_BS.astype(np.int32),
      mask_BT=mask_BT.astype(np.float32),
      advantage_B=generator.normal(size=ROWS).astype(np.float32),
      old_logp_BT=np.zeros((ROWS, SLOTS), np.float32),
      old_entropy_BT=np.zeros((ROWS, SLOTS), np.float32),
      sampler_logp_BT=np.zeros((ROWS, SLOTS), np.float32))


def programs_of(name):
  config = tiny.get_config(name)
  config.compute.unroll = 1
  config.optimizer.learning_rate = 1e-2
  mesh = mesh_lib.make({'data': 1, 'fsdp': 1, 'tensor': 1}, jax.devices()[:1])
  return programs_lib.make(
      config, programs_lib.prepare_model(MODEL, config, mesh), mesh)


@pytest.fixture(scope='module')
def start():
  """Parameters, and a batch with the statistics of π_old, for every row."""
  programs = programs_of('tepo')
  params = transformer.init(MODEL, jax.random.key(0))
  batch = jax.device_put(programs.pack(random_batch(0)),
                         programs.minibatch_sharding)
  old_logp_BT, old_entropy_BT = programs.score(params, batch)
  return jax.device_get(params), batch.replace(
      old_logp_BT=old_logp_BT, old_entropy_BT=old_entropy_BT)


# One row per form; the others differ in a coefficient.
ROWS_OF_THE_PAPER = [name for name in methods.methods(1e-3)
                     if not name.endswith(('_1', '1e-1', '1e-2', '1e-4'))]


@pytest.mark.long_after_first
@pytest.mark.parametrize('name', ROWS_OF_THE_PAPER)
def test_row(name, start):
  before, batch = start
  programs = programs_of(name)
  state = programs.init_state(jax.tree.map(jax.numpy.array, before))
  old = (programs.old_policy(state.params, batch)
         if programs.policy_loss.needs_kl else None)
  for index in range(2):
    state, metrics = programs.train_step(
        state, batch, jax.random.key(index), 0.0, old)
    assert all(np.isfinite(value) for value in metrics.values()), metrics
    assert metrics['skipped'] == 0
    if index == 0:
      assert metrics['grad_norm'] > 0
      assert metrics['weight_min'] == metrics['weight_max'] == 1
      assert metrics['noise_floor_share'] == 1
      assert metrics.get('kl_full', 0) == 0
  assert metrics['weight_max'] != 1 or name in ('gpg', 'rloo')
  assert int(state.step) == 2
  changed = jax.tree.map(lambda a, b: np.any(a != b), before,
                         jax.device_get(state.params))
  assert all(jax.tree.leaves(changed))
