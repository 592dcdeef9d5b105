"""Checkpoints of a run: Orbax, asynchronous, atomic, bit exact, sharded.

DIR/<step>/state holds the arrays, DIR/<step>/extra a small JSON object. A
step is listed only once it is whole: a process killed while saving leaves the
step before it as the latest.
"""

import contextlib
import gc
import os
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from tepo_jax import errors


class Checkpointer:
  """Saves and restores (state, extra) by step, the last `keep` of them.

  With `read_only` nothing is created, saved or tidied up: for programs that
  look at a run which may still be going on.
  """

  def __init__(self, directory: str | os.PathLike, keep: int = 2,
               read_only: bool = False):
    self._directory = pathlib.Path(directory).absolute()
    if read_only and not self._directory.is_dir():
      raise errors.InputError(f'no checkpoints: {self._directory} is missing')
    options = ocp.CheckpointManagerOptions(
        max_to_keep=None if read_only else keep, read_only=read_only,
        create=not read_only, cleanup_tmp_directories=not read_only,
        save_root_metadata=False)
    try:
      self._manager = ocp.CheckpointManager(
          self._directory, options=options, item_handlers={
              'state': ocp.StandardCheckpointHandler(),
              'extra': ocp.JsonCheckpointHandler()})
    except OSError as error:
      raise errors.InputError(
          f'checkpoint folder {self._directory}: {error}') from error

  def save(self, step: int, state: Any, extra: dict[str, Any]) -> None:
    """Starts saving; returns once `state` may be donated or changed.

    Args:
      step: later than every saved step.
      state: a tree of arrays.
      extra: what JSON can hold.
    """
    started = self._manager.save(step, args=ocp.args.Composite(
        state=ocp.args.StandardSave(state), extra=ocp.args.JsonSave(extra)))
    if not started:
      raise ValueError(f'step {step} does not follow step {self.latest()}')

  def latest(self) -> int | None:
    """The last whole step, None when there is none; waits for a save."""
    self.wait()
    return self._manager.latest_step()

  def restore(self, step: int | None, abstract_state: Any
              ) -> tuple[Any, dict[str, Any]]:
    """The state and extra of `step` (None: the latest).

    Args:
      step: one that was saved and kept.
      abstract_state: tree of jax.ShapeDtypeStruct with shardings; the arrays
        come back in exactly these, whatever the mesh they were saved from.

    Raises:
      InputError: there is no such step, it cannot be read, or its arrays are
        not those of `abstract_state`.
    """
    self.wait()
    steps = sorted(self._manager.all_steps())
    step = steps[-1] if step is None and steps else step
    if step not in steps:
      wanted = '' if step is None else f' of step {step}'
      raise errors.InputError(
          f'no checkpoint{wanted} in {self._directory} (there: {steps})')
    with _no_stray_tracebacks():
      try:
        _check_arrays(self._manager.item_metadata(step).state, abstract_state)
        restored = self._manager.restore(step, args=ocp.args.Composite(
            state=ocp.args.StandardRestore(abstract_state),
            extra=ocp.args.JsonRestore()))
        return restored.state, restored.extra
      except jax.errors.JaxRuntimeError:
        raise  # out of device memory is not the checkpoint's fault
      except Exception as error:  # Orbax and tensorstore raise many kinds
        reason = ' '.join(str(error).split())[:300] or type(error).__name__
    raise errors.InputError(
        f'checkpoint {self._directory}/{step} cannot be restored: {reason}')

  def wait(self) -> None:
    """Until the save that was started is whole; raises its error."""
    self._manager.wait_until_finished()

  def close(self) -> None:
    """Waits, and lets the threads go."""
    self._manager.close()


def _check_arrays(saved, abstract_state) -> None:
  """Refuses another shape or dtype, which Orbax would cast to, by name."""
  if saved is None:
    raise errors.InputError('its list of arrays is missing')
  there, here = _signature(saved.tree), _signature(abstract_state)
  for name in sorted(there.keys() ^ here.keys()):
    where = 'not in it' if name in here else 'in it, not in this run'
    raise errors.InputError(f'{name} is {where}')
  for name, signature in there.items():
    if signature != here[name]:
      raise errors.InputError(
          f'{name} is {signature} in it, {here[name]} in this run')


def _signature(tree) -> dict[str, str]:
  return {
      jax.tree_util.keystr(path, simple=True, separator='/'):
          f'{np.dtype(leaf.dtype).name}{list(leaf.shape)}'
      for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


@contextlib.contextmanager
def _no_stray_tracebacks() -> Iterator[None]:
  """Orbax drops failed coroutines, of which Python prints the tracebacks."""
  hook = sys.unraisablehook
  sys.unraisablehook = lambda _: None
  try:
    yield
  finally:
    gc.collect()
    sys.unraisablehook = hook
