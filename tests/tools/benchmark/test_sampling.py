"""Decode steps of the benchmark, with both forms of the cache."""

import pytest

from tepo_jax import cli
from tepo_jax.tools import workload as workload_lib
from tepo_jax.tools.benchmark import sampling


@pytest.mark.long_after_first
@pytest.mark.parametrize('cache', ['pages', 'rectangle'])
def test_a_decode_step_is_measured(cache):
  """Of 8 slots, each with a sequence of its own that takes up to 96 columns."""
  config = cli.load_config('configs/benchmark.py:tiny')
  with config.unlocked():
    config.rollout.cache = cache
    config.pretrain.update(num_layers=1, vocabulary=512, d_model=32, d_ff=32)
  engine = sampling.Engine(config, workload_lib.of(config))
  seconds, lowered = sampling.decode_step(engine, 8, 96, 2)
  assert len(seconds) == 2 and min(seconds) > 0
  text = lowered.as_text()
  assert ('x64x4x32x' in text) == (cache == 'pages')  # pages of 64 columns
