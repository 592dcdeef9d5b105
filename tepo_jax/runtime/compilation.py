"""How often XLA compiles: after the first steps of a run, it should not."""

import sys

import jax

_EVENT = '/jax/core/compile/backend_compile_duration'


class Counter:
  """Counts the programs that are compiled, or read from the cache.

  What is compiled after `warm_up` calls of `pop` is told on stderr: a few
  times it may be a completion longer than any before; again and again it is a
  shape that changes from step to step, and time lost.
  """

  def __init__(self, warm_up: int):
    self._left = warm_up
    self._names = []
    jax.monitoring.register_event_duration_secs_listener(self._listen)

  def pop(self) -> int:
    """How many since the last call."""
    names, self._names = self._names, []
    if names and not self._left:
      print(f'warning: {len(names)} programs compiled after the warm-up: '
            f'{", ".join(sorted(set(names)))}', file=sys.stderr, flush=True)
    self._left = max(0, self._left - 1)
    return len(names)

  def _listen(self, event, *_, fun_name='?', **__):
    if event == _EVENT:
      self._names.append(fun_name)
