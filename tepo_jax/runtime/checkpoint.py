"""Checkpoints of a run by Orbax: asynchronous, atomic, bit-exact, sharded.

DIR/<step>/state holds the arrays, DIR/<step>/extra a small JSON object with
their digests, DIR/<step>/metrics the score, if there is one. A step is listed
only once it is complete: if a process is killed while saving, the step before
stays the latest. The digests detect later damage. DIR may be in a bucket:
arrays then go there without passing a disk. A run on a CPU waits for each save
(job/trainer._save).
"""

from collections.abc import Callable, Iterator, Mapping
import contextlib
import itertools
import operator
import os
import re
import shutil
import time
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import preservation_policy

from tepo_jax import errors
from tepo_jax.runtime import buckets
from tepo_jax.runtime import digests
from tepo_jax.runtime import disk
from tepo_jax.runtime import files
from tepo_jax.runtime import host
from tepo_jax.runtime import processes

# Arrays that are padded with zeros at their ends, by name ('params/w'): their
# shapes without padding. A checkpoint may hold them padded otherwise.
Unpadded = Mapping[str, tuple[int, ...]]
_NONE: Unpadded = {}
_SCORE = operator.itemgetter('score')
LISTING_SECONDS = 90  # within which all hosts should list a saved step
Check = Callable[[str, dict[str, Any]], None]  # (where, extra)
_NO_CHECK: Check = lambda *_: None

# In tensorstore's errors if a bucket refuses, or does not answer.
_UNREACHABLE = {
    'PERMISSION_DENIED|UNAUTHENTICATED': buckets.BucketError,
    'UNAVAILABLE|DEADLINE_EXCEEDED|RESOURCE_EXHAUSTED: .*HTTP':
        buckets.SilentBucketError}


class DamagedError(errors.InputError):
  """A checkpoint that was damaged after it was saved."""


