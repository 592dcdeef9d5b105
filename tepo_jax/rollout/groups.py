"""Prompts, in the order of the data, and graded groups of their completions.

Axes: G samples of a prompt · T tokens of a completion.
"""

from collections.abc import Mapping, Sequence
import dataclasses

import numpy as np

from tepo_jax.rollout import requests as requests_lib
from tepo_jax.data import problem as problem_lib

_DATA_ORDER = 1  # seeds the generator


@dataclasses.dataclass(frozen=True)
class Prompt:
  """A problem, its token ids, and its index in the run's data order."""
  problem: problem_lib.Problem
  token_ids: tuple[int, ...]
  cursor: int


@dataclasses.dataclass(frozen=True)
class Group:
  """A prompt with its G completions; arrays are numpy.

  token_GT: int32, EOS included, then 0.
  logp_GT: float32, log-probability of each token under the policy's
    temperature-scaled softmax (`draw.draw`), nats, then 0.
  length_G: int32, tokens with EOS; no token id marks the end.
  ended_G: bool; False if the completion was truncated.
  text_G: decoded completions. accuracy_G: 0/1 verdicts, truncated is 0.
  scores: {reward function: float32 [G]}, NaN where the function failed.
  """
  prompt: Prompt
  token_GT: np.ndarray
  logp_GT: np.ndarray
  length_G: np.ndarray
  ended_G: np.ndarray
  text_G: tuple[str, ...]
  accuracy_G: np.ndarray
  scores: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)


class DataOrder:
  """An endless order of n items: in each epoch a permutation by (seed, epoch).

  Entry i is a function of (seed, i), so one integer cursor resumes it.
  """

  def __init__(self, count: int, seed: int):
    self._count, self._seed = count, seed
    self._epoch, self._permutation = None, None

  def __getitem__(self, cursor: int) -> int:
    epoch, index = divmod(cursor, self._count)
    if epoch != self._epoch:
      generator = np.random.default_rng((self._seed, _DATA_ORDER, epoch))
      self._epoch, self._permutation = epoch, generator.permutation(self._count)
    return int(self._permutation[index])


def is_mixed(group: Group) -> bool:
  """Whether the verdicts differ; if not, rewards for them give no advantage."""
  return bool(group.accuracy_G.min() != group.accuracy_G.max())


def is_correct(completion: requests_lib.Completion, verdict: bool) -> bool:
  """Whether it counts as correct: a truncated completion never does, whatever
  its text."""
  return bool(completion.ended and verdict)


def to_group(prompt: Prompt,
             samples: Sequence[tuple[requests_lib.Completion, str, bool]],
             max_tokens: int) -> Group:
  """The group of a prompt's (completion, text, verdict), in sample order."""
  completions, texts, verdicts = zip(*samples)
  token_GT = np.zeros((len(samples), max_tokens), np.int32)
  logp_GT = np.zeros((len(samples), max_tokens), np.float32)
  for row, c in enumerate(completions):
    token_GT[row, :len(c.token_T)] = c.token_T
    logp_GT[row, :len(c.token_T)] = c.logp_T
  length_G = np.array([len(c.token_T) for c in completions], np.int32)
  ended_G = np.array([c.ended for c in completions])
  return Group(prompt, token_GT, logp_GT, length_G, ended_G, texts,
               np.array(list(map(is_correct, completions, verdicts)),
                        np.float32))
