"""math-verify's verdicts in a worker, and what it took and evaluated."""

import builtins
from collections.abc import Sequence
import functools
import time

from tepo_jax.grading import grader
from tepo_jax.grading import verifying
from tepo_jax.grading import workers


def verify(answer: str, references: Sequence[str], alarm_s: int
           ) -> tuple[tuple[bool, float, list[str]], bool]:
  """In a worker: ((verdict, seconds of CPU time, what `eval` was called with),
  whether an alarm went off)."""
  evaluated, builtin_eval = [], builtins.eval
  builtins.eval = lambda source, *scope: (
      evaluated.append(source if isinstance(source, str) else repr(source))
      or builtin_eval(source, *scope))
  start = time.process_time()
  verdict, timed_out = verifying.verify(answer, references, alarm_s)
  took_s = time.process_time() - start
  builtins.eval = builtin_eval
  return (verdict, took_s, evaluated), timed_out


@functools.cache
def _pool():
  return workers.Pool(1, 120, workers.Job(
      'tests.grading.observed:verify', grader.VERIFYING.first,
      (False, 0., []), cpu_s=verifying.CPU_S))


def ask(answer: str, references: Sequence[str]
        ) -> tuple[bool, float, list[str], bool]:
  """What `verify` returns, flat."""
  question = answer, tuple(references)
  outcomes, _ = _pool().ask([question])
  outcome, timed_out = outcomes[question]
  return *outcome, timed_out


def grade(answer: str, references: Sequence[grader.Reference]
          ) -> tuple[bool, float]:
  """(verdict about an extracted answer, seconds of CPU time that it took)."""
  start = time.process_time()
  verdict, undecided = grader.decide_quickly(answer, references)
  took_s = time.process_time() - start
  if verdict is None:
    verdict, more_s, *_ = ask(answer, undecided)
    took_s += more_s
  return verdict, took_s
