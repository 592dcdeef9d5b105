"""Arrays of groups, and what training on them is, against torch in float64."""

import jax
import numpy as np
import pytest
import torch

from configs import methods
from tepo_jax.data import problem as problem_lib
from tepo_jax.job import learner as learner_lib
from tepo_jax.learning import objective
from tepo_jax.rollout import groups as groups_lib
from tepo_jax.rollout import selection as selection_lib

T = 6


def _two_groups():
  problem = problem_lib.Problem('0', '?', ('1',), 'test')
  one = groups_lib.Group(
      groups_lib.Prompt(problem, (5, 6), 8),
      np.array([[1, 2, 3], [4, 0, 0]], np.int32),
      np.array([[-.1, -.2, -.3], [-.4, 0, 0]], np.float32),
      np.array([3, 1], np.int32), np.array([False, True]), ('', ''),
      np.array([0, 1], np.float32))
  two = groups_lib.Group(
      groups_lib.Prompt(problem, (7,), 9),
      np.array([[0, 0, 0], [9, 8, 0]], np.int32),
      np.array([[-.5, 0, 0], [-.6, -.7, 0]], np.float32),
      np.array([1, 2], np.int32), np.array([True, True]), ('', ''),
      np.array([1, 0], np.float32))
  return [one, two]


def test_batch_of():
  """Two prompts of 2 samples and a row of filler; token 0 is a valid id."""
  batch = learner_lib.batch_of(
      _two_groups(), np.array([0., 1., 1., 0.]), rows=5, width=3,
      estimator='drgrpo')
  np.testing.assert_array_equal(batch.token_BS, [
      [0, 5, 6, 1, 2, 3], [0, 5, 6, 4, 0, 0], [0, 0, 7, 0, 0, 0],
      [0, 0, 7, 9, 8, 0], [0, 0, 0, 0, 0, 0]])
  np.testing.assert_array_equal(batch.position_BS, [
      [-1, 0, 1, 2, 3, 4], [-1, 0, 1, 2, -1, -1], [-1, -1, 0, 1, -1, -1],
      [-1, -1, 0, 1, 2, -1], [-1, -1, -1, -1, -1, -1]])
  np.testing.assert_array_equal(batch.mask_BT, [
      [1, 1, 1], [1, 0, 0], [1, 0, 0], [1, 1, 0], [0, 0, 0]])
  np.testing.assert_allclose(batch.advantage_B, [-.5, .5, .5, -.5, 0])
  np.testing.assert_allclose(batch.sampler_logp_BT, [
      [-.1, -.2, -.3], [-.4, 0, 0], [-.5, 0, 0], [-.6, -.7, 0], [0, 0, 0]])
  for name in ('token_BS', 'position_BS'):
    assert getattr(batch, name).dtype == np.int32
  for name in ('mask_BT', 'advantage_B', 'old_logp_BT', 'old_entropy_BT',
               'sampler_logp_BT'):
    assert getattr(batch, name).dtype == np.float32
  assert not batch.old_logp_BT.any() and not batch.old_entropy_BT.any()


def test_truncated_completions_have_no_token():
  """The first of `_two_groups` is truncated: its reward of 1 is in the baseline
  with 'mask', its neighbour is left alone with 'exclude'."""
  reward_B = np.array([1., 0., 1., 0.])
  for truncated, first, want in [('count', [1, 1, 1], [.5, -.5]),
                                 ('mask', [0, 0, 0], [.5, -.5]),
                                 ('exclude', [0, 0, 0], [0, 0])]:
    batch = learner_lib.batch_of(
        _two_groups(), reward_B, rows=5, width=3, estimator='drgrpo',
        truncated=truncated)
    np.testing.assert_array_equal(
        batch.mask_BT, [first, [1, 0, 0], [1, 0, 0], [1, 1, 0], [0, 0, 0]])
    np.testing.assert_allclose(batch.advantage_B, [*want, .5, -.5, 0])


def _gradient(batch, logp_BT, aggregate):
  """Of the loss in log π, in float64. One update at ratio 1: it is −c A."""
  loss = objective.make_policy_loss(
      methods.methods(0.0)['grpo'] | dict(aggregate=aggregate))
  x = objective.Tokens(*4 * [logp_BT], np.broadcast_to(
      batch.advantage_B.astype(float)[:, None], logp_BT.shape), batch.mask_BT)
  with jax.enable_x64(True):
    return jax.grad(lambda logp: loss.partial(
        x.replace(logp_BT=logp), loss.statistics(x)))(logp_BT)


@pytest.mark.parametrize('loss_type', ['dapo', 'seq-mean-token-mean',
                                       'seq-mean-token-sum'])
