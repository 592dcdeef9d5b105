"""Every row against torch autograd, by the formulas of the methods' sheet.

The reference never sees a mask: it works on lists of completions, each a
vector of its valid tokens, in float64.
"""

import math

import jax
from jax import numpy as jnp
import numpy as np
import pytest
import torch

from configs import methods
from tepo_jax.learning import behaviour
from tepo_jax.learning import objective

ROWS = methods.methods(beta=0.7)  # large, so that an error in the KL shows
INPUTS = [(regime, mask) for regime in ('on_policy', 'mild', 'violent')
          for mask in ('ragged', 'holes', 'empty_row')]
INPUTS.append(('extreme', 'ragged'))
# Panel A's rows differ in the coefficient alone: these have all the inputs.
FULL = [name for name in ROWS if '1e-' not in name]


def _completions(batch):
  """Leaves (whole arrays, differentiable) and vectors of the valid tokens."""
  leaves, vectors = {}, {}
  for name, array in batch.items():
    if name != 'mask_BT':
      leaves[name] = torch.tensor(array, requires_grad=True)
      vectors[name[:-3]] = [
          leaves[name][i][torch.tensor(np.flatnonzero(m))]
          for i, m in enumerate(batch['mask_BT'])]
  return leaves, vectors


def _held(exponent):
  return torch.exp(torch.clamp(exponent, -20, 20))


def _weight(name, logp, old_logp):
  d = logp - old_logp
  log = {
      'token': lambda: d,
      'sequence': lambda: d.mean().expand(len(d)),
      'sequence_token': lambda: d.mean().detach() + logp - logp.detach(),
      'prefix': lambda: torch.stack(
          [d[:t + 1].mean() for t in range(len(d))]),
      'none': lambda: logp - logp.detach(),
  }[name]()
  return _held(log)


def _surrogate(clip, w, a, logp):
  if clip['name'] == 'none':
    return w * a
  clipped = torch.clamp(w, 1 - clip['low'], 1 + clip['high'])
  if clip['name'] == 'printed':
    return torch.minimum(w, clipped) * a
  if clip['name'] == 'detached':
    return clipped.detach() * a * torch.exp(logp - logp.detach())
  s = torch.minimum(w * a, clipped * a)
  if clip.get('dual'):
    s = torch.where(a < 0, torch.maximum(s, clip['dual'] * a), s)
  return s


def _shaped(shape, v, i):
  a, h = v['advantage'][i], v['entropy'][i].detach()
  if shape['name'] == 'entropy':
    return a + torch.minimum(shape['alpha'] * h, a.abs() / shape['kappa'])
  if shape['name'] == 'steer':
    def omega(j):
      logp, old_logp = v['logp'][j].detach(), v['old_logp'][j]
      return (v['advantage'][j] * _held(logp - old_logp) * (1 - torch.exp(logp))
              * (logp + v['old_entropy'][j])).abs()
    top = max([0.02] + [omega(j).detach().max().item()
                        for j in range(len(v['logp'])) if len(v['logp'][j])])
    return torch.exp(np.log(shape['floor']) * omega(i) / top).detach() * a
  return a


def _covariance(v):
  a, logp = torch.cat(v['advantage']), torch.cat(v['logp']).detach()
  return [(v['advantage'][i] - a.mean()) * (v['logp'][i].detach() - logp.mean())
          for i in range(len(v['logp']))]


def _region(reg, v, i):
  a, logp = v['advantage'][i], v['logp'][i].detach()
  cov = _covariance(v)
  change = {
      'exact': v['entropy'][i].detach() - v['old_entropy'][i],
      'covariance': -cov[i],
      'npg': -a * torch.exp(logp) * (logp + v['entropy'][i].detach()),
  }[reg['delta_entropy']]
  falling = (a > 0) & (change < -reg['entropy_tolerance'])
  rising = (a < 0) & (change > reg['entropy_tolerance'])
  if reg['region'] == 'top_covariance':
    every = torch.cat(cov)
    count = max(1, int(reg['fraction'] * len(every)))
    return cov[i] >= torch.sort(every, descending=True).values[count - 1]
  return {'none': a != a, 'all': a == a, 'positive_falling': falling,
          'negative_rising': rising, 'misaligned': falling | rising,
          }[reg['region']]


