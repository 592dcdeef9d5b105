"""What only a GPU or TPU can show: launch/test.sh -m gpu, or -m tpu."""

import os

import jax
import numpy as np
import pytest

from tepo_jax import cli
from tepo_jax import selftest
from tepo_jax.runtime import mesh as mesh_lib
from tepo_jax.tools import workload as workload_lib
from tepo_jax.tools.plan import check
from tepo_jax.tools.plan import gpus
from tepo_jax.tools.plan import step

pytestmark = [
    pytest.mark.gpu, pytest.mark.tpu, pytest.mark.skipif(
        'TEPO_TEST_DEVICE' not in os.environ, reason='needs a GPU or TPU')]


def test_it_is_found():
  assert jax.devices()[0].platform == os.environ['TEPO_TEST_DEVICE']


def test_it_passes_the_self_test(capsys):
  failed = selftest.run_checks()
  assert not failed, capsys.readouterr().out


def test_arguments_are_as_planned():
  """The output (-rA) also has the temporaries, which may differ."""
  kind = jax.devices()[0].device_kind
  names = [name for name, gpu in gpus.GPUS.items() if gpu.name == kind]
  if not names:
    pytest.skip(f'no data sheet of {kind} in tools/plan/gpus.py')
  slice_ = gpus.topology(f'{names[0]}x{len(jax.devices())}')
  config = cli.load_config('configs/tiny.py:tepo')
  workload = workload_lib.of(config)
  plan = step.make(config, workload, slice_, config.mesh, brief=True)
  found = check.compare(config, workload, plan, jax.devices())
  print(check.text(found))
  assert found and all(planned.arguments == real.arguments
                       for planned, real in found)


@pytest.mark.parametrize('dtype, limit', [('float32', 1e-5), ('bfloat16', .02)])
def test_products(dtype, limit):
  """Relative error of a product, which TF32 or a bfloat16 pass would break."""
  x = np.random.default_rng(0).normal(size=(512, 512)).astype(dtype)
  mesh = mesh_lib.make({'data': 1, 'fsdp': 1, 'tensor': 1}, jax.devices()[:1])
  found = np.asarray(jax.jit(mesh_lib.on_mesh(
      mesh, lambda a: a @ a.T, dtype=dtype))(x), np.float64)
  wanted = x.astype(np.float64) @ x.T.astype(np.float64)
  assert np.linalg.norm(found - wanted) < limit * np.linalg.norm(wanted)
