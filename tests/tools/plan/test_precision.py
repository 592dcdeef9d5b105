"""Matrix products of float32 runs are float32, whatever the device."""

import re

import pytest

from tepo_jax.tools import workload as workload_lib
from tepo_jax.tools.plan import chips
from tepo_jax.tools.plan import compiling
from tepo_jax.tools.plan import gpus
from tests.tools.plan import tiny

pytestmark = pytest.mark.usefixtures('optimized')
_EXACT = 'precision = [HIGHEST, HIGHEST]'


def _products(topology, dtype):
  """{program: its products of float32 factors, as StableHLO}."""
  if topology[0] == 'v':
    pytest.importorskip('libtpu')
    slice_ = chips.topology(topology)
  elif not gpus.FOLDER.exists():
    pytest.skip('the GPU compiler is not installed')
  else:
    slice_ = gpus.topology(topology)
  config = tiny.make_config()
  config.compute.dtype = dtype
  programs = tiny.make_programs(config, slice_)
  return {
      program.name.split()[0]: [
          line for line in program.lower().as_text().splitlines()
          if re.search(r'dot_general.*: \(tensor<[\dx]+f32>, tensor<[\dx]+f32>',
                       line)]
      for program in compiling.step_programs(
          config, workload_lib.of(config), programs, 8, brief=True)
      if program.name.split()[0] in ('prefill', 'decode', 'score', 'update')}


@pytest.mark.long
@pytest.mark.parametrize('topology', ['v5e:1x1', 'rtx4090x1'])
def test_float32_is_float32(topology):
  found = _products(topology, 'float32')
  assert found.keys() == {'prefill', 'decode', 'score', 'update'}
  for name, products in found.items():
    assert len(products) >= 2, name  # prefill: keys and values, of one layer
    assert all(_EXACT in line for line in products), name


@pytest.mark.long
def test_bfloat16_asks_for_no_more():
  for products in _products('v5e:1x1', 'bfloat16').values():
    assert not any(_EXACT in line for line in products)