def _penalty(name, v, i):
  d = v['logp'][i] - v['old_logp'][i]
  rho = _held(d)
  return {
      'none': 0 * d, 'kl_full': v['kl'][i], 'kl_k1': d, 'kl_abs': d.abs(),
      'kl_k2': d**2 / 2, 'kl_k3': _held(-d) + d - 1,
      'kl_k3_is': rho * d - rho + 1, 'entropy': v['entropy'][i],
  }[name]


def _reference_kl(name, d):
  """verl's kl_penalty (core_algos.py, b178a3c) but for its clamp of k3 to 10;
  a '+' has the gradient of k2."""
  value = {'k1': d, 'k2': d**2 / 2, 'k3': _held(-d) + d - 1}[name.strip('+')]
  if not name.endswith('+'):
    return value
  return d**2 / 2 - (d**2 / 2).detach() + value.detach()


def _coefficient(aggregate, n, total, rows):
  if isinstance(aggregate, str):
    aggregate = dict(name=aggregate)
  return {
      'token_mean': lambda: 1 / total,
      'seq_mean_token_mean': lambda: 1 / (n * rows),
      'seq_mean_token_sum': lambda: 1 / rows,
      'constant_length': lambda: 1 / (aggregate['length'] * rows),
  }[aggregate['name']]()


def reference(row, batch, dropped=None, weights=None):
  """Loss and its gradients in logp, entropy and kl; `dropped`: bool [B,T];
  `weights`: a vector of behaviour weights per completion."""
  leaves, v = _completions(batch)
  sizes = [len(logp) for logp in v['logp']]
  total, rows = sum(sizes), sum(n > 0 for n in sizes)
  loss = 0.0
  for i, n in enumerate(sizes):
    if not n:
      continue
    w = _weight(row['weight'], v['logp'][i], v['old_logp'][i])
    s = _surrogate(row['clip'], w, _shaped(row['shape'], v, i), v['logp'][i])
    if dropped is not None:
      valid = np.flatnonzero(batch['mask_BT'][i])
      s = s * torch.tensor(~dropped[i][valid])
    if weights is not None:
      s = s * weights[i]
    r = _penalty(row['reg']['penalty'], v, i)
    inside = _region(row['reg'], v, i)
    each = row['reg']['coef'] * torch.where(inside, r, 0 * r) - s
    if row['reference']['place'] == 'loss':
      each = each + row['reference']['coef'] * _reference_kl(
          row['reference']['estimator'],
          v['logp'][i] - v['reference_logp'][i])
    loss = loss + each.sum() * _coefficient(row['aggregate'], n, total, rows)
  wanted = [leaves[k] for k in ('logp_BT', 'entropy_BT', 'kl_BT')]
  grads = torch.autograd.grad(
      loss, wanted, allow_unused=True, materialize_grads=True)
  return loss.item(), [g.numpy() for g in grads]


def _ours(row):
  loss = objective.make_policy_loss(row)

  def run(batch, rng):
    def value(logp, entropy, kl):
      tokens = objective.Tokens(**dict(
          batch, logp_BT=logp, entropy_BT=entropy, kl_BT=kl))
      statistics = loss.statistics(tokens, rng)
      return loss.partial(tokens, statistics), statistics
    return jax.value_and_grad(value, (0, 1, 2), has_aux=True)(
        batch['logp_BT'], batch['entropy_BT'], batch['kl_BT'])
  return run


def _assert_close(ours, theirs, value_tolerance, gradient_tolerance):
  for got, want, tolerance in zip(
      [ours[0], *ours[1]], [theirs[0], *theirs[1]],
      [value_tolerance, *[gradient_tolerance] * 3]):
    scale = max(1.0, np.max(np.abs(want)))
    np.testing.assert_allclose(got, want, rtol=0, atol=tolerance * scale)


def _check(run, row, batch, value_tolerance=1e-7, gradient_tolerance=1e-8):
  (value, statistics), grads = run(batch, jax.random.key(3))
  dropped = None
  if row['clip']['name'] == 'covariance':
    dropped = np.asarray(statistics.dropped_BT)
    _assert_legal_drop(row['clip'], batch, dropped)
  clean = {k: np.where(batch['mask_BT'], a, 0.5) if k != 'mask_BT' else a
           for k, a in batch.items()}
  _assert_close((value, grads), reference(row, clean, dropped),
                value_tolerance, gradient_tolerance)


