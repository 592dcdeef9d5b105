"""The tables of `tepo_jax.mechanism` in Markdown, from its results alone."""

from collections.abc import Iterable, Mapping, Sequence
import json
import re
from typing import Any

_PAGE = '''\
# The gradients of methods on one rollout

Made by `tepo_jax.mechanism --minibatches={minibatches}`; `mechanism.json` has
all numbers. π_old: a model of {parameters:,} parameters, digest `{model:.16}`;
its rollout: {minibatches} minibatches of groups of {samples} completions, seed
{seed}. Updates: by `{method}`, on another rollout. The methods are rows of
`configs/methods.py`, with its numbers, and β = {beta:g} for TEPO's KL.
Brackets: 95 % bootstrap intervals over minibatches; "–": some resample has no
value.

## Signal, and cosine to the policy gradient

g: a method's expected gradient on a minibatch. *Signal to noise*: |g|² over the
variance of one minibatch's gradient. *Halves*: the cosine of the gradients on
two halves of the minibatches, mean of random splits. *Cosine* and *length*: of
g against the token-mean policy gradient on as many minibatches of fresh
samples. |g|² and inner products are means over pairs of distinct minibatches,
which are unbiased; a signal to noise below 0 is one that so few minibatches do
not show. *To GRPO*: of the sums over minibatches, on the same data.

{methods}

## As the optimiser sees them

*Norm*: the median of one minibatch's gradient. Longer ones than {longest:g}
(`optimizer.max_grad_norm`) are scaled down to it. *Signal to noise*: as above,
of gradients so scaled, and its difference to GRPO's on the same minibatches.

{clipped}

## What TEPO's KL adds

|∇KL in M| over |g| at β = 1 (for another β, times β), and their cosine, of the
sums over minibatches; then the mean over single minibatches. g: TEPO without
its KL.

{kl}

## Which tokens make the gradient

Of TEPO without its KL. *Share*: g_class · g / |g|², which add up to 1;
*length*: |g_class| / |g|; both from pairs of minibatches. Then the class's % of
the tokens, of M, and of the KL in M; tokens with A = 0 are in no class by A.

{shares}

## The tokens with the largest KL in M

After {last} updates. The completion is what is before the token, the token, and
what is after it, each in quotes and with its line breaks as \\n.

{tokens}

## The sketches' error

Relative error of |x|² of one gradient, root mean square over the gradients
computed: {errors}. Expected gradients have this error too, in no interval.
Where noise dominates, sketches add more to the means over pairs; this part
scatters over minibatches, so intervals include it.

## Fields that differ from configs/base.py

{fields}; {versions}
'''


def markdown(results: Mapping[str, Any]) -> str:
  """The page with all tables."""
  setup, levels = results['setup'], results['levels']
  *_, last = levels
  return _PAGE.format(
      **{key: setup[key] for key in setup if key not in ('config', 'versions')},
      last=last, fields=_pairs(setup['config']),
      versions=_pairs(setup['versions']), methods=_table(
          'updates, method, signal to noise, halves, cosine, length, '
          'cosine to GRPO, length to GRPO', (
              [k, name, _cell(x['signal_to_noise']),
               '–' if x['halves'] is None else f'{x["halves"]:.3g}',
               *(_cell(x[key]) for key in (
                   'cosine', 'length', 'to_grpo', 'length_to_grpo'))]
              for k, level in levels.items()
              for name, x in level['methods'].items())),
      clipped=_table(
          "updates, method, norm, signal to noise, less GRPO's", (
              [k, name, f'{x["norm"]:.3g}', _cell(x['clipped']),
               _cell(x['clipped_less_grpo'])]
              for k, level in levels.items()
              for name, x in level['methods'].items())),
      kl=_table(
          'updates, length, cosine, length of an update, cosine of an update', (
              [k, *(_cell(level['kl'][key]) for key in (
                  'length', 'cosine', 'update_length', 'update_cosine'))]
              for k, level in levels.items())),
      shares=_table(
          'updates, tokens, share, length, tokens %, M %, KL in M %', (
              [k, f'{division}: {name}', _cell(x['share']),
               _cell(x['length']),
               *(f'{100 * y:.3g}' for y in level['spread'][division][name])]
              for k, level in levels.items()
              for division, by_class in level['shares'].items()
              for name, x in by_class.items())),
      tokens=_table('before, token, after, KL, A, H°, ΔH, ℓ − ℓ°, '
                          'problem', (
          [*(_text(x[key]) for key in ('before', 'token', 'after')),
           *(f'{x[key]:.3g}' for key in (
               'kl', 'advantage', 'entropy', 'entropy_change', 'log_ratio')),
           _text(x['problem'])] for x in levels[last]['tokens'])),
      errors=', '.join(f'{100 * level["sketch_error"]:.2g} % after {k} updates'
                       for k, level in levels.items()))


def _text(text):
  """For a cell: one line in quotes, as JSON escapes it, and backslashes before
  what Markdown reads as more than text."""
  return re.sub(r'([\\`*_~$<>&#|\[\]])', r'\\\1', json.dumps(
      text, ensure_ascii=False))


def _cell(interval: Sequence[float] | None) -> str:
  """'1.23 [1.1, 1.4]', with three digits."""
  return '–' if interval is None else '{:.3g} [{:.3g}, {:.3g}]'.format(
      *interval)


def _pairs(fields: Mapping[str, Any]) -> str:
  """Names and values."""
  return ', '.join(f'`{name}={value}`' for name, value in fields.items())


def _table(head: str, lines: Iterable[list[str]]) -> str:
  """A table; `head`: its columns, separated by commas."""
  names = head.split(', ')
  return '\n'.join(f'| {" | ".join(line)} |' for line in (
      names, ['---'] * len(names), *lines))
