"""An untrained model, for what its weights do not matter to."""

import pytest

from configs import tiny
from tepo_jax.job import base_model
from tepo_jax.job import session as session_lib
from tepo_jax.tools.mechanism import observe


@pytest.fixture(scope='package', name='lab')
def _lab(tmp_path_factory):
  """An untrained model is never correct; the overlong penalty mixes rewards."""
  config, folder = tiny.get_config('grpo'), tmp_path_factory.mktemp('m') / 'b'
  config.data.limit, config.eval.limit = 24, 6
  config.rollout.update(
      prompts=4, samples=4, max_tokens=12, dynamic_sampling='off',
      overlong_buffer=11)
  config.train.update(
      minibatch_prompts=4, epochs=2, microbatch_tokens=144)
  config.optimizer.learning_rate = 2e-2
  config.pretrain.update(
      worked_steps=1, mixed_steps=0, learning_rate=1e-9,  # untrained
      demonstrations=32, num_layers=1, num_heads=2,
      num_kv_heads=1, d_model=16, head_dim=8, d_ff=16)
  base_model.make(config, folder)
  config.model = str(folder)
  with session_lib.open_folder(config, folder) as session:
    yield observe.Lab(config, session, 12)
