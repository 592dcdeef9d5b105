r"""Reward functions: what a completion earns, besides being correct.

A reward function takes the completions of one problem,

  function(completions, row, tokens, ended) -> one float for each completion

completions: their decoded texts. row: the problem with all columns of its data;
sets without columns of their own have 'problem' and 'answers'. tokens: lengths
in tokens. ended: False for completions that were truncated. It runs in worker
processes, which have a deadline, 2 GiB of memory, and no file to write to.

`config.reward.functions` names them: rows of FUNCTIONS, 'module:function' for
your own, or 'accuracy', the grader's verdict. The reward is their sum with
`config.reward.weights`. Nothing here imports jax.
"""

from collections.abc import Mapping, Sequence
import functools
import importlib
import json
import math
import os
from typing import Any

import numpy as np

from tepo_jax import errors
from tepo_jax import grading
from tepo_jax.grading import workers as workers_lib

ACCURACY = 'accuracy'
LARGEST = 3.4e38  # of float32, in which rewards are weighted and summed

_MESSAGE = 300  # characters of an exception's message


def boxed(completions: Sequence[str], row: Mapping[str, Any],
          tokens: Sequence[int], ended: Sequence[bool]) -> list[float]:
  r"""1 for a completion that ended and holds exactly one \boxed{}, else 0."""
  del row, tokens
  return [float(done and text.count('\\boxed{') == 1
                and grading.extract(text, 'boxed') is not None)
          for text, done in zip(completions, ended)]


def brevity(completions: Sequence[str], row: Mapping[str, Any],
            tokens: Sequence[int], ended: Sequence[bool]) -> list[float]:
  """0.5 − (length − shortest) / (longest − shortest), in [−0.5, 0.5]; 0 if all
  have one length: the length reward of Kimi k1.5, §2.3.3, for all verdicts."""
  del completions, row, ended
  least, span = min(tokens), max(tokens) - min(tokens)
  return [0.5 - (n - least) / span if span else 0.0 for n in tokens]


FUNCTIONS = {'boxed': boxed, 'brevity': brevity}


@functools.cache
def find(name: str):
  """The function of a row of FUNCTIONS, or of 'module:function'.

  Raises:
    errors.InputError: there is none; names it.
  """
  if name in FUNCTIONS:
    return FUNCTIONS[name]
  module, _, attribute = name.partition(':')
  if not attribute:
    raise errors.InputError(
        f'no reward {name!r}; one of: '
        f'{", ".join((ACCURACY, *FUNCTIONS))}, or module:function')
  try:
    function = getattr(importlib.import_module(module), attribute)
  except (Exception, SystemExit) as error:
    raise errors.InputError(
        f'{name}: {type(error).__name__}: {errors.one_line(error)}'
    ) from error
  if not callable(function):
    raise errors.InputError(f'{name} is not a function')
  return function


def answer(name: str, completions: list[str], row: str,
           tokens: list[int], ended: list[bool], alarm_s: int
           ) -> tuple[list[float] | str, bool]:
  """Calls a function in a worker: (its floats, or what is wrong; False).

  row: as JSON.
  """
  del alarm_s  # the pool kills workers that are late
  try:
    values = [float(x) for x in find(name)(
        completions, json.loads(row), tokens, ended)]
  except Exception as error:
    return f'{type(error).__name__}: {errors.one_line(error)}'[:_MESSAGE], False
  if len(values) != len(completions):
    return (f'returned {len(values)} values for {len(completions)} '
            'completions'), False
  if not all(abs(value) <= LARGEST for value in values):  # nor NaN
    return f'returned a value that is not finite: {values}'[:_MESSAGE], False
  return values, False


class Scorer:
  """Calls reward functions for groups of completions, in worker processes.

  Attributes:
    names: of the functions.
    failures: {id of a problem: what went wrong, in one line} since they were
      last taken.
  """

  def __init__(self, names: Sequence[str], workers: int, timeout_s: int):
    self.names = tuple(names)
    self.failures: dict[str, str] = {}
    self._timeout_s = timeout_s
    self._pool = workers_lib.Pool(workers, timeout_s, workers_lib.Job(
        f'{__name__}:answer', path=(os.getcwd(),), alarmed=False,
        modules=tuple(name.partition(':')[0] for name in names
                      if name not in FUNCTIONS)))

  def score(self, problems: Sequence[tuple[str, tuple]]
            ) -> list[dict[str, np.ndarray]]:
    """{function: float32 [G]} of each problem; NaN where a function failed.

    problems: (id, (completions, row, tokens, ended)) of each.
    """
    questions = {
        (index, name): (name, *_as_question(*group))
        for index, (_, group) in enumerate(problems) for name in self.names}
    outcomes, _ = self._pool.ask(list(dict.fromkeys(questions.values())))
    scores = [{} for _ in problems]
    for (index, name), question in questions.items():
      values, timed_out = outcomes[question]
      if not isinstance(values, list):
        reason = values or (f'took more than {self._timeout_s} s' if timed_out
                            else 'its worker died')
        problem = problems[index][0]
        self.failures[problem] = f'{name}: problem {problem}: {reason}'
        values = [math.nan] * len(problems[index][1][0])
      scores[index][name] = np.array(values, np.float32)
    return scores

  def close(self) -> None:
    """Ends the workers."""
    self._pool.close()


def _as_question(completions, row, tokens, ended):
  """Hashable arguments of `answer`; what JSON cannot hold becomes text."""
  return (tuple(completions), json.dumps(row, default=str),
          tuple(map(int, tokens)), tuple(map(bool, ended)))
