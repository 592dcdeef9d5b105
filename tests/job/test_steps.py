"""The jitted programs in bfloat16: casts that must not move the policy."""

import jax
import numpy as np

from configs import tiny
from tepo_jax.job import steps
from tepo_jax.learning import update
from tepo_jax.policy import transformer
from tepo_jax.runtime import mesh as mesh_lib

MODEL = transformer.ModelConfig(
    vocab_size=32, d_model=16, num_layers=2, num_heads=2, num_kv_heads=1,
    head_dim=8, d_ff=16, max_position=32, tie_embeddings=True, qk_norm=True)


def test_in_bfloat16_the_old_policy_is_the_policy_exactly():
  """Norm scales off bfloat16's grid, as after any update, stay as they are."""
  config = tiny.get_config('tepo')
  config.compute.dtype = config.compute.gradient_dtype = 'bfloat16'
  mesh = mesh_lib.make({'data': 1, 'fsdp': 1, 'tensor': 1}, jax.devices()[:1])
  programs = steps.make(config, MODEL, mesh)
  generator = np.random.default_rng(0)
  params = jax.tree.map(
      lambda x: x + generator.normal(0, 0.1, x.shape).astype(np.float32),
      transformer.init(MODEL, jax.random.key(0)))
  zeros_BT = np.zeros((8, 6), np.float32)
  batch = update.Batch(
      token_BS=generator.integers(0, 32, (8, 10), np.int32),
      position_BS=np.tile(np.arange(10, dtype=np.int32), (8, 1)),
      mask_BT=np.ones((8, 6), np.float32),
      advantage_B=generator.normal(size=8).astype(np.float32),
      old_logp_BT=zeros_BT, old_entropy_BT=zeros_BT, sampler_logp_BT=zeros_BT)
  state = programs.init_state(params)
  old_params = programs.to_old_policy(state.params)
  minibatch = jax.device_put(programs.pack(batch),
                             programs.minibatch_sharding)
  old_logp_BT, old_entropy_BT = programs.score(state.params, minibatch)
  minibatch = minibatch.replace(
      old_logp_BT=old_logp_BT, old_entropy_BT=old_entropy_BT)
  _, metrics = programs.train_step(
      state, minibatch, jax.random.key(0), 0.0, old_params)
  assert metrics['noise_floor_share'] == 1
  assert metrics['kl_full'] == 0 and metrics['region_share'] == 0
  assert metrics['weight_min'] == metrics['weight_max'] == 1
  assert metrics['grad_norm'] > 0
