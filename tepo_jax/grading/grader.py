r"""Grades a completion's final answer: correct or not.

Only the extracted answer (`answers`) is graded: first by its spelling and its
number, then by its structure and values (`comparison`). Answers that these
cannot decide go to math-verify (`verifying`), whose parsing may hang, in
processes that can be killed (`workers`). Nothing here imports jax.
"""

import collections
from collections.abc import Iterable, Sequence
import decimal
import functools
import logging
import os
from typing import NamedTuple

from tepo_jax.grading import answers as answers_lib
from tepo_jax.grading import arithmetic
from tepo_jax.grading import comparison
from tepo_jax.grading import copies
from tepo_jax.grading import expressions
from tepo_jax.grading import nodes
from tepo_jax.grading import structures
from tepo_jax.grading import values
from tepo_jax.grading import verifying
from tepo_jax.grading import workers as workers_lib

_LOG = logging.getLogger(__name__)

MIN_TIMEOUT_S = 2
NUMBER_TOLERANCE = decimal.Decimal('1e-6')  # relative, of non-integers

VERIFYING = workers_lib.Job(
    'tepo_jax.grading.verifying:verify', ('1', ('\\frac{1}{2}',)), False,
    cpu_s=verifying.CPU_S)
# math-verify as it is, without the corrections of `verifying.verify`.
MATH_VERIFY = workers_lib.Job(
    'tepo_jax.grading.verifying:verify_alone', ('1', ('\\frac{1}{2}',)), False)

_TIMEOUT_S = 10  # for a question of `grade` to its worker


class Reference(NamedTuple):
  """A reference answer; its unit and absolute tolerance if the data has any; for
  Countdown, the numbers that an expression must use; and the problem, so that a
  formula copied from it is not accepted."""
  text: str
  unit: str | None = None
  abs_error: float | None = None
  numbers: tuple[int, ...] | None = None
  problem: str | None = None


def grade(completion: str, answers: Sequence[str | Reference],
          style: str = 'boxed') -> bool:
  """Whether the completion's answer is equivalent to any of `answers`.

  One at a time; `Grader` grades many in parallel. math-verify runs in a worker
  process, which starts at the first answer that it must decide about and ends
  with this process.
  """
  answer = answers_lib.extract(completion, style)
  if answer is None:
    return False
  verdict, undecided = decide_quickly(answer, _references(answers))
  if verdict is None:
    verdict, _ = ask_math_verify(answer, undecided)
  return verdict


def ask_math_verify(answer: str, references: tuple[str, ...]
                    ) -> tuple[bool, bool]:
  """(verdict, whether it ran out of time), of a worker of this process."""
  question = answer, references
  return _worker(os.getpid()).ask([question])[0][question]


@functools.cache
def _worker(process):
  """A fork has another process's number: it shares no worker's pipes."""
  del process
  return workers_lib.Pool(1, _TIMEOUT_S, VERIFYING)


def _references(answers):
  return tuple(answer if isinstance(answer, Reference) else Reference(answer)
               for answer in answers)


def decide_quickly(answer: str, references: Sequence[Reference]
                   ) -> tuple[bool | None, tuple[str, ...]]:
  """(verdict, or None to ask math-verify; the references to ask it about)."""
  undecided = []
  for reference in references:
    verdict = _decide(answer, reference)
    if verdict:
      return True, ()
    if verdict is None:
      undecided.append(reference.text)
  return (None if undecided else False), tuple(undecided)


def _leave_undecided(answer, references):
  """Of a Countdown problem there is nothing that math-verify could compare."""
  if any(reference.numbers is not None for reference in references):
    return decide_quickly(answer, references)
  return None, tuple(reference.text for reference in references)


def _decide(answer, reference):
  if reference.numbers is not None:
    return arithmetic.is_solution(answer, reference.numbers, reference.text)
  try:
    verdict = _compare(answer, reference)
    # Only now, because reading the problem's formulas takes longest.
    is_copy = verdict is not False and reference.problem and (
        copies.is_copied(answer, reference.text, reference.problem))
    return False if is_copy else verdict
  except expressions.TooLarge:  # Only the same spelling is equal to it.
    return False
  except Exception:  # No text from a model may stop its training.
    _LOG.exception('cannot compare %r to %r', answer, reference.text)
    return None


