"""Updates do not depend on packing, mesh or padding; π = π_old is exact."""

import dataclasses
import functools
import re

import jax
from jax import numpy as jnp
import numpy as np
import optax
import pytest
import torch

from configs import tiny
from tepo_jax.job import base_model
from tepo_jax.job import programs as programs_lib
from tepo_jax.learning import objective
from tepo_jax.learning import optimizer as optimizer_lib
from tepo_jax.learning import packing
from tepo_jax.learning import update
from tepo_jax.policy import transformer
from tepo_jax.runtime import mesh as mesh_lib

MODEL = transformer.ModelConfig(
    vocab_size=128, d_model=32, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=8, d_ff=48, max_position=64, tie_embeddings=True, qkv_bias=True)
B, P, T = 8, 4, 7
LENGTHS = np.array([7, 2, 5, 1, 6, 7, 3, 4])
PROMPTS = np.array([1, 4, 2, 3, 4, 2, 3, 1])
ONE_DEVICE = dict(data=1, fsdp=1, tensor=1)
# Compiling dominates these tests; those of exactness do not use this.
QUICK = {'xla_backend_optimization_level': 0,
         'xla_cpu_use_fusion_emitters': False}
# All statistics of the whole minibatch in one row: Clip-Cov's drop, KL-Cov's
# top-k, STEER's maximum. The shares select a few of 35 tokens.
STATISTICAL = dict(
    weight='sequence', aggregate='seq_mean_token_mean',
    clip=dict(name='covariance', low=0.2, high=0.28, fraction=0.2,
              band=(0.05, 9.0)),
    shape=dict(name='steer', floor=0.5),
    reg=dict(penalty='kl_abs', region='top_covariance', coef=0.7,
             fraction=0.2))


def _config(remat, max_grad_norm):
  c = tiny.get_config('tepo')
  c.train.chunk_size = 16
  c.compute.remat = remat
  c.rollout.temperature = 0.9
  c.method.reg.coef = 0.5  # large, so that an error in the KL shows
  c.optimizer.epsilon = 1e-2  # Adam must not magnify rounding
  c.optimizer.max_grad_norm = max_grad_norm
  c.optimizer.learning_rate = 1e-2
  return c


@functools.cache
def _weights():
  """π and π_old: host arrays, far enough apart for clips and regions."""
  init = jax.jit(functools.partial(transformer.init, MODEL),
                 compiler_options=QUICK)
  one, two = (init(jax.random.key(seed)) for seed in (0, 1))
  return (jax.tree.map(lambda a: 4 * np.asarray(a), one),
          jax.tree.map(lambda a, b: np.asarray(3.9 * a + 0.4 * b), one, two))


def _batch(width=P, length=T, rows=B, seed=0):
  """B completions as the host has them; `rows` beyond them are filler."""
  rng = np.random.default_rng(seed)
  token_BS = rng.integers(0, 40, (B, P + T))
  position_BS = np.full((B, P + T), -1)
  for row in range(B):
    position_BS[row, P - PROMPTS[row]:P + LENGTHS[row]] = np.arange(
        PROMPTS[row] + LENGTHS[row])
    twin = np.flatnonzero(PROMPTS == PROMPTS[row])[-1]  # pairs share a prompt
    token_BS[row, :P] = token_BS[twin, :P]
    token_BS[row, P - PROMPTS[row]:P][:2] = (3, 5)[:PROMPTS[row]]  # all share
  mask_BT = np.arange(T) < LENGTHS[:, None]
  wider = ((0, rows - B), (width - P, length - T))
  fill = functools.partial(np.pad, pad_width=((0, rows - B), (0, length - T)))
  zeros_BT = np.zeros((rows, length), np.float32)
  return packing.Batch(
      token_BS=np.pad(token_BS, wider).astype(np.int32),
      position_BS=np.pad(position_BS, wider,
                         constant_values=-1).astype(np.int32),
      mask_BT=fill(mask_BT.astype(np.float32)),
      advantage_B=np.pad(rng.normal(size=B), (0, rows - B)).astype(np.float32),
      old_logp_BT=zeros_BT, old_entropy_BT=zeros_BT, sampler_logp_BT=zeros_BT)


