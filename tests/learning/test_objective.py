"""The objective on numbers computed by hand; safety, metrics, errors."""

import math

import jax
import ml_collections
import numpy as np
import pytest

from tepo_jax import errors
from tepo_jax.learning import choices
from tepo_jax.learning import numerics
from tepo_jax.learning import objective

NO_REG = dict(penalty='none', region='none', coef=0.0)
PPO = dict(name='ppo', low=0.2, high=0.28)
S1 = math.sqrt(1.35)  # sequence weight of the first completion below


def make(weight='token', clip=PPO, shape=dict(name='none'),
         aggregate='token_mean', reg=NO_REG):
  return objective.make_policy_loss(dict(
      weight=weight, clip=clip, shape=shape, aggregate=aggregate, reg=reg))


def tokens(ratio, advantage, mask=None, **others):
  """logp from ratios; the old policy gives every token probability e^-1.

  All have one shape, so that eager operations compile once; the rows and
  columns that are not given are NaN under the mask.
  """
  logp = np.log(np.array(ratio, float)) - 1
  fields = dict(
      logp_BT=logp, entropy_BT=np.ones_like(logp),
      old_logp_BT=np.full_like(logp, -1.0), old_entropy_BT=np.ones_like(logp),
      advantage_BT=np.broadcast_to(advantage, logp.shape),
      mask_BT=np.ones_like(logp) if mask is None else np.array(mask)) | others
  return objective.Tokens(**{
      name: padded(value, 0 if name == 'mask_BT' else np.nan)
      for name, value in fields.items()})


def padded(array, fill=0):
  out = np.full((6, 8), fill, float)
  out[:len(array), :len(array[0])] = array
  return out


def two_completions():
  """Ratios 1.5 and 0.9, A = 1; ratio 0.5, A = -2."""
  return tokens([[1.5, 0.9], [0.5, 7.0]], [[1.0], [-2.0]], [[1, 1], [1, 0]])


def value_and_grad(loss, x, rng=None, field='logp_BT'):
  def value(leaf):
    y = x.replace(**{field: leaf})
    return loss.partial(y, loss.statistics(y, rng))
  return jax.value_and_grad(value)(getattr(x, field))


def check(got, value, grad):
  np.testing.assert_allclose(got[0], value, rtol=0, atol=1e-12)
  np.testing.assert_allclose(got[1], padded(grad), rtol=0, atol=1e-12)


HAND = {
    # row: loss, gradient in logp
    'grpo': (dict(), -(1.28 + 0.9 - 1.6) / 3, [[0, -0.9 / 3], [0, 0]]),
    'no clip': (dict(clip=dict(name='none')), -(1.5 + 0.9 - 1) / 3,
                [[-1.5 / 3, -0.9 / 3], [1 / 3, 0]]),
    'tepo_no_kl': (dict(weight='sequence'), -(2 * S1 - 1.6) / 3,
                   [[-S1 / 3, -S1 / 3], [0, 0]]),
    'sequence_token': (dict(weight='sequence_token'), -(2 * S1 - 1.6) / 3,
                       [[-S1 / 3, -S1 / 3], [0, 0]]),
    'printed': (dict(weight='sequence', clip=PPO | dict(name='printed')),
                -(2 * S1 - 1) / 3, [[-S1 / 3, -S1 / 3], [1 / 3, 0]]),
    'gspo': (dict(weight='sequence', aggregate='seq_mean_token_mean'),
             -(S1 - 1.6) / 2, [[-S1 / 4, -S1 / 4], [0, 0]]),
    'token_sum': (dict(weight='sequence', aggregate='seq_mean_token_sum'),
                  -(2 * S1 - 1.6) / 2, [[-S1 / 2, -S1 / 2], [0, 0]]),
    # prefix weights 1.5 and sqrt(1.5 * 0.9); the first is clipped
    'prefix': (dict(weight='prefix'), -(1.28 + S1 - 1.6) / 3,
               [[-S1 / 6, -S1 / 6], [0, 0]]),
    'cispo': (dict(clip=dict(name='detached', low=math.inf, high=0.28)),
              -(1.28 + 0.9 - 1) / 3, [[-1.28 / 3, -0.9 / 3], [1 / 3, 0]]),
    'gpg': (dict(weight='none', clip=dict(name='none')), 0.0,
            [[-1 / 3, -1 / 3], [2 / 3, 0]]),
    # H = 1: adds min(0.4, 1/5) twice and min(0.4, 2/5)
    'entropy_shape': (dict(shape=dict(name='entropy', alpha=0.4, kappa=5.0)),
                      -(1.28 * 1.2 + 0.9 * 1.2 - 0.8 * 1.6) / 3,
                      [[0, -0.9 * 1.2 / 3], [0, 0]]),
}


