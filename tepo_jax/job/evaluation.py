"""Evaluation sets under their decodings, and what is said of the outcome."""

import dataclasses
import math
from typing import Any

import jax
import numpy as np
import tqdm

from tepo_jax import errors
from tepo_jax.job import session as session_lib
from tepo_jax.rollout import collect
from tepo_jax.rollout import draw
from tepo_jax.rollout import generation
from tepo_jax.tasks import datasets


@dataclasses.dataclass(frozen=True)
class Evaluation:
  """One set under one decoding, named 'SET' or 'SET/greedy'."""
  name: str
  prompts: list[collect.Prompt]
  sampler: generation.GroupSampler

  def run(self, params: Any, key: jax.Array
          ) -> tuple[list[collect.Group], dict[str, float]]:
    """A group of each prompt, and `summarize` with the grader's counts.

    `params` are in the decode layout.
    """
    groups = sorted(
        tqdm.tqdm(self.sampler.stream(params, self.prompts, key), self.name,
                  len(self.prompts), leave=False, disable=None),
        key=lambda group: group.prompt.cursor)
    counts = dict(self.sampler.counts)
    self.sampler.counts.clear()
    return groups, summarize(groups) | counts


def prepare(session: session_lib.Session) -> list[Evaluation]:
  """The evaluations of `config.eval`, in its order."""
  settings = session.config.eval
  evaluations = []
  for name in settings.sets:
    split = 'test' if name == 'arithmetic' else None
    prompts = session.prompts(name, split, settings.limit)
    for samples, temperature in _decodings(settings, name):
      evaluations.append(Evaluation(
          name if temperature > 0 else f'{name}/greedy', prompts,
          session.sampler(
              prompts=len(prompts), samples=samples,
              max_tokens=settings.max_tokens,
              decoding=_decoding(settings, temperature),
              stop_after_boxed=settings.stop_after_boxed)))
  return evaluations


def _decodings(settings, name):
  """(samples, temperature) pairs: the config's, else the set's own."""
  source = datasets.SETS.get(name.partition(':')[0])
  samples, temperature = settings.samples, settings.temperature
  if source is not None:
    samples = source.samples if samples is None else samples
    temperature = source.temperature if temperature is None else temperature
  if samples is None or temperature is None:
    raise errors.InputError(
        f'{name} has no decoding of its own: set eval.samples and '
        'eval.temperature')
  decodings = [(samples, temperature)]
  if settings.greedy and temperature > 0:
    decodings.append((1, 0.0))
  return decodings


def _decoding(settings, temperature):
  """Greedy decoding has nothing to truncate."""
  if temperature == 0:
    return draw.Decoding(temperature)
  return draw.Decoding(temperature, settings.top_k, settings.top_p)


def summarize(groups: list[collect.Group]) -> dict[str, float]:
  """avg@k, pass@1…k, truncated share and mean length (in tokens)."""
  accuracy_NG = np.stack([g.accuracy_G for g in groups])
  samples = accuracy_NG.shape[1]
  correct_N = accuracy_NG.sum(1).astype(int)
  powers = [2 ** i for i in range(samples.bit_length())]
  return {
      f'avg@{samples}': float(accuracy_NG.mean()),
      **{f'pass@{k}': float(np.mean(
          [pass_at_k(samples, c, k) for c in correct_N]))
         for k in powers if k <= samples},
      'truncated': float(np.mean([~g.ended_G for g in groups])),
      'mean_length': float(np.mean([g.length_G for g in groups])),
      'problems': len(groups)}


def pass_at_k(samples: int, correct: int, k: int) -> float:
  """1 − C(n − c, k) / C(n, k): unbiased (Chen et al. 2021, 2107.03374)."""
  return 1 - math.comb(samples - correct, k) / math.comb(samples, k)


def sample_lines(name: str, groups: list[collect.Group]) -> list[dict]:
  """One JSON object a completion, for samples.jsonl."""
  return [
      {'set': name, 'id': g.prompt.problem.id,
       'problem': g.prompt.problem.problem,
       'answers': g.prompt.problem.answers, 'sample': j, 'completion': text,
       'correct': bool(g.accuracy_G[j]), 'tokens': int(g.length_G[j]),
       'truncated': not g.ended_G[j]}
      for g in groups for j, text in enumerate(g.text_G)]
