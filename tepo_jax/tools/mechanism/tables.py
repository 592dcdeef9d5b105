"""The tables of `tepo_jax.mechanism` in Markdown, from its results alone."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tepo_jax.tools.mechanism import moments

_HALVES = {'all': 'All completions', 'short': 'The shorter half',
           'long': 'The longer half'}
_INTRODUCTION = '''\
# Gradients off policy, the mask M, and the KL penalty

Made by `tepo_jax.mechanism`; `mechanism.json` has the numbers. θ_0 is the base
model. Brackets are 95 % bootstrap intervals over prompts; "–": some resample has
no value.
'''
_POLICIES = '''
## The policies: θ_0 after updates by `{method}` on another rollout

d = ℓ − ℓ° and the exact KL are means over tokens that θ_0 sampled; the other
columns are of fresh samples.
'''
_WEIGHTS = '''
## Importance weights of θ_0's samples

% of tokens with a weight outside [0.8, 1.28]; and % that an estimator clips, on
the side that the sign of A selects.
'''
_GRADIENTS = '''
## Variance and bias of the gradient on θ_0's samples

Each prompt's {samples} completions give one vector; g is its mean. *Noise*:
tr Cov / |g|², in prompts: the mean over that many has as much noise as signal.
*Variance*: tr Cov relative to the token weight. *Cosine* and *length*: of g
against h, the mean gradient of the policy's fresh samples. Without updates all
weights are 1, and two samples of one policy are compared.
'''
_MASK = '''
## M, and the predicted entropy change

{where} M: % of tokens with A > 0 and ΔH < 0. The predictions of ΔH by token,
where A ≠ 0: their correlation with the measured ΔH, and % of tokens on whose
sign they agree.
'''
_METHODS = '''
## Updates of one rollout by several methods

Of {prompts} prompts from θ_0. Clipped and M: % of tokens, averaged over the
updates. KL to θ_0 and ΔH: after them, on the rollout's tokens; accuracy and
entropy: of fresh samples.
'''


def markdown(results: Mapping[str, Any]) -> str:
  """The page with all tables."""
  setup, levels = results['setup'], results['levels']
  method, rows = setup['method'], results['methods']
  policies = rows[method]
  return '\n'.join((
      _INTRODUCTION, *_setup(setup), _POLICIES.format(method=method),
      *_table(('updates', 'mean \\|d\\|', 'KL to θ_0', 'accuracy %',
               'entropy', 'tokens'), (
          (count, _cell(x['tokens']['abs_d']), _cell(x['tokens']['kl']),
           *_own(x['fresh']), _cell(x['fresh']['length']))
          for count, x in levels.items())),
      _WEIGHTS, *_weights(levels), _GRADIENTS.format(samples=setup['samples']),
      *(line for half in _HALVES for line in _gradients(levels, half)),
      _MASK.format(where='On prompts that were not trained on.'),
      *_mask({count: x['tokens'] for count, x in levels.items()}),
      '\nThe same on the rollout that was trained on:\n', *_mask(policies),
      _METHODS.format(prompts=setup['config']['rollout.prompts']),
      *_methods(rows))) + '\n'


def _setup(setup):
  versions = ', '.join(f'{k} {v}' for k, v in setup['versions'].items())
  fields = ', '.join(f'`{k}={v}`' for k, v in setup['config'].items())
  return (f'Model of {setup["parameters"]:,} parameters, digest '
          f'`{setup["model"][:16]}`; {setup["prompts"]} prompts × '
          f'{setup["samples"]} completions; seed {setup["seed"]}; {versions}.',
          '', f'Fields that differ from configs/base.py: {fields}.')


def _weights(levels):
  first = next(iter(levels.values()))['tokens']['weights']
  clipped = [name for name in first if ' ' in name]
  plain = [name for name in first if name not in (*clipped, 'none')]
  return _table(
      ('updates', *(f'outside: {name}' for name in plain),
       *(f'clipped: {name}' for name in clipped)), (
           (count, *(_percent(x['tokens']['weights'][name]['outside'])
                     for name in plain),
            *(_percent(x['tokens']['weights'][name]['clipped'])
              for name in clipped)) for count, x in levels.items()))


def _gradients(levels, half):
  return ('', f'### {_HALVES[half]}', '', *_table(
      ('updates', 'weight, clip', 'noise', 'variance', 'cosine', 'length'), (
          (count, 'any' if count == '0' else name, *(
              _cell(found[half][key]) for key in (
                  'noise', 'variance_ratio', 'cosine', 'length')))
          for count, x in levels.items()
          for name, found in x['gradients'].items())))


def _mask(by_count):
  readings = {'Eq. 19': 'covariance', 'Eq. 18': 'npg'}
  return _table(
      ('updates', 'M %', 'KL in M', 'KL', 'ΔH < 0 %', *(
          f'{label}: {what}' for label in readings
          for what in ('correlation', 'agreement %'))), (
              (count, _percent(x['region']), _cell(x['kl_region']),
               _cell(x['kl']), _percent(x['falling']), *(
                   cell for name in readings.values() for cell in (
                       _cell(x['readings'][name]['correlation']),
                       _percent(x['readings'][name]['agreement']))))
              for count, x in by_count.items()))


def _methods(rows):
  return _table(
      ('method', 'updates', 'clipped %', 'M %', 'KL', 'KL in M', 'ΔH',
       'accuracy %', 'entropy'), (
           (name, count, f'{100 * x["updates"]["clipped"]:.3g}',
            f'{100 * x["updates"]["region"]:.3g}', _cell(x['kl']),
            _cell(x['kl_region']), _cell(x['entropy_change']),
            *_own(x['fresh']))
           for name, by_count in rows.items()
           for count, x in by_count.items()))


def _own(fresh):
  return _percent(fresh['accuracy']), _cell(fresh['entropy'])


def _percent(interval):
  return _cell(interval and [100 * x for x in interval])


def _cell(interval: moments.Interval) -> str:
  """'1.23 [1.1, 1.4]', with three digits."""
  if interval is None:
    return '–'
  value, low, high = (f'{x:.3g}' for x in interval)
  return f'{value} [{low}, {high}]'


def _table(head: Sequence[str], lines: Iterator[Sequence[str]]) -> list[str]:
  return [f'| {" | ".join(line)} |' for line in (
      head, ['---'] * len(head), *lines)]
