"""A small learner and groups to train it on.

Axes: B completions · N groups · G samples of a prompt · T tokens.
"""

import types

import jax
import numpy as np

from configs import tiny
from tepo_jax.data import problem as problem_lib
from tepo_jax.job import learner as learner_lib
from tepo_jax.job import programs as programs_lib
from tepo_jax.policy import transformer
from tepo_jax.rollout import groups as groups_lib
from tepo_jax.runtime import mesh as mesh_lib
from tepo_jax.runtime import progress as progress_lib

MODEL = transformer.ModelConfig(
    vocab_size=32, d_model=16, num_layers=1, num_heads=2, num_kv_heads=2,
    head_dim=8, d_ff=16, max_position=32, tie_embeddings=True)
GROUPS, SAMPLES, T = 4, 2, 6


def make_learner(method, packing='segments', shape=(1, 1, 1), scale=1.0,
                 microbatch_tokens=40, learning_rate=3e-5, remat='none',
                 rank=0, period=0, warmup_steps=0, dtype='float32',
                 momentum_dtype='float32'):
  """Two epochs of two updates; `scale` multiplies the initial weights; `rank`
  is of LoRA, `period` of a reference policy."""
  config = tiny.get_config(method)
  config.lora.rank, config.method.reference.period = rank, period
  config.compute.remat, config.compute.dtype = remat, dtype
  config.data.max_prompt_tokens = 4
  config.rollout.update(
      prompts=GROUPS, samples=SAMPLES, max_tokens=T, logp_gap_limit=10.0)
  config.train.update(minibatch_prompts=2, packing=packing,
                      microbatch_tokens=microbatch_tokens)
  config.optimizer.update(
      learning_rate=learning_rate, warmup_steps=warmup_steps,
      momentum_dtype=momentum_dtype)
  mesh = mesh_lib.make(dict(zip(mesh_lib.AXES, shape)),
                       jax.devices()[:np.prod(shape)])
  return learner_lib.Learner(config, types.SimpleNamespace(
      model=programs_lib.prepare_model(MODEL, config, mesh), mesh=mesh,
      timers=progress_lib.Timers(),
      load_params=lambda: jax.tree.map(
          lambda x: scale * x, transformer.init(MODEL, jax.random.key(0)))))


def groups_of(logp_BT):
  """One right and one wrong completion a group, with the sampler's logp."""
  rng = np.random.default_rng(0)
  length_NG = rng.integers(1, T + 1, (GROUPS, SAMPLES), np.int32)
  mask_NGT = np.arange(T) < length_NG[..., None]
  token_NGT = rng.integers(0, 32, mask_NGT.shape, np.int32) * mask_NGT
  logp_NGT = np.where(mask_NGT, logp_BT.reshape(mask_NGT.shape), 0)
  problem = problem_lib.Problem('0', '?', ('1',), 'test')
  return [groups_lib.Group(
      groups_lib.Prompt(problem, (1 + n, 2), n), token_NGT[n],
      logp_NGT[n].astype(np.float32), length_NG[n], np.ones(SAMPLES, bool),
      ('', ''), np.array([1, 0], np.float32)) for n in range(GROUPS)]


def sampled():
  return groups_of(np.full((GROUPS * SAMPLES, T), -3.0))


def rewards_of(groups):
  return np.concatenate([g.accuracy_G for g in groups])
