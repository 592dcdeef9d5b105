"""The benchmark's FLOPs, and the measurements of its parts."""

import dataclasses

import jax
import numpy as np
import pytest

from configs import benchmark
from tepo_jax.job import programs as programs_lib
from tepo_jax.learning import packing
from tepo_jax.runtime import mesh as mesh_lib
from tepo_jax.tools import workload as workload_lib
from tepo_jax.tools.benchmark import memory
from tepo_jax.tools.benchmark import updating


def _config():
  c = benchmark.get_config('tiny')
  c.data.max_prompt_tokens = 4
  c.rollout.max_tokens = 12
  c.rollout.prompts = 2
  c.rollout.samples = 2
  c.pretrain.update(d_model=8, num_layers=1, num_heads=2, num_kv_heads=1,
                    head_dim=4, d_ff=16, vocabulary=64)
  c.train.microbatch_tokens = 4 * (4 + 12)
  c.mesh.fsdp = 4
  return c


def test_flops_of_the_tiny_workload():
  """By hand: 3 passes of 2 x (layers x tokens + causal attention + head).

  A layer has q, o 256 x 256, k, v 256 x 64, and three of 256 x 1024: 950,272.
  There are 32 rows of 64 + 128 tokens; the head is 256 x 8192 on 128 of them.
  """
  workload = workload_lib.of(benchmark.get_config('tiny'))
  want = 2 * (4 * 950_272 * 32 * 192 + 4 * 256 * 32 * 192 ** 2
              + 256 * 8192 * 32 * 128)
  assert workload.forward_flops() == want
  assert 3 * want == pytest.approx(199e9, rel=0.01)


@pytest.mark.parametrize('size', ['tiny', 'small'])
def test_a_group_fills_a_microbatch(size):
  config = benchmark.get_config(size)
  pack = programs_lib.make_packer(
      config, mesh_lib.make(config.mesh, jax.devices()[:1]))
  minibatch = pack(workload_lib.of(config).random_batch())
  assert packing.efficiency(minibatch) == 1
  assert minibatch.used == config.rollout.prompts


def test_a_batch_has_the_workloads_lengths():
  workload = dataclasses.replace(
      workload_lib.of(_config()), mean_tokens=5, samples=50)
  batch = workload.random_batch()
  lengths = workload.lengths(100)
  np.testing.assert_array_equal(batch.mask_BT.sum(1), lengths)
  np.testing.assert_array_equal(
      (batch.position_BS >= 0).sum(1), 4 + lengths)
  assert batch.token_BS.max() == 63


def test_flops_of_shared_prompts():
  """By hand: 4 prompts of 63 once, and 32 rows of 1 + 128."""
  workload = workload_lib.of(benchmark.get_config('tiny'))
  want = 2 * (4 * 950_272 * (4 * 63 + 32 * 129) + 4 * 256 * 32 * 192 ** 2
              + 256 * 8192 * 32 * 128)
  assert workload.forward_flops(shared=True) == want


@pytest.mark.long
def test_parts_measure_every_packing():
  config = _config()
  workload = workload_lib.of(config, rounds=1)
  found = {m.name: m.value for part in (
      updating.measure_scoring, updating.measure_update)
           for m in part(config, workload, {})}
  for what in 'scoring', 'update':
    for mode in 'shared', 'packed', 'padded':
      seconds = found[f'{what}/{mode}/seconds']
      assert seconds > 0
      assert found[f'{what}/{mode}/tokens'] == pytest.approx(4 * 16 / seconds)
      # A completion a device: 3 + 1 + 12 of 16 slots, nothing to share.
      assert found[f'{what}/{mode}/slots real'] == 1
    assert found[f'{what}/packed over shared'] > 0
  assert found['update/packed/useful'] == pytest.approx(
      3 * workload.forward_flops() / found['update/packed/seconds'])


@pytest.mark.long
def test_a_step_is_measured():
  config = _config()
  found = list(updating.measure_step(
      config, workload_lib.of(config, rounds=1), {}))
  assert [m.name for m in found] == ['step/ours/seconds']
  assert found[0].value > 0


def test_memory_does_not_grow_with_tokens():
  """The vocabulary is full; the model is narrow, to compile quickly."""
  head = dataclasses.replace(memory._HEAD, d_model=64)
  short, long = (memory.scoring_bytes(head, tokens, 1024)
                 for tokens in (2048, 8192))
  assert long < 1.05 * short
  assert long < memory.scoring_bytes(head, 8192, None) / 4
