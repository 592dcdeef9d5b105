"""Every method, one row each: the paper's tables, and methods from elsewhere.

    from configs import methods
    row = methods.methods(beta=1e-3)['tepo']

A row is five independent choices (tepo_jax/learning/objective.py has their
formulas) and the estimator of the advantage; `reference`, off in the paper, is
a KL to the policy that the run starts from. beta is TEPO's KL coefficient:
1e-3 for Qwen2.5-7B, 1 for Qwen3-14B; the paper states none for Table 2's
models: 1e-3 here.

Rows that the paper prints twice with the same digits are one run: grpo (T1,
T3C), clip_cov, kl_cov, entropy_advantage (T1, T3B), gpg (T1, T3C), gspo (T1,
T3D). T1 is Table 1, T3B Panel B of Table 3.
"""

import copy

# DAPO's Clip-Higher, the paper's epsilon for every clipped row (4.1).
_PPO = dict(name='ppo', low=0.2, high=0.28)
# PPO's own epsilon (1707.06347).
_SYMMETRIC = dict(name='ppo', low=0.2, high=0.2)


def _reg(penalty, region, coef, **numbers):
  return dict(penalty=penalty, region=region, coef=coef,
              delta_entropy='exact', entropy_tolerance=0.0, **numbers)


def reference_kl(coef=0.0, estimator='k3', place='loss'):
  """The KL to a reference policy; its fields are of `choices.Reference`."""
  return dict(coef=coef, estimator=estimator, place=place, period=0)


def _row(weight, clip, *, shape=dict(name='none'), aggregate='token_mean',
         reg=_reg('none', 'none', 0.0), estimator='grpo',
         reference=reference_kl()):
  return copy.deepcopy(dict(
      weight=weight, clip=clip, shape=shape, aggregate=aggregate, reg=reg,
      estimator=estimator, reference=reference))


def _tepo(**changes):
  """TEPO without its KL, with these choices changed."""
  return _row(**(dict(weight='sequence', clip=_PPO) | changes))


def _baselines():
  """The methods that TEPO is compared with."""
  return {
      # GRPO with DAPO's clip and token-mean. T1, T2, T3C, T4.
      'grpo': _row('token', _PPO),
      # T1, T3B. The clip of its authors' code: [0, 2], not .2/.28.
      'clip_cov': _row('token', dict(
          name='covariance', low=1.0, high=1.0, fraction=2e-4,
          band=(1.0, 5.0))),
      # T1, T3B. No clip, as in its authors' code. k = 2e-3 is a fraction:
      # "0.2" in their script is a percentage.
      'kl_cov': _row('token', dict(name='none'), reg=_reg(
          'kl_abs', 'top_covariance', 1.0, fraction=2e-3)),
      # T1, T3B. The paper prints alpha = 4e-4; the method's own value for
      # GRPO is 0.4.
      'entropy_advantage': _row('token', _PPO, shape=dict(
          name='entropy', alpha=4e-4, kappa=2.0)),
      # T1, T3C: no importance sampling.
      'gpg': _row('none', dict(name='none'), estimator='gpg'),
      # T1, T3D. TEPO's epsilon, because Panel D repeats Table 1's row.
      'gspo': _tepo(aggregate='seq_mean_token_mean'),
      # The GSPO paper's own epsilon.
      'gspo_original': _tepo(
          clip=dict(name='ppo', low=3e-4, high=4e-4),
          aggregate='seq_mean_token_mean'),
      # T3C. No lower bound, as its authors run it.
      'cispo': _row('token', dict(
          name='detached', low=float('inf'), high=0.28)),
      # T3C, "Sentence Prefix IS".
      'prefix_is': _row('prefix', _PPO),
      # T3D.
      'seq_mean_token_sum': _tepo(aggregate='seq_mean_token_sum'),
      # T3B.
      'max_entropy': _tepo(reg=_reg('entropy', 'all', -1e-3)),
      'min_entropy': _tepo(reg=_reg('entropy', 'all', 1e-3)),
      # T3B, printed "STEEL".
      'steer': _tepo(shape=dict(name='steer', floor=0.8)),
  }