class Checkpointer:
  """Saves and restores (state, extra) by step.

  It keeps the last `keep` steps, every step that is a multiple of `keep_every`
  (0: none), and the step with the highest score.

  With `read_only` it creates, saves and deletes nothing: for programs that
  read the checkpoints of a run that may still be training.
  """

  def __init__(self, directory: str | os.PathLike, keep: int = 2,
               keep_every: int = 0, read_only: bool = False):
    self._directory = files.path(directory).absolute()
    self._saving, self._failure, self._cause = None, None, None
    self._failed = set()  # steps whose save failed
    if read_only and not self._directory.is_dir():
      found = ('a file, not a folder' if self._directory.exists()
               else 'missing')
      raise errors.InputError(f'no checkpoints: {self._directory} is {found}')
    options = ocp.CheckpointManagerOptions(
        best_fn=_SCORE,  # without it, scores are not saved
        preservation_policy=_kept(keep, keep_every), read_only=read_only,
        create=not read_only, cleanup_tmp_directories=not read_only,
        save_root_metadata=False)
    try:
      self._manager = ocp.CheckpointManager(
          str(self._directory), options=options, item_handlers={
              'state': ocp.StandardCheckpointHandler(),
              'extra': ocp.JsonCheckpointHandler()})
    except buckets.BucketError:
      raise
    except OSError as error:
      raise errors.InputError(
          f'checkpoint folder {self._directory}: {error}') from error

  def save(self, step: int, state: Any, extra: dict[str, Any],
           score: float | None = None, unpadded: Unpadded = _NONE) -> None:
    """Starts saving; returns once `state` may be donated or changed.

    A failed save (a full disk) is logged on stderr and leaves earlier steps
    intact; `close` raises only if the last save failed.

    Args:
      step: later than every saved step. state: a tree of arrays.
      extra: JSON-serialisable values.
      score: the step with the highest score is kept; None: never the highest.
      unpadded: the arrays that are padded, perhaps by nothing.
    """
    self.wait()
    if self._manager.latest_step() is not None and (
        step <= self._manager.latest_step()):
      raise ValueError(f'step {step} does not follow step {self.latest()}')
    self._remove_unfinished()
    if self._failed:  # else what came up late would fail this save too
      with contextlib.suppress(Exception):
        self._manager.check_for_errors()
    self._saving, self._failure, self._cause = step, None, None
    host.trim()  # a copy of the state comes next
    with self._logging_failure():
      self._manager.save(
          step, metrics=None if score is None else {'score': score},
          args=ocp.args.Composite(
              state=ocp.args.StandardSave(state),
              extra=ocp.args.JsonSave({
                  'extra': extra, 'digests': digests.compute(state),
                  'unpadded': {name: list(shape)
                               for name, shape in unpadded.items()}})))

  def latest(self) -> int | None:
    """The last complete step, or None; waits for a save in progress."""
    self.wait()
    return self._manager.latest_step()

  def restore(self, step: int | None, abstract_state: Any,
              unpadded: Unpadded = _NONE, check: Check = _NO_CHECK,
              part: str | None = None) -> tuple[Any, dict[str, Any]]:
    """Reads the state and extra of `step` (None: the latest); all processes do.

    Args:
      abstract_state: tree of jax.ShapeDtypeStruct with shardings, which the
        restored arrays get, whatever mesh they were saved from.
      unpadded: the arrays whose padding may differ from the saved one.
      check: gets 'checkpoint DIR/STEP' and extra first; may raise InputError.
      part: field of the state that is read and returned in its place.

    Raises:
      InputError: no such step, other arrays, or `check` refused it.
      DamagedError: the checkpoint is damaged.
      RunError: a disk refuses to read it.
    """
    self.wait()
    steps = sorted(self._manager.all_steps())
    step = steps[-1] if step is None and steps else step
    if processes.any_of(step not in steps):
      wanted = '' if step is None else f' of step {step}'
      raise errors.InputError(
          f'no checkpoint{wanted} in {self._directory} (it has: {steps})')
    where, damage, refused = f'checkpoint {self._directory}/{step}', None, False
    # The manager's own restore lets all processes wait for each other at its
    # end, which one with an error does not reach.
    folder = self._manager.directory / str(step)
    try:  # Orbax and tensorstore raise many kinds
      # First what raises OSErrors: those of the metadata Orbax only logs.
      record = ocp.JsonCheckpointHandler().restore(folder / 'extra')
      saved = self._manager.item_metadata(step).state
      if saved is None:
        raise ValueError('its list of arrays is missing')
      extra, found = record['extra'], record['digests']
      check(where, extra)
      _check_arrays(where, saved.tree, abstract_state, unpadded,
                    record['unpadded'])
      wanted = abstract_state if part is None else {
          part: getattr(abstract_state, part)}
      state = ocp.PyTreeCheckpointHandler().restore(
          folder / 'state', args=ocp.args.PyTreeRestore(
              wanted, partial_restore=part is not None,
              restore_args=jax.tree.map(lambda x: ocp.ArrayRestoreArgs(
                  sharding=x.sharding, global_shape=x.shape, dtype=x.dtype,
                  strict=not unpadded), wanted)))
    except (errors.InputError, jax.errors.JaxRuntimeError, MemoryError):
      raise  # running out of memory is no damage
    except Exception as error:
      damage, refused = _damage(where, error), disk.refused(error)
    # Each process reads its own part, and `digests` is a program of all.
    if damage and not processes.is_first():
      errors.note(f'process {jax.process_index()}: {damage}')
    if processes.any_of(damage is not None):
      kind = errors.RunError if processes.any_of(refused) else DamagedError
      raise kind(damage or f'{where}: another process cannot read it')
    _check_digests(where, saved.tree, state, found)
    return state if part is None else state[part], extra

  def restore_last_good(
      self, abstract_state: Any, unpadded: Unpadded = _NONE,
      check: Check = _NO_CHECK) -> tuple[int, Any, dict[str, Any]] | None:
    """Reads (step, state, extra) of the last undamaged step, if any was saved;
    all processes of a job must call it, and get the same step.

    Later, damaged steps are named on stderr and moved to DIR/damaged_<step>, so
    that the run can save these steps again.

    Raises:
      InputError: every step is damaged, or not seen by all; or as `restore`.
    """
    while (step := self._latest_of_all()) is not None:
      try:
        return step, *self.restore(step, abstract_state, unpadded, check)
      except DamagedError as error:
        if processes.any_of(len(self._manager.all_steps()) == 1):
          raise
        processes.on_first(self._set_aside, step, str(error))
      self._manager.reload()
    return None

  def _latest_of_all(self):
    """The latest step that any process lists, once all do: hosts may hold the
    listing of a shared folder back for a while."""
    deadline = time.monotonic() + LISTING_SECONDS
    while True:
      step = processes.greatest(self.latest() or 0)
      if not processes.any_of(step not in (0, *self._manager.all_steps())):
        return step or None
      if processes.any_of(time.monotonic() > deadline):
        raise errors.InputError(
            f'{self._directory}: not all processes of this job see the '
            f'checkpoint of step {step}; do all hosts share this folder?')
      time.sleep(1)
      self._manager.reload()

  def _set_aside(self, step, damage):
    errors.note(f'warning: {damage}; using the checkpoint before it')
    paths = (self._directory / f'damaged_{step}{suffix}' for suffix in
             itertools.chain([''], map('.{}'.format, itertools.count(1))))
    (self._directory / str(step)).rename(
        next(path for path in paths if not path.exists()))

  def wait(self) -> None:
    """Waits until the save in progress is complete or has failed, and returns
    the memory that it used to the system."""
    saving = self._manager.is_saving_in_progress()
    with self._logging_failure():
      self._manager.wait_until_finished()
    if saving:
      host.settle()

  def describe_latest(self) -> str:
    """'the last checkpoint is of step 3', for messages."""
    latest = self.latest()
    return ('there is no checkpoint yet' if latest is None else
            f'the last checkpoint is of step {latest}')

  def close(self) -> None:
    """Waits for the save in progress and ends Orbax's threads.

    Raises:
      RunError: the last save failed.
    """
    latest = self.describe_latest()
    try:
      self._manager.close()
    except Exception as error:  # Orbax and tensorstore raise many kinds
      # Mostly what else a failed save met, such as its removed folder.
      self._failure = self._failure or self._described(error)
      self._cause = self._cause or error
      with contextlib.suppress(Exception):
        self._manager.close()  # raises each error once; ends the rest
    self._remove_unfinished()
    if self._failure:
      raise errors.RunError(f'{self._failure}; {latest}') from self._cause

  def _described(self, error):
    reason = _reason(error)
    return (f'checkpoint {self._directory}/{self._saving} could not be saved: '
            f'{reason}{disk.free(reason, self._directory)}')

  @contextlib.contextmanager
  def _logging_failure(self) -> Iterator[None]:
    """Logs a warning instead of what a save raises, here or in its thread."""
    try:
      yield
    except Exception as error:  # Orbax and tensorstore raise many kinds
      self._failure, self._cause = self._described(error), error
      errors.note(f'warning: {self._failure}')
      self._failed.add(self._saving)
      self._remove_unfinished()

  def _remove_unfinished(self):
    """Deletes what failed saves have left. Orbax's threads may still write
    there, without anything to wait for: called again later."""
    for step in self._failed:
      with contextlib.suppress(OSError):
        self._remove_step(step)

  def _remove_step(self, step):
    if files.is_remote(self._directory):
      if step not in steps(self._directory):
        (self._directory / str(step)).rmtree(missing_ok=True)
      return
    for left in self._directory.glob(f'{step}.orbax-checkpoint-tmp*'):
      shutil.rmtree(left, ignore_errors=True)


