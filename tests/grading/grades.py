"""Grades tables of (reference answer, answer)."""

from collections.abc import Iterable

from tepo_jax import grading


def with_verdict(pairs: Iterable[tuple[str, str]], verdict: bool
                 ) -> list[tuple[str, str]]:
  """The pairs that are graded so."""
  return [(reference, answer) for reference, answer in pairs
          if grading.grade(f'\\boxed{{{answer}}}', [reference]) == verdict]
