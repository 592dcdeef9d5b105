"""What a run does for carried completions (`rollout.carry`): the selection of a
step, what checkpoints hold, and metrics."""

from collections.abc import Mapping
import dataclasses
from typing import Any

import jax
import ml_collections
import numpy as np

from tepo_jax.rollout import carry
from tepo_jax.rollout import sampler as sampler_lib
from tepo_jax.rollout import selection as selection_lib
from tepo_jax.rollout import shapes as shapes_lib
from tepo_jax.runtime import mesh as mesh_lib

# In a checkpoint's `extra`, only where completions are carried.
_CARRIED, _SIZES = 'carried', 'sizes'


@dataclasses.dataclass(frozen=True)
class Sizes:
  """With how many slots, and pages of each of so many shards, a run samples:
  which completions a step carries depends on them. wanted: the
  config.rollout.slots that they follow from."""
  wanted: int | None
  slots: int
  pages: int
  shards: int


def is_on(config: ml_collections.ConfigDict) -> bool:
  """Whether completions are carried."""
  return config.rollout.carry.max_versions > 0


def selection(config: ml_collections.ConfigDict, step: int, cursor: int,
              carried: tuple[carry.Carried, ...]) -> selection_lib.Selection:
  """The selection of a rollout step."""
  rollout = config.rollout
  settings = dict(
      cursor=cursor, wanted=rollout.prompts, group_size=rollout.samples,
      mode=rollout.dynamic_sampling, max_batches=rollout.max_generation_batches,
      mixed=rollout.mixed, truncated=rollout.truncated)
  if not is_on(config):
    return selection_lib.Selection(**settings)
  return carry.Selection(
      step=step, max_versions=rollout.carry.max_versions, carried=carried,
      **settings)


def saved(config: ml_collections.ConfigDict, carried: tuple[carry.Carried, ...],
          sizes: Sizes | None) -> dict[str, Any]:
  """For a checkpoint: what is in flight, and the run's sizes, None before it
  has sampled."""
  if not is_on(config):
    return {}
  return {_CARRIED: carry.to_json(carried),
          _SIZES: sizes and dataclasses.asdict(sizes)}


def restored(extra: Mapping[str, Any]
             ) -> tuple[tuple[carry.Carried, ...], Sizes | None]:
  """What `saved` gave. Checkpoints of runs that carry nothing have nothing in
  flight."""
  if _CARRIED not in extra:
    return (), None
  return (carry.from_json(extra[_CARRIED]),
          extra[_SIZES] and Sizes(**extra[_SIZES]))


def forked(extra: Mapping[str, Any], continues: bool, fits: bool
           ) -> dict[str, Any]:
  """The extra for a fork.

  continues: whether it samples as its parent, whose completions it then
    continues; else it begins their groups anew.
  fits: whether its weights and cache are as large, so that it keeps the sizes.
  """
  if _CARRIED not in extra:
    return dict(extra)
  if continues:
    return extra | {_SIZES: extra[_SIZES] if fits else None}
  return {name: value for name, value in extra.items()
          if name not in (_CARRIED, _SIZES)} | {
              'cursor': min(extra[_CARRIED]['prompt_id'],
                            default=extra['cursor'])}


def of_shapes(config: ml_collections.ConfigDict, shapes: shapes_lib.Shapes
              ) -> Sizes:
  """The sizes of a run that samples with these shapes."""
  return Sizes(config.rollout.slots, shapes.slots[-1], shapes.pages,
               shapes.shards)


def kept(sizes: Sizes | None, settings: ml_collections.ConfigDict,
         mesh: jax.sharding.Mesh) -> Sizes | None:
  """The sizes, unless `settings`, which are config.rollout, or the mesh of
  sampling ask for others."""
  if sizes is None or (
      settings.slots != sizes.wanted
      or (settings.cache == 'pages') != (sizes.pages > 0)
      or mesh_lib.batch_shards(mesh) != sizes.shards):
    return None
  return sizes


def metrics(rollout: sampler_lib.Rollout, step: int) -> dict[str, float]:
  """Of the groups that a step carries, and of the age of the tokens that it
  trains on: how many rollout steps ago they were drawn.

  Tokens that are carried are not discarded; those of earlier steps were not
  drawn in this one.
  """
  def versions(groups):
    return np.concatenate([np.zeros(0, int), *(
        row_T[:length] for group in groups
        for row_T, length in zip(group.version_GT, group.length_G))])

  parts = [drawn for each in rollout.carried for drawn in each.samples]
  unfinished = [drawn for drawn in parts if drawn.ended is None]
  kept = np.concatenate([versions(rollout.sampled), *(
      drawn.version_T for drawn in parts)])
  age = step - versions(rollout.groups)
  return {
      'carry/groups': len(rollout.carried),
      'carry/completions': len(unfinished),
      'carry/tokens': sum(len(drawn.token_T) for drawn in unfinished),
      'sampling/tokens_discarded':
          rollout.stats.tokens - int(np.sum(kept == step))} | ({
              'carry/age_mean': age.mean(), 'carry/age_max': age.max()}
                                                      if len(age) else {})