@pytest.mark.parametrize('name', HAND)
def test_by_hand(x64, name):
  row, value, grad = HAND[name]
  check(value_and_grad(make(**row), two_completions()), value, grad)


@pytest.mark.parametrize('ratio, value, grad', [
    (5.0, 6.0, 0.0),  # A = -2: min(-10, -2.56) = -10, at least 3 * -2
    (2.0, 4.0, 4.0),
    (0.5, 1.6, 0.0),
])
def test_dual_clip(x64, ratio, value, grad):
  loss = make(clip=PPO | dict(dual=3.0))
  check(value_and_grad(loss, tokens([[ratio]], -2.0)), value, [[grad]])


def test_an_optional_number_is_left_out_or_none(x64):
  for clip in PPO, PPO | dict(dual=None):
    check(value_and_grad(make(clip=clip), tokens([[5.0]], -2.0)), 10, [[10]])


@pytest.mark.parametrize('penalty, value, grad', [
    # d = ln 2, so e^-d = 1/2 and rho = 2
    ('kl_k1', math.log(2), 1.0),
    ('kl_abs', math.log(2), 1.0),
    ('kl_k2', math.log(2)**2 / 2, math.log(2)),
    ('kl_k3', 0.5 + math.log(2) - 1, 0.5),
    ('kl_k3_is', 2 * math.log(2) - 1, 2 * math.log(2)),
    ('none', 0.0, 0.0),
])
def test_sampled_penalties(x64, penalty, value, grad):
  loss = make(reg=dict(penalty=penalty, region='all', coef=3.0))
  got = value_and_grad(loss, tokens([[2.0]], 0.0))
  check(got, 3 * value, [[3 * grad]])


@pytest.mark.parametrize('penalty, field', [
    ('entropy', 'entropy_BT'), ('kl_full', 'kl_BT')])
def test_given_penalties(x64, penalty, field):
  x = tokens([[1.0, 1.0]], 0.0, [[1, 0]], **{field: [[0.7, np.inf]]})
  loss = make(reg=dict(penalty=penalty, region='all', coef=-2.0))
  check(value_and_grad(loss, x, field=field), -1.4, [[-2.0]])


@pytest.mark.parametrize('region, tolerance, expected', [
    ('none', 0.0, [0, 0, 0, 0, 0, 0]),
    ('all', 0.0, [1, 1, 1, 1, 1, 1]),
    ('positive_falling', 0.0, [1, 0, 0, 0, 0, 0]),
    ('negative_rising', 0.0, [0, 0, 0, 1, 0, 0]),
    ('misaligned', 0.0, [1, 0, 0, 1, 0, 0]),
    ('misaligned', 0.25, [0, 0, 0, 1, 0, 0]),
    ('misaligned', 0.5, [0, 0, 0, 0, 0, 0]),
])
def test_regions(x64, region, tolerance, expected):
  """(A, dH): (1,-), (1,+), (-1,-), (-1,+), (1,0), (0,-)."""
  change = np.array([[-0.25], [0.5], [-0.5], [0.5], [0.0], [-0.5]])
  x = tokens(np.ones((6, 1)), [[1.], [1.], [-1.], [-1.], [1.], [0.]],
             entropy_BT=1 + change, kl_BT=np.ones((6, 1)))
  loss = make(reg=dict(penalty='kl_full', region=region, coef=6.0,
                       entropy_tolerance=tolerance))
  _, grad = value_and_grad(loss, x, field='kl_BT')
  np.testing.assert_array_equal(grad[:, 0], expected)
  metrics = loss.metrics(x, loss.statistics(x))
  np.testing.assert_allclose(metrics['region_share'], np.mean(expected))


