"""The tiny config, smaller still, and its programs on a slice."""

from tepo_jax import cli
from tepo_jax.runtime import mesh as mesh_lib
from tepo_jax.tools import workload as workload_lib
from tepo_jax.tools.plan import compiling


def make_config(name='configs/tiny.py:tepo'):
  """Two minibatches of two prompts, and a model of one layer."""
  config = cli.load_config(name)
  config.rollout.prompts, config.train.minibatch_prompts = 4, 2
  config.pretrain.num_layers = 1
  return config


def make_programs(config, slice_, workload=None):
  """`compiling.make_programs` on all chips of a slice."""
  return compiling.make_programs(
      config, workload or workload_lib.of(config),
      mesh_lib.make(config.mesh, slice_.devices), slice_.chip.hbm_bytes)