def _mesh(shape):
  count = np.prod(list(shape.values()))
  return mesh_lib.make(shape, jax.devices()[:count])


def _put(programs, batch):
  return jax.device_put(programs.pack(batch), programs.minibatch_sharding)


def _scored(programs, params, batch, options):
  """The minibatch with ℓ° and H° of `params`, on the devices."""
  minibatch = _put(programs, batch)
  params = jax.device_put(params, programs.state_sharding.params)
  logp_BT, entropy_BT = programs.score.lower(
      params, minibatch).compile(options)(params, minibatch)
  return minibatch.replace(old_logp_BT=logp_BT, old_entropy_BT=entropy_BT)


def _packer(mode, row_tokens, microbatch_tokens, shards=1):
  """'padded' puts every sequence in its own row."""
  if mode == 'shared':
    return packing.SharedPacker(row_tokens, microbatch_tokens, 1.2, shards)
  return packing.Packer(
      row_tokens, microbatch_tokens, shards, padded=mode == 'padded')


def _programs(mesh, mode='padded', row_tokens=P + T, microbatch_tokens=10**3,
              remat='none', max_grad_norm=1.0):
  """The programs of a run, with the packer of the arguments."""
  config = _config(remat, max_grad_norm)
  return dataclasses.replace(
      programs_lib.make(
          config, programs_lib.prepare_model(MODEL, config, mesh), mesh),
      pack=_packer(mode, row_tokens, microbatch_tokens,
                   mesh_lib.batch_shards(mesh)))


@functools.cache
def _compiled(shape=tuple(ONE_DEVICE.items()), rows=B, width=P, length=T,
              weighted=False, **settings):
  """The programs, and train_step compiled for one shape and mesh, without or
  with behaviour weights."""
  programs = _programs(_mesh(dict(shape)), **settings)
  state = programs_lib.abstract_state(programs)
  batch = _batch(width, length, rows)
  batch = _put(programs, batch.replace(
      behaviour_BT=batch.mask_BT if weighted else None))
  compiled = programs.train_step.lower(
      state, batch, jax.random.key(0),
      programs.old_policy.eval_shape(state.params, batch)).compile(QUICK)
  return programs, compiled


def _state(programs):
  return programs.init_state(jax.device_put(
      _weights()[0], programs.state_sharding.params))


def _old_policy(programs, params, minibatch):
  params = jax.device_put(params, programs.state_sharding.params)
  return programs.old_policy.lower(
      params, minibatch).compile(QUICK)(params, minibatch)


def _step(batch, **arguments):
  """(state, metrics) after an off-policy TEPO update of π."""
  programs, train_step = _compiled(**arguments)
  state = _state(programs)
  minibatch = _put(programs, batch)
  old = _old_policy(programs, _weights()[1], minibatch)
  after, metrics = train_step(
      state, minibatch, jax.random.key(0), old)
  assert all(x.is_deleted() for x in jax.tree.leaves(state))  # donated
  assert not any(x.is_deleted() for x in jax.tree.leaves(old))
  return mesh_lib.to_host(after), mesh_lib.to_host(metrics)


@functools.cache
def _off_policy_batch():
  """ℓ° and H° are π_old's; host arrays."""
  programs, _ = _compiled()
  scored = mesh_lib.to_host(_scored(
      programs, _weights()[1], _batch(), QUICK))
  return _batch().replace(old_logp_BT=scored.old_logp_BT,
                          old_entropy_BT=scored.old_entropy_BT)


@functools.cache
def _base():
  return _step(_off_policy_batch())


def _close(got, want, **tolerance):
  jax.tree.map(functools.partial(np.testing.assert_allclose, **tolerance),
               got, want)


