"""What a rollout step and a run tell: numbers, lines, a closing table."""

import json
import pathlib
from typing import Any

import ml_collections
import numpy as np

from tepo_jax.job import minibatches as minibatches_lib
from tepo_jax.learning import batch as batch_lib
from tepo_jax.learning import packing
from tepo_jax.rollout import groups as groups_lib


def rollout_metrics(rollout: groups_lib.Rollout,
                    settings: ml_collections.ConfigDict) -> dict[str, float]:
  """What the step's sampling looked like, over all groups sampled."""
  groups = rollout.sampled
  length_B = np.concatenate([g.length_G for g in groups])
  ended_B = np.concatenate([g.ended_G for g in groups])
  return {
      'reward': rewards(groups, settings).mean(),
      'accuracy': np.mean([g.accuracy_G for g in groups]),
      'response_length_mean': length_B.mean(),
      'response_length_max': length_B.max(),
      'truncated_share': 1 - ended_B.mean(),
      'mixed_share': np.mean([groups_lib.is_mixed(g) for g in groups]),
      'groups_sampled': len(groups),
      'groups_trained': len(rollout.groups)}


def packing_metrics(batch: batch_lib.Batch,
                    minibatches: list[batch_lib.Minibatch]) -> dict[str, float]:
  """padding_share: of the slots of unpacked rows, what holds no token.

  packing_efficiency: of the slots that the updates' layers compute, what holds
  one.
  """
  shares = [packing.efficiency(m) for m in minibatches]
  return {'padding_share': np.mean(batch.position_BS < 0),
          'packing_efficiency': np.mean(shares)}


def average(history: list[dict[str, Any]]) -> dict[str, float]:
  """Means over a step's updates; extremes of weight_min and _max; counts."""
  reduce = {'weight_min': np.min, 'weight_max': np.max, 'skipped': np.sum,
            'empty_minibatches': np.sum}
  return {name: reduce.get(name, np.mean)([h[name] for h in history])
          for name in history[0]}


def summary(scalars: dict[str, float]) -> str:
  """What a step was like, for the progress lines."""
  clipped = [scalars[f'clip_fraction_{part}'] for part in (
      'low', 'high', 'covariance') if f'clip_fraction_{part}' in scalars]
  shown = {'reward': 'reward', 'accuracy': 'acc', 'entropy': 'H',
           'grad_norm': 'grad', 'response_length_mean': 'len',
           'response_length_max': 'max', 'tokens_per_second': 'tok/s',
           'seconds/step': 's'}
  parts = [f'{label} {scalars[name]:.{4 if scalars[name] >= 1000 else 3}g}'
           for name, label in shown.items() if name in scalars]
  if clipped:
    parts.insert(4, f'clip {sum(clipped):.2%}')
  return '  '.join(parts)


def evaluated(scalars: dict[str, float]) -> str:
  """The evaluations of a step, or nothing."""
  return '  '.join(f'{name.removeprefix("eval/")} {value:.1%}'
                   for name, value in scalars.items()
                   if name.startswith('eval/') and '/avg@' in name)


def rewards(groups: list[groups_lib.Group],
            settings: ml_collections.ConfigDict) -> np.ndarray:
  """Of the groups' completions, by `config.rollout`."""
  return minibatches_lib.rewards(groups, settings.max_tokens, settings.overlong_buffer,
                         settings.overlong_factor)


def results_table(workdir: pathlib.Path) -> str:
  """Before and after, from the first and last evaluation on record."""
  records = [json.loads(line) for line in
             (workdir / 'metrics.jsonl').read_text().splitlines()]
  records = [r for r in records if any(name.startswith('eval/') for name in r)]
  if not records:
    return 'no evaluation on record'
  first, last = records[0], records[-1]
  rows = [f'{"":<36}{"step " + str(first["step"]):>10}'
          f'{"step " + str(last["step"]):>10}']
  for name in first:
    if name.startswith('eval/') and not name.endswith('/problems'):
      rows.append(f'{name.removeprefix("eval/"):<36}{first[name]:>10.3f}'
                  f'{last[name]:>10.3f}')
  return '\n'.join(rows)
