"""What a schedule samples, returns and raises.

Axes: T tokens of a completion.
"""

from collections.abc import Sequence
import dataclasses
from typing import Protocol

import numpy as np

from tepo_jax import errors


@dataclasses.dataclass(frozen=True)
class Request:
  """A prompt to sample from.

  prompt_id: selects the random numbers. limits: for each sample, the most
  tokens (at least 1) that it may have.
  """
  token_ids: Sequence[int]
  prompt_id: int
  limits: Sequence[int]


class Source(Protocol):
  """Where a run takes its requests from, while it decodes."""

  def take(self, samples: int) -> list[Request]:
    """The next requests, with about that many samples in all; none if empty.

    It is called before every chunk of decoding, also with 0 samples. When it is
    called, the caller of `Schedule.run` has seen all completions except those
    that ended in the last chunk.
    """

  def wanted(self, prompt_id: int) -> bool:
    """Whether the samples of a request that it gave are still needed."""


class Queue:
  """A source that gives all its requests at once."""

  def __init__(self, requests: Sequence[Request]):
    self._requests = list(requests)

  def take(self, samples: int) -> list[Request]:
    """All the requests; none later."""
    del samples
    requests, self._requests = self._requests, []
    return requests

  def wanted(self, prompt_id: int) -> bool:
    """Always."""
    del prompt_id
    return True


@dataclasses.dataclass(frozen=True)
class Completion:
  """Sample number `sample` of a request.

  token_T int32 with EOS, logp_T float32 (see `draw.draw`); no padding.
  ended: False if the completion was truncated.
  """
  request: Request
  sample: int
  token_T: np.ndarray
  logp_T: np.ndarray
  ended: bool


class NonFiniteError(errors.RunError):
  """The model computed NaN or an infinite logit for a prompt.

  prompt_id: see `Request`.
  """

  def __init__(self, prompt_id: int):
    super().__init__(f'prompt {prompt_id}: the model\'s logits are not finite')
    self.prompt_id = prompt_id
