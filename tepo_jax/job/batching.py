"""Arrays of graded groups, and their advantages, on the host.

Axes: B completions · P tokens of a prompt · T tokens of a completion ·
S = P + T · G samples of a prompt.
"""

from collections.abc import Sequence

import numpy as np

from tepo_jax.learning import advantage
from tepo_jax.learning import batch as batch_lib
from tepo_jax.rollout import groups as groups_lib


def to_batch(self, groups: list[groups_lib.Group], reward_B: np.ndarray,
               estimator: str, rows: int | None = None) -> batch_lib.Batch:
    """Host arrays of the groups, padded to `rows` (None: a rollout's size)."""
    rollout = self.config.rollout
    return to_batch(
        groups, reward_B, rows=rows or rollout.prompts * rollout.samples,
        width=self.config.data.max_prompt_tokens, estimator=estimator,
        truncated=rollout.truncated)

  def on_devices(self, batch: batch_lib.Batch) -> batch_lib.Minibatch:
    """Packs a host batch and copies it to the devices."""
    return self._put(self.programs.pack(batch))

  def _put(self, packed):
    return mesh_lib.put(packed, self.programs.minibatch_sharding)

  def _split(self, batch):
    """The batch rows of each minibatch: whole groups in the data's order.

    Skips minibatches that hold only filler rows (possible in mode 'drop').
    """
    size = self.config.train.minibatch_prompts * self.config.rollout.samples
    every_row = np.arange(len(batch.mask_BT)).reshape(-1, size)
    return [rows for rows in every_row if batch.mask_BT[rows].any()]

  def _score(self, batch, members):
    """The packed minibatches on the host; the same on the devices, scored
    exactly as they will be trained on; for an exact KL, π_old in each."""
    programs, params, base = self.programs, self.state.params, self.base()
    packed, minibatches, old, first, used = [], [], None, [], 0
    states_RKSD = None if programs.kept is None else jnp.zeros(
        programs.kept.shape, programs.kept.dtype,
        device=programs.kept.sharding)
    for mine in members:  # the devices score one while the host packs the next
      packed.append(programs.pack(_completions(batch, mine)))
      minibatch = self._put(packed[-1])
      if states_RKSD is None:
        logp_BT, entropy_BT = programs.score(params, minibatch, *base)
      else:
        logp_BT, entropy_BT, old = programs.score_and_keep(
            params, minibatch, states_RKSD, used, *base)
        states_RKSD, used = old.states_RKSD, used + int(packed[-1].used)
        first.append(old.first)
      minibatches.append(minibatch.replace(
          old_logp_BT=logp_BT, old_entropy_BT=entropy_BT,
          reference_logp_BT=self.reference_logp_BT(minibatch)))
    return packed, minibatches, [old.replace(first=m) for m in first]

  def reference_logp_BT(self, minibatch: batch_lib.Minibatch
                        ) -> jax.Array | None:
    """ℓ of the reference policy; None if there is none."""
    if self.state.reference is None:
      return None
    return self.programs.score(
        self.state.reference, minibatch, *self.base())[0]

  def _penalise(self, scored, groups, reward_B):
    """The step with advantages of rewards less the KL to the reference."""
    method = self.programs.policy_loss.method
    batch = scored.batch
    advantage_B = advantages(
        groups, reward_B, batch.mask_BT, method.estimator,
        self.config.rollout.truncated,
        method.reference.coef * np.asarray(
            method.reference.estimator(scored.reference_gap_BT())))
    sharding = self.programs.minibatch_sharding.advantage_B
    return dataclasses.replace(
        scored, batch=batch.replace(advantage_B=advantage_B), minibatches=[
            minibatch.replace(
                advantage_B=mesh_lib.put(advantage_B[mine], sharding))
            for mine, minibatch in zip(scored.members, scored.minibatches)])

  def _weigh(self, scored):
    """The step with behaviour weights."""
    batch = scored.batch
    weight_BT = behaviour.weights(
        scored.old_logp_BT(), batch.sampler_logp_BT, batch.mask_BT,
        **self.config.train.behaviour)
    sharding = self.programs.minibatch_sharding.behaviour_BT
    return dataclasses.replace(scored, minibatches=[
        minibatch.replace(
            behaviour_BT=mesh_lib.put(weight_BT[mine], sharding))
        for mine, minibatch in zip(scored.members, scored.minibatches)])

  def _compare(self, scored):
    """Metrics of the packing, and of the sampler's log-probabilities compared
    with the trainer's.

    Raises:
      errors.RunError: they are too far apart.
    """
    settings, batch = self.config.train.behaviour, scored.batch
    arrays = scored.old_logp_BT(), batch.sampler_logp_BT, batch.mask_BT
    return self._gap(*arrays) | behaviour.metrics(
        behaviour.weights(*arrays, **settings), *arrays,
        weight=settings.weight, cap=settings.cap) | {
            'padding_share': np.mean(batch.position_BS < 0),
            'packing_efficiency': scored.efficiency}

  def _gap(self, old_logp_BT, sampler_logp_BT, mask_BT):
    """|log π| gap of the sampler and the trainer, in nats."""
    gaps = np.abs(sampler_logp_BT - old_logp_BT)[mask_BT > 0]
    limit = self.config.rollout.logp_gap_limit
    if not gaps.mean() <= limit:
      raise errors.RunError(
          f'the sampler\'s log-probabilities are {gaps.mean():.3g} nats from '
          f'the trainer\'s on average, more than rollout.logp_gap_limit='
          f'{limit}: the ratios would be noise')
    return {
        'logp_gap_mean': gaps.mean(), 'logp_gap_p99': np.quantile(gaps, 0.99)}

  def _count_skipped(self, outcome, step):
    skipped = outcome['skipped'] > 0
    self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0
    if self.skipped_in_a_row == MAX_SKIPPED:
      raise errors.RunError(
          f'{MAX_SKIPPED} updates in a row had a loss or gradient that is not '
          f'finite (the last: loss {outcome["loss"]}, gradient norm '
          f'{outcome["grad_norm"]}) in step {step}')


