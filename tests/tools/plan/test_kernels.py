"""What splash attention computes, against counts by hand."""

import collections

import pytest

from tepo_jax.tools.plan import cost
from tepo_jax.tools.plan import kernels

_MODULE = '''HloModule m, is_scheduled=true

ENTRY %main (…) -> f32[] {{
{parameters}
  ROOT %{name} = ({results}) custom-call({operands}), {target}={{
"xprof_metadata":"{{}}"
}}}}, backend_config={{"custom_call_config":{{"body":"AA"{estimate}}}}}
}}
'''


def _module(name, arguments, results, estimate=''):
  """A module that calls one kernel; arrays as in 'bf16[4,2048,128]'."""
  return _MODULE.format(
      name=name, parameters='\n'.join(
          f'  %p{i} = {a} parameter({i})' for i, a in enumerate(arguments)),
      operands=', '.join(f'%p{i}' for i in range(len(arguments))),
      results=', '.join(results), estimate=estimate, target=(
          'custom_call_target="tpu_custom_call", '
          'frontend_attributes={kernel_metadata'))


def _splash(phase, length, heads, kv_heads, size, grid, fused=False):
  """A call as jax makes it; grid: of the blocks' places."""
  q, k = (f'bf16[{n},{length},{size}]' for n in (heads, kv_heads))
  results = {'fwd': [q], 'dq': [q], 'dkv': [k, k] + fused * [
      f'bf16[{grid[-1]},{heads},{length},{size}]']}[phase]
  places = f's8[1,{grid[0]},{grid[1]}]'
  return _module(f'splash_mha_{phase}_segmented_no_residuals.1',
                 [places, places, q, k, k], results)


@pytest.mark.parametrize('length, heads, size, blocks, shown', [
    (2048, 4, 128, 4, 10), (10240, 28, 128, 20, 210), (8192, 32, 64, 4, 10)])
def test_flops_of_the_shown_blocks(length, heads, size, blocks, shown):
  """Two products forward, four and three backward, or five if fused."""
  product = 2 * heads * shown * (length // blocks) ** 2 * size
  for phase, fused, products in (
      ('fwd', 0, 2), ('dkv', 0, 4), ('dq', 0, 3), ('dkv', 1, 5)):
    text = _splash(phase, length, heads, 2, size, (blocks, blocks), fused)
    assert cost.of(text).flops == products * product


def test_a_window_shows_fewer_blocks():
  """Eight blocks of queries, each with up to three of keys."""
  text = _splash('fwd', 4096, 2, 2, 128, (8, 3))
  assert cost.of(text).flops == 2 * 2 * 2 * (1 + 2 + 6 * 3) * 512 ** 2 * 128


def test_every_block_reads_its_keys_and_values():
  """Of 8 heads, 10 blocks of 512 each, from 2 key heads; queries and outputs
  pass once, and the blocks' places."""
  text = _splash('fwd', 2048, 8, 2, 128, (4, 4))
  once = 2 * 8 * 2048 * 128 * 2 + 2 * 16
  assert cost.of(text).hbm_bytes == once + 2 * 8 * 10 * 512 * 128 * 2


def test_a_kernel_counts_as_it_estimates():
  """Such as one on a page table, which reads some pages of the pool."""
  estimate = (',"cost_estimate":{"flops":7000,"transcendentals":0,'
              '"bytes_accessed":5000}')
  found = cost.of(_module('ragged_paged_attention.3', ['bf16[9999,9999]'],
                          ['bf16[8,128]'], estimate))
  assert (found.flops, found.hbm_bytes) == (7000, 5000)
  assert not found.uncounted


def test_the_kernel_for_pages_reads_what_is_alive():
  """1,000 columns of a pool of 9,999 pages, for 16 queries of 7 heads; blocks
  of 8 queries."""
  text = _module(
      'ragged_paged_attention_kernel.2',
      ['s32[16]', 's32[16,40]', 'bf16[16,7,128]', 'bf16[9999,64,2,128]'],
      ['bf16[16,7,128]'])
  found = cost.of(text, columns=1000)
  assert found.hbm_bytes == (
      1000 * 2 * 128 * 2 + 2 * 16 * 7 * 128 * 2 + 4 * (16 + 16 * 40))
  assert found.flops == 2 * 2 * 8 * 1000 * 7 * 128
  assert not found.uncounted
  assert cost.of(text).uncounted


@pytest.mark.parametrize('size, named', [(1000, True), (100, False)])
def test_an_unknown_kernel_is_named_if_it_is_large(size, named):
  found = cost.of(_module('my_kernel.2', [f'bf16[{size},{size}]'],
                          ['bf16[8,128]']))
  assert found.flops == 0
  assert found.uncounted == (
      {'my_kernel.2': 2 * size ** 2 + 2 * 8 * 128} if named else {})


def test_calls_of_the_same_name_add_up():
  total, call = cost.Cost(), cost.Cost(uncounted=collections.Counter(sort=5))
  total.add(call)
  total.add(call, 3)
  assert total.uncounted == {'sort': 20}


def test_what_is_no_kernel_has_no_work():
  module = kernels.hlo.parse(_splash('fwd', 512, 1, 1, 128, (1, 1)))
  main = module.computations[module.entry]
  assert kernels.work(main, main.instructions['p0']) is None
