r"""Rewards: what completions earn, and what happens if that fails.

A reward function takes the completions of one problem,

  function(completions, row, tokens, ended) -> one float for each completion

completions: their decoded texts. row: the problem with all columns of its data;
sets without columns of their own have 'problem' and 'answers'. tokens: lengths
in tokens. ended: False for completions that were truncated. It runs in worker
processes, which have a deadline, 2 GiB of memory, and no file to write to.

`config.reward.functions` names them: rows of FUNCTIONS, 'module:function' for
your own, or 'accuracy', the grader's verdict. The reward is their sum with
`config.reward.weights`, plus DAPO's overlong penalty. `RewardFunctions` calls
them for groups, `Rewards` holds what they gave. If one failed, `Rewards.check`
stops the run, or prints why its values count as 0.

Axes: N groups · G samples of a prompt · B = N G completions · F functions.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
import dataclasses
import functools
import importlib
import json
import math
import os
from typing import Any

import numpy as np

from tepo_jax import errors
from tepo_jax import grading
from tepo_jax.data import problem as problem_lib
from tepo_jax.grading import workers as workers_lib
from tepo_jax.rollout import groups as groups_lib

ACCURACY = 'accuracy'
LARGEST = 3.4e38  # of float32, in which rewards are weighted and summed

_MADE_UP = ('It is \\boxed{1}.', '')  # completions of a trial call
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
def find(name: str) -> Callable[..., Any]:
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


def overlong_penalty(length_B: np.ndarray, max_length: int, buffer: int,
                     factor: float) -> np.ndarray:
  """min(-(length - (max_length - buffer)) / buffer * factor, 0), float32 [B].

  DAPO's soft overlong punishment (2503.14476, Eq. 13), off in the paper.
  Lengths are in tokens: 0 up to max_length - buffer, -factor at max_length. The
  buffer is in 1 .. max_length.
  """
  excess_B = np.asarray(length_B, np.float32) - np.float32(max_length - buffer)
  # XLA divides by a scalar by its reciprocal; so does this, to the same bits.
  share_B = -excess_B * (np.float32(1) / np.float32(buffer))
  return np.minimum(share_B * np.float32(factor), np.float32(0))


@dataclasses.dataclass(frozen=True)
class Rewards:
  """What the completions of N groups earned.

  reward_NG: float32; what advantages are computed from. A function that failed
    counts as 0.
  parts: {reward function other than the accuracy: float32 [N, G]}, NaN where
    it failed.
  reasons: {index of a group: what failed, in one line}, of the groups that this
    process asked the functions about.
  """
  reward_NG: np.ndarray
  parts: Mapping[str, np.ndarray]
  reasons: Mapping[int, str]

  def check(self, count: int, on_failure: str) -> None:
    """Acts on functions that failed for the first `count` groups: 'stop' stops
    the run, 'zero' says on stderr why their values count as 0.

    Raises:
      errors.RunError: a function failed, and `on_failure` is 'stop'.
    """
    failed = [n for n in range(count) if any(
        np.isnan(part_NG[n]).any() for part_NG in self.parts.values())]
    if not failed:
      return
    reason = next((self.reasons[n] for n in failed if n in self.reasons), None)
    message = (f'reward {reason} ({len(failed)} of '
               f'{errors.counted(count, "group")})')
    if on_failure == 'stop':
      raise errors.RunError(message if reason else 'a reward function failed '
                            'on another process, which names it')
    if reason:
      errors.note(f'{message}: counted as 0')


# The values of a group's function, or what is wrong with them, by (prompt_id,
# name of the function).
_Outcomes = dict[tuple[int, str], list[float] | str]


class RewardFunctions:
  """Calls a run's reward functions, in worker processes, and adds up what they
  give. Each process of the job asks about its share of the groups.

  `start` does not wait, so that devices may decode meanwhile; `rewards` does.
  """

  def __init__(self, weights: Mapping[str, float], *, max_tokens: int,
               overlong_buffer: int, overlong_factor: float, workers: int,
               timeout_s: int):
    """weights: {function, or 'accuracy': its weight}. max_tokens, overlong_…:
    see `overlong_penalty`; a buffer of 0: none."""
    # It imports jax, which the workers, who import this module, do without.
    from tepo_jax.runtime import processes
    self._processes = processes
    self._weights = dict(weights)
    self._overlong = max_tokens, overlong_buffer, overlong_factor
    self._called = [name for name in weights if name != ACCURACY]
    self._timeout_s = timeout_s
    self._thread = futures.ThreadPoolExecutor(1)
    self._pool = workers_lib.Pool(workers, timeout_s, workers_lib.Job(
        f'{__name__}:answer', path=(os.getcwd(),), alarmed=False,
        modules=tuple(name.partition(':')[0] for name in self._called
                      if name not in FUNCTIONS)))

  def try_out(self, problem: problem_lib.Problem) -> None:
    """Calls each function on two made-up completions of a problem, an answer
    and an empty text that was truncated.

    Raises:
      errors.InputError: it fails on them; names the function and the reason.
    """
    made_up = (_MADE_UP, json.dumps(problem.columns, default=str), (8, 1),
               (True, False))
    questions = [(name, *made_up) for name in self._called]
    answers, _ = self._pool.ask(questions)
    for question in questions:
      reason = _reason(*answers[question], self._timeout_s)
      if isinstance(reason, str):
        raise errors.InputError(
            f'config.reward.functions: {question[0]}: on made-up completions '
            f'{list(_MADE_UP)} of problem {problem.id}: {reason}')

  def of(self, groups: Sequence[groups_lib.Group]) -> Rewards:
    """The rewards of the groups."""
    return self.rewards(groups, self.start(groups))

  def start(self, groups: Sequence[groups_lib.Group]
            ) -> list[futures.Future[_Outcomes]]:
    """Starts to call the functions, if there are others than the accuracy."""
    mine = [group for group in groups
            if self._processes.is_mine(group.prompt.prompt_id)]
    return [self._thread.submit(self._call, mine)] if self._called else []

  def rewards(self, groups: Sequence[groups_lib.Group],
              started: Sequence[futures.Future[_Outcomes]]) -> Rewards:
    """Waits for what was started, for each of these groups once, and returns
    their rewards; all processes must call it alike. What was started for other
    groups, which are carried, is left out."""
    parts, reasons = self._parts(groups, started)
    values = {ACCURACY: np.stack([g.accuracy_G for g in groups])} | parts
    reward_NG = sum(
        (np.float32(weight) * np.nan_to_num(values[name])
         for name, weight in self._weights.items()),
        np.zeros(values[ACCURACY].shape, np.float32))
    max_tokens, buffer, factor = self._overlong
    if buffer:
      length_NG = np.stack([g.length_G for g in groups])
      reward_NG = reward_NG + overlong_penalty(
          length_NG, max_tokens, buffer, factor)
    return Rewards(reward_NG, parts, reasons)

  def close(self) -> None:
    """Ends the workers, after the calls that they answer."""
    self._thread.shutdown(cancel_futures=True)
    self._pool.close()

  def _call(self, groups):
    """The functions' outcomes for the groups."""
    questions = {
        (group.prompt.prompt_id, name): (name, *_as_question(group))
        for group in groups for name in self._called}
    answers, _ = self._pool.ask(list(dict.fromkeys(questions.values())))
    return {key: _reason(*answers[question], self._timeout_s)
            for key, question in questions.items()}

  def _parts(self, groups, started):
    """`Rewards.parts` and `Rewards.reasons` of the groups."""
    if not self._called:
      return {}, {}
    index = {group.prompt.prompt_id: n for n, group in enumerate(groups)}
    part_FNG = np.zeros(
        (len(self._called), len(groups), len(groups[0].text_G)), np.float32)
    reasons = {}
    for outcomes in started:
      for (prompt_id, name), values in outcomes.result().items():
        if prompt_id not in index:
          continue
        n = index[prompt_id]
        if isinstance(values, str):
          problem = groups[n].prompt.problem.id
          reasons[n] = f'{name}: problem {problem}: {values}'
          values = math.nan
        part_FNG[self._called.index(name), n] = values
    # The other processes' groups are 0 here.
    return dict(zip(self._called, self._processes.total(part_FNG))), reasons


def _reason(values, timed_out, timeout_s):
  """A worker's values, or what is wrong with them."""
  return values or (f'took more than {timeout_s} s' if timed_out
                    else 'its worker died')


def _as_question(group):
  """Hashable arguments of `answer`; what JSON cannot hold becomes text."""
  return (group.text_G, json.dumps(group.prompt.problem.columns, default=str),
          tuple(group.length_G.tolist()), tuple(group.ended_G.tolist()))
