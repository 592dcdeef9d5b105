"""Grades a completion's final answer: correct or not.

This package imports nothing else of the project, and no jax. Its public names
are these; `answers` extracts and normalises an answer, `comparison` decides
equivalence, `workers` runs what may hang in processes that can be killed.
"""

from tepo_jax.grading.answers import extract
from tepo_jax.grading.answers import STYLES
from tepo_jax.grading.grader import canonical_key
from tepo_jax.grading.grader import grade
from tepo_jax.grading.grader import Grader
from tepo_jax.grading.grader import MAX_TIMEOUT_S
from tepo_jax.grading.grader import MIN_TIMEOUT_S
from tepo_jax.grading.grader import Reference

__all__ = ['Grader', 'MAX_TIMEOUT_S', 'MIN_TIMEOUT_S', 'Reference', 'STYLES',
           'canonical_key', 'extract', 'grade']
