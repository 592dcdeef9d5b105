"""Dynamic sampling: prompts -> completions -> rewards -> groups to train on.

Host code around three functions it is given: one that samples, one that
grades, one that names the next problems.

Axes: Q prompts · G samples a prompt · B rows · P prompt slots · T completion
slots · R prompts kept for training.
"""

from collections.abc import Callable, Iterator, Sequence
import dataclasses

import numpy as np

from tepo_jax import errors
from tepo_jax.learning import advantage
from tepo_jax.learning import update
from tepo_jax.rollout import schedule
from tepo_jax.tasks import datasets

MODES = ('refill', 'drop', 'off')

_DATA_ORDER, _MINIBATCHES = 1, 2  # apart, so that their numbers are too


@dataclasses.dataclass(frozen=True)
class Prompt:
  """A problem, its token ids, and its place in the run's data order."""
  problem: datasets.Problem
  token_ids: tuple[int, ...]
  cursor: int

  def at(self, cursor: int) -> 'Prompt':
    """The same prompt at another place of the order."""
    return dataclasses.replace(self, cursor=cursor)


@dataclasses.dataclass(frozen=True)
class Group:
  """A prompt with its G completions; arrays are numpy.

  token_GT: int32, EOS included; 0 behind the end. `length_G` [int32], never a
    token id, says where a row ends: behind EOS; at T when none was drawn.
  logp_GT: float32, log-probability of each token under the policy's
    temperature-scaled softmax (`draw.draw`), nats; 0 behind the end.
  ended_G: bool, whether the completion came to its end; False: truncated.
  text_G: decoded completions. accuracy_G: 0/1 verdicts, truncated is 0.
  """
  prompt: Prompt
  token_GT: np.ndarray
  logp_GT: np.ndarray
  length_G: np.ndarray
  ended_G: np.ndarray
  text_G: tuple[str, ...]
  accuracy_G: np.ndarray


@dataclasses.dataclass(frozen=True)
class Rollout:
  """The groups of a rollout step, how they were found, where the data goes on.

  groups: at most R, in data order; fewer than R only with 'drop'.
  sampled: every group sampled, kept or not.
  cursor: the data order's next place.
  """
  groups: list[Group]
  sampled: list[Group]
  cursor: int


class DataOrder:
  """An endless order of n items: a new permutation of (seed, epoch) each pass.

  `cursor` is the whole state: item i of the order is a function of (seed, i).
  """

  def __init__(self, count: int, seed: int):
    self._count = count
    self._seed = seed
    self._epoch = None
    self._permutation = None

  def __getitem__(self, cursor: int) -> int:
    epoch, place = divmod(cursor, self._count)
    if epoch != self._epoch:
      generator = np.random.default_rng((self._seed, _DATA_ORDER, epoch))
      self._permutation = generator.permutation(self._count)
      self._epoch = epoch
    return int(self._permutation[place])


def pad_prompts(prompts: Sequence[Prompt], rows: int, width: int):
  """Left-padded [Q, P] int32 token ids and positions, and [Q] prompt ids.

  Rows behind the last prompt are filler: their positions are all −1.
  """
  token_QP = np.zeros((rows, width), np.int32)
  position_QP = np.full((rows, width), -1, np.int32)
  prompt_id_Q = np.zeros(rows, np.int32)
  for row, prompt in enumerate(prompts):
    length = len(prompt.token_ids)
    token_QP[row, width - length:] = prompt.token_ids
    position_QP[row, width - length:] = np.arange(length)
    prompt_id_Q[row] = prompt.cursor
  return token_QP, position_QP, prompt_id_Q


def collect(draw: Callable[[int], list[Prompt]],
            sample: Callable[[list[Prompt]], list[Group]], *, cursor: int,
            wanted: int, mode: str, max_batches: int) -> Rollout:
  """Samples groups until `wanted` of them can be trained on (DAPO §3.2).

  A group is mixed iff its verdicts are not all equal, before any shaping.
  'refill' goes on sampling until `wanted` mixed groups are there and drops
  the surplus; 'drop' samples once and keeps what is mixed; 'off' keeps all.

  Args:
    draw: the prompts from a cursor on, `wanted` of them.
    sample: completions and verdicts of prompts.
    cursor: where the data order stands.
    wanted: R, groups to train on, and prompts sampled at a time.
    mode: one of MODES.
    max_batches: generation batches 'refill' may take.

  Raises:
    errors.RunError: `max_batches` were not enough; names the pass rate.
  """
  kept, sampled = [], []
  for _ in range(max_batches if mode == 'refill' else 1):
    prompts = draw(cursor)
    cursor = prompts[-1].cursor + 1
    groups = sample(prompts)
    sampled += groups
    kept += [g for g in groups if mode == 'off' or is_mixed(g)]
    if len(kept) >= wanted:
      break
  else:
    if mode == 'refill':
      raise errors.RunError(_starved(kept, sampled, wanted, max_batches))
  return Rollout(kept[:wanted], sampled, cursor)