def _completions(batch, members):
  return jax.tree.map(lambda x: x[members], batch)


def to_batch(groups: Sequence[groups_lib.Group], reward_B: np.ndarray, *,
             rows: int, width: int, estimator: str, truncated: str = 'count'
             ) -> batch_lib.Batch:
  """The batch of the groups, with filler rows (an empty mask) up to `rows`.

  Args:
    groups: those to train on. reward_B: of their completions, in order.
    rows: B, a constant of the run. width: P, the longest prompt.
    estimator: see `advantage.group_advantage`.
    truncated: `rollout.truncated`. With 'mask' and 'exclude', truncated
      completions have an empty mask; with 'exclude', they do not count in the
      advantages of their groups either.
  """
  def stacked(arrays):
    joined = np.concatenate(arrays)
    padding = [(0, rows - len(joined))] + [(0, 0)] * (joined.ndim - 1)
    return np.pad(joined, padding)

  group_size, length = groups[0].token_GT.shape
  token_BS = np.zeros((rows, width + length), np.int32)
  position_BS = np.full((rows, width + length), -1, np.int32)
  token_BS[:, width:] = stacked([g.token_GT for g in groups])
  length_B = stacked([g.length_G for g in groups])
  prompts = [g.prompt.token_ids for g in groups for _ in range(group_size)]
  for i, prompt in enumerate(prompts):
    start, end = width - len(prompt), width + length_B[i]
    token_BS[i, start:width] = prompt
    position_BS[i, start:end] = np.arange(end - start)
  mask_BT = np.arange(length) < length_B[:, None]
  if truncated != 'count':
    mask_BT &= stacked([g.ended_G for g in groups])[:, None]
  zeros_BT = np.zeros((rows, length), np.float32)
  return batch_lib.Batch(
      token_BS=token_BS, position_BS=position_BS,
      mask_BT=mask_BT.astype(np.float32),
      advantage_B=advantages(groups, reward_B, mask_BT, estimator, truncated),
      old_logp_BT=zeros_BT, old_entropy_BT=zeros_BT,
      sampler_logp_BT=stacked([g.logp_GT for g in groups]))


def advantages(groups: Sequence[groups_lib.Group], reward_B: np.ndarray,
               mask_BT: np.ndarray, estimator: str, truncated: str,
               penalty_BT: np.ndarray | None = None) -> np.ndarray:
  """The advantages of a batch, float32 [B], or [B, T] if the estimator gives
  each token its own; 0 in filler rows.

  Args:
    groups, reward_B, estimator, truncated: as for `to_batch`.
    mask_BT: of the batch.
    penalty_BT: taken from the reward at each token of the mask; the estimators
      that give a completion one advantage take the sum over its tokens.
  """
  count, padding = len(reward_B), (0, len(mask_BT) - len(reward_B))
  penalty_BT = (None if penalty_BT is None else
                np.where(mask_BT > 0, penalty_BT, 0).astype(np.float32))
  if advantage.is_by_token(estimator):
    return np.asarray(advantage.of_tokens(
        np.pad(reward_B, padding),
        np.zeros_like(mask_BT) if penalty_BT is None else penalty_BT,
        mask_BT > 0), np.float32)
  if penalty_BT is not None:
    reward_B = reward_B - penalty_BT[:count].sum(1)
  counted_B = (np.concatenate([g.ended_G for g in groups])
               if truncated == 'exclude' else None)
  return np.pad(np.asarray(advantage.group_advantage(
      reward_B, len(groups[0].length_G), estimator, counted_B),
                           np.float32), padding)
