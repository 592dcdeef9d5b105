"""The tables of `tepo_jax.mechanism` in Markdown, from its results alone."""

from collections.abc import Iterable, Mapping
from typing import Any

_PAGE = '''\
# Gradients off policy, the mask M, and the KL penalty

Made by `tepo_jax.mechanism`; `mechanism.json` has all numbers. θ_0: a model of
{parameters:,} parameters, digest `{model:.16}`; {prompts} held-out prompts ×
{samples} completions, seed {seed}. Brackets: 95 % bootstrap intervals over
prompts; "–": some resample has no value.

## θ_0 after updates by `{method}` on another rollout

d = ℓ − ℓ° and the exact KL are means over tokens that θ_0 sampled; accuracy,
entropy and length, of fresh samples.

{policies}

% of θ_0's tokens whose weight is outside [0.8, 1.28], and % that an estimator
clips, on the side that the sign of A selects:

{weights}

## Variance and bias of the gradient on θ_0's samples

A prompt's completions give one vector; g is its mean. *Noise*: tr Cov / |g|²;
the mean over that many prompts has as much noise as signal. *Variance*: tr Cov,
relative to the token weight's. *Cosine* and *length*: of g against the mean
gradient of the policy's fresh samples. After 0 updates all weights are 1: this
compares two samples of one policy.

{gradients}

## M, and the predicted entropy change

M: % of tokens with A > 0 and ΔH < 0. Eq. 19 and 18 predict ΔH by token:
correlation with the measured ΔH, and % of signs that agree, where A ≠ 0.
Held-out prompts, then those trained on:

{mask}

## {rollout} prompts from θ_0, updates by several methods

Clipped and M: % of tokens, averaged over the updates. KL to θ_0 and ΔH: after
them, on the tokens trained on. Accuracy and entropy: of fresh samples.

{methods}

## Fields that differ from configs/base.py

{fields}; {versions}
'''
_WEIGHTS = [('outside', name) for name in ('token', 'sequence', 'prefix')] + [
    ('clipped', name) for name in (
        'token .2/.28', 'sequence .2/.28', 'sequence 3e-4/4e-4')]


def markdown(results: Mapping[str, Any]) -> str:
  """The page with all tables."""
  setup, levels, rows = (
      results[part] for part in ('setup', 'levels', 'methods'))
  return _PAGE.format(
      **{name: setup[name] for name in (
          'parameters', 'model', 'prompts', 'samples', 'seed', 'method')},
      rollout=setup['config']['rollout.prompts'],
      fields=_pairs(setup['config']), versions=_pairs(setup['versions']),
      policies=_table('updates, mean abs d, KL, accuracy %, entropy, length', (
          [k, _cell(x['tokens']['abs_d']), _cell(x['tokens']['kl']),
           *_own(x['fresh']), _cell(x['fresh']['length'])]
          for k, x in levels.items())),
      weights=_table(', '.join(['updates', *map(': '.join, _WEIGHTS)]), (
          [k, *(_percent(x['tokens']['weights'][name][part])
                for part, name in _WEIGHTS)] for k, x in levels.items())),
      gradients='\n\n'.join(_gradients(levels, half) for half in (
          'all', 'short', 'long')),
      mask='\n\n'.join(map(_mask, (
          {k: x['tokens'] for k, x in levels.items()}, rows[setup['method']]))),
      methods=_table('method, updates, clipped %, M %, KL, KL in M, ΔH, '
                     'accuracy %, entropy', (
          [name, k, f'{100 * _clipped(x["updates"]):.3g}',
           f'{100 * x["updates"]["region_share"]:.3g}', _cell(x['kl']),
           _cell(x['kl_region']), _cell(x['entropy_change']), *_own(x['fresh'])]
          for name, by_count in rows.items() for k, x in by_count.items())))


def _gradients(levels, half):
  return _table(f'updates, {half} completions, noise, variance, cosine, '
                'length', (
      [k, 'any' if k == '0' else name, *(_cell(by_half[half][key]) for key in (
          'noise', 'variance_ratio', 'cosine', 'length'))]
      for k, x in levels.items() for name, by_half in x['gradients'].items()))


def _mask(by_count):
  return _table('updates, M %, KL in M, KL, ΔH < 0 %, Eq. 19: correlation, '
                'agreement %, Eq. 18: correlation, agreement %', (
      [k, _percent(x['region']), _cell(x['kl_region']), _cell(x['kl']),
       _percent(x['falling']), *(cell(x['readings'][name][key])
                                 for name in ('covariance', 'npg')
                                 for cell, key in ((_cell, 'correlation'),
                                                   (_percent, 'agreement')))]
      for k, x in by_count.items()))


def _clipped(metrics):
  return metrics['clip_fraction_low'] + metrics['clip_fraction_high']


def _own(fresh):
  return _percent(fresh['accuracy']), _cell(fresh['entropy'])


def _percent(interval):
  return _cell(interval and [100 * x for x in interval])


def _cell(interval):
  """'1.23 [1.1, 1.4]', with three digits."""
  return '{:.3g} [{:.3g}, {:.3g}]'.format(*interval) if interval else '–'


def _pairs(fields):
  return ', '.join(f'`{name}={value}`' for name, value in fields.items())


def _table(head: str, lines: Iterable[list[str]]) -> str:
  names = head.split(', ')
  return '\n'.join(f'| {" | ".join(line)} |' for line in (
      names, ['---'] * len(names), *lines))
