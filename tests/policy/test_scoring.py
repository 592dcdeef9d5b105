"""Scoring against float64: torch's log-softmax, closed-form gradients."""

import dataclasses
import functools

import jax
from jax import numpy as jnp
import numpy as np
import pytest
import torch

from tepo_jax.job import programs as programs_lib
from tepo_jax.policy import scoring
from tepo_jax.policy import transformer
from tepo_jax.runtime import mesh as mesh_lib

MODEL = transformer.ModelConfig(
    vocab_size=41, d_model=32, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=8, d_ff=48, max_position=64)
PROMPTS, LENGTHS = (4, 2, 3), (7, 5, 1)  # tokens of each row
P, T = 4, 7
MASK_BT = np.arange(T) < np.array(LENGTHS)[:, None]
ENTRIES = ('logp_BT', 'entropy_BT', 'kl_BT')
# Most of the time is compilation; the values do not depend on optimisation.
QUICK = {'xla_backend_optimization_level': 0,
         'xla_cpu_use_fusion_emitters': False}


def _params(seed):
  """Weights large enough for peaked distributions."""
  init = jax.jit(functools.partial(transformer.init, MODEL),
                 compiler_options=QUICK)
  return jax.tree.map(lambda x: 4 * x, init(jax.random.key(seed)))


@pytest.fixture(scope='module')
def params():
  return _params(0)


@pytest.fixture(scope='module')
def old_params(params):
  other = _params(1)
  return jax.tree.map(lambda a, b: 0.7 * a + 0.3 * b, params, other)


def _rows(pad=0):
  """Left-padded prompts, right-padded completions: tokens and positions."""
  token_BS = np.random.default_rng(0).integers(0, 41, (3, P + T))
  position_BS = np.full((3, P + T), -1)
  for row, (prompt, length) in enumerate(zip(PROMPTS, LENGTHS)):
    position_BS[row, P - prompt:P + length] = np.arange(prompt + length)
  return (np.pad(token_BS, ((0, 0), (pad, 0))).astype(np.int32),
          np.pad(position_BS, ((0, 0), (pad, 0)),
                 constant_values=-1).astype(np.int32))


@functools.cache
def _score(temperature, chunk_size, num_targets=T):
  return jax.jit(functools.partial(
      scoring.score, MODEL, num_targets=num_targets, temperature=temperature,
      chunk_size=chunk_size), compiler_options=QUICK)


def _logits(params, token_BS, position_BS):
  """Logits of the last T tokens, all at once: [B, T, V]."""
  hidden_BSD, _ = transformer.forward(MODEL, params, token_BS, position_BS)
  return transformer.logits(MODEL, params, hidden_BSD)[:, P - 1:-1]


_jitted_logits = jax.jit(_logits, compiler_options=QUICK)


def _distribution(params, temperature):
  """log π in float64: torch [B, T, V]."""
  logits_BTV = np.asarray(_jitted_logits(params, *_rows()))
  return torch.log_softmax(
      torch.tensor(logits_BTV).double() / temperature, -1)


def _reference(params, old_params, temperature):
  logp_BTV = _distribution(params, temperature)
  old_BTV = _distribution(old_params, temperature)
  target_BT = torch.tensor(_rows()[0][:, P:]).long()
  return {
      'logp_BT': logp_BTV.gather(-1, target_BT[..., None])[..., 0],
      'entropy_BT': torch.special.entr(logp_BTV.exp()).sum(-1),
      'kl_BT': torch.nn.functional.kl_div(
          old_BTV, logp_BTV, reduction='none', log_target=True).sum(-1)}


@pytest.mark.parametrize('temperature', [1.0, 0.7])
def test_values(params, old_params, temperature):
  scores = _score(temperature, 6)(params, *_rows(), old_params=old_params)
  expected = _reference(params, old_params, temperature)
  for name in ENTRIES:
    got, want = np.asarray(getattr(scores, name)), expected[name].numpy()
    assert got.dtype == np.float32
    np.testing.assert_allclose(got[MASK_BT], want[MASK_BT], rtol=0, atol=5e-6)
  kl = expected['kl_BT'].numpy()[MASK_BT]
  assert kl.min() >= 0 and kl.max() > 0.05  # large enough to show an error


@pytest.mark.parametrize('chunk_size', [1, 9, 10**6])
def test_chunk_size_does_not_change_scores(params, old_params, chunk_size):
  """9 tokens of 3 rows: chunks of 3 targets, which do not divide 7."""
  base = _score(1.0, 6)(params, *_rows(), old_params=old_params)
  other = _score(1.0, chunk_size)(params, *_rows(), old_params=old_params)
  for name in ENTRIES:
    np.testing.assert_allclose(
        getattr(base, name), getattr(other, name), rtol=0, atol=2e-6)


