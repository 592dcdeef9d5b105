"""Identities between rows, and changes that must not change a loss."""

import functools
import math

import hypothesis
from hypothesis import strategies as st
import jax
import numpy as np
import pytest

from configs import methods
from tepo_jax.learning import objective

ROWS = methods.methods(beta=0.7)
KEYS = 'logp_BT', 'entropy_BT', 'kl_BT'


def value_and_grads(row, batch, rng=None):
  """Loss, and gradients in logp, entropy and kl."""
  loss = objective.make_policy_loss(row)

  def value(arrays):
    tokens = objective.Tokens(**(batch | arrays))
    return loss.partial(tokens, loss.statistics(tokens, rng))
  return jax.value_and_grad(value)({key: batch[key] for key in KEYS})


def assert_same(got, want, atol=1e-12):
  jax.tree.map(
      functools.partial(np.testing.assert_allclose, rtol=0, atol=atol),
      got, want)


@pytest.fixture
def batch(x64, minibatch):
  return minibatch('violent', 'empty_row', seed=11, garbage=False)


@pytest.fixture
def on_policy(x64, minibatch):
  return minibatch('on_policy', 'empty_row', seed=12)


# At the old policy


def test_tepo_is_reinforce_at_the_old_policy(on_policy):
  value, grads = value_and_grads(ROWS['tepo'], on_policy)
  mask = on_policy['mask_BT']
  expected = np.where(mask, -on_policy['advantage_BT'], 0) / mask.sum()
  assert_same(value, expected.sum())
  assert_same(grads['logp_BT'], expected)
  assert not grads['kl_BT'].any() and not grads['entropy_BT'].any()


@pytest.mark.parametrize('name', objective.WEIGHTS)
def test_weights_are_one_at_the_old_policy(on_policy, name):
  loss = objective.make_policy_loss(ROWS['grpo'] | dict(weight=name))
  metrics = loss(objective.Tokens(**on_policy))[1]
  assert metrics['weight_min'] == metrics['weight_max'] == 1
  assert metrics['kl_k1'] == metrics['kl_k3'] == 0
  assert metrics['entropy_unchanged_share'] == 1


@pytest.mark.parametrize(
    'name', [name for name in objective.PENALTIES if name != 'entropy'])
def test_kls_are_zero_at_the_old_policy(on_policy, name):
  row = ROWS['tepo_no_kl'] | dict(
      reg=dict(penalty=name, region='all', coef=5.0))
  assert_same(value_and_grads(row, on_policy)[0],
              value_and_grads(ROWS['tepo_no_kl'], on_policy)[0])


# Between rows


def test_sequence_token_has_tepos_gradient(batch):
  row = ROWS['tepo_no_kl']
  assert_same(value_and_grads(row | dict(weight='sequence_token'), batch),
              value_and_grads(row, batch))


@pytest.mark.parametrize('weight', objective.WEIGHTS)
def test_ppo_without_bounds_is_no_clip(batch, weight):
  row = ROWS['grpo'] | dict(weight=weight)
  ppo = dict(name='ppo', low=math.inf, high=math.inf)
  assert_same(value_and_grads(row | dict(clip=ppo), batch),
              value_and_grads(row | dict(clip=dict(name='none')), batch))


def test_steer_with_floor_one_is_its_base(batch):
  row = ROWS['steer'] | dict(shape=dict(name='steer', floor=1.0))
  assert_same(value_and_grads(row, batch),
              value_and_grads(ROWS['tepo_no_kl'], batch))


@pytest.mark.parametrize('changes', [dict(coef=0.0), dict(region='none')])
def test_a_regulariser_of_nothing_is_none(batch, changes):
  row = ROWS['tepo'] | dict(reg=ROWS['tepo']['reg'] | changes)
  assert_same(value_and_grads(row, batch | dict(kl_BT=batch['kl_BT'] * 0)),
              value_and_grads(ROWS['tepo_no_kl'], batch))


def test_k3_is_is_rho_times_k3(batch):
  x = objective.Tokens(**batch)
  ratio = np.exp(np.clip(batch['logp_BT'] - batch['old_logp_BT'], -20, 20))
  assert_same(objective.PENALTIES['kl_k3_is'](x),
              ratio * objective.PENALTIES['kl_k3'](x), atol=1e-9)


def test_tight_bounds_keep_no_wrong_side(batch):
  """Where PPO clips, the gradient is 0; elsewhere it is -A w / N."""
  _, grads = value_and_grads(ROWS['grpo'], batch)
  mask, a = batch['mask_BT'], batch['advantage_BT']
  w = np.exp(batch['logp_BT'] - batch['old_logp_BT'])
  free = np.where(a > 0, w <= 1.28, w >= 0.8) & mask
  assert 0 < free.sum() < mask.sum()
  assert_same(grads['logp_BT'], -a * w * free / mask.sum())


# Changes without effect

UNCHANGED = {name: ROWS[name] for name in (
    'tepo', 'tepo_covariance', 'kl_cov', 'steer', 'gspo', 'prefix_is',
    'seq_mean_token_sum', 'entropy_advantage', 'max_entropy', 'dr_grpo')}
