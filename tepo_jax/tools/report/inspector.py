"""Data of the token inspector: groups, tokens, values, most frequent in M.

Plain data for page.py. Axes: B completions · T completion tokens.
"""

import collections
from collections.abc import Callable, Mapping, Sequence
import dataclasses
from typing import Any

import numpy as np

from tepo_jax.learning import update
from tepo_jax.rollout import dump
from tepo_jax.rollout import selection as selection_lib
from tepo_jax.tools.report import replay

MOST_TOKENS = 60_000  # of completions in one page, by whole groups
SUMMARY = 40  # tokens in the list of those most often in M


@dataclasses.dataclass(frozen=True)
class Quantity:
  """A value of each token. scale: 'diverging' (around `centre`), 'sequential'
  (from 0) or 'flag'."""
  key: str
  label: str
  scale: str
  centre: float = 0.0


QUANTITIES = (
    Quantity('advantage', 'advantage A', 'diverging'),
    Quantity('ratio', 'ratio ρ', 'diverging', 1.0),
    Quantity('weight', 'importance weight w', 'diverging', 1.0),
    Quantity('sequence_weight', 'sequence weight s', 'diverging', 1.0),
    Quantity('entropy', 'entropy H before the update, nats', 'sequential'),
    Quantity('entropy_change', 'ΔH after the update, nats', 'diverging'),
    Quantity('kl', 'KL(new ‖ old), nats', 'sequential'),
    Quantity('region', 'mask M: where the penalty acts', 'flag'),
    Quantity('clipped', 'clipped (−1 below, 1 above)', 'flag'),
    Quantity('sampler_gap', 'sampler gap, nats', 'diverging'),
    Quantity('surprise', 'surprise −log π of the sampler, nats', 'sequential'),
)


def values(view: replay.TokenView) -> dict[str, np.ndarray]:
  """Returns every quantity of QUANTITIES, [B, T]; 0 where masked."""
  batch, selection = view.batch, view.selection
  mask_BT = batch.mask_BT > 0
  change_BT = np.where(mask_BT, view.logp_BT - batch.old_logp_BT, 0)
  mean_B1 = change_BT.sum(1, keepdims=True) / np.maximum(
      mask_BT.sum(1, keepdims=True), 1)
  found = {
      'advantage': np.asarray(update.by_token(batch.advantage_B, mask_BT)),
      'ratio': np.exp(change_BT), 'weight': selection['weight_BT'],
      'sequence_weight': np.broadcast_to(np.exp(mean_B1), mask_BT.shape),
      'entropy': batch.old_entropy_BT,
      'entropy_change': view.entropy_BT - batch.old_entropy_BT,
      'kl': view.kl_BT,
      'region': selection['region_BT'].astype(int),
      'clipped': selection['high_BT'].astype(int) - selection['low_BT'],
      'sampler_gap': batch.sampler_logp_BT - batch.old_logp_BT,
      'surprise': -batch.sampler_logp_BT}
  return {key: np.where(mask_BT, value_BT, 0)
          for key, value_BT in found.items()}


def payload(records: Sequence[dict[str, Any]], decode: Callable[[int], str],
            arrays: Mapping[str, np.ndarray],
            fields: Mapping[str, Any] | None = None, **about: Any
            ) -> dict[str, Any]:
  """Returns the data that the page embeds.

  Args:
    records: of a saved rollout (rollout/dump.py), one per completion.
    decode: returns the text of a token id.
    arrays: quantity -> [B, T] in the order of `records`.
    fields: the run's config, by dotted name. Its rollout.mixed and
      rollout.truncated decide which groups are mixed; default: all verdicts.
    about: further fields: title, about.

  Returns:
    JSON data: `quantities`, `vocabulary` (id -> text), `groups` (those trained
    on come first), `mixed` (what a mixed group has), `summary`, `left_out`
    (number of groups), and `about`.
  """
  members = collections.defaultdict(list)
  for index, record in enumerate(records):
    members[record['cursor']].append(index)
  shown, tokens = [], 0
  for indices in sorted(members.values(),
                        key=lambda some: not records[some[0]]['trained']):
    tokens += sum(records[i]['tokens'] for i in indices)
    if shown and tokens > MOST_TOKENS:
      break
    shown.append(indices)
  rules = {name: (fields or {}).get(f'rollout.{name}', default)
           for name, default in (('mixed', 'verdicts'), ('truncated', 'count'))}
  groups = [_group(records, indices, arrays, rules) for indices in shown]
  ids = set().union(*(records[i]['token_ids'] for some in shown for i in some))
  return about | {
      'quantities': [dataclasses.asdict(q) for q in QUANTITIES
                     if q.key in arrays],
      'vocabulary': {str(i): decode(i) for i in sorted(ids)},
      'groups': groups, 'mixed': _difference(**rules),
      'left_out': len(members) - len(shown),
      'summary': most_in_region(records, arrays['region'], decode)
                 if 'region' in arrays else []}


def _difference(mixed, truncated):
  """What a mixed group has, in words."""
  return ('completions with different rewards' if mixed == 'reward'
          else 'both correct and wrong completions') + (
              ', not counting truncated ones' if truncated == 'exclude' else '')


def _is_mixed(members, rules):
  """Whether training counts the group of these records as mixed."""
  selection = selection_lib.Selection(
      cursor=0, wanted=1, group_size=len(members), mode='drop', max_batches=1,
      **rules)
  [group] = dump.to_groups(members, max(one['tokens'] for one in members))
  return selection.is_mixed(group, dump.rewards(members))


def _group(records, indices, arrays, rules):
  first = records[indices[0]]
  return {
      'id': f'{first["set"]}/{first["id"]}', 'cursor': first['cursor'],
      'problem': first['problem'], 'answers': list(first['answers']),
      'mixed': _is_mixed([records[i] for i in indices], rules),
      'trained': first['trained'],
      'completions': [
          {name: records[i][name] for name in (
              'completion', 'extracted', 'correct', 'reward', 'truncated')}
          | {'scores': {name.removeprefix(dump.PART): value
                        for name, value in records[i].items()
                        if name.startswith(dump.PART)}}
          | {'tokens': records[i]['token_ids'],
             'values': {key: exact(value_BT[i, :records[i]['tokens']])
                        for key, value_BT in arrays.items()}}
          for i in indices]}


def exact(values_T: np.ndarray) -> list[float | int | None]:
  """Returns the shortest decimals that parse to the same float32, or None."""
  if np.issubdtype(values_T.dtype, np.integer):
    return values_T.tolist()
  return [float(str(x)) if np.isfinite(x) else None
          for x in values_T.astype(np.float32)]


def most_in_region(records: Sequence[dict[str, Any]], region_BT: np.ndarray,
                   decode: Callable[[int], str]) -> list[dict[str, Any]]:
  """Returns the tokens most often in M, of the completions trained on.

  Fields: token, id, inside (times in M), count (occurrences), share.
  """
  count, inside = collections.Counter(), collections.Counter()
  for record, region_T in zip(records, region_BT):
    if record['trained']:
      count.update(record['token_ids'])
      inside.update(i for i, is_in in zip(record['token_ids'], region_T)
                    if is_in)
  return [{'token': decode(i), 'id': i, 'inside': n, 'count': count[i],
           'share': n / count[i]} for i, n in sorted(
               inside.items(), key=lambda kv: (-kv[1], kv[0]))[:SUMMARY]]