def _assert_legal_drop(clip, batch, dropped):
  """Clip-Cov drops random tokens, but a fixed number of the candidates."""
  mask = batch['mask_BT']
  logp, a = batch['logp_BT'][mask], batch['advantage_BT'][mask]
  w = np.exp(np.clip(logp - batch['old_logp_BT'][mask], -20, 20))
  cov = (a - a.mean()) * (logp - logp.mean())
  clipped = np.where(a > 0, w > 1 + clip['high'], w < 1 - clip['low'])
  low, high = clip['band']
  candidates = (cov > low) & (cov < high) & ~clipped
  wanted = min(max(int(clip['fraction'] * mask.sum()), 1), candidates.sum())
  assert not dropped[~mask].any()
  assert not dropped[mask][~candidates].any()
  assert dropped.sum() == wanted


@pytest.mark.parametrize('name', FULL)
def test_row_in_float64(x64, minibatch, name):
  run = jax.jit(_ours(ROWS[name]))
  for regime, mask in INPUTS:
    _check(run, ROWS[name], minibatch(regime, mask))


@pytest.mark.parametrize('name', sorted(ROWS.keys() - set(FULL)))
def test_coefficient_in_float64(x64, minibatch, name):
  _check(_ours(ROWS[name]), ROWS[name], minibatch('violent', 'empty_row'))


@pytest.mark.long_after_first
@pytest.mark.parametrize('name', FULL)
def test_row_in_float32(minibatch, name):
  """The whole call, loss and metrics, in one jitted float32 program."""
  loss = objective.make_policy_loss(ROWS[name])
  batch = {k: v.astype(np.float32) for k, v in minibatch(
      'mild', 'empty_row').items()}

  @jax.jit
  def run(batch, rng):
    def call(logp, entropy, kl):
      tokens = objective.Tokens(**dict(
          batch, logp_BT=logp, entropy_BT=entropy, kl_BT=kl))
      value, metrics = loss(tokens, rng)
      return value, (metrics, loss.statistics(tokens, rng))
    (value, aux), grads = jax.value_and_grad(call, (0, 1, 2), has_aux=True)(
        batch['logp_BT'], batch['entropy_BT'], batch['kl_BT'])
    return (value, aux[1]), grads, aux[0]

  (value, statistics), grads, metrics = run(batch, jax.random.key(3))
  assert all(leaf.dtype == jnp.float32
             for leaf in [value, *grads, *metrics.values()])
  assert all(np.isfinite(metric) for metric in metrics.values())
  wide = {k: v.astype(bool if k == 'mask_BT' else np.float64)
          for k, v in batch.items()}
  _check(lambda *_: ((value, statistics), grads), ROWS[name], wide,
         1e-5, 1e-5)


VARIANTS = {
    **{f'reference_{estimator}': ROWS['tepo'] | dict(reference=dict(
        coef=0.3, estimator=estimator, place='loss', period=0))
       for estimator in ('k1', 'k2', 'k3', 'k1+', 'k3+')},
    **{f'{weight}_{aggregate}': ROWS['tepo'] | dict(
        weight=weight, aggregate=aggregate)
       for weight, aggregate in [
           ('token', 'seq_mean_token_mean'), ('prefix', 'seq_mean_token_mean'),
           ('sequence_token', 'seq_mean_token_mean'),
           ('token', 'seq_mean_token_sum'), ('prefix', 'seq_mean_token_sum'),
           ('none', 'seq_mean_token_sum')]},
    'covariance': ROWS['clip_cov'] | dict(clip=dict(
        name='covariance', low=0.2, high=0.28, fraction=0.1,
        band=(-0.3, 1.2))),
    'dual': ROWS['grpo'] | dict(clip=dict(
        name='ppo', low=0.2, high=0.28, dual=1.5)),
    'detached_low': ROWS['cispo'] | dict(clip=dict(
        name='detached', low=0.2, high=0.28)),
    'top_covariance': ROWS['kl_cov'] | dict(reg=ROWS['kl_cov']['reg'] | dict(
        fraction=0.3)),
    'entropy_shape': ROWS['grpo'] | dict(
        shape=dict(name='entropy', alpha=0.4, kappa=2.0)),
    'steer_everywhere': ROWS['kl_k3_is_1'] | dict(
        shape=dict(name='steer', floor=0.1), aggregate='seq_mean_token_sum'),
    **{f'dead_zone_{reading}': ROWS['kl_misaligned'] | dict(
        reg=ROWS['kl_misaligned']['reg'] | dict(
            entropy_tolerance=0.1, delta_entropy=reading))
       for reading in ('exact', 'covariance', 'npg')},
}