def test_readings_of_the_entropy_change(x64):
  """l = ln(.5), ln(.25) with A = 3, -1: the means are -1.5 ln 2 and 1, so the
  covariance is ln 2 twice. H = 0.1, H0 = 1."""
  x = numerics.clean(tokens(
      [[1.0], [1.0]], [[3.0], [-1.0]], logp_BT=np.log([[0.5], [0.25]]),
      entropy_BT=np.full((2, 1), 0.1)))
  for reading, expected in {
      'exact': [-0.9, -0.9], 'covariance': [-math.log(2)] * 2,
      'npg': [-1.5 * (math.log(0.5) + 0.1), 0.25 * (math.log(0.25) + 0.1)],
  }.items():
    change = objective.CHANGES[reading](x)[:2, 0]
    np.testing.assert_allclose(change, expected, err_msg=reading)


def test_kl_cov(x64):
  """A = 1, -1 and l = -1 + (.3, .1, -.2, -.4): covariances .35, .15, .15,
  .35; half of four tokens: the first and the last, |d| = .3 + .4."""
  x = tokens(np.exp([[0.3, 0.1], [-0.2, -0.4]]), [[1.0], [-1.0]])
  loss = make(clip=dict(name='none'), reg=dict(
      penalty='kl_abs', region='top_covariance', coef=1.0, fraction=0.5))
  surrogate = math.exp(.3) + math.exp(.1) - math.exp(-.2) - math.exp(-.4)
  check(value_and_grad(loss, x), (0.7 - surrogate) / 4, [
      [(1 - math.exp(.3)) / 4, -math.exp(.1) / 4],
      [math.exp(-.2) / 4, (math.exp(-.4) - 1) / 4]])


def test_clip_cov(x64):
  """The same covariances: band (.2, 1) holds the first and the last token;
  the first is beyond the PPO bound, so the last is the only candidate."""
  x = tokens(np.exp([[0.3, 0.1], [-0.2, -0.4]]), [[1.0], [-1.0]])
  loss = make(clip=dict(name='covariance', low=0.5, high=0.28, fraction=1.0,
                        band=(0.2, 1.0)))
  check(value_and_grad(loss, x, jax.random.key(0)),
        -(1.28 + math.exp(.1) - math.exp(-.2)) / 4,
        [[0, -math.exp(.1) / 4], [math.exp(-.2) / 4, 0]])


def test_clip_cov_draws_uniformly():
  """One of the six candidates, each as often; the two others never."""
  logp = np.tile([[0.4], [-0.4]], 4)
  advantage = np.array([[1.0], [-1.0]])
  x = tokens(np.exp(logp), advantage, [[1, 1, 1, 0], [1, 1, 1, 0]])
  loss = make(clip=dict(name='covariance', low=1.0, high=1.0, fraction=0.2,
                        band=(0.0, 1.0)))
  dropped = np.asarray(jax.jit(jax.vmap(
      lambda key: loss.statistics(x, key).dropped_BT))(
          jax.random.split(jax.random.key(1), 3000)))
  assert (dropped.sum(axis=(1, 2)) == 1).all()
  counts = dropped.sum(axis=0)
  assert counts[:2, :3].sum() == 3000
  assert (np.abs(counts[:2, :3] - 500) < 5 * math.sqrt(500 * 5 / 6)).all()


def test_clip_cov_needs_rng():
  loss = make(clip=dict(name='covariance', low=1.0, high=1.0, fraction=2e-4,
                        band=(1.0, 5.0)))
  with pytest.raises(ValueError, match='rng'):
    loss(two_completions())


