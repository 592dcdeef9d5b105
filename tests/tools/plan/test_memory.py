"""The plan's memory of a device, against the memory in a run."""

import collections
import dataclasses
import math

import jax
import pytest

from tepo_jax import cli
from tepo_jax.job import programs as programs_lib
from tepo_jax.job import sampling as sampling_lib
from tepo_jax.job import training
from tepo_jax.policy.huggingface import weights
from tepo_jax.runtime import mesh as mesh_lib
from tepo_jax.tools import workload as workload_lib
from tepo_jax.tools.plan import compiling

pytestmark = [pytest.mark.long, pytest.mark.usefixtures(
    'compilation_folder')]

SLOTS = 12  # no multiple of a prefill's samples: some wait during decoding
CHANGES = {
    'steps': 1, 'eval.period': 0, 'data.limit': 16, 'rollout.prompts': 8,
    'rollout.samples': 4, 'rollout.max_tokens': 8, 'rollout.slots': SLOTS,
    'rollout.dynamic_sampling': 'off', 'train.microbatch_tokens': 256,
    'train.minibatch_prompts': 4,
    'pretrain.num_layers': 2, 'pretrain.worked_steps': 1,
    'pretrain.mixed_steps': 1, 'mesh.tensor': 2}
NAMES = {'to_decode': 'reshard', 'score_and_keep': 'score',
         'train_step': 'update'}


def _held(others):
  """Bytes of all arrays on the first device except `others`."""
  device, others = jax.devices()[0], set(map(id, others))
  return sum(math.prod(array.sharding.shard_shape(array.shape))
             * array.dtype.itemsize for array in jax.live_arrays()
             if device in array.sharding.device_set and id(array) not in others)


class _Watched:
  """A jitted function that records the memory in use at each call."""

  def __init__(self, function, label, found, others):
    self._function, self._label, self._found = function, label, found
    self._others = others

  def __call__(self, *arguments):
    self._found[self._label(*arguments)].append(
        _held(self._others))
    return self._function(*arguments)

  def __getattr__(self, name):
    return getattr(self._function, name)


def _watch(monkeypatch, found):
  """Records memory for every program that is made from now on."""
  make, make_sampling = programs_lib.make, sampling_lib.make
  others = jax.live_arrays()  # those of other tests

  def size(cache):
    return 'x'.join(map(str, cache.position.shape))

  labels = {
      'prefill': lambda weights, tokens, _: 'prefill {}x{}'.format(
          *tokens.shape),
      'insert': lambda cache, prompts, *_: (
          f'insert {size(cache)} of {prompts.position.shape[1]}'),
      'decode': lambda weights, cache, *_: f'decode {size(cache)}'}

  def watched(programs, labels):
    return dataclasses.replace(programs, **{
        field: _Watched(getattr(programs, field), label, found, others)
        for field, label in labels.items()})

  monkeypatch.setattr(programs_lib, 'make', lambda *a: watched(
      make(*a), {field: lambda *_, name=name: name
                 for field, name in NAMES.items()}))
  monkeypatch.setattr(sampling_lib, 'make', lambda *a, **k: watched(
      make_sampling(*a, **k), labels))


@pytest.mark.nightly
def test_memory_in_use_when_a_program_starts(tmp_path, monkeypatch):
  config = cli.load_config('configs/tiny.py:tepo')
  config.update_from_flattened_dict(CHANGES)
  found = collections.defaultdict(list)
  with monkeypatch.context() as patch:
    _watch(patch, found)
    training.train(config, tmp_path / 'run')

  model = weights.model_config(tmp_path / 'run' / 'base_model')
  workload = dataclasses.replace(
      workload_lib.of(config),
      model=programs_lib.execution(model, config.compute))
  predicted = {}
  programs = compiling.make_programs(
      config, workload, mesh_lib.make(config.mesh))
  for program in compiling.step_programs(config, workload, programs, SLOTS):
    if program.name in found:
      memory = program.lower().compile().memory_analysis()
      predicted[program.name] = program.resident + max(
          program.given, memory.argument_size_in_bytes)
  assert predicted.keys() == found.keys()
  assert {name.split()[0] for name in found} == {
      'reshard', 'prefill', 'insert', 'decode', 'score', 'update'}
  # Small arrays come and go: scores of a minibatch, a decoded chunk.
  most = {name: max(held) for name, held in found.items()}
  assert most == pytest.approx(predicted, rel=0.02)