def _assert_same_update(got, want=None):
  """Parameters, moments and metrics, up to fp32 rounding of the sums."""
  want = want or _base()
  _close(got[0].params, want[0].params, rtol=1e-6, atol=3e-7)
  scale = max(np.abs(x).max() for x in jax.tree.leaves(_moment(want[0])))
  _close(_moment(got[0]), _moment(want[0]), rtol=0, atol=2e-6 * scale)
  _close(got[1], want[1], rtol=2e-5, atol=1e-6)


def _moment(state):
  """The first moment of Adam: after one step (1 − β₁) x the gradient."""
  return optax.tree_utils.tree_get(state.opt_state, 'mu')


def test_the_case_is_worth_testing():
  """Clipped and free tokens, inside and outside of the KL region."""
  after, metrics = _base()
  assert 0 < metrics['region_share'] < 1
  assert 0 < metrics['clip_fraction_low'] + metrics['clip_fraction_high'] < 1
  assert metrics['weight_min'] < 0.9 and metrics['weight_max'] > 1.1
  assert metrics['kl_full'] > 0.02
  assert metrics['grad_norm'] > 0.1 and metrics['skipped'] == 0
  assert after.step == 1
  moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), after.params,
                       _weights()[0])
  assert min(jax.tree.leaves(moved)) > 1e-4


# 55 tokens: 3 rows of 24 in 3, 2 and 1 microbatches; 6 rows of 11 in 2; one
# sequence a row in 4; rows of whole vector registers.
# Prompts shared: 49 tokens, less what they share in a bin, in 3 bins of 24, and
# in 2 of 30.
PACKINGS = [('segments', 24, 24), ('segments', 24, 50), ('segments', 24, 100),
            ('segments', 11, 33), ('padded', 11, 24), ('segments', 32, 32),
            ('shared', 11, 24), ('shared', 24, 30)]


@pytest.mark.long_after_first
@pytest.mark.parametrize('mode, row_tokens, microbatch_tokens', PACKINGS)
def test_packing_changes_nothing(mode, row_tokens, microbatch_tokens):
  """Against one microbatch of padded rows."""
  arguments = dict(mode=mode, row_tokens=row_tokens,
                   microbatch_tokens=microbatch_tokens)
  minibatch = _compiled(**arguments)[0].pack(_batch())
  assert minibatch.used > 1 or microbatch_tokens == 100
  _assert_same_update(_step(_off_policy_batch(), **arguments))


@pytest.mark.long_after_first
@pytest.mark.parametrize('shape, mode', [
    (dict(data=1, fsdp=2, tensor=2), 'segments'),
    (dict(data=1, fsdp=2, tensor=2), 'shared'),
    (dict(data=1, fsdp=1, tensor=4), 'segments'),  # key heads are copied
    *(pytest.param(*case, marks=pytest.mark.nightly) for case in (
        (dict(data=4, fsdp=1, tensor=1), 'padded'),
        (dict(data=1, fsdp=4, tensor=1), 'segments')))])
def test_the_mesh_changes_nothing(shape, mode):
  """Against one device; parameters and moments are sharded indeed."""
  arguments = dict(shape=tuple(shape.items()), mode=mode,
                   microbatch_tokens=44)
  _assert_same_update(_step(_off_policy_batch(), **arguments))
  programs, compiled = _compiled(**arguments)
  gathered = re.findall(r'= \w+\[([\d,]*)\]\S* all-gather', compiled.as_text())
  if shape['tensor'] > 1:  # no logits
    assert not any(dims.endswith(f',{MODEL.vocab_size}') for dims in gathered)
  state = _state(programs)
  for params in state.params, _moment(state):
    kernel = params['layers']['gate']['kernel']
    assert kernel.size == kernel.addressable_shards[0].data.size * (
        shape['fsdp'] * shape['tensor'])


