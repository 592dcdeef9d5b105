"""Models sharded over four virtual devices, and over two processes."""

import dataclasses
import functools
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tepo_jax import errors
from tepo_jax.policy import cache as cache_lib
from tepo_jax.policy import lora
from tepo_jax.policy import padding as padding_lib
from tepo_jax.policy import scoring
from tepo_jax.policy import transformer
from tepo_jax.policy.huggingface import weights
from tepo_jax.runtime import mesh as mesh_lib
from tests import jobs

ROOT = pathlib.Path(__file__).resolve().parents[2]
# tensor=4 and fsdp=4 divide no size by chance: the vocabulary of 61 is padded,
# the 2 key/value heads are copied.
MODEL = transformer.ModelConfig(
    vocab_size=61, d_model=24, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=10, d_ff=40, max_position=64, qkv_bias=True)
SHAPES = [(1, 2, 2), (2, 1, 2), (4, 1, 1), (1, 1, 4), (1, 4, 1)]


@pytest.fixture(scope='module')
def saved(tmp_path_factory):
  """(a folder of MODEL, its parameters)."""
  rng = np.random.RandomState(0)
  params = jax.tree.map(
      lambda leaf: rng.normal(0.1, 0.3, leaf.shape).astype(leaf.dtype),
      transformer.abstract_params(MODEL))
  folder = tmp_path_factory.mktemp('sharded') / 'model'
  weights.save(folder, MODEL, params)
  return folder, params


def _logits(config, params, token_BS, position_BS):
  """Two forwards with a cache, so that its sharding is tested too."""
  params = cache_lib.convert(config, params)
  cache = cache_lib.init_cache(config, len(token_BS), 9, 'float32')
  _, cache = transformer.forward(
      config, params, token_BS[:, :6], position_BS[:, :6], cache)
  hidden_BSD, cache = transformer.forward(
      config, params, token_BS[:, 6:], position_BS[:, 6:], cache)
  return transformer.logits(config, params, hidden_BSD), cache.k[0]


def _real(params):
  """The parameters without the vocabulary's padding."""
  count = MODEL.vocab_size
  return params | {
      'embed': {'embedding': params['embed']['embedding'][:count]},
      'head': {'kernel': params['head']['kernel'][:, :count]}}


def _on(mesh):
  return jax.jit(mesh_lib.on_mesh(mesh, _logits), static_argnums=0)


@pytest.fixture(scope='module')
def rows():
  rng = np.random.RandomState(1)
  position_BS = np.arange(8, dtype=np.int32) - np.array([[0], [1], [3], [5]])
  return (rng.randint(0, 61, (4, 8)).astype(np.int32),
          np.maximum(position_BS, -1).astype(np.int32))