def is_mixed(group: Group) -> bool:
  """Whether the group's verdicts differ: else its advantages are all 0."""
  accuracy_G = group.accuracy_G
  return bool(advantage.mixed_groups(accuracy_G, accuracy_G.size)[0])


def _starved(kept, sampled, wanted, max_batches):
  rate = np.mean([g.accuracy_G.mean() for g in sampled])
  solved = sum(g.accuracy_G.all() for g in sampled)
  failed = sum(not g.accuracy_G.any() for g in sampled)
  return (
      f'dynamic sampling found {len(kept)} of {wanted} mixed groups in '
      f'max_generation_batches={max_batches} batches: pass rate {rate:.1%}, '
      f'{solved} of {len(sampled)} groups all right, {failed} all wrong')


def to_group(prompt: Prompt,
             samples: Sequence[tuple[schedule.Completion, str, bool]],
             max_tokens: int) -> Group:
  """The group of (completion, text, verdict) of every sample, in order.

  A truncated completion counts as wrong whatever it says.
  """
  completions, texts, verdicts = zip(*samples)
  token_GT = np.zeros((len(samples), max_tokens), np.int32)
  logp_GT = np.zeros((len(samples), max_tokens), np.float32)
  for row, completion in enumerate(completions):
    length = len(completion.token_T)
    token_GT[row, :length] = completion.token_T
    logp_GT[row, :length] = completion.logp_T
  ended_G = np.array([c.ended for c in completions])
  return Group(
      prompt, token_GT, logp_GT,
      np.array([len(c.token_T) for c in completions], np.int32), ended_G,
      texts, np.asarray(verdicts, np.float32) * ended_G)


def rewards(groups: Sequence[Group], max_tokens: int, overlong_buffer: int,
            overlong_factor: float) -> np.ndarray:
  """Accuracy plus DAPO's soft overlong penalty (off at buffer 0): [R·G]."""
  reward_B = np.concatenate([g.accuracy_G for g in groups])
  if overlong_buffer:
    length_B = np.concatenate([g.length_G for g in groups])
    reward_B = reward_B + np.asarray(advantage.overlong_penalty(
        length_B, max_tokens, overlong_buffer, overlong_factor))
  return reward_B


def to_batch(groups: Sequence[Group], reward_B: np.ndarray, *, rows: int,
             width: int, estimator: str) -> update.Batch:
  """Host arrays for the updates; filler rows with an empty mask up to `rows`.

  Args:
    groups: to train on. reward_B: of their completions, in order.
    rows: B, a constant of the run. width: P, prompt slots.
    estimator: of `advantage.group_advantage`.
  """
  group_size, slots = groups[0].token_GT.shape
  prompt_BP, prompt_position_BP, _ = pad_prompts(
      [g.prompt for g in groups for _ in range(group_size)], rows, width)
  token_BT = _stack([g.token_GT for g in groups], rows)
  length_B = _stack([g.length_G for g in groups], rows)
  mask_BT = np.arange(slots) < length_B[:, None]
  start_B1 = prompt_position_BP[:, -1:] + 1
  position_BT = np.where(mask_BT, start_B1 + np.arange(slots), -1)
  advantage_B = advantage.group_advantage(reward_B, group_size, estimator)
  zeros_BT = np.zeros((rows, slots), np.float32)
  return update.Batch(
      token_BS=np.concatenate([prompt_BP, token_BT], 1),
      position_BS=np.concatenate(
          [prompt_position_BP, position_BT], 1).astype(np.int32),
      mask_BT=mask_BT.astype(np.float32),
      advantage_B=_stack([np.asarray(advantage_B, np.float32)], rows),
      old_logp_BT=zeros_BT, old_entropy_BT=zeros_BT,
      sampler_logp_BT=_stack([g.logp_GT for g in groups], rows))


def minibatch_order(rows: int, group_size: int, minibatch_prompts: int,
                    epochs: int, seed: int, step: int) -> Iterator[np.ndarray]:
  """Row indices of each update: whole groups; epochs after the first shuffle.

  The first epoch keeps the data order, which is random already; the others
  are a function of (seed, rollout step).
  """
  groups = np.arange(rows).reshape(-1, group_size)
  generator = np.random.default_rng((seed, _MINIBATCHES, step))
  for epoch in range(epochs):
    if epoch:
      groups = generator.permutation(groups)
    for start in range(0, len(groups), minibatch_prompts):
      yield groups[start:start + minibatch_prompts].reshape(-1)


def _stack(arrays, rows):
  """Concatenates along axis 0 and fills up with zeros to `rows`."""
  joined = np.concatenate(arrays)
  padding = [(0, rows - len(joined))] + [(0, 0)] * (joined.ndim - 1)
  return np.pad(joined, padding)
