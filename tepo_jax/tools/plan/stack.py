"""A large enough stack for the compiler's threads."""

import os
import resource
import sys

_STACK = 1 << 28  # bytes


def ensure() -> None:
  """Starts `python -m tepo_jax.plan` again if its threads would have less than
  _STACK bytes of stack: large updates' compilations overflowed the usual 8 MB.
  """
  if 'tepo_jax.plan' not in sys.orig_argv:
    return
  soft, hard = resource.getrlimit(resource.RLIMIT_STACK)
  wanted = _STACK if hard == resource.RLIM_INFINITY else min(_STACK, hard)
  if soft != resource.RLIM_INFINITY and soft < wanted:
    resource.setrlimit(resource.RLIMIT_STACK, (wanted, hard))
    os.execv(sys.executable, sys.orig_argv)