@pytest.mark.parametrize('name', VARIANTS)
def test_other_combinations_in_float64(x64, minibatch, name):
  run = jax.jit(_ours(VARIANTS[name]))
  for regime, mask in INPUTS:
    _check(run, VARIANTS[name], minibatch(regime, mask, seed=1))


# Behaviour weights

NO_BOUNDS = dict(cap=math.inf, reject_below=0.0, reject_above=math.inf)
BEHAVIOURS = {
    'token': NO_BOUNDS | dict(weight='token', cap=1.5),
    'sequence': NO_BOUNDS | dict(weight='sequence', cap=1.5),
    'token_rejected': NO_BOUNDS | dict(weight='token', reject_above=1.5),
    'sequence_rejected': dict(weight='sequence', cap=2.0, reject_below=0.3,
                              reject_above=3.0)}


def _behaviour(batch, sampler, settings):
  """The weights by torch, a vector per completion."""
  weights = []
  for i, mask in enumerate(batch['mask_BT']):
    old_logp, mu = (torch.tensor(x[i][mask])
                    for x in (batch['old_logp_BT'], sampler))
    r = _held(old_logp - mu)
    if settings['weight'] == 'sequence':
      r = _held((old_logp - mu).sum()).expand(len(r))
    inside = (r >= settings['reject_below']) & (r <= settings['reject_above'])
    weights.append(torch.where(
        inside, torch.clamp(r, max=settings['cap']), 0 * r))
  return weights


def _sampled(minibatch, regime, mask):
  """A minibatch and the sampler's logp, with garbage under the mask."""
  batch = minibatch(regime, mask, seed=6)
  rng = np.random.default_rng(7)
  return batch, batch['old_logp_BT'] + 0.7 * rng.normal(
      size=batch['old_logp_BT'].shape)


def _check_weighted(run, row, batch, sampler, settings, weight_BT):
  (value, _), grads = run(dict(batch, behaviour_BT=weight_BT), None)
  clean = {k: np.where(batch['mask_BT'], a, 0.5) if k != 'mask_BT' else a
           for k, a in batch.items()}
  _assert_close((value, grads), reference(
      row, clean, weights=_behaviour(clean, sampler, settings)), 1e-7, 1e-8)


NUMBERS = {'constant_length': dict(length=5.0)}


@pytest.mark.parametrize('aggregate', objective.AGGREGATES)
@pytest.mark.parametrize('name', BEHAVIOURS)
def test_behaviour_weights_in_float64(x64, minibatch, name, aggregate):
  """They multiply the surrogate, not the penalty, and leave c as it is."""
  row = ROWS['kl_k3_1e-1'] | dict(weight='token', aggregate=dict(
      name=aggregate, **(NUMBERS[aggregate] if aggregate in NUMBERS else {})))
  run, settings = jax.jit(_ours(row)), BEHAVIOURS[name]
  for regime, mask in INPUTS:
    batch, sampler = _sampled(minibatch, regime, mask)
    weight_BT = behaviour.weights(
        batch['old_logp_BT'], sampler, batch['mask_BT'], **settings)
    valid = weight_BT[batch['mask_BT']]
    assert valid.std() > 0.1
    assert (valid == 0).any() == name.endswith('_rejected')
    _check_weighted(run, row, batch, sampler, settings, weight_BT)


@pytest.mark.parametrize('bug', [
    dict(cap=1.6), dict(weight='sequence'), dict(reject_above=1.4),
    dict(reject_below=0.5), 'inverted', 'off'])
