"""Compilations are counted, and logged after the warm-up."""

import jax
import numpy as np

from tepo_jax.runtime import host


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
  warning = 'warning: 1 programs compiled after the warm-up: jit(double)\n'
  assert logged == ['', '', warning, '', warning]