@pytest.mark.long_after_first
@pytest.mark.parametrize('shape', SHAPES)
def test_load_forward_and_save_are_those_of_one_device(
    shape, saved, rows, tmp_path):
  folder, params = saved
  want, _ = jax.jit(_logits, static_argnums=0)(MODEL, params, *rows)
  mesh = mesh_lib.make(dict(zip(mesh_lib.AXES, shape)))
  config, sharded = weights.load(folder, 'float32', mesh)
  assert dataclasses.replace(config, vocab_padding=0, kv_copies=1) == MODEL
  shardings = mesh_lib.shardings(mesh, transformer.logical_axes(config))
  jax.tree.map(_assert_leaf, sharded, params, shardings)
  got, key_BKHT = _on(mesh)(config, sharded, *_put(mesh, rows))
  got = np.asarray(got)[rows[1][:, 6:] >= 0]
  np.testing.assert_allclose(
      got[:, :61], want[rows[1][:, 6:] >= 0], atol=2e-5)
  assert got.shape[1] == 61 + config.vocab_padding
  assert np.all(got[:, 61:] < -1e8)
  # Each device holds a part of the cache: rows by data and fsdp, heads by
  # tensor.
  part = key_BKHT.sharding.shard_shape(key_BKHT.shape)
  assert part[0] * shape[0] * shape[1] == 4
  assert part[1] == max(1, 2 // shape[2])
  weights.save(tmp_path / 'out', config, sharded)
  assert (tmp_path / 'out' / 'model.safetensors').read_bytes() == (
      folder / 'model.safetensors').read_bytes()


def _assert_leaf(got, want, sharding):
  assert got.sharding == sharding
  whole = np.asarray(got)
  corner = tuple(slice(size) for size in want.shape)
  np.testing.assert_array_equal(whole[corner], want)
  assert np.count_nonzero(whole) == np.count_nonzero(want)  # padding is 0


@pytest.mark.long
def test_scores_ignore_the_padding(saved, rows):
  """ℓ, H, KL and the gradient of their sum, for vocabularies of 64 and 61."""
  folder, params = saved
  mesh = mesh_lib.make(dict(data=1, fsdp=1, tensor=4))
  padded, sharded = weights.load(folder, 'float32', mesh)

  def total(config, params, old_params):
    scores = scoring.score(
        config, params, *rows, num_targets=3, temperature=0.7, chunk_size=8,
        old_params=old_params)
    return sum(map(jnp.sum, jax.tree.leaves(scores))), scores

  def evaluate(config, params):
    old_params = jax.tree.map(lambda x: 0.9 * x, params)
    return jax.jit(mesh_lib.on_mesh(mesh, jax.value_and_grad(
        functools.partial(total, config), has_aux=True)))(params, old_params)

  (_, want), want_gradient = evaluate(MODEL, params)
  (_, got), gradient = evaluate(padded, sharded)
  # Of each token: their sum nearly cancels.
  jax.tree.map(functools.partial(
      np.testing.assert_allclose, rtol=1e-5, atol=1e-6), got, want)
  jax.tree.map(functools.partial(np.testing.assert_allclose, atol=2e-5),
               _real(gradient), want_gradient)
  assert not gradient['head']['kernel'][:, 61:].any()


@pytest.mark.long
@pytest.mark.parametrize('shape, remat', [
    ((1, 2, 2), 'none'), ((1, 1, 4), 'mlp'), *(
        pytest.param(*case, marks=pytest.mark.nightly) for case in (
            ((1, 4, 1), 'dots'), ((2, 2, 1), 'full')))])
@pytest.mark.usefixtures('optimized')
def test_gradients_are_those_of_one_device(shape, remat, rows):
  """In float64, of all weights and adapters; 21 tokens, or 14 a row shard,
  divide into no equal parts, and `tensor=4` copies the key heads."""
  model = dataclasses.replace(
      MODEL, qk_norm=True, tie_embeddings=True, vocab_size=64,
      lora=lora.Lora(3, 6.0))
  count = 3 if shape[2] == 4 else 4
  token_BS, position_BS = (x[:count, :7] for x in rows)
  rng = np.random.RandomState(2)
  params = jax.tree.map(
      lambda leaf: rng.normal(0.1, 0.3, leaf.shape).astype(leaf.dtype),
      transformer.abstract_params(model))

  def loss(config, params):
    hidden_BSD, _ = transformer.forward(config, params, token_BS, position_BS)
    return jnp.sum(jnp.where(
        position_BS[..., None] >= 0, jnp.sin(hidden_BSD), 0))

  with jax.enable_x64(True):
    want = jax.device_get(jax.jit(jax.value_and_grad(functools.partial(
        loss, dataclasses.replace(model, dtype='float64'))))(
            jax.tree.map(np.float64, params)))
  mesh = mesh_lib.make(dict(zip(mesh_lib.AXES, shape)))
  cut = dataclasses.replace(
      padding_lib.sharded_over(model, shape[2]), remat=remat)
  assert cut.kv_copies == max(1, shape[2] // 2) and not cut.vocab_padding
  params = jax.device_put(
      params, mesh_lib.shardings(mesh, transformer.logical_axes(cut)))
  compiled = jax.jit(mesh_lib.on_mesh(mesh, jax.value_and_grad(
      functools.partial(loss, cut)))).lower(params).compile()
  # Between the products each device has its own tokens; or, with fsdp, its
  # part of the weights' gradients.
  assert 'reduce-scatter' in compiled.as_text()
  jax.tree.map(lambda a, b: np.testing.assert_allclose(
      a, b, rtol=0, atol=3e-6 * np.abs(b).max()), compiled(params), want)


def test_padding_the_vocabulary_gathers_no_logits(saved, rows):
  """The logits stay sharded by vocabulary."""
  mesh = mesh_lib.make(dict(data=1, fsdp=1, tensor=4))
  config, params = weights.load(saved[0], 'float32', mesh)

  def top(params, token_BS, position_BS):
    hidden_BSD, _ = transformer.forward(config, params, token_BS, position_BS)
    return jax.nn.logsumexp(transformer.logits(config, params, hidden_BSD), -1)

  compiled = jax.jit(mesh_lib.on_mesh(mesh, top)).lower(
      params, *_put(mesh, rows)).compile().as_text()
  gathered = [line for line in compiled.splitlines() if 'all-gather(' in line]
  assert not any('61]' in line or '64]' in line for line in gathered), gathered


@pytest.mark.parametrize('heads,kv_heads,tensor,copies', [
    (28, 4, 4, 1), (28, 4, 2, 1), (28, 4, 7, 7), (32, 8, 16, 2),
    (40, 8, 40, 5), (4, 1, 4, 4)])
def test_each_shard_has_the_key_heads_that_it_needs(
    heads, kv_heads, tensor, copies):
  config = dataclasses.replace(
      MODEL, num_heads=heads, num_kv_heads=kv_heads, vocab_size=100)
  cut = padding_lib.sharded_over(config, tensor)
  assert cut.kv_copies == copies
  assert heads % (kv_heads * copies) == 0 and kv_heads * copies % tensor == 0
  assert (100 + cut.vocab_padding) % tensor == 0 <= cut.vocab_padding < tensor


@pytest.mark.parametrize('vocabulary, tensor, padding', [
    (152064, 1, 0), (152064, 4, 0),  # 297 registers of 128 a shard
    (128256, 8, 768), (128256, 4, 256), (152064, 8, 512),
    (16032, 8, 0),  # 352 more would be 2 %
    (16033, 8, 7), (151643, 1, 0)])
def test_a_shard_has_whole_registers_of_the_vocabulary(
    vocabulary, tensor, padding):
  cut = padding_lib.sharded_over(dataclasses.replace(
      MODEL, num_heads=8, num_kv_heads=8, vocab_size=vocabulary), tensor)
  assert cut.vocab_padding == padding


@pytest.mark.parametrize('shape,parts', [
    ((1, 1, 4), ['tensor=4', '6 query heads', '2 key/value heads']),
    ((1, 4, 1), ['fsdp=4', 'dimension 1 (embed)', '(61, 30)'])])
def test_a_mesh_that_cannot_hold_the_model_is_refused(tmp_path, shape, parts):
  config = dataclasses.replace(MODEL, num_heads=6, d_model=30)
  weights.save(tmp_path / 'in', config, _zeros(config))
  mesh = mesh_lib.make(dict(zip(mesh_lib.AXES, shape)))
  with pytest.raises(errors.InputError) as refusal:
    weights.load(tmp_path / 'in', 'float32', mesh)
  assert all(part in str(refusal.value) for part in parts), refusal.value


def test_each_device_reads_only_its_slice(saved, monkeypatch):
  sizes = []
  original = weights._slice

  def counting(sources, leaf, transpose, index):
    out = original(sources, leaf, transpose, index)
    sizes.append(out.size / np.prod(leaf.shape))
    return out

  monkeypatch.setattr(weights, '_slice', counting)
  mesh = mesh_lib.make(dict(data=2, fsdp=2, tensor=1))
  weights.load(saved[0], 'float32', mesh)
  leaves = len(jax.tree.leaves(saved[1]))
  # Norm scales and biases (6 leaves) are whole, the others halves; replicas
  # over `data` share one reading.
  assert sorted(sizes) == [0.5] * 2 * (leaves - 6) + [1.0] * 6


_PROCESS = """
import sys
from tepo_jax.policy.huggingface import weights
from tepo_jax.runtime import mesh as mesh_lib
from tepo_jax.runtime import processes
processes.initialize()
mesh = mesh_lib.make({'data': 1, 'fsdp': 1, 'tensor': -1})
config, params = weights.load(sys.argv[1], 'float32', mesh)
assert config.vocab_padding == 3
assert not params['embed']['embedding'].is_fully_addressable
weights.save(sys.argv[2], config, params)
print('saved')
"""


@pytest.mark.long
def test_two_processes_load_and_save(saved, tmp_path):
  job = jobs.start(
      2, ['-c', _PROCESS], saved[0], tmp_path / 'out')
  for _, out, err in jobs.finish(job, timeout=120):
    assert out.endswith('saved\n'), err[-2000:]
  assert (tmp_path / 'out' / 'model.safetensors').read_bytes() == (
      saved[0] / 'model.safetensors').read_bytes()


_MEMORY = """
import re, sys, jax, numpy as np
from tepo_jax.policy.huggingface import weights

def resident(name):
  status = open('/proc/self/status').read()
  return int(re.search(name + r':\\s+(\\d+) kB', status)[1]) * 1024

weights.load(sys.argv[1], 'float32')  # a small one: one-time allocations
before = resident('VmRSS')
_, params = weights.load(sys.argv[2], 'float32')
sizes = [leaf.nbytes for leaf in jax.tree.leaves(params)]
print((resident('VmHWM') - before - sum(sizes)) / max(sizes))
"""


@pytest.mark.long
def test_peak_host_memory_of_loading(saved, tmp_path):
  """Besides the parameters, below 1.3 of the largest stacked tensor."""
  if not os.path.exists('/proc/self/status'):
    pytest.skip('needs /proc')
  config = dataclasses.replace(MODEL, d_model=512, d_ff=3072, num_layers=16)
  weights.save(tmp_path / 'in', config, _zeros(config))
  done = subprocess.run(
      [sys.executable, '-c', _MEMORY, saved[0], tmp_path / 'in'], text=True,
      capture_output=True, check=True, env=os.environ | {
          'PYTHONPATH': str(ROOT), 'XLA_FLAGS': ''})

  assert float(done.stdout) < 1.3


def _zeros(config):
  return jax.tree.map(
      lambda leaf: np.zeros(leaf.shape, leaf.dtype),
      transformer.abstract_params(config))


def _put(mesh, rows):
  return mesh_lib.put(rows, mesh_lib.batch_sharding(mesh))