def test_a_wrong_behaviour_weight_fails(x64, minibatch, bug):
  batch, sampler = _sampled(minibatch, 'mild', 'ragged')
  settings = BEHAVIOURS['token']
  arrays = batch['old_logp_BT'], sampler
  if bug == 'off':
    weight_BT = np.ones_like(sampler)
  else:
    weight_BT = behaviour.weights(
        *(arrays[::-1] if bug == 'inverted' else arrays), batch['mask_BT'],
        **(settings | (bug if isinstance(bug, dict) else {})))
  with pytest.raises(AssertionError):
    _check_weighted(_ours(ROWS['grpo']), ROWS['grpo'], batch, sampler,
                    settings, weight_BT)


SMOOTH = 'grpo', 'kl_misaligned', 'gspo', 'prefix_is', 'kl_k3_is_1'


@pytest.mark.parametrize('name', SMOOTH)
def test_finite_differences(x64, minibatch, name):
  """Of the rows without a stop-gradient where they are differentiable."""
  batch = minibatch('mild', 'holes', seed=2, rows=3, length=4, garbage=False)
  loss = objective.make_policy_loss(ROWS[name])
  keys = ['logp_BT', 'entropy_BT', 'kl_BT']
  sizes = batch['logp_BT'].shape

  def value(flat):
    arrays = flat.reshape(3, *sizes)
    tokens = objective.Tokens(**dict(batch, **dict(zip(keys, arrays))))
    return loss.partial(tokens, loss.statistics(tokens))

  flat = np.concatenate([batch[key].ravel() for key in keys])
  steps = 1e-5 * np.eye(flat.size)
  values = jax.jit(jax.vmap(value))(np.concatenate([flat + steps,
                                                    flat - steps]))
  up, down = np.split(np.asarray(values), 2)
  np.testing.assert_allclose(
      jax.jit(jax.grad(value))(flat), (up - down) / 2e-5, rtol=0, atol=1e-8)


def test_gradient_in_the_logits(x64, minibatch):
  """TEPO's closed form, through softmax, entropy and the exact KL."""
  batch = minibatch('violent', 'empty_row', seed=4, garbage=False)
  rng = np.random.default_rng(5)
  mask, advantage = batch['mask_BT'], batch['advantage_BT']
  rows, length = mask.shape
  old_z = rng.normal(size=(rows, length, 5))
  z = old_z + rng.normal(size=(rows, length, 5))
  token = rng.integers(0, 5, (rows, length))
  beta, low, high = 0.7, 0.2, 0.28

  def read(z):
    log_p = jax.nn.log_softmax(z)
    picked = jnp.take_along_axis(log_p, token[..., None], -1)[..., 0]
    return picked, -jnp.sum(jnp.exp(log_p) * log_p, -1), log_p

  old_logp, old_entropy, log_q = read(old_z)

  def value(z):
    logp, entropy, log_p = read(z)
    kl = jnp.sum(jnp.exp(log_p) * (log_p - log_q), -1)
    return objective.make_policy_loss(ROWS['tepo'])(objective.Tokens(
        logp, entropy, old_logp, old_entropy, advantage, mask, kl))[0]

  p, q = np.exp(read(z)[2]), np.exp(log_q)
  hit = np.eye(5)[token]
  ratio = np.log((p / q * hit).sum(-1))
  change = -(p * np.log(p)).sum(-1) + (q * np.log(q)).sum(-1)
  kl = (p * np.log(p / q)).sum(-1, keepdims=True)
  total = mask.sum()
  expected = np.zeros_like(p)
  for i in range(rows):
    valid = np.flatnonzero(mask[i])
    if not len(valid):
      continue
    s = np.exp(ratio[i][valid].mean())
    a = advantage[i][0]
    free = s <= 1 + high if a > 0 else s >= 1 - low
    for t in valid:
      drawn = a > 0 and change[i, t] < 0
      expected[i, t] = (
          -s * a * free / total * (hit[i, t] - p[i, t])
          + beta * drawn / total * p[i, t] * (
              np.log(p[i, t] / q[i, t]) - kl[i, t]))
  assert np.abs(expected).max() > 0.01
  np.testing.assert_allclose(
      jax.jit(jax.grad(value))(z), expected, rtol=0, atol=1e-8)