def test_steer(x64):
  """pi = 1/2, H0 = ln 2 + (.4, .2): |W| = .5 * (.4, .2) = .2, .1; the second
  keeps 0.25^(1/2) of its advantage. Below 0.02 the maximum is 0.02."""
  x = tokens([[1.0, 1.0]], 1.0, logp_BT=np.log([[.5, .5]]),
             old_logp_BT=np.log([[.5, .5]]),
             old_entropy_BT=math.log(2) + np.array([[.4, .2]]))
  loss = make(shape=dict(name='steer', floor=0.25))
  check(value_and_grad(loss, x), -(0.25 + 0.5) / 2, [[-0.125, -0.25]])
  x = x.replace(old_entropy_BT=padded(math.log(2) + np.array([[.02, .0]])))
  check(value_and_grad(loss, x), -(0.5 + 1) / 2, [[-0.25, -0.5]])


@pytest.mark.parametrize('clip', [
    PPO, dict(name='ppo', low=0.0, high=0.0),
    dict(name='printed', low=0.0, high=0.0),
    dict(name='detached', low=0.0, high=0.0), dict(name='none')])
@pytest.mark.parametrize('advantage', [2.0, -2.0])
def test_gradient_at_a_tie(clip, advantage):
  """At w = 1, even with both bounds at 1, the gradient is A exactly."""
  _, grad = value_and_grad(make(clip=clip), tokens([[1.0]], advantage))
  np.testing.assert_array_equal(grad, padded([[-advantage]]))


def test_kl_abs_pushes_nothing_on_policy():
  loss = make(reg=dict(penalty='kl_abs', region='all', coef=1.0))
  check(value_and_grad(loss, tokens([[1.0]], 0.0)), 0, [[0]])


@pytest.mark.parametrize('fraction, count, expected', [
    (2e-3, 1500, 3), (2e-3, 1499, 2), (2e-3, 100, 1), (0.29, 100, 28),
    (1.0, 7, 7), (2e-4, 1_000_000, 200)])
def test_share_is_pythons(fraction, count, expected):
  """In float32, 2e-3 * 1500 would round to 3 or to just below it."""
  assert expected == max(1, int(fraction * count))
  mask = np.arange(count + 50) < count
  assert numerics.share(fraction, mask) == expected


# Safety


ROWS = {
    'token': dict(), 'sequence': dict(weight='sequence'),
    'prefix': dict(weight='prefix', clip=dict(name='none')),
    'detached': dict(clip=dict(name='detached', low=math.inf, high=0.28)),
    'steer': dict(weight='sequence_token', clip=dict(name='none'),
                  shape=dict(name='steer', floor=0.8)),
    'kl_cov': dict(clip=dict(name='none'), reg=dict(
        penalty='kl_abs', region='top_covariance', coef=1.0, fraction=0.5)),
    'k2': dict(reg=dict(penalty='kl_k2', region='all', coef=1.0)),
    'k3': dict(reg=dict(penalty='kl_k3', region='all', coef=1.0)),
    'k3_is': dict(reg=dict(penalty='kl_k3_is', region='misaligned', coef=1.0,
                           delta_entropy='covariance')),
}


@pytest.mark.parametrize('name', ROWS)
@pytest.mark.parametrize('difference', [1e4, -1e4])
def test_violent_log_ratios_stay_finite(name, difference):
  old = -2e4
  x = tokens([[1.0, 1.0], [1.0, 1.0]], [[1.0], [-1.0]],
             old_logp_BT=np.full((2, 2), old),
             logp_BT=old + difference * np.eye(2))
  value, grad = value_and_grad(make(**ROWS[name]), x)
  assert np.isfinite(value) and np.isfinite(grad).all()


@pytest.mark.parametrize('name', ROWS)
def test_no_valid_token(name):
  garbage = padded([[np.inf, -np.inf, 1e38]], np.nan)
  x = objective.Tokens(*[garbage] * 5, np.zeros((6, 8)), garbage)
  (value, metrics), grads = jax.value_and_grad(
      make(**ROWS[name]), has_aux=True)(x)
  assert value == 0
  assert all(not np.asarray(g).any() for g in jax.tree.leaves(grads))
  assert metrics['empty_minibatches'] == 1
  assert all(np.isfinite(metric) for metric in metrics.values())


