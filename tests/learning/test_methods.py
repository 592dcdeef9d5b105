"""configs/methods.py against a second copy of the methods' sheet."""

import ast
import math
import pathlib

import ml_collections
import pytest

from configs import methods
from tepo_jax import errors
from tepo_jax.learning import objective

BETA = 0.03
PPO = ('ppo', dict(low=0.2, high=0.28))
NONE = ('none', {})
COV = ('covariance', dict(low=1, high=1, fraction=2e-4, band=(1, 5)))
CISPO = ('detached', dict(low=math.inf, high=0.28))
ENTROPY = ('entropy', dict(alpha=4e-4, kappa=2))
MEAN = 'token_mean'
GSPO = 'seq_mean_token_mean'
NO_REG = ('none', 'none', 0)
SYMMETRIC = ('ppo', dict(low=0.2, high=0.2))
CONSTANT = dict(name='constant_length', length=8192)
TEPO = ('kl_full', 'positive_falling', BETA)

# row: weight, clip, shape, estimator, aggregate, (penalty, region, coef)
TABLE = {
    'grpo': ('token', PPO, NONE, 'grpo', MEAN, NO_REG),
    'clip_cov': ('token', COV, NONE, 'grpo', MEAN, NO_REG),
    'kl_cov': ('token', NONE, NONE, 'grpo', MEAN,
               ('kl_abs', 'top_covariance', 1)),
    'entropy_advantage': ('token', PPO, ENTROPY, 'grpo', MEAN, NO_REG),
    'gpg': ('none', NONE, NONE, 'gpg', MEAN, NO_REG),
    'gspo': ('sequence', PPO, NONE, 'grpo', GSPO, NO_REG),
    'tepo': ('sequence', PPO, NONE, 'grpo', MEAN, TEPO),
    'tepo_no_kl': ('sequence', PPO, NONE, 'grpo', MEAN, NO_REG),
    'max_entropy': ('sequence', PPO, NONE, 'grpo', MEAN,
                    ('entropy', 'all', -1e-3)),
    'min_entropy': ('sequence', PPO, NONE, 'grpo', MEAN,
                    ('entropy', 'all', 1e-3)),
    'steer': ('sequence', PPO, ('steer', dict(floor=0.8)), 'grpo', MEAN,
              NO_REG),
    'cispo': ('token', CISPO, NONE, 'grpo', MEAN, NO_REG),
    'prefix_is': ('prefix', PPO, NONE, 'grpo', MEAN, NO_REG),
    'seq_mean_token_sum': ('sequence', PPO, NONE, 'grpo',
                           'seq_mean_token_sum', NO_REG),
    'kl_negative_rising': ('sequence', PPO, NONE, 'grpo', MEAN,
                           ('kl_full', 'negative_rising', BETA)),
    'kl_misaligned': ('sequence', PPO, NONE, 'grpo', MEAN,
                      ('kl_full', 'misaligned', BETA)),
    'gspo_original': ('sequence', ('ppo', dict(low=3e-4, high=4e-4)), NONE,
                      'grpo', GSPO, NO_REG),
    'tepo_printed': ('sequence', ('printed', PPO[1]), NONE, 'grpo', MEAN,
                     TEPO),
    'tepo_algorithm1': ('sequence', NONE, NONE, 'grpo', MEAN, TEPO),
    'tepo_sequence_token': ('sequence_token', PPO, NONE, 'grpo', MEAN, TEPO),
    'tepo_covariance': ('sequence', PPO, NONE, 'grpo', MEAN, TEPO),
    'tepo_npg': ('sequence', PPO, NONE, 'grpo', MEAN, TEPO),
    'rloo': ('none', NONE, NONE, 'rloo', 'seq_mean_token_sum', NO_REG),
    'grpo_original': ('token', SYMMETRIC, NONE, 'grpo', GSPO, NO_REG),
    'rloo_original': ('none', NONE, NONE, 'rloo', 'seq_mean_token_sum', NO_REG),
    'reinforce_pp': ('token', SYMMETRIC, NONE, 'reinforce_pp', MEAN, NO_REG),
    'reinforce_pp_baseline_original': (
        'token', SYMMETRIC, NONE, 'reinforce_pp_baseline', MEAN, NO_REG),
    'dr_grpo': ('token', PPO, NONE, 'drgrpo', CONSTANT, NO_REG),
    'reinforce_pp_baseline': ('token', PPO, NONE, 'reinforce_pp_baseline',
                              MEAN, NO_REG),
} | {
    f'{name}_{text}': ('sequence', PPO, NONE, 'grpo', MEAN,
                       (penalty, 'all', coef))
    for name, penalty in [
        ('kl', 'kl_full'), ('kl_k1', 'kl_k1'), ('kl_k2', 'kl_k2'),
        ('kl_k3', 'kl_k3'), ('kl_k3_is', 'kl_k3_is')]
    for text, coef in [('1', 1), ('1e-1', .1), ('1e-2', .01),
                       ('1e-3', .001), ('1e-4', .0001)]
}
# row: coef, estimator and place of the KL to a reference policy
REFERENCES = {
    'grpo_original': (0.04, 'k3', 'loss'),
    'rloo_original': (0.03, 'k1', 'reward'),
    'reinforce_pp': (0.01, 'k1', 'reward'),
    'reinforce_pp_baseline_original': (1e-5, 'k2', 'loss')}
