"""Model folders in a bucket: the same weights, and each byte is read once."""

import hashlib
import shutil

import jax
import numpy as np
import pytest

from tepo_jax import errors
from tepo_jax.job import facts
from tepo_jax.policy import transformer
from tepo_jax.policy.huggingface import weights
from tepo_jax.runtime import files
from tepo_jax.runtime import mesh as mesh_lib
from tests import jobs


@pytest.fixture(name='folder', scope='module')
def _folder(tmp_path_factory):
  """A small model whose matrices have a multiple of four rows."""
  model = transformer.ModelConfig(
      vocab_size=64, d_model=32, num_layers=2, num_heads=4, num_kv_heads=4,
      head_dim=8, d_ff=48, max_position=64, rope_theta=1e4, qk_norm=True,
      tie_embeddings=False)
  folder = tmp_path_factory.mktemp('model') / 'hf'
  weights.save(folder, model, transformer.init(model, jax.random.key(0)))
  return folder


@pytest.fixture(name='remote')
def _remote(folder, bucket_server, tmp_path):
  remote = files.path(f'gs://lab/{tmp_path.name}')
  with files.local_folder(remote) as local:
    shutil.copytree(folder, local, dirs_exist_ok=True)
  bucket_server.log.clear()
  return remote


def _bytes_read(server):
  return sum(size for _, path, size in server.log if '.safetensors' in path
             and 'alt=media' in path)


@pytest.mark.parametrize('shape', [
    None, {'data': 1, 'fsdp': 4, 'tensor': 1},
    {'data': 1, 'fsdp': 2, 'tensor': 2}, {'data': 4, 'fsdp': 1, 'tensor': 1}])
def test_loading_reads_each_byte_once(folder, remote, bucket_server, shape):
  mesh = shape and mesh_lib.make(shape)
  got = weights.load(str(remote), 'float32', mesh)
  want = weights.load(folder, 'float32', mesh)
  assert got[0] == want[0]
  jax.tree.map(np.testing.assert_array_equal, got[1], want[1])
  assert jax.tree.map(lambda x: x.sharding, got[1]) == jax.tree.map(
      lambda x: x.sharding, want[1])
  size = (folder / 'model.safetensors').stat().st_size
  # Vectors are read again by each device that holds a part of them.
  assert size <= _bytes_read(bucket_server) < 1.1 * size


def test_an_export_replaces_all_of_an_interrupted_one(folder, remote):
  files.reserve(remote)
  (remote / 'adapter_config.json').write_text('{}')
  model, params = weights.load(folder, 'float32')
  weights.save(str(remote), model, params)
  assert sorted(path.name for path in remote.iterdir()) == [
      'config.json', 'model.safetensors']


def test_other_weights_in_a_bucket_are_seen(folder, remote):
  before = facts.of_model(str(remote))
  assert facts.of_model(str(remote)) == before
  file = remote / 'model.safetensors'
  data = bytearray(file.read_bytes())
  data[-1] ^= 1
  file.write_bytes(bytes(data))
  assert {name for name, value in facts.of_model(str(remote)).items()
          if value != before[name]} == {'the model\'s weights'}
  (remote / 'config.json').write_text('{}')
  assert facts.of_model(str(remote))[
      'the model\'s configuration and tokenizer'] != before[
          'the model\'s configuration and tokenizer']


_LOAD = """
import hashlib, sys
import jax
from tepo_jax.policy.huggingface import weights
from tepo_jax.runtime import files, mesh, processes
processes.initialize()
read, counted = files.read_range, [0]
def count(path, start, size):
  counted[0] += size
  return read(path, start, size)
files.read_range = count
params = weights.load(sys.argv[1], 'float32', mesh.make(
    {'data': 1, 'fsdp': -1, 'tensor': 1}))[1]
digest = hashlib.sha256()
for leaf in jax.tree.leaves(params):
  digest.update(mesh.to_host(leaf).tobytes())
print(counted[0], digest.hexdigest())
"""


@pytest.mark.long
def test_each_of_two_processes_reads_half(folder, remote, bucket_server):
  outcomes = jobs.finish(jobs.start(
      2, ['-c', _LOAD], str(remote), devices=2, JAX_PLATFORMS='cpu'), 200)
  assert [status for status, *_ in outcomes] == [0, 0], outcomes
  counted, digests = zip(*(out.splitlines()[-1].split()
                           for _, out, _ in outcomes))
  want = hashlib.sha256()
  for leaf in jax.tree.leaves(weights.load(folder, 'float32')[1]):
    want.update(np.asarray(leaf).tobytes())
  assert set(digests) == {want.hexdigest()}
  size = (folder / 'model.safetensors').stat().st_size
  header = 8 + int.from_bytes(
      (folder / 'model.safetensors').read_bytes()[:8], 'little')
  for count in map(int, counted):
    assert (size - header) / 2 <= count - header < 0.6 * (size - header)


def test_saving_writes_the_same_files(folder, remote, tmp_path):
  config, params = weights.load(folder, 'float32')
  for out in (tmp_path / 'out', remote.parent / (remote.name + '_out')):
    weights.save(out, config, params, source=remote)
    assert {entry.name: entry.read_bytes() for entry in out.iterdir()} == {
        entry.name: entry.read_bytes() for entry in (
            tmp_path / 'out').iterdir()}
    with pytest.raises(errors.InputError, match='not empty'):
      weights.save(out, config, params)
