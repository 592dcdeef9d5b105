"""Grades a completion's final answer: correct or not.

This package imports nothing else of the project, and no jax. Its public names
are these; `workers`, whose processes can be killed, also serves the reward
functions. The README maps the modules and lists the conventions.
"""

from tepo_jax.grading.answers import boxes
from tepo_jax.grading.answers import canonical
from tepo_jax.grading.answers import extract
from tepo_jax.grading.answers import MAX_CHARS
from tepo_jax.grading.answers import STYLES
from tepo_jax.grading.grader import canonical_key
from tepo_jax.grading.grader import grade
from tepo_jax.grading.grader import Grader
from tepo_jax.grading.grader import MIN_TIMEOUT_S
from tepo_jax.grading.grader import Reference

__all__ = ['Grader', 'MAX_CHARS', 'MIN_TIMEOUT_S', 'Reference', 'STYLES', 'boxes',
           'canonical', 'canonical_key', 'extract', 'grade']
