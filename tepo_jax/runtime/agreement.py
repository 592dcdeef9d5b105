"""Whether all processes of a job have been given the same."""

from collections.abc import Callable, Mapping
import hashlib
import json

import jax
from jax.experimental import multihost_utils
import numpy as np

from tepo_jax import errors


def check(facts: Callable[[], Mapping[str, object]]) -> None:
  """Compares facts, by name, of all processes; all of them must call it.

  Processes that differ in what they compute would train silently to a wrong
  result, or wait for each other for ever. With one process, `facts` is not
  called. Values are compared by their JSON; others, by their repr.

  Raises:
    InputError: on every process; names the facts that differ from the first
      process's, and on which processes.
  """
  if jax.process_count() == 1:
    return
  found, error = {}, None
  try:
    found = facts()
  except errors.InputError as raised:
    error = raised
  kinds = multihost_utils.process_allgather(np.array(
      0 if error is None else 1 + errors.is_unanswered(error)))
  if error is not None:
    raise error
  if kinds.any():
    kind = errors.Unanswered if kinds.max() == 2 else errors.InputError
    raise kind(
        f'{_processes(np.flatnonzero(kinds))} cannot read what this process '
        'can; its own message says what')
  names = sorted(found)
  if differing := _differing(_digests([json.dumps(names)]))[0]:
    raise errors.InputError(
        f'{_processes(differing)}: runs another program than process 0, or '
        'another config file; start all processes with the same')
  rows = _differing(_digests([
      json.dumps(found[name], sort_keys=True, default=repr)
      for name in names]))
  said = [f'{name} ({_processes(differing)})'
          for name, differing in zip(names, rows) if differing]
  if said:
    raise errors.InputError(
        f'the processes of this job differ from process 0: '
        f'{errors.listed(said)}; start all of them with the same')


def _digests(texts):
  """Two 32-bit integers of each text: jax has no larger ones by default."""
  return np.array([np.frombuffer(
      hashlib.blake2b(text.encode(errors='surrogatepass'), digest_size=8
                      ).digest(), np.int32) for text in texts])


def _differing(digests_N2):
  """For each digest, the processes whose own is not the first one's."""
  all_PN2 = np.asarray(multihost_utils.process_allgather(digests_N2))
  differs_PN = (all_PN2 != all_PN2[0]).any(-1)
  return [np.flatnonzero(differs_P).tolist() for differs_P in differs_PN.T]


def _processes(numbers):
  numbers = list(map(str, numbers))
  return f'process{"es" if len(numbers) > 1 else ""} {errors.listed(numbers)}'