def test_padding_does_not_change_scores(params, old_params):
  """Neither the tokens in padding nor its length change the scores."""
  token_BS, position_BS = _rows()
  base = _score(1.0, 6)(params, token_BS, position_BS, old_params=old_params)
  garbage_BS = np.where(position_BS < 0, 40, token_BS).astype(np.int32)
  other = _score(1.0, 6)(params, garbage_BS, position_BS,
                         old_params=old_params)
  wider = _score(1.0, 6)(params, *_rows(pad=3), old_params=old_params)
  start, end = P - PROMPTS[1], P + LENGTHS[1]
  alone = _score(1.0, 6, LENGTHS[1])(
      params, token_BS[1:2, start:end], position_BS[1:2, start:end],
      old_params=old_params)
  for name in ENTRIES:
    want = np.asarray(getattr(base, name))
    np.testing.assert_array_equal(getattr(other, name)[MASK_BT], want[MASK_BT])
    np.testing.assert_allclose(
        getattr(wider, name)[MASK_BT], want[MASK_BT], rtol=1e-6, atol=2e-6)
    np.testing.assert_allclose(
        getattr(alone, name)[0], want[1, :LENGTHS[1]], rtol=1e-6, atol=2e-6)


def test_every_target_of_a_sequence(params):
  """num_targets = S - 1, as in supervised learning."""
  token_BS, position_BS = _rows()
  whole = _score(1.0, 6, P + T - 1)(params, token_BS, position_BS)
  part = _score(1.0, 6)(params, token_BS, position_BS)
  assert whole.kl_BT is None and part.kl_BT is None
  np.testing.assert_allclose(
      whole.logp_BT[:, P - 1:][MASK_BT], part.logp_BT[MASK_BT], atol=2e-6)
  assert whole.logp_BT.shape == (3, P + T - 1)


def _closed_form(params, old_params, temperature):
  """∂(ℓ, H, KL)/∂logits, float64 numpy, at every target: name -> [B, T, V]."""
  logp_BTV = _distribution(params, temperature).numpy()
  old_BTV = _distribution(old_params, temperature).numpy()
  p_BTV = np.exp(logp_BTV)
  ratio_BTV = logp_BTV - old_BTV
  entropy_BT1 = -(p_BTV * logp_BTV).sum(-1, keepdims=True)
  kl_BT1 = (p_BTV * ratio_BTV).sum(-1, keepdims=True)
  one_hot_BTV = np.eye(41)[_rows()[0][:, P:]]
  return {
      'logp_BT': (one_hot_BTV - p_BTV) / temperature,
      'entropy_BT': -p_BTV * (logp_BTV + entropy_BT1) / temperature,
      'kl_BT': p_BTV * (ratio_BTV - kl_BT1) / temperature}


def test_gradients(params, old_params):
  """Through the chunks, against ∂/∂logits in closed form; none in π_old."""
  temperature = 0.7
  token_BS, position_BS = _rows()
  weight_BT = np.random.default_rng(1).normal(size=(3, T)) * MASK_BT

  @functools.partial(jax.jit, compiler_options=QUICK)
  def gradients(params, old_params, share):
    def total(params, old_params):
      scores = scoring.score(
          MODEL, params, token_BS, position_BS, num_targets=T,
          temperature=temperature, chunk_size=6, old_params=old_params)
      return sum(jnp.sum(weight_BT * getattr(scores, name)) * share[i]
                 for i, name in enumerate(ENTRIES))
    return jax.grad(total, (0, 1))(params, old_params)

  @functools.partial(jax.jit, compiler_options=QUICK)
  def pull_back(params, cotangent_BTV):
    _, vjp = jax.vjp(lambda p: _logits(p, token_BS, position_BS), params)
    return vjp(cotangent_BTV)[0]

  closed = _closed_form(params, old_params, temperature)
  for index, name in enumerate(ENTRIES):
    got, of_old = gradients(params, old_params, np.eye(3, dtype='f4')[index])
    want = pull_back(params, (closed[name] * weight_BT[..., None]).astype('f4'))
    scale = max(np.abs(x).max() for x in jax.tree.leaves(want))
    assert scale > 1e-2
    jax.tree.map(functools.partial(
        np.testing.assert_allclose, rtol=0, atol=1e-5 * scale), got, want)
    for leaf in jax.tree.leaves(of_old):
      np.testing.assert_array_equal(leaf, 0)


def _shapes(jaxpr):
  """Yields the shape of every array in a program and its inner programs."""
  for equation in jaxpr.eqns:
    yield from (v.aval.shape for v in equation.outvars)
    for value in jax.tree.leaves(
        equation.params, is_leaf=lambda x: hasattr(x, 'eqns')):
      inner = getattr(value, 'jaxpr', value)
      if hasattr(inner, 'eqns'):
        yield from _shapes(inner)


