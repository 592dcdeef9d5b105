"""How often XLA compiles: after the first steps of a run, it should not."""

import jax

_EVENT = '/jax/core/compile/backend_compile_duration'


class Counter:
  """Counts the programs that are compiled, or read from the cache."""

  def __init__(self):
    self._count = 0
    jax.monitoring.register_event_duration_secs_listener(self._listen)

  def pop(self) -> int:
    """How many since the last call."""
    count, self._count = self._count, 0
    return count

  def _listen(self, event, *_, **__):
    self._count += event == _EVENT