def steps(directory: str | os.PathLike) -> list[int]:
  """The complete steps in a folder, ascending; none if it is missing."""
  directory = files.path(directory)
  return sorted(
      int(entry.name) for entry in
      (directory.iterdir() if directory.is_dir() else ())
      if re.fullmatch('[0-9]{1,18}', entry.name)
      and ocp.utils.is_checkpoint_finalized(str(entry)))


def _kept(keep, keep_every):
  """The policy that decides which steps the next save keeps."""
  policies = [preservation_policy.LatestN(keep), preservation_policy.BestN(
      get_metric_fn=_SCORE, n=1, keep_checkpoints_without_metrics=False)]
  if keep_every:
    policies.append(preservation_policy.EveryNSteps(keep_every))
  return preservation_policy.AnyPreservationPolicy(policies)


def _check_arrays(where, saved, abstract_state, unpadded, was_unpadded) -> None:
  """Refuses arrays of other names, shapes or dtypes; Orbax would cast."""
  there, here = digests.named(saved), digests.named(abstract_state)
  for name in sorted(there.keys() ^ here.keys()):
    but = 'not in it' if name in here else 'in it, but not in this run'
    raise errors.InputError(f'{where}: {name} is {but}')
  for name, array in there.items():
    there_is = _signature(array.dtype, was_unpadded.get(name, array.shape))
    here_is = _signature(
        here[name].dtype, unpadded.get(name, here[name].shape))
    if there_is != here_is:
      raise errors.InputError(
          f'{where}: {name} is {there_is} in it, {here_is} in this run')


def _check_digests(where, saved, state, found):
  shapes = {name: array.shape for name, array in digests.named(saved).items()}
  for name, digest in digests.compute(state, shapes).items():
    if found.get(name) != digest:
      raise DamagedError(f'{where}: {name} differs from what was saved')


def _signature(dtype, shape) -> str:
  return f'{np.dtype(dtype).name}{list(shape)}'


def _damage(where, error):
  """What an error says of the files; raises if it says nothing of them."""
  reason = _reason(error)
  for pattern, kind in _UNREACHABLE.items():
    if re.search(pattern, str(error)):
      raise kind(f'{where}: {reason}') from error
  what = 'read' if disk.refused(error) else 'restored'
  return f'{where} cannot be {what}: {reason}'


def _reason(error):
  # Orbax prints the settings of a driver, and keeps what it met as the cause.
  text, settings, _ = errors.one_line(error).partition(
      '. See full TensorStore details')
  if settings and error.__cause__:
    text += f': {errors.one_line(error.__cause__)}'
  return text[:500] or type(error).__name__