@pytest.mark.parametrize('name', ROWS)
def test_one_token_rows_and_masks_of_any_type(name):
  x = tokens([[1.1], [0.8], [3.0]], [[1.0], [-1.0], [1.0]], [[1], [1], [0]])
  values = {float(value_and_grad(make(**ROWS[name]), x.replace(
      mask_BT=np.asarray(x.mask_BT, dtype)))[0])
            for dtype in (bool, np.int32, np.float32)}
  assert len(values) == 1 and math.isfinite(values.pop())


# Metrics


def test_metrics_by_hand(x64):
  """Ratios 1.5, 0.9, 1.4 of A = 1; 0.5 of A = -2; 9 of A = 0; 1.3 of A = 1;
  and an empty row."""
  x = tokens([[1.5, 0.9, 1.4], [0.5, 7, 7], [9, 7, 7], [1.3, 7, 7], [7] * 3],
             [[1.0], [-2.0], [0.0], [1.0], [1.0]],
             [[1, 1, 1], [1, 0, 0], [1, 0, 0], [1, 0, 0], [0, 0, 0]],
             entropy_BT=[[0.5, 1, 1], [2, 9, 9], [1, 9, 9], [1, 9, 9], [9] * 3],
             kl_BT=[[0.4, 0, 0], [0.8, 9, 9], [0, 9, 9], [0, 9, 9], [9] * 3])
  loss = make(reg=dict(penalty='kl_full', region='misaligned', coef=1.0))
  metrics = {k: float(v) for k, v in loss(x)[1].items()}
  d = np.log([1.5, 0.9, 1.4, 0.5, 9.0, 1.3])
  advantage = np.array([1.0, 1.0, 1.0, -2.0, 0.0, 1.0])
  expected = dict(
      clip_fraction_low=1 / 6, clip_fraction_high=3 / 6,
      clip_fraction_low_sequences=1 / 4, clip_fraction_high_sequences=2 / 4,
      clip_fraction_covariance=0, weight_mean=14.6 / 6, weight_min=0.5,
      weight_max=9.0, kl_k1=d.mean(), kl_k3=(np.exp(-d) + d - 1).mean(),
      kl_full=0.2, entropy=6.5 / 6,
      covariance=np.mean((d - d.mean()) * (advantage - advantage.mean())),
      region_share=2 / 6, entropy_unchanged_share=4 / 6,
      empty_minibatches=0)
  assert metrics.keys() == expected.keys()
  for name, value in expected.items():
    np.testing.assert_allclose(metrics[name], value, atol=1e-12, err_msg=name)


@pytest.mark.parametrize('ratio', [0.5, 2.0])
def test_weight_range_ignores_padding(ratio):
  metrics = make()(tokens([[ratio]], 1.0))[1]
  np.testing.assert_allclose(metrics['weight_min'], ratio, rtol=1e-6)
  np.testing.assert_allclose(metrics['weight_max'], ratio, rtol=1e-6)


def test_covariance_drops_are_counted(x64):
  x = tokens(np.exp([[0.3, 0.1], [-0.2, -0.4]]), [[1.0], [-1.0]])
  loss = make(clip=dict(name='covariance', low=1.0, high=1.0, fraction=0.75,
                        band=(0.0, 1.0)))
  metrics = loss(x, jax.random.key(0))[1]
  assert metrics['clip_fraction_covariance'] == 0.75
  assert metrics['clip_fraction_high'] == 0


def test_kl_full_is_unknown_without_kl():
  assert 'kl_full' not in make()(two_completions())[1]


# What a row needs


def test_needs():
  reg = dict(penalty='kl_full', region='positive_falling', coef=1.0)
  assert make(reg=reg).needs_kl
  assert not make(reg=reg | dict(coef=0.0)).needs_kl
  assert not make(reg=reg | dict(region='none')).needs_kl
  assert not make(reg=reg | dict(penalty='kl_k3')).needs_kl
  assert not make(reg=reg).whole_minibatch
  assert not make(reg=reg | dict(delta_entropy='npg')).whole_minibatch
  assert make(reg=reg | dict(delta_entropy='covariance')).whole_minibatch
  assert make(
      reg=reg | dict(region='top_covariance', fraction=0.1)).whole_minibatch
  assert not make(reg=reg | dict(
      region='top_covariance', fraction=0.1, coef=0.0)).whole_minibatch
  assert make(shape=dict(name='steer', floor=0.8)).whole_minibatch
  assert not make(shape=dict(name='entropy', alpha=1, kappa=2)).whole_minibatch