def _compare(answer, reference):
  ours, theirs = (
      answers_lib.canonical(text) for text in (answer, reference.text))
  if not ours:  # a font or a colour without text
    return False
  if ours == theirs:
    return True
  numbers = [answers_lib.number(text) for text in (ours, theirs)]
  if reference[1:3] == (None, None) and None not in numbers and (
      ',' not in ours or ',' not in theirs):
    return _is_close(*numbers)
  node, right = (
      structures.try_read(text, unit or ('dollar' if '\\$' in raw else None))
      for text, unit, raw in ((ours, None, answer),
                              (theirs, reference.unit, reference.text)))
  if reference.problem and node and right:
    node = copies.without_question(node, right, reference.problem)
  if node is None or right is None:
    return None
  return comparison.same(right, node, reference.abs_error)


def _is_close(answer, reference):
  """Integers exactly, other numbers to a relative 1e-6."""
  if any(n == n.to_integral_value() for n in (answer, reference)):
    return answer == reference
  return abs(answer - reference) <= NUMBER_TOLERANCE * abs(reference)


@functools.lru_cache(65536)
def canonical_key(answer: str) -> str:
  """A key equal for equivalent answers, counted by majority votes."""
  text = answers_lib.canonical(answer)
  try:
    node = structures.try_read(text)
    return text if node is None else repr(_key(node))
  except expressions.Unreadable:
    return text
  except Exception:  # No text from a model may stop an evaluation.
    _LOG.exception('cannot read %r', answer)
    return text


def _key(node):
  """A hashable key, the same for equivalent nodes (to 15 digits)."""
  parts = node.parts
  if node.kind == 'named':
    return _key(parts[0])
  if node.kind == 'value':
    return ('value', *map(values.fingerprint, parts))
  if node.kind == 'chain':
    try:
      return _key(nodes.interval(node)[1])
    except expressions.Unreadable:
      return ('chain', node.text, *map(values.fingerprint, parts))
  if node.kind == 'based':
    return ('based', node.text, parts)
  keys = map(_key, parts)
  if node.kind in ('set', 'list', 'union'):
    return ('set', *sorted(keys, key=repr))
  return (node.kind, node.text, *keys)


# {what decides: (the decision without math-verify, the job of the workers)}
_VERIFIERS = {'own': (decide_quickly, VERIFYING),
              'math_verify': (_leave_undecided, MATH_VERIFY)}


class Grader:
  """Grades lists of completions, hard ones in worker processes (`workers`).

  An answer on which a worker spends more than `timeout_s` is wrong. Any
  thread may call `grade`. verifier: 'own', or 'math_verify': that library alone
  decides about the extracted answers, to compare results with other code.
  """

  def __init__(self, workers: int = 2, style: str = 'boxed',
               timeout_s: int = 10, verifier: str = 'own'):
    if verifier not in _VERIFIERS:
      raise ValueError(f'unknown verifier {verifier!r}: use one of '
                       f'{tuple(_VERIFIERS)}')
    if style not in answers_lib.STYLES:
      raise ValueError(f'unknown answer style {style!r}: use one of '
                       f'{answers_lib.STYLES}')
    if workers < 1 or timeout_s < MIN_TIMEOUT_S:
      raise ValueError(
          'workers must be at least 1 and timeout_s at least '
          f'{MIN_TIMEOUT_S}, got {workers} and {timeout_s}')
    self._style = style
    self._decide, job = _VERIFIERS[verifier]
    self._pool = workers_lib.Pool(workers, timeout_s, job)

  def grade(self, items: Iterable[tuple[str, Sequence[str | Reference]]]
            ) -> tuple[list[bool], dict[str, int]]:
    """Grades (completion, answers) pairs.

    Returns:
      The verdicts in the order of `items`, and counts: 'no_answer',
      completions without an answer; 'timeout', completions graded wrong
      because time ran out; 'died', worker deaths.
    """
    pairs = [(answers_lib.extract(text, self._style), _references(answers))
             for text, answers in items]
    occurrences = collections.Counter(pairs)
    verdicts, hard = {}, {}
    for pair in occurrences:
      verdicts[pair], undecided = (False, ()) if pair[0] is None else (
          self._decide(*pair))
      if verdicts[pair] is None:
        hard[pair] = pair[0], undecided
    outcomes, deaths = self._pool.ask(list(dict.fromkeys(hard.values())))
    counts = {'no_answer': sum(answer is None for answer, _ in pairs),
              'timeout': 0, 'died': deaths}
    for pair, question in hard.items():
      verdicts[pair], timed_out = outcomes[question]
      counts['timeout'] += timed_out * occurrences[pair]
    return [verdicts[pair] for pair in pairs], counts

  def close(self) -> None:
    """Ends the workers; a later `grade` starts new ones."""
    self._pool.close()

  def __enter__(self):
    return self

  def __exit__(self, *exception):
    self.close()