READINGS = {'tepo_covariance': 'covariance', 'tepo_npg': 'npg'}


def test_the_names_are_the_sheets():
  assert methods.methods(BETA).keys() == TABLE.keys()


@pytest.mark.parametrize('name', TABLE)
def test_row_is_the_sheets(name):
  row = methods.methods(BETA)[name]
  weight, clip, shape, estimator, aggregate, reg = TABLE[name]
  assert row['weight'] == weight
  assert row['clip'] == dict(name=clip[0], **clip[1])
  assert row['shape'] == dict(name=shape[0], **shape[1])
  assert row['estimator'] == estimator
  assert row['aggregate'] == aggregate
  numbers = {'fraction': 2e-3} if name == 'kl_cov' else {}
  assert row['reg'] == dict(
      penalty=reg[0], region=reg[1], coef=reg[2], entropy_tolerance=0,
      delta_entropy=READINGS[name] if name in READINGS else 'exact',
      **numbers)
  assert row['reference'] == dict(zip(
      ('coef', 'estimator', 'place', 'period'),
      (*REFERENCES.get(name, (0, 'k3', 'loss')), 0)))


@pytest.mark.parametrize('name', TABLE)
def test_row_builds_and_needs_what_it_reads(name):
  """From a ConfigDict, which the programs pass."""
  loss = objective.make_policy_loss(
      ml_collections.ConfigDict(methods.methods(BETA)[name]))
  penalty = TABLE[name][-1][0]
  assert loss.needs_kl == (penalty == 'kl_full')
  assert loss.needs_reference == (name in REFERENCES)
  assert loss.whole_minibatch == (
      name in ('clip_cov', 'kl_cov', 'steer', 'tepo_covariance'))
  assert loss.method.estimator == TABLE[name][3]


def test_rows_share_nothing():
  rows = methods.methods(BETA)
  rows['tepo']['clip']['low'] = 9.0
  rows['tepo']['reg']['coef'] = 9.0
  assert rows['grpo']['clip']['low'] == rows['kl_1']['clip']['low'] == 0.2
  assert methods.methods(BETA)['kl_misaligned']['reg']['coef'] == BETA


def test_beta_is_checked_with_the_row():
  with pytest.raises(errors.InputError, match='method.reg.coef'):
    objective.make_policy_loss(methods.methods(beta='large')['tepo'])


@pytest.mark.parametrize('field, value, said', [
    ('coef', -1, '>= 0'), ('coef', math.inf, '>= 0'),
    ('estimator', 'k4', 'one of k1, k2, k3, k1\\+, k3\\+'),
    ('place', 'both', 'one of loss, reward'), ('period', 1.5, 'whole number'),
    ('period', -1, 'whole number'), ('perod', 1, 'no such field')])
def test_a_wrong_reference_is_named(field, value, said):
  row = methods.methods(BETA)['grpo_original']
  row['reference'][field] = value
  with pytest.raises(
      errors.InputError, match=f'method.reference.{field}.*{said}'):
    objective.make_policy_loss(row)


def test_configs_import_nothing_of_the_program():
  tree = ast.parse(pathlib.Path(methods.__file__).read_text())
  imported = [alias.name for node in ast.walk(tree)
              if isinstance(node, ast.Import) for alias in node.names]
  imported += [node.module for node in ast.walk(tree)
               if isinstance(node, ast.ImportFrom)]
  assert imported == ['copy']