def test_order_and_padding_change_nothing():
  """Another order; filler rows, wider prompts and longer completions."""
  batch = _off_policy_batch()
  order = np.array([3, 1, 7, 0, 2, 6, 5, 4])
  _assert_same_update(_step(jax.tree.map(lambda x: x[order], batch)))
  wide = _batch(P + 2, T + 3, B + 4)
  fill = functools.partial(np.pad, pad_width=((0, 4), (0, 3)))
  wide = wide.replace(old_logp_BT=fill(batch.old_logp_BT),
                      old_entropy_BT=fill(batch.old_entropy_BT))
  order = np.random.default_rng(0).permutation(B + 4)
  _assert_same_update(_step(jax.tree.map(lambda x: x[order], wide),
                            rows=B + 4, width=P + 2, length=T + 3))


@pytest.mark.long
def test_behaviour_weights_are_those_of_their_completions():
  """In several microbatches and on a mesh as in one microbatch."""
  rng = np.random.default_rng(3)
  batch = _off_policy_batch().replace(
      behaviour_BT=rng.uniform(0.1, 2, (B, T)).astype(np.float32))
  want = _step(batch, weighted=True)
  assert abs(want[1]['loss'] - _base()[1]['loss']) > 1e-3
  _assert_same_update(_step(
      batch, weighted=True, shape=tuple(dict(data=1, fsdp=4, tensor=1).items()),
      mode='segments', microbatch_tokens=44), want)


def test_masked_tokens_may_hold_anything():
  batch = _off_policy_batch()
  hidden_BT = batch.mask_BT == 0
  token_BS = np.where(batch.position_BS < 0, 39, batch.token_BS)
  batch = batch.replace(
      token_BS=token_BS.astype(np.int32),
      old_logp_BT=np.where(hidden_BT, np.nan, batch.old_logp_BT),
      old_entropy_BT=np.where(hidden_BT, np.inf, batch.old_entropy_BT))
  jax.tree.map(np.testing.assert_array_equal, _step(batch), _base())


def test_gradient_that_is_not_finite_is_skipped():
  """Parameters, moments and step are unchanged to the bit.

  All advantages are no numbers: a clipped completion has no gradient.
  """
  batch = _off_policy_batch()
  after, metrics = _step(batch.replace(
      advantage_B=np.full_like(batch.advantage_B, np.nan)))
  assert metrics['skipped'] == 1 and not np.isfinite(metrics['grad_norm'])
  jax.tree.map(np.testing.assert_array_equal, after, mesh_lib.to_host(
      _state(_compiled()[0])))


def test_nan_in_a_filler_row_changes_nothing():
  batch = _off_policy_batch()
  mask_BT, advantage_B = batch.mask_BT.copy(), batch.advantage_B.copy()
  mask_BT[2] = 0
  zero = _step(batch.replace(mask_BT=mask_BT, advantage_B=advantage_B))
  advantage_B[2] = np.nan
  nan = _step(batch.replace(mask_BT=mask_BT, advantage_B=advantage_B))
  assert nan[1]['skipped'] == 0
  jax.tree.map(np.testing.assert_array_equal, nan, zero)