def test_statistics_without_scoring_read_no_policy():
  x = two_completions().replace(logp_BT=None, entropy_BT=None)
  statistics = make(weight='sequence').statistics(x)
  np.testing.assert_allclose(
      statistics.coefficient_BT, padded([[1 / 3, 1 / 3], [1 / 3, 0]]))
  assert jax.tree.leaves(statistics) == [statistics.coefficient_BT]


def test_kl_full_without_kl_is_refused():
  loss = make(reg=dict(penalty='kl_full', region='all', coef=1.0))
  with pytest.raises(ValueError, match='kl_BT'):
    loss(two_completions())


def test_a_policy_loss_is_static_to_jit():
  loss = make()
  run = jax.jit(lambda loss, x: loss(x)[0], static_argnums=0)
  assert run(loss, two_completions()) == loss(two_completions())[0]
  assert hash(loss) != hash(make()) and loss != make()


def test_a_config_dict_is_a_row():
  row = ml_collections.ConfigDict(dict(
      weight='sequence', clip=PPO, shape=dict(name='steer', floor=0.8),
      aggregate='token_mean', estimator='gpg',
      reg=dict(penalty='kl_k3', region='all', coef=1)))
  assert objective.make_policy_loss(row).method.estimator == 'gpg'


GOOD = dict(weight='token', clip=PPO, shape=dict(name='none'),
            aggregate='token_mean', reg=NO_REG)
COVARIANCE = dict(name='covariance', low=1.0, high=1.0, fraction=2e-4,
                  band=(1.0, 5.0))


@pytest.mark.parametrize('changes, field, also', [
    (dict(weight='tokens'), 'method.weight', 'sequence_token'),
    (dict(weight=None), 'method.weight', 'prefix'),
    (dict(aggregate='mean'), 'method.aggregate', 'seq_mean_token_sum'),
    (dict(estimator='ppo'), 'method.estimator', 'drgrpo'),
    (dict(colour='red'), 'method.colour', 'aggregate'),
    (dict(clip='ppo'), 'method.clip.low', 'missing'),
    (dict(clip=0.2), 'method.clip', 'mapping'),
    (dict(aggregate=['token_mean']), 'method.aggregate', 'mapping'),
    (dict(aggregate=dict(name='token_mean', length=9)),
     'method.aggregate.length', 'no such field'),
    (dict(clip=dict(low=0.2, high=0.2)), 'method.clip.name', 'missing'),
    (dict(clip=PPO | dict(name='pppo')), 'method.clip.name', 'detached'),
    (dict(clip=dict(name='ppo', low=0.2)), 'method.clip.high', 'missing'),
    (dict(clip=PPO | dict(hihg=1)), 'method.clip.hihg', 'dual'),
    (dict(clip=PPO | dict(low=-0.1)), 'method.clip.low', '[0, 1]'),
    (dict(clip=PPO | dict(low=math.nan)), 'method.clip.low', '[0, 1]'),
    (dict(clip=PPO | dict(high='0.28')), 'method.clip.high', '>= 0'),
    (dict(clip=PPO | dict(high=True)), 'method.clip.high', '>= 0'),
    (dict(clip=PPO | dict(high=None)), 'method.clip.high', '>= 0'),
    (dict(clip=PPO | dict(dual=1.0)), 'method.clip.dual', '> 1'),
    (dict(clip=COVARIANCE | dict(fraction=0)), 'method.clip.fraction',
     '(0, 1]'),
    (dict(clip=COVARIANCE | dict(fraction=2.0)), 'method.clip.fraction',
     '(0, 1]'),
    (dict(clip=COVARIANCE | dict(band=(5.0, 1.0))), 'method.clip.band',
     'lower'),
    (dict(clip=COVARIANCE | dict(band=1.0)), 'method.clip.band', 'pair'),
    (dict(clip=COVARIANCE | dict(band=(1.0, math.nan))), 'method.clip.band',
     'pair'),
    (dict(clip=PPO | dict(low=(0.2,))), 'method.clip.low', '[0, 1]'),
    (dict(shape=dict(name='steer', floor=0.0)), 'method.shape.floor', '(0, 1]'),
    (dict(shape=dict(name='entropy', alpha=-1.0, kappa=2.0)),
     'method.shape.alpha', '>= 0'),
    (dict(shape=dict(name='entropy', alpha=1.0, kappa=0.0)),
     'method.shape.kappa', '> 0'),
    (dict(shape=dict(name='entropy', alpha=1.0, kappa=math.inf)),
     'method.shape.kappa', 'finite'),
    (dict(shape=dict(name='steel', floor=0.8)), 'method.shape.name', 'steer'),
    (dict(reg=None), 'method.reg', 'mapping'),
    (dict(reg=NO_REG | dict(penalty='kl')), 'method.reg.penalty', 'kl_k3_is'),
    (dict(reg=NO_REG | dict(region='everywhere')), 'method.reg.region',
     'positive_falling'),
    (dict(reg=NO_REG | dict(region='top_covariance')), 'method.reg.fraction',
     'missing'),
    (dict(reg=NO_REG | dict(fraction=0.1)), 'method.reg.fraction',
     'no such field'),
    (dict(reg=NO_REG | dict(coef=math.inf)), 'method.reg.coef', 'finite'),
    (dict(reg=NO_REG | dict(entropy_tolerance=-1e-3)),
     'method.reg.entropy_tolerance', '>= 0'),
    (dict(reg=NO_REG | dict(delta_entropy='approx')),
     'method.reg.delta_entropy', 'npg'),
    (dict(reg=dict(penalty='kl_k1', region='all')), 'method.reg.coef',
     'missing'),
])
def test_wrong_rows_are_refused(changes, field, also):
  with pytest.raises(errors.InputError) as error:
    objective.make_policy_loss(GOOD | changes)
  message = str(error.value)
  assert message.startswith(field + ':') and also in message
  assert '\n' not in message


