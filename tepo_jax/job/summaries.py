"""Metrics of a rollout step, its progress line, and a run's closing table."""

import json
import pathlib
from typing import Any

import numpy as np

from tepo_jax.learning import batch as batch_lib
from tepo_jax.learning import packing
from tepo_jax.rollout import groups as groups_lib
from tepo_jax.rollout import schedule
from tepo_jax.rollout import selection


def rollout_metrics(rollout: selection.Rollout, reward_B: np.ndarray
                    ) -> dict[str, float]:
  """Statistics over the groups up to the last one that is trained on.

  The surplus is left out: of the prompts behind that group, only those with
  short completions were completed. `reward_B` is of all completed groups.
  """
  groups = rollout.sampled
  reward_B = reward_B[:sum(len(g.text_G) for g in groups)]
  scores = {name: np.concatenate([g.scores[name] for g in groups])
            for name in groups[0].scores}
  length_B = np.concatenate([g.length_G for g in groups])
  ended_B = np.concatenate([g.ended_G for g in groups])
  return {
      'reward': reward_B.mean(),
      'accuracy': np.mean([g.accuracy_G for g in groups]),
      'response_length_mean': length_B.mean(),
      'response_length_max': length_B.max(),
      'truncated_share': 1 - ended_B.mean(),
      'mixed_share': np.mean([groups_lib.is_mixed(g) for g in groups]),
      'groups_sampled': len(groups),
      'groups_trained': len(rollout.groups)} | {
          f'reward/{name}': np.nan_to_num(score_B).mean()
          for name, score_B in scores.items()}


def sampling_metrics(stats: schedule.Stats, rollout: selection.Rollout
                     ) -> dict[str, float]:
  """The work of the sampler, and the share of its tokens that is of no use:
  those of the surplus and of completions that were stopped."""
  tokens, trained = (
      sum(int(g.length_G.sum()) for g in groups)
      for groups in (rollout.sampled, rollout.groups))
  return {
      'sampling/occupancy': stats.occupancy,
      'sampling/slot_share': stats.tokens / stats.slot_steps,
      'sampling/steps': stats.steps, 'sampling/prefills': stats.prefills,
      'sampling/tokens': stats.tokens, 'sampling/tokens_trained': trained,
      'sampling/tokens_discarded': stats.tokens - tokens}


def packing_metrics(batch: batch_lib.Batch,
                    minibatches: list[batch_lib.Minibatch]) -> dict[str, float]:
  """The share of padding in the unpacked batch, and of real tokens among the
  positions that the layers compute in updates."""
  return {'padding_share': np.mean(batch.position_BS < 0),
          'packing_efficiency': np.mean(
              [packing.efficiency(m) for m in minibatches])}


def average(history: list[dict[str, Any]]) -> dict[str, float]:
  """A step's mean over its updates, except for extremes and counts."""
  reduce = {'weight_min': np.min, 'weight_max': np.max, 'skipped': np.sum,
            'empty_minibatches': np.sum}
  return {name: reduce.get(name, np.mean)([h[name] for h in history])
          for name in history[0]}


def summary(scalars: dict[str, float]) -> str:
  """The progress line's summary of a step."""
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
  """The progress line's accuracies, empty if the step has no evaluation."""
  return '  '.join(f'{name.removeprefix("eval/")} {value:.1%}'
                   for name, value in scalars.items()
                   if name.startswith('eval/') and '/avg@' in name)


def results_table(workdir: pathlib.Path) -> str:
  """A table of the first and the last recorded evaluation."""
  records = [json.loads(line) for line in
             (workdir / 'metrics.jsonl').read_text().splitlines()]
  records = [r for r in records if any(name.startswith('eval/') for name in r)]
  if not records:
    return 'no evaluation was recorded'
  first, last = records[0], records[-1]
  steps = [f'step {record["step"]}' for record in (first, last)]
  return '\n'.join([f'{"":<36}{steps[0]:>10}{steps[1]:>10}'] + [
      f'{name.removeprefix("eval/"):<36}{first[name]:>10.3f}{last[name]:>10.3f}'
      for name in first
      if name.startswith('eval/') and not name.endswith('/problems')])
