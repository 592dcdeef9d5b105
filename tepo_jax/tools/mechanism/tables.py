"""The tables of `tepo_jax.mechanism` in Markdown, from its results alone."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from configs import base

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
compares two samples of one policy. Short: up to the median length.

{gradients}

## M, and the predicted entropy change

M: % of tokens with A > 0 and ΔH < 0. Eq. 19 and 18 predict ΔH by token:
correlation with the measured ΔH, and % of signs that agree, where A ≠ 0.
Held-out prompts, then those trained on:

{mask}

## {rollout} prompts from θ_0, updates by several methods

Clipped: % of tokens, averaged over the updates. TEPO's M, KL to θ_0 and ΔH:
after them, on the tokens trained on. Accuracy and entropy: of fresh samples.

{methods}

## Fields that differ from configs/base.py

{fields}; {versions}
'''
_WEIGHTS = [('outside', name) for name in ('token', 'sequence', 'prefix')] + [
    ('clipped', name) for name in (
        'token .2/.28', 'sequence .2/.28', 'sequence 3e-4/4e-4')]
_CLIPPED = 'clip_fraction_low', 'clip_fraction_high'


def markdown(results: Mapping[str, Any]) -> str:
  """The page with all tables."""
  setup, levels = results['setup'], results['levels']
  drifts = {k: x['tokens'] for k, x in levels.items()}
  rows = [(name, k, x) for name, by_count in results['methods'].items()
          for k, x in by_count.items()]
  return _PAGE.format(
      **{key: setup[key] for key in setup if key not in ('config', 'versions')},
      # The config there lacks what equals the defaults.
      rollout=setup['config'].get(
          'rollout.prompts', base.get_config().rollout.prompts),
      fields=pairs(setup['config']), versions=pairs(setup['versions']),
      policies=table('updates, mean abs d, KL, accuracy %, entropy, length', (
          [k, cell(x['tokens']['abs_d']), cell(x['tokens']['kl']),
           *_own(x), cell(x['fresh']['length'])] for k, x in levels.items())),
      weights=table(', '.join(['updates', *map(': '.join, _WEIGHTS)]), (
          [k, *(cell(x['weights'][name][part], 100)
                for part, name in _WEIGHTS)] for k, x in drifts.items())),
      gradients='\n\n'.join(_gradients(levels, half) for half in (
          'all', 'short', 'long')),
      mask='\n\n'.join((_mask(drifts), _mask(
          results['methods'][setup['method']]))),
      methods=table('method, updates, clipped %, M %, KL, KL in M, ΔH, '
                    'accuracy %, entropy', (
          [name, k, f'{100 * sum(x["updates"][key] for key in _CLIPPED):.3g}',
           cell(x['region'], 100),
           *(cell(x[key]) for key in ('kl', 'kl_region', 'entropy_change')),
           *_own(x)] for name, k, x in rows)))


def _gradients(levels, half):
  return table(f'updates, {half} completions, noise, variance, cosine, '
               'length', (
      [k, 'any' if k == '0' else name, *(cell(by_half[half][key]) for key in (
          'noise', 'variance_ratio', 'cosine', 'length'))]
      for k, x in levels.items() for name, by_half in x['gradients'].items()))


def _mask(drifts):
  return table('updates, M %, KL in M, KL, ΔH < 0 %, Eq. 19: correlation, '
               'agreement %, Eq. 18: correlation, agreement %', (
      [k, cell(x['region'], 100), cell(x['kl_region']), cell(x['kl']),
       cell(x['falling'], 100), *(
           cell(x['readings'][name][key], scale)
           for name in ('covariance', 'npg')
           for key, scale in (('correlation', 1), ('agreement', 100)))]
      for k, x in drifts.items() if k != '0'))  # there, nothing has moved


def _own(x):
  return cell(x['fresh']['accuracy'], 100), cell(x['fresh']['entropy'])


def cell(interval: Sequence[float] | None, scale: float = 1) -> str:
  """'1.23 [1.1, 1.4]', with three digits."""
  return '–' if interval is None else '{:.3g} [{:.3g}, {:.3g}]'.format(
      *(scale * x for x in interval))


def pairs(fields: Mapping[str, Any]) -> str:
  """Names and values."""
  return ', '.join(f'`{name}={value}`' for name, value in fields.items())


def table(head: str, lines: Iterable[list[str]]) -> str:
  """A table; `head`: its columns, separated by commas."""
  names = head.split(', ')
  return '\n'.join(f'| {" | ".join(line)} |' for line in (
      names, ['---'] * len(names), *lines))
