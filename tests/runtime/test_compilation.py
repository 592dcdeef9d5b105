"""Compilations are counted, and logged after the warm-up."""

import logging
import time

import jax
import numpy as np
import pytest

from tepo_jax.runtime import host

pytestmark = pytest.mark.long


def test_compilations_after_the_warm_up_are_logged(capsys):
  counter = host.CompilationCounter(warm_up=2)

  @jax.jit
  def double(x_N):
    return 2 * x_N

  sizes, counts, logged = (1, 1, 2, 2, 3), [], []
  for size in sizes:
    double(np.zeros(size, np.float32))
    counts.append(counter.pop())
    logged.append(capsys.readouterr().err)
  assert counts == [1, 0, 1, 0, 1]
  warning = 'warning: 1 program compiled after the warm-up: jit(double)\n'
  assert logged == ['', '', warning, '', warning]


def test_compilations_are_named_with_their_first_array_of_integers():
  """Not of int8."""
  events = []

  @jax.jit
  def decode(slots_N, *more):
    return slots_N + sum(x.sum().astype(int) for x in more)

  arrays = [np.zeros(shape, dtype) for shape, dtype in (
      (64, np.int32), ((90, 4000), np.int8), ((64, 1024), np.int32),
      ((90, 4000), np.float32), ((1, 90000), np.int32))]
  with host.compilations_shown(events.append, lambda: events.append('done')):
    decode(*arrays)
    decode(*arrays)  # is compiled already
  assert [e for e in events if e != 'done'] == ['decode 64 × 1,024']
  assert events[-1] == 'done'
  events.clear()
  decode(*(array[:32] for array in arrays))
  assert events.count('decode 32 × 1,024') == 0
  assert not logging.getLogger(host._LOGGER).filters


def test_a_compilation_counts_for_the_program_of_its_name():
  """Another thread may compile too; what was not announced does not count."""
  ended = []

  def other_ends(_):
    if not ended:
      jax.monitoring.record_event_duration_secs(
          host._COMPILED, 999., fun_name='jit(other)')

  with host.compilations_shown(
      started=other_ends, ended=lambda: ended.append('done')):
    jax.monitoring.record_event_duration_secs(host._COMPILED, 999.)
    assert not ended
    jax.jit(lambda x_N: 3 * x_N)(np.zeros(7, np.float32))
  assert ended == ['done']


def test_the_seconds_of_compilation_are_counted_once(monkeypatch):
  """Tracing a program from 6 to 12 s traces another from 8 to 10 s."""
  now = [0.0]
  monkeypatch.setattr(host.time, 'monotonic', lambda: now[0])
  counter = host.CompilationCounter(warm_up=9)
  for end, part, seconds in (
      (10, 'jaxpr_trace', 2), (12, 'jaxpr_trace', 6),
      (13, 'jaxpr_to_mlir_module', 1), (20, 'backend_compile', 7),
      (30, 'something_else', 5)):
    now[0] = end
    jax.monitoring.record_event_duration_secs(
        f'/jax/core/compile/{part}_duration', seconds)
  assert counter.seconds() == 14


def test_the_events_of_compilation_are_those_of_jax():
  counter = host.CompilationCounter(warm_up=9)
  start = time.monotonic()
  jax.jit(lambda x_N: 2 * x_N)(np.zeros(7, np.float32))
  assert 0 < counter.seconds() <= time.monotonic() - start
  assert len(counter._spans) == len(host._PARTS)
