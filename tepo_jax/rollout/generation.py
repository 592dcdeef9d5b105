"""Prompts in, graded groups out: the host's side of sampling.

Axes as in `sampler`.
"""

import collections
from collections.abc import Callable, Iterator, Sequence
import dataclasses
from typing import Any

import jax
import transformers

from tepo_jax.rollout import collect
from tepo_jax.runtime import mesh as mesh_lib
from tepo_jax.runtime import metrics
from tepo_jax.tasks import grading


@dataclasses.dataclass
class GroupSampler:
  """Samples G completions of each prompt and grades them.

  Attributes:
    generate: (weights, prompt_QP, position_QP, prompt_id_Q, key) ->
      Completions of Q·G rows, for constant Q and P.
    rows, width, group_size: Q, P and G of `generate`.
    grader, tokenizer, mesh, timers: what else it takes.
    counts: of the grader (no_answer, timeout, died), added up.
  """
  generate: Callable[..., Any]
  rows: int
  width: int
  group_size: int
  grader: grading.Grader
  tokenizer: transformers.PreTrainedTokenizerBase
  mesh: jax.sharding.Mesh
  timers: metrics.Timers
  counts: collections.Counter = dataclasses.field(
      default_factory=collections.Counter)

  def __call__(self, weights: Any, prompts: Sequence[collect.Prompt],
               key: jax.Array) -> list[collect.Group]:
    """A group of each prompt, in their order."""
    groups = {group.prompt.cursor: group
              for group in self.stream(weights, prompts, key)}
    return [groups[prompt.cursor] for prompt in prompts]

  def stream(self, weights: Any, prompts: Sequence[collect.Prompt],
             key: jax.Array) -> Iterator[collect.Group]:
    """The prompts' groups as they are done, in any order."""
    for start in range(0, len(prompts), self.rows):
      yield from self._batch(weights, prompts[start:start + self.rows], key)

  def _batch(self, weights, prompts, key):
    """Groups of at most Q prompts, in their order."""
    with self.timers('rollout'):
      inputs = mesh_lib.put_batch(
          self.mesh, collect.pad_prompts(prompts, self.rows, self.width))
      completions = mesh_lib.to_host(self.generate(weights, *inputs, key))
    rows = len(prompts) * self.group_size
    with self.timers('grade'):
      texts = self.tokenizer.batch_decode(
          [tokens[:length] for tokens, length in zip(
              completions.token_BT[:rows], completions.length_B)],
          skip_special_tokens=True)
      answers = [prompt.problem.golds for prompt in prompts
                 for _ in range(self.group_size)]
      verdicts, counts = self.grader.grade(list(zip(texts, answers)))
    self.counts.update(counts)
    return collect.to_groups(prompts, completions, texts, verdicts,
                             self.group_size)
