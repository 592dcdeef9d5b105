"""TEPO: token-level policy optimisation of language models in JAX."""

import sys

__version__ = '0.2.0'

if sys.argv[:1] == ['-m']:
  # `python -m tepo_jax.PROGRAM`: the program's imports, which follow, take
  # seconds, and an exception raised in them prints a traceback.
  from tepo_jax.runtime import interrupts
  interrupts.install()
