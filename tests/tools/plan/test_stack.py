"""The planner's threads have stacks that large compilations do not overflow."""

import os
import resource
import sys

import pytest

from tepo_jax.tools.plan import stack

MIB = 1 << 20


@pytest.mark.parametrize('soft, hard, wanted', [
    (8 * MIB, resource.RLIM_INFINITY, 256 * MIB), (8 * MIB, 64 * MIB, 64 * MIB),
    (64 * MIB, 64 * MIB, None), (256 * MIB, resource.RLIM_INFINITY, None),
    (resource.RLIM_INFINITY, resource.RLIM_INFINITY, None)])
def test_it_starts_again_with_a_larger_stack(monkeypatch, soft, hard, wanted):
  limits, started = [(soft, hard)], []
  monkeypatch.setattr(resource, 'getrlimit', lambda _: limits[-1])
  monkeypatch.setattr(resource, 'setrlimit', lambda _, x: limits.append(x))
  monkeypatch.setattr(os, 'execv', lambda *command: started.append(command))
  stack.ensure()  # not for pytest's command
  assert not started
  command = [sys.executable, '-m', 'tepo_jax.plan', '--help']
  monkeypatch.setattr(sys, 'orig_argv', command)
  stack.ensure()
  assert limits[1:] == ([] if wanted is None else [(wanted, hard)])
  assert started == [(sys.executable, command)] * len(limits[1:])
  stack.ensure()
  assert len(limits[1:]) <= 1  # once