UNCHANGED['kl_cov'] = ROWS['kl_cov'] | dict(
    reg=ROWS['kl_cov']['reg'] | dict(fraction=0.3))
# Its draw depends on row and column; this one drops every candidate.
UNCHANGED['clip_cov'] = ROWS['clip_cov'] | dict(
    clip=ROWS['clip_cov']['clip'] | dict(fraction=1.0, band=(0.2, 5.0)))
ROWS_IN, LENGTH_IN, ROWS_OUT, LENGTH_OUT, MICROBATCH = 4, 6, 6, 9, 2


def _scatter(batch, rows, columns):
  """The minibatch with its rows moved, and garbage for padding."""
  out = {}
  for name, array in batch.items():
    fill = False if name == 'mask_BT' else np.inf
    out[name] = np.full((ROWS_OUT, LENGTH_OUT), fill)
    out[name][np.ix_(rows, columns)] = array
  return out


@functools.cache
def _whole(name):
  return jax.jit(functools.partial(value_and_grads, UNCHANGED[name]))


@functools.cache
def _statistics(name):
  loss = objective.make_policy_loss(UNCHANGED[name])
  return jax.jit(lambda batch, rng: loss.statistics(
      objective.Tokens(**batch), rng))


@functools.cache
def _partial(name):
  loss = objective.make_policy_loss(UNCHANGED[name])
  return jax.jit(jax.value_and_grad(
      lambda arrays, batch, statistics: loss.partial(
          objective.Tokens(**(batch | arrays)), statistics)))


@pytest.mark.long_after_first
@pytest.mark.parametrize('name', UNCHANGED)
@hypothesis.given(
    regime=st.sampled_from(['on_policy', 'mild', 'violent']),
    mask=st.sampled_from(['ragged', 'holes', 'empty_row']),
    seed=st.integers(0, 10_000), rows=st.permutations(range(ROWS_OUT)),
    columns=st.permutations(range(LENGTH_OUT)),
    cut=st.permutations(range(ROWS_OUT)))
@hypothesis.settings(max_examples=8, deadline=None)
def test_padding_order_and_microbatches(
    minibatch, name, regime, mask, seed, rows, columns, cut):
  with jax.enable_x64(True):
    batch = minibatch(regime, mask, seed, ROWS_IN, LENGTH_IN)
    place = rows[:ROWS_IN], sorted(columns[:LENGTH_IN])
    rng = jax.random.key(seed)
    value, grads = _whole(name)(batch, rng)

    moved = _scatter(batch, *place)
    moved_value, moved_grads = _whole(name)(moved, rng)
    assert_same(moved_value, value)
    for key in KEYS:
      assert_same(np.asarray(moved_grads[key])[np.ix_(*place)], grads[key])
      assert_same(np.abs(moved_grads[key]).sum(), np.abs(grads[key]).sum(),
                  atol=1e-10)

    statistics = _statistics(name)(moved, rng)
    total, summed = 0.0, jax.tree.map(np.zeros_like, moved_grads)
    for start in range(0, ROWS_OUT, MICROBATCH):
      index = np.array(cut[start:start + MICROBATCH])
      some = {key: array[index] for key, array in moved.items()}
      part, part_grads = _partial(name)(
          {key: some[key] for key in KEYS}, some,
          jax.tree.map(lambda leaf: leaf[index], statistics))
      total += part
      for key in KEYS:
        summed[key][index] += part_grads[key]
    assert_same(total, value)
    assert_same(summed, moved_grads)


def test_clip_cov_draws_survive_padding(minibatch):
  """Rows below and columns to the right do not change the draw."""
  loss = objective.make_policy_loss(UNCHANGED['clip_cov'] | dict(
      clip=ROWS['clip_cov']['clip'] | dict(fraction=0.2, band=(-5.0, 5.0))))
  batch = minibatch('mild', 'holes', 3, ROWS_IN, LENGTH_IN)
  wide = _scatter(batch, range(ROWS_IN), range(LENGTH_IN))
  dropped = [np.asarray(loss.statistics(
      objective.Tokens(**b), jax.random.key(5)).dropped_BT)
             for b in (batch, wide)]
  assert 0 < dropped[0].sum() < batch['mask_BT'].sum()
  np.testing.assert_array_equal(dropped[1][:ROWS_IN, :LENGTH_IN], dropped[0])


@pytest.mark.parametrize('name', ['tepo', 'kl_cov', 'clip_cov', 'steer'])
def test_the_mesh_changes_nothing(x64, minibatch, name):
  batch = minibatch('mild', 'holes', 8, rows=8, length=6)
  mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ('data',))
  sharding = jax.sharding.NamedSharding(
      mesh, jax.sharding.PartitionSpec('data'))
  rng = jax.random.key(1)
  run = jax.jit(functools.partial(value_and_grads, ROWS[name]))
  assert_same(run(jax.device_put(batch, sharding), rng), run(batch, rng))