def _elsewhere():
  """Methods that are in none of the paper's tables."""
  return {
      # GRPO of DeepSeekMath (2402.03300, Eq. 3; 0.04 in its 4.2), which does
      # not print its clip's epsilon.
      'grpo_original': _row(
          'token', _SYMMETRIC, aggregate='seq_mean_token_mean',
          reference=reference_kl(0.04)),
      # RLOO (2402.14740), without its KL to a reference model: REINFORCE with
      # the other samples' mean as the baseline, no importance weight.
      'rloo': _row('none', dict(name='none'), aggregate='seq_mean_token_sum',
                   estimator='rloo'),
      # As published: the KL of a completion is taken from its reward (0.03 in
      # the paper's appendix C).
      'rloo_original': _row(
          'none', dict(name='none'), aggregate='seq_mean_token_sum',
          estimator='rloo', reference=reference_kl(0.03, 'k1', 'reward')),
      # Dr. GRPO (2503.20783): GRPO without the two divisions that bias it, by
      # the group's std and by the completion's length. The constant length is
      # rollout.max_tokens of base.py.
      'dr_grpo': _row('token', _PPO, estimator='drgrpo', aggregate=dict(
          name='constant_length', length=8192)),
      # REINFORCE++ with baseline (2501.03262), without its KL to a reference
      # model.
      'reinforce_pp_baseline': _row(
          'token', _PPO, estimator='reinforce_pp_baseline'),
      # The same with the KL and the clip of its authors' code (OpenRLHF).
      'reinforce_pp_baseline_original': _row(
          'token', _SYMMETRIC, estimator='reinforce_pp_baseline',
          reference=reference_kl(1e-5, 'k2')),
      # REINFORCE++ (2501.03262): the KL of each later token is taken from a
      # token's return, which is normalised over the batch. No baseline of the
      # group. The coefficient is the default of its authors' code.
      'reinforce_pp': _row(
          'token', _SYMMETRIC, estimator='reinforce_pp',
          reference=reference_kl(0.01, 'k1', 'reward')),
  }


def _undifferentiated_kl():
  """T3A: a KL on all tokens, exact and by each estimator.

  The paper does not say which it used. Its collapse at beta = 1 cannot come
  from an exact KL to the rollout's policy, which is 0 at the start of each
  rollout step; it can come from k1 as a loss.
  """
  estimators = {'kl': 'kl_full', 'kl_k1': 'kl_k1', 'kl_k2': 'kl_k2',
                'kl_k3': 'kl_k3', 'kl_k3_is': 'kl_k3_is'}
  return {
      f'{name}_{beta}': _tepo(reg=_reg(penalty, 'all', float(beta)))
      for name, penalty in estimators.items()
      for beta in ('1', '1e-1', '1e-2', '1e-3', '1e-4')
  }


# Table 3. Tables 1, 2 and 4 have no other rows.
PANELS = {
    'A: KL on all tokens': (
        'kl_1', 'kl_1e-1', 'kl_1e-2', 'kl_1e-3', 'kl_1e-4'),
    'B: entropy regularisation': (
        'clip_cov', 'kl_cov', 'entropy_advantage', 'max_entropy',
        'min_entropy', 'steer'),
    'C: importance sampling': ('grpo', 'gpg', 'cispo', 'prefix_is'),
    'D: aggregation': ('gspo', 'seq_mean_token_sum'),
    'E: the region of the KL': (
        'kl_negative_rising', 'kl_misaligned', 'tepo_no_kl', 'tepo'),
}


def paper(beta):
  """The rows of `methods` that are in the paper's tables."""
  rows = methods(beta)
  return {name: rows[name] for panel in PANELS.values() for name in panel}


def methods(beta):
  """Name -> row; beta is the coefficient of TEPO's KL."""
  kl = _reg('kl_full', 'positive_falling', beta)
  return {
      # T1 to T4.
      'tepo': _tepo(reg=kl),
      # T3, "TEPO-w/o. KL".
      'tepo_no_kl': _tepo(),
      # T3E: the other regions.
      'kl_negative_rising': _tepo(reg=kl | dict(region='negative_rising')),
      'kl_misaligned': _tepo(reg=kl | dict(region='misaligned')),
      # Eq. 4 as typeset: the advantage outside the min.
      'tepo_printed': _tepo(clip=_PPO | dict(name='printed'), reg=kl),
      # Algorithm 1's surrogate has no clip. (Nor does it print a KL: set
      # reg.coef = 0 for that.)
      'tepo_algorithm1': _tepo(clip=dict(name='none'), reg=kl),
      # GSPO-token's form: the same gradient if no token is clipped and the
      # advantage is one number per completion.
      'tepo_sequence_token': _tepo(weight='sequence_token', reg=kl),
      # Other readings of the entropy change in the mask: Eq. 19, Eq. 18.
      'tepo_covariance': _tepo(reg=kl | dict(delta_entropy='covariance')),
      'tepo_npg': _tepo(reg=kl | dict(delta_entropy='npg')),
  } | _undifferentiated_kl() | _baselines() | _elsewhere()