@pytest.mark.long
def test_minibatch_statistics_of_microbatches():
  """Clip-Cov's draw, KL-Cov's top-k, STEER's maximum do not depend on the
  microbatches."""
  params, _ = _weights()
  policy_loss = objective.make_policy_loss(STATISTICAL)
  assert policy_loss.whole_minibatch
  optimizer = optimizer_lib.make(1e-2, beta1=0.9, beta2=0.999, epsilon=1e-2,
                                 weight_decay=0.0, max_grad_norm=1.0)
  outcomes = []
  scorer = update.Scorer(MODEL, temperature=0.9, chunk_size=16, shards=1)
  for arguments in PACKINGS[0], PACKINGS[2], PACKINGS[4]:
    pack = _packer(*arguments)
    state = update.TrainState(jnp.int32(0), params, optimizer.init(params))
    after, metrics = jax.jit(
        functools.partial(update.train_step, scorer, policy_loss, optimizer),
        compiler_options=QUICK)(
            state, pack(_off_policy_batch()), jax.random.key(2))
    outcomes.append((mesh_lib.to_host(after), mesh_lib.to_host(metrics)))
  metrics = outcomes[0][1]
  tokens = LENGTHS.sum()
  assert metrics['region_share'] * tokens == pytest.approx(tokens // 5)
  assert 1 < metrics['clip_fraction_covariance'] * tokens <= tokens // 5 + 0.1
  for other in outcomes[1:]:
    _assert_same_update(other, outcomes[0])


@functools.cache
def _pull_back():
  """Gradient of Σ weight · log π(token) by a plain softmax, not scoring.py."""
  def total(params, weight_BS, token_BS, position_BS, temperature):
    hidden_BSD, _ = transformer.forward(MODEL, params, token_BS, position_BS)
    z_BSV = transformer.logits(MODEL, params, hidden_BSD) / temperature
    z_BS = jnp.take_along_axis(z_BSV[:, :-1], token_BS[:, 1:, None], -1)[..., 0]
    logp_BS = z_BS - jax.nn.logsumexp(z_BSV[:, :-1], -1)
    return jnp.sum(weight_BS * logp_BS)
  return jax.jit(jax.value_and_grad(total), compiler_options=QUICK)


@pytest.mark.usefixtures('optimized')  # "exactly" is XLA's doing
@pytest.mark.long_after_first
@pytest.mark.parametrize('mode, microbatch_tokens, remat, mesh', [
    ('segments', 24, 'dots', (2, 2)), ('shared', 24, 'full', (1, 1)), *(
        pytest.param(*case, marks=pytest.mark.nightly) for case in (
            ('segments', 24, 'none', (1, 1)), ('padded', 100, 'none', (1, 1)),
            ('padded', 24, 'dots', (1, 1)), ('segments', 50, 'full', (1, 1)),
            ('segments', 24, 'mlp', (1, 4)),
            ('segments', 24, 'full', (4, 1))))])
def test_first_update_is_reinforce_exactly(
    mode, microbatch_tokens, remat, mesh):
  """π = π_old: w = 1, ΔH = 0, M = 0, KL = 0 to the last bit (reading 2).

  As in a run: the programs of `programs.make`, fully optimised, the same
  shapes. The gradient is that of −Σ A ℓ / N. `mesh`: fsdp, tensor.
  """
  programs = _programs(
      _mesh(dict(zip(mesh_lib.AXES, (1, *mesh)))), mode=mode,
      row_tokens=24, remat=remat, microbatch_tokens=microbatch_tokens,
      max_grad_norm=1e9)
  params = _weights()[0]
  batch = _batch()
  scored = _scored(programs, params, batch, {})
  assert np.abs(np.asarray(scored.old_logp_BT)[batch.mask_BT > 0]).min() > 0
  state = _state(programs)
  old = programs.old_policy(state.params, scored)
  after, metrics = mesh_lib.to_host(programs.train_step(
      state, scored, jax.random.key(0), old))
  assert metrics['weight_min'] == metrics['weight_max'] == 1
  assert metrics['entropy_unchanged_share'] == 1
  for name in ('region_share', 'kl_full', 'kl_k1', 'kl_k3', 'skipped',
               'clip_fraction_low', 'clip_fraction_high'):
    assert metrics[name] == 0, name
  weight_BT = -batch.mask_BT * batch.advantage_B[:, None] / LENGTHS.sum()
  _, want = _pull_back()(
      params, np.pad(weight_BT, ((0, 0), (P - 1, 0))), batch.token_BS,
      batch.position_BS, 0.9)
  scale = max(np.abs(x).max() for x in jax.tree.leaves(want))
  _close(jax.tree.map(lambda m: m / np.float32(0.1), _moment(after)), want,
         rtol=0, atol=2e-5 * scale)
  np.testing.assert_allclose(metrics['grad_norm'], optax.global_norm(want),
                             rtol=1e-5)
  np.testing.assert_allclose(  # w = 1: L = −Σ A / N
      metrics['loss'], weight_BT.sum(), rtol=1e-5)


def test_gradients_of_microbatches_are_summed_in_place():
  """The backward pass adds a layer's gradient to that of all microbatches, so
  that no tree of the kernels' gradients is made, nor added as a whole."""
  model = dataclasses.replace(MODEL, dtype='bfloat16', remat='full')
  scorer = update.Scorer(model, temperature=0.9, chunk_size=16, shards=1)
  policy_loss = objective.make_policy_loss(tiny.get_config('grpo').method)
  params, optimizer = _weights()[0], optax.sgd(0.1)
  pack = packing.Packer(11, 24, shards=1)
  program = jax.jit(functools.partial(
      update.train_step, scorer, policy_loss, optimizer)).lower(
          update.TrainState(jnp.int32(0), params, optimizer.init(params)),
          pack(_off_policy_batch()), jax.random.key(2)).as_text()
  down = 'tensor<2x48x32x'  # no other parameter has this shape
  assert f'{down}f32>' in program and f'{down}bf16>' not in program
  assert not re.search(rf'stablehlo.add %iterArg.*{down}f32>', program)


@pytest.mark.parametrize('dtype, error', [('float32', 2e-6),
                                          ('bfloat16', 1e-3)])
def test_optimizer_is_torchs_adamw(dtype, error):
  """Clipped and unclipped gradients, weight decay, seven steps of 0.03, whose
  sizes a first moment in bfloat16 changes by up to 0.4 %."""
  rng = np.random.default_rng(0)
  start = {'a': rng.normal(size=(4, 3)), 'b': rng.normal(size=5)}
  settings = dict(beta1=0.9, beta2=0.95, epsilon=1e-6, weight_decay=0.1)
  optimizer = optimizer_lib.make(0.03, max_grad_norm=1.0, **settings,
                                 momentum_dtype=dtype)
  params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), start)
  state, step = optimizer.init(params), jax.jit(optimizer.update)
  theirs = {k: torch.tensor(v, requires_grad=True) for k, v in start.items()}
  adamw = torch.optim.AdamW(theirs.values(), lr=0.03, betas=(0.9, 0.95),
                            eps=1e-6, weight_decay=0.1)
  norms = []
  for scale in (0.01, 3.0, 0.2, 10.0, 0.1, 1e-4, 1.0):
    gradient = {k: scale * rng.normal(size=v.shape) for k, v in start.items()}
    for name, tensor in theirs.items():
      tensor.grad = torch.tensor(gradient[name])
    norms.append(float(torch.nn.utils.clip_grad_norm_(theirs.values(), 1.0)))
    adamw.step()
    updates, state = step(
        jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), gradient), state,
        params)
    params = optax.apply_updates(params, updates)
    for name, tensor in theirs.items():
      np.testing.assert_allclose(params[name], tensor.detach(), rtol=0,
                                 atol=error)
  assert min(norms) < 1 < max(norms)
  moments = optax.tree_utils.tree_get(state, 'ScaleByAdamState')
  assert {x.dtype for x in jax.tree.leaves(moments.mu)} == {jnp.dtype(dtype)}
  assert {x.dtype for x in jax.tree.leaves(moments.nu)} == {jnp.dtype('f4')}


def test_supervised_step():
  """One step of plain descent: θ − lr · ∇(−Σ m ℓ / Σ m)."""
  params, batch = _weights()[0], _batch()
  mask_BT = np.pad(batch.mask_BT, ((0, 0), (P - 1, 0)))
  mask_BT[0, 0] = 1  # prompt tokens may be learnt too
  optimizer = optax.sgd(0.5)
  state = update.TrainState(jnp.int32(4), params, optimizer.init(params))
  after, loss = jax.jit(
      functools.partial(base_model.next_token_step, MODEL, optimizer),
      compiler_options=QUICK)(state, batch.token_BS, batch.position_BS,
                              mask_BT)
  want_loss, gradient = _pull_back()(
      params, -mask_BT / mask_BT.sum(), batch.token_BS, batch.position_BS, 1.0)
  np.testing.assert_allclose(loss, want_loss, rtol=1e-6)
  _close(after.params, jax.tree.map(lambda p, g: p - 0.5 * g, params, gradient),
         rtol=1e-6, atol=1e-6)
  assert after.step == 5