def test_a_divergence_without_a_cotangent(params, old_params):
  """In several chunks, it does not change the gradient of ℓ."""
  def total(params, old_params):
    return jnp.sum(scoring.score(
        MODEL, params, *_rows(), num_targets=T, chunk_size=6,
        old_params=old_params).logp_BT)

  gradient = jax.jit(jax.grad(total), compiler_options=QUICK)
  jax.tree.map(np.testing.assert_array_equal, gradient(params, old_params),
               gradient(params, None))


@pytest.mark.parametrize('rows, targets, chunk_size',
                         [(4, 64, 48), (8, 10, 30), (5, 16, 30)])
def test_never_holds_all_logits(rows, targets, chunk_size):
  """At most chunk_size x V at a time, in the backward pass too."""
  model = dataclasses.replace(MODEL, d_model=8)
  params = transformer.abstract_params(model)
  tokens = jax.ShapeDtypeStruct((rows, targets + 1), 'int32')

  def total(params, old_params, token_BS, position_BS):
    scores = scoring.score(
        model, params, token_BS, position_BS, num_targets=targets,
        chunk_size=chunk_size, old_params=old_params)
    return sum(jnp.sum(x) for x in jax.tree.leaves(scores))

  jaxpr = jax.make_jaxpr(jax.grad(total))(params, params, tokens, tokens)
  held = [int(np.prod(shape)) // 41 for shape in _shapes(jaxpr.jaxpr)
          if shape and shape[-1] == 41]
  assert chunk_size // 2 < max(held) <= chunk_size


def _logit_products(jaxpr):
  """Products over the vocabulary; a loop counts once per iteration."""
  count = 0
  for equation in jaxpr.eqns:
    if equation.primitive.name == 'dot_general':
      count += 41 in equation.outvars[0].aval.shape
    assert equation.primitive.name != 'while'
    trip_count = equation.params.get('length', 1)
    assert trip_count in (0, 1)
    for value in equation.params.values():
      inner = getattr(value, 'jaxpr', value)
      if hasattr(inner, 'eqns'):
        count += trip_count * _logit_products(inner)
  return count


def test_one_chunk_makes_its_logits_once(params):
  """One product forward; backward one for the states, one for the weight."""
  def total(hidden_RSD, weight, old):
    scores = scoring.score_states(
        MODEL, hidden_RSD, weight, rows, temperature=1.0, chunk_size=10**6,
        old=old)
    return sum(jnp.sum(x) for x in jax.tree.leaves(scores))

  token_BS, position_BS = _rows()
  rows = scoring.PackedRows(token_BS, position_BS, None, position_BS >= 0)
  states = jnp.ones((*token_BS.shape, MODEL.d_model)), params['head']['kernel']
  for old, products in (None, 2), (states, 3):  # logits, ∂ weight; old logits
    jaxpr = jax.make_jaxpr(jax.grad(total, (0, 1)))(*states, old)
    assert _logit_products(jaxpr.jaxpr) == products


@pytest.mark.parametrize('with_kl', [False, True])
def test_the_gradient_of_the_logits_reuses_their_memory(with_kl):
  """Compiled as a CPU's training programs, which store what a sum reads.

  So without a KL they hold two [M, V]: the logits, and the operand of one sum
  after the other, over which the gradient is written. With it there are two
  more, that its sum and its gradient share: π, and z − z° in π_old's place.
  """
  def loss(hidden_RSD, weight, old_weight):
    old = (hidden_RSD, old_weight) if with_kl else None
    scores = scoring.score_states(
        model, hidden_RSD, weight, rows, temperature=0.7, chunk_size=10**6,
        old=jax.lax.stop_gradient(old))
    return sum(jnp.sum(x * x) for x in jax.tree.leaves(scores))

  model = dataclasses.replace(MODEL, vocab_size=2048)
  zeros_RS = jnp.zeros((1, 256), jnp.int32)
  rows = scoring.PackedRows(zeros_RS, zeros_RS, None, zeros_RS == 0)
  mesh = mesh_lib.make(dict(data=1, fsdp=1, tensor=1), jax.devices()[:1])
  compiled = programs_lib.compiled(
      mesh, jax.grad(loss, (0, 1)), 'float32').lower(
      jnp.zeros((1, 256, MODEL.d_model)),
      *[jnp.zeros((MODEL.d_model, 2048))] * 2).compile()
  held = compiled.memory_analysis().temp_size_in_bytes / (256 * 2048 * 4)
  assert 2 + 2 * with_kl <= held < 2.5 + 2 * with_kl


def test_scores_are_float32_in_bfloat16():
  model = dataclasses.replace(MODEL, dtype='bfloat16')
  params = transformer.abstract_params(model, 'bfloat16')
  scores = jax.eval_shape(
      functools.partial(scoring.score, model, num_targets=T), params, *_rows(),
      old_params=params)
  for name in ENTRIES:
    assert getattr(scores, name).dtype == jnp.float32
    assert getattr(scores, name).shape == (3, T)