def test_truncated_completions_are_in_no_denominator(loss_type):
  """Against TRL's mask_truncated_completions with loss_type dapo, whose
  num_items_in_batch is the sum of the loss mask (it once counted the truncated
  tokens too), and against agg_loss of verl, whose denominators leave masked
  completions out."""
  rng = np.random.default_rng(0)
  length_B, ended_B = np.array([6, 2, 6, 4]), np.array([0, 1, 0, 1], bool)
  groups = [groups_lib.Group(
      groups_lib.Prompt(None, (1,), n), np.ones((2, T), np.int32),
      np.zeros((2, T), np.float32), length_B[part], ended_B[part], ('', ''),
      None) for n, part in enumerate((slice(2), slice(2, 4)))]
  batch = learner_lib.batch_of(groups, rng.normal(size=4), rows=4, width=1,
                               estimator='drgrpo', truncated='mask')
  logp_BT = -rng.random((4, T))
  gradient_BT = _gradient(batch, logp_BT, {'dapo': 'token_mean'}.get(
      loss_type, loss_type.replace('-', '_')))

  mask = torch.tensor(np.arange(T) < length_B[:, None]) * torch.tensor(
      ended_B)[:, None]
  logp = torch.tensor(logp_BT, requires_grad=True)
  each = -torch.exp(logp - logp.detach()) * torch.tensor(
      batch.advantage_B, dtype=torch.float64)[:, None] * mask
  rows = (mask.sum(1) > 0).sum()
  {'dapo': lambda: each.sum() / mask.sum(),
   'seq-mean-token-sum': lambda: each.sum() / rows,
   'seq-mean-token-mean': lambda: (
       each.sum(1) / (mask.sum(1) + 1e-8)).sum() / rows,
   }[loss_type]().backward()
  assert np.abs(gradient_BT).max() > 0.01
  np.testing.assert_allclose(gradient_BT, logp.grad, rtol=1e-7, atol=0)


def _random_groups(count, size):
  """Groups and rewards; some groups agree in verdicts or rewards alone."""
  rng = np.random.default_rng(1)
  reward_NG = rng.choice([0, 0.25, 1], (count, size), p=[0.7, 0.1, 0.2])
  groups = []
  for n in range(count):
    ended_G = rng.random(size) < 0.8
    length_G = np.where(ended_G, rng.integers(1, T, size), T)
    groups.append(groups_lib.Group(
        groups_lib.Prompt(None, (1,), n), np.ones((size, T), np.int32),
        np.zeros((size, T), np.float32), length_G, ended_G, ('',) * size,
        np.float32(ended_G & (rng.random(size) < 0.5))))
  return groups, reward_NG


def _trained(groups, reward_NG, logp_NGT, mixed, truncated):
  """Which groups are trained on, and the gradient in log π, by torch in float64
  and lists: a group is left out where the std of the metric is 0 (filter_groups
  of verl's recipe/dapo), its advantages are those of
  compute_grpo_outcome_advantage of verl (b178a3c), the loss is the mean over
  tokens."""
  logp, kept, terms, tokens = (
      torch.tensor(logp_NGT, requires_grad=True), [], [], 0)
  for n, group in enumerate(groups):
    counted = [i for i, ended in enumerate(group.ended_G)
               if ended or truncated != 'exclude']
    reward = torch.tensor(reward_NG[n][counted])
    metric = reward if mixed == 'reward' else torch.tensor(
        group.accuracy_G[counted])
    if not counted or metric.std(correction=0) == 0:
      continue
    kept.append(n)
    advantage = (reward - reward.mean()) / (reward.std() + 1e-6)
    for i, a in zip(counted, advantage):
      if group.ended_G[i] or truncated == 'count':
        own = logp[n, i, :group.length_G[i]]
        terms.append(-a * torch.exp(own - own.detach()).sum())
        tokens += len(own)
  (sum(terms) / tokens).backward()
  return kept, logp.grad.numpy()


@pytest.mark.parametrize('truncated', ['count', 'mask', 'exclude'])
def test_mixed_groups_and_their_gradient_are_verls(truncated):
  groups, reward_NG = _random_groups(count=12, size=3)
  logp_NGT = -np.random.default_rng(2).random((12, 3, T))
  chosen = {}
  for mixed in 'verdicts', 'reward':
    selection = selection_lib.Selection(
        cursor=0, wanted=12, group_size=3, mode='drop', max_batches=1,
        mixed=mixed, truncated=truncated)
    chosen[mixed] = selection.choose(list(map(
        selection.is_mixed, groups, reward_NG)))
    kept, want_NGT = _trained(groups, reward_NG, logp_NGT, mixed, truncated)
    assert chosen[mixed] == kept
    with jax.enable_x64(True):
      batch = learner_lib.batch_of(
          [groups[n] for n in kept], reward_NG[kept].ravel(),
          rows=36, width=1, estimator='grpo', truncated=truncated)
    order = kept + [n for n in range(12) if n not in kept]  # then filler
    got_BT = _gradient(batch, logp_NGT[order].reshape(-1, T), 'token_mean')
    assert np.abs(got_BT).max() > 1e-3
    np.testing.assert_allclose(
        got_BT, want_NGT[order].reshape(-1, T), rtol=1e-7, atol=0)
  assert 0 < len(chosen['verdicts']) < 12
  assert set(chosen['reward']) - set(chosen['verdicts'])
  assert set(chosen['verdicts']) - set(chosen['reward'])


@pytest.mark.parametrize('estimator, want', [
    ('grpo', [-.7071, .7071, 1.4142 / 2, -1.4142 / 2]),
    ('gpg', [-.5, .5, .5, -.5])])
def test_advantages_are_the_groups(estimator, want):
  batch = learner_lib.batch_of(
      _two_groups(), np.array([0., 1., 1., 0.]), rows=4, width=2,
      estimator=estimator)
  np.testing.assert_allclose(batch.advantage_B, want, atol=1e-4)
