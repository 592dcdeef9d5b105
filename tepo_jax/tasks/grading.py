r"""Is the completion's final answer right? 0 or 1.

Only the extracted answer is judged (`answers`): its spelling and its number
first, then its structure and values (`comparison`); what those
cannot read goes to math-verify (`verifying`), whose parsing may hang, in
processes that can be killed (`pool`). Nothing here imports jax.
"""

import collections
import decimal
import functools
import logging
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from tepo_jax.tasks import answers as answers_lib
from tepo_jax.tasks import comparison
from tepo_jax.tasks import expressions
from tepo_jax.tasks import pool
from tepo_jax.tasks import structures
from tepo_jax.tasks import units
from tepo_jax.tasks import verifying

_LOG = logging.getLogger(__name__)

MIN_TIMEOUT_S = 2
NUMBER_TOLERANCE = decimal.Decimal('1e-6')  # relative, of non-integers

_ALARM_S = 5  # of `grade`


class Gold(NamedTuple):
  """A right answer; its unit and absolute tolerance where the data has them."""
  text: str
  unit: str | None = None
  abs_error: float | None = None


def grade(completion: str, answers: Sequence[str | Gold],
          style: str = 'boxed') -> bool:
  """Whether the completion's answer equals any of `answers`.

  In this process: for the main thread only (math-verify's alarms raise
  elsewhere), and with no more protection than those alarms. Completions of a
  model in training belong to `Grader`.
  """
  answer, golds = answers_lib.extract(completion, style), _golds(answers)
  if answer is None:
    return False
  verdict, undecided = decide_quickly(answer, golds)
  if verdict is None:
    verdict, _ = verifying.verify(answer, undecided, _ALARM_S)
  return verdict


def _golds(answers):
  return tuple(gold if isinstance(gold, Gold) else Gold(gold)
               for gold in answers)


def decide_quickly(answer: str, golds: Sequence[Gold]
                   ) -> tuple[bool | None, tuple[str, ...]]:
  """(True, False, or None where math-verify has to tell; by which golds)."""
  undecided = []
  for gold in golds:
    verdict = _decide(answer, gold)
    if verdict:
      return True, ()
    if verdict is None:
      undecided.append(gold.text)
  return (None if undecided else False), tuple(undecided)


def _decide(answer, gold):
  ours, theirs = (
      answers_lib.canonical(text) for text in (answer, gold.text))
  if ours == theirs:
    return True
  numbers = [answers_lib.number(text) for text in (ours, theirs)]
  if gold.abs_error is None and gold.unit is None and None not in numbers and (
      ',' not in ours or ',' not in theirs):
    if _is_close(*numbers):
      return True
    if numbers[0] == numbers[0].to_integral_value():
      return False  # Not even rounded is it the gold.
  try:
    node, right = read(ours), read(theirs, gold.unit)
    if node is None or right is None:
      return None
    return comparison.same(right, node, gold.abs_error)
  except Exception:  # No text of a model may end its training.
    _LOG.exception('cannot compare %r to %r', answer, gold.text)
    return None


def _is_close(answer, gold):
  """Integers exactly, other numbers to a relative 1e-6."""
  if all(number == number.to_integral_value() for number in (answer, gold)):
    return answer == gold
  return abs(answer - gold) <= NUMBER_TOLERANCE * abs(gold)


@functools.lru_cache(65536)
def read(text: str, unit: str | None = None) -> structures.Node | None:
  """The structure of a canonical text; None where it has none."""
  try:
    return structures.with_unit(
        structures.read(text), unit and units.read(unit))
  except expressions.Unreadable:
    return None


@functools.lru_cache(65536)
def canonical_key(answer: str) -> str:
  """Alike for answers that say the same: what a majority votes on."""
  text = answers_lib.canonical(answer)
  node = read(text)
  try:
    return text if node is None else repr(comparison.key(node))
  except expressions.Unreadable:
    return text


class Grader:
  """Grades lists of completions, the hard ones in workers (`pool.Pool`).

  An answer that takes a worker more than `timeout_s` is wrong. `grade` may be
  called from any thread.
  """

  def __init__(self, workers: int = 2, style: str = 'boxed',
               timeout_s: int = 10):
    if style not in answers_lib.STYLES:
      raise ValueError(f'no answer style {style!r}, only {answers_lib.STYLES}')
    if workers < 1 or not isinstance(timeout_s, int) or (
        timeout_s < MIN_TIMEOUT_S):
      raise ValueError(
          f'need a worker and a whole number of seconds from {MIN_TIMEOUT_S} '
          f'on, got {workers} and {timeout_s!r}')
    self._style = style
    self._pool = pool.Pool(workers, timeout_s)

  def grade(self, items: Iterable[tuple[str, Sequence[str | Gold]]]
            ) -> tuple[list[bool], dict[str, int]]:
    """Verdicts on (completion, answers) pairs, in their order, and counts.

    Returns:
      verdicts, and {'no_answer', 'timeout', 'died'}: completions without an
      answer; completions called wrong since time ran out; worker deaths.
    """
    pairs = [(answers_lib.extract(completion, self._style), _golds(answers))
             for completion, answers in items]
    occurrences = collections.Counter(pairs)
    verdicts, hard = {}, {}
    for pair in occurrences:
      verdict, undecided = (False, ()) if pair[0] is None else (
          decide_quickly(*pair))
      verdicts[pair] = verdict
      if verdict is None:
        hard[pair] = pair[0], undecided
    outcomes, deaths = self._pool.ask(list(dict.fromkeys(hard.values())))
    counts = {'no_answer': sum(answer is None for answer, _ in pairs),
              'timeout': 0, 'died': deaths}
    for pair, question in hard.items():
      verdicts[pair], timed_out = outcomes[question]
      counts['timeout'] += timed_out * occurrences[pair]
    return [verdicts[pair] for pair in pairs], counts

  def close(self) -> None:
    """Ends the workers. `grade` would start new ones."""
    self._pool.close()

  def __enter__(self):
    return self

  def __exit__(self, *exception):
    self.close()
