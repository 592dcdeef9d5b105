"""Decode steps of the benchmark, with both forms of the cache."""

import dataclasses
import types

import numpy as np
import pytest

from tepo_jax import cli
from tepo_jax.rollout import engine as engine_lib
from tepo_jax.rollout import shapes as shapes_lib
from tepo_jax.tools import workload as workload_lib
from tepo_jax.tools.benchmark import sampling


@pytest.mark.long
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


@pytest.mark.long
def test_the_bytes_of_a_step_are_compared_with_what_is_alive():
  """Without the kernel a step reads more than that, but no longer the pool."""
  config = cli.load_config('configs/benchmark.py:tiny')
  with config.unlocked():
    config.rollout.cache = 'pages'
    config.pretrain.update(num_layers=1, vocabulary=512, d_model=32, d_ff=32)
  workload = dataclasses.replace(workload_lib.of(config), rounds=1)
  engine = sampling.Engine(config, workload)
  found = {m.name: m for m in sampling._decode_steps(engine, workload)}
  over = [m.value for name, m in found.items()
          if name.endswith('bytes_over_floor')]
  assert len(over) == len(engine.schedule(engine.rows).shapes.slots)
  assert all(1 < each < 20 for each in over)


@pytest.mark.parametrize('count, shards', [(16, 1), (128, 1), (128, 4)])
def test_all_slots_have_pages_of_their_own(count, shards):
  """Of a pool in which not all of them can have the greatest length."""
  shapes = dataclasses.replace(shapes_lib.make(
      slots=128, work=128, prompt_tokens=96, max_tokens=600, chunk=32,
      shards=shards), page=64)
  shapes = dataclasses.replace(
      shapes, pages=shapes.least_pages + 128 // shards * 3)
  columns, = sampling.step_columns(shapes, count)
  assert columns == (shapes.columns[-1] if count == 16 else 2 * 64)
  programs = shapes_lib.SamplingPrograms(*[lambda *_: None] * 5)
  cache = sampling._pages(
      types.SimpleNamespace(programs=programs, chunk=32), shapes,
      engine_lib.idle_slots(count, 64), columns)
  for table_NW in np.split(cache.table_NW[:, :2], shards):
    assert len(np.unique(table_NW)) == table_NW.size
    assert table_NW.max() < shapes.pages
