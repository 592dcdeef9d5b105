"""Every row of the paper makes updates with the jitted programs of a run."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from configs import methods
from configs import tiny
from tepo_jax.job import programs as programs_lib
from tepo_jax.learning import packing
from tepo_jax.policy import transformer
from tepo_jax.runtime import mesh as mesh_lib

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
  return packing.Batch(
      token_BS=generator.integers(0, 32, (ROWS, PROMPT + SLOTS), np.int32),
      position_BS=position_BS.astype(np.int32),
      mask_BT=mask_BT.astype(np.float32),
      advantage_B=generator.normal(size=ROWS).astype(np.float32),
      old_logp_BT=np.zeros((ROWS, SLOTS), np.float32),
      old_entropy_BT=np.zeros((ROWS, SLOTS), np.float32),
      sampler_logp_BT=np.zeros((ROWS, SLOTS), np.float32))


def programs_of(name, shape=(1, 1, 1), model=MODEL, **optimizer):
  config = tiny.get_config(name)
  config.optimizer.update({'learning_rate': 1e-2} | optimizer)
  mesh = mesh_lib.make(dict(zip(mesh_lib.AXES, shape)),
                       jax.devices()[:np.prod(shape)])
  return programs_lib.make(
      config, programs_lib.prepare_model(model, config, mesh), mesh)


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


# Every part of these is in another row.
COMBINED = ('gspo_original', 'min_entropy')


@pytest.mark.long_after_first
@pytest.mark.parametrize('name', [
    pytest.param(name, marks=pytest.mark.nightly) if name in COMBINED else name
    for name in ROWS_OF_THE_PAPER])
def test_row(name, start):
  before, batch = start
  programs = programs_of(name)
  state = programs.init_state(jax.tree.map(jax.numpy.array, before))
  if programs.policy_loss.needs_reference:
    batch = batch.replace(
        reference_logp_BT=programs.score(state.reference, batch)[0])
  old = (programs.old_policy(state.params, batch)
         if programs.policy_loss.needs_kl else None)
  for index in range(2):
    state, metrics = programs.train_step(
        state, batch, jax.random.key(index), old)
    assert all(np.isfinite(value) for value in metrics.values()), metrics
    assert metrics['skipped'] == 0
    if index == 0:
      assert metrics['grad_norm'] > 0
      assert metrics['weight_min'] == metrics['weight_max'] == 1
      assert metrics['entropy_unchanged_share'] == 1
      assert metrics.get('kl_full', 0) == 0
      assert metrics.get('kl_reference', 0) == 0
  if programs.policy_loss.needs_reference:
    assert metrics['kl_reference'] != 0
  assert metrics['weight_max'] != 1 or name in ('gpg', 'rloo', 'rloo_original')
  assert int(state.step) == 2
  changed = jax.tree.map(lambda a, b: np.any(a != b), before,
                         jax.device_get(state.params))
  assert all(jax.tree.leaves(changed))


@pytest.mark.parametrize('name', ['kl_cov', 'gspo_original', 'tepo'])
def test_rounding_decides_nothing_until_the_weights_move(name, start):
  """On GPUs scoring and update may round differently: ℓ° and H° get noise."""
  before, exact = start
  programs = programs_of(name)
  noise_BT = 1e-2 * np.random.default_rng(0).normal(size=(ROWS, SLOTS)).astype(
      np.float32)
  noisy = exact.replace(old_logp_BT=exact.old_logp_BT + noise_BT,
                        old_entropy_BT=exact.old_entropy_BT + noise_BT)

  def first_two(batch):
    state = programs.init_state(jax.tree.map(jax.numpy.array, before))
    old = (programs.old_policy(state.params, batch)
           if programs.policy_loss.needs_kl else None)
    for index in range(2):
      state, metrics = programs.train_step(
          state, batch.replace(scored_at=np.int32(0)), jax.random.key(index),
          old)
      metrics.pop('kl_full', None)  # it keeps the noise
      yield jax.device_get((state.params, metrics))

  (first, second), (wanted, other) = first_two(noisy), first_two(exact)
  jax.tree.map(np.testing.assert_array_equal, first, wanted)
  assert first[1]['weight_min'] == first[1]['weight_max'] == 1
  assert second[1]['kl_k3'] != other[1]['kl_k3']


@functools.cache
def _two_updates(name, shape):
  """How far two updates move the parameters, and the metrics of both.

  With so large an epsilon, rounding does not decide the sign of Adam's steps.
  """
  programs = programs_of(
      name, shape, dataclasses.replace(MODEL, num_heads=4, num_kv_heads=2),
      learning_rate=0.3, epsilon=1e-2)
  before = jax.device_get(transformer.init(programs.model, jax.random.key(0)))
  state = programs.init_state(mesh_lib.put(
      before, programs.state_sharding.params))
  minibatch = mesh_lib.put(
      programs.pack(random_batch(0)), programs.minibatch_sharding)
  old_logp_BT, old_entropy_BT = programs.score(state.params, minibatch)
  minibatch = minibatch.replace(
      old_logp_BT=old_logp_BT, old_entropy_BT=old_entropy_BT)
  old = (programs.old_policy(state.params, minibatch)
         if programs.policy_loss.needs_kl else None)
  found = []
  for index in range(2):
    state, metrics = programs.train_step(
        state, minibatch, jax.random.key(index), old)
    found.append(metrics)
  return jax.tree.map(lambda a, b: a - b, jax.device_get(state.params),
                      before), jax.device_get(found)


@pytest.mark.long
@pytest.mark.parametrize('name, shape', [
    *((name, (1, 2, 2)) for name in ('tepo', 'clip_cov', 'kl_cov')),
    # The others differ from these only in functions of [B, T], which every
    # device computes whole.
    *(pytest.param(*case, marks=pytest.mark.nightly) for case in (
        ('tepo', (1, 4, 1)), ('tepo', (1, 1, 4)), *((name, (1, 2, 2))
         for name in ('grpo', 'gspo', 'cispo', 'entropy_advantage', 'gpg',
                      'kl_1e-3'))))])
def test_row_on_a_mesh(name, shape):
  want, want_metrics = _two_updates(name, (1, 1, 1))
  got, metrics = _two_updates(name, shape)
  scale = max(np.abs(x).max() for x in jax.tree.leaves(want))
  assert scale > 1e-3
  jax.tree.map(lambda a, b: np.testing.assert_allclose(
      a, b, rtol=0, atol=2e-6 * scale + 3e-8), got, want)
  for now, before in zip(metrics, want_metrics):
    assert now.keys() == before.keys()
    for key in now:
      np.testing.assert_allclose(
          now[key], before[key], rtol=2e-5, atol=2e-6, err_msg=key)