@pytest.mark.parametrize('key', GOOD)
def test_missing_choices_are_refused(key):
  row = {k: v for k, v in GOOD.items() if k != key}
  with pytest.raises(errors.InputError, match=f'method.{key}: missing'):
    objective.make_policy_loss(row)


# A new method


def tail_clip(weight_BT, advantage_BT, x, *, tau_positive):
  """S = min(w, tau) A."""
  bounded_BT = numerics.bound(weight_BT, -np.inf, tau_positive)
  return bounded_BT * advantage_BT, -np.inf, tau_positive


def per_slot(mask_BT, *, length):
  """m / (B * length)."""
  return mask_BT / (mask_BT.shape[0] * length)


def test_a_function_with_a_new_number_is_a_table_entry_and_a_row(
    x64, monkeypatch):
  """Ratios 1.5, .9 of A = 1, .5 of A = -2; six rows of four tokens."""
  monkeypatch.setitem(objective.CLIPS, 'tail', choices.Choice(
      tail_clip, dict(tau_positive=choices.POSITIVE)))
  monkeypatch.setitem(objective.AGGREGATES, 'per_slot', choices.Choice(
      per_slot, dict(length=choices.POSITIVE)))
  row = dict(clip=dict(name='tail', tau_positive=1.2),
             aggregate=dict(name='per_slot', length=4))
  check(value_and_grad(make(**row), two_completions()),
        -(1.2 + 0.9 - 1) / 24, [[0, -0.9 / 24], [1 / 24, 0]])
  for bad in -1.0, None, '1':
    row['clip']['tau_positive'] = bad
    with pytest.raises(errors.InputError, match='clip.tau_positive: .* > 0'):
      make(**row)


def test_a_number_without_a_range_is_named(monkeypatch):
  def half(mask_BT, *, share):
    return share * mask_BT

  monkeypatch.setitem(objective.AGGREGATES, 'half', half)
  with pytest.raises(
      errors.InputError, match='method.aggregate.share: no such field'):
    make(aggregate=dict(name='half', share=0.5))
