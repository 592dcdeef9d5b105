"""The sampler against naive loops, float64 sums, itself in other batches."""

import functools

import jax
from jax import numpy as jnp
import numpy as np
import pytest

from tepo_jax.policy import scoring
from tepo_jax.policy import transformer
from tepo_jax.rollout import sampler

V = 40
MODEL = transformer.ModelConfig(
    vocab_size=V, d_model=32, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=8, d_ff=48, max_position=64, qkv_bias=True)
P, T = 5, 8
NO_EOS = (V,)  # an id that no token has
PROMPT_LENGTHS = (5, 1, 3, 4)
IDS = np.array([7, 0, 123456, 3], np.int32)
QUICK = {'xla_backend_optimization_level': 0,
         'xla_cpu_use_fusion_emitters': False}


@pytest.fixture(scope='module')
def params():
  """Weights large enough that a token's probability depends on its past."""
  init = jax.jit(functools.partial(transformer.init, MODEL),
                 compiler_options=QUICK)
  return jax.tree.map(lambda x: 4 * x, init(jax.random.key(0)))


@functools.cache
def _jitted(group_size, max_tokens, temperature, eos_ids):
  return jax.jit(functools.partial(
      sampler.generate, MODEL, group_size=group_size, max_tokens=max_tokens,
      temperature=temperature, eos_ids=eos_ids), compiler_options=QUICK)


def _generate(params, *, rows=(0, 1, 2, 3), seed=0, group_size=3,
              max_tokens=T, temperature=1.0, eos_ids=NO_EOS, **changed):
  inputs = dict(zip(('token_QP', 'position_QP', 'id_Q'), _prompts()))
  inputs = {name: value[list(rows)] for name, value in inputs.items()} | changed
  return jax.tree.map(np.asarray, _jitted(
      group_size, max_tokens, temperature, eos_ids)(
          params, *inputs.values(), jax.random.key(seed)))


def _prompts():
  token_QP = np.random.default_rng(0).integers(0, V, (4, P)).astype(np.int32)
  position_QP = np.full((4, P), -1, np.int32)
  for row, length in enumerate(PROMPT_LENGTHS):
    position_QP[row, P - length:] = np.arange(length)
  return token_QP, position_QP, IDS


def _cut(free, eos_ids):
  """What a run that knows these EOS ids must give, from one that knows none."""
  hit_BT = np.isin(free.token_BT, eos_ids)
  ended_B = hit_BT.any(1)
  length_B = np.where(ended_B, hit_BT.argmax(1) + 1, free.token_BT.shape[1])
  inside_BT = np.arange(free.token_BT.shape[1]) < length_B[:, None]
  return sampler.Completions(
      np.where(inside_BT, free.token_BT, 0),
      np.where(inside_BT, free.logp_BT, 0), length_B, ended_B)


def _assert_same(got, want, rows=slice(None)):
  jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b[rows]),
               got, want)


def _sequence(completions, group_size):
  """Prompt and completion, as the trainer sees them: tokens, positions."""
  token_QP, position_QP, _ = _prompts()
  start_B1 = np.repeat(PROMPT_LENGTHS, group_size)[:, None]
  slot_T = np.arange(completions.token_BT.shape[1])
  position_BT = np.where(
      slot_T < completions.length_B[:, None], start_B1 + slot_T, -1)
  return (np.concatenate([np.repeat(token_QP, group_size, 0),
                          completions.token_BT], 1),
          np.concatenate([np.repeat(position_QP, group_size, 0),
                          position_BT], 1).astype(np.int32))


def test_greedy_is_the_argmax_of_full_forwards(params):
  """No cache, one token at a time; its log-probability at temperature 1."""
  @functools.partial(jax.jit, compiler_options=QUICK)
  def logits(params, token_BS, position_BS):
    hidden_BSD, _ = transformer.forward(MODEL, params, token_BS, position_BS)
    return transformer.logits(MODEL, params, hidden_BSD)

  got = _generate(params, group_size=2, temperature=0.0)
  token_QP, position_QP, _ = _prompts()
  token_QS = np.pad(token_QP, ((0, 0), (0, T)))
  position_QS = np.pad(position_QP, ((0, 0), (0, T)), constant_values=-1)
  logp_QT = np.zeros((4, T))
  for step in range(T):
    logits_QV = np.asarray(logits(params, token_QS, position_QS))[
        :, P + step - 1].astype(np.float64)
    token_QS[:, P + step] = logits_QV.argmax(1)
    position_QS[:, P + step] = np.array(PROMPT_LENGTHS) + step
    logp_QT[:, step] = logits_QV.max(1) - np.log(np.exp(logits_QV).sum(1))
  np.testing.assert_array_equal(got.token_BT,
                                np.repeat(token_QS[:, P:], 2, 0))
  np.testing.assert_allclose(got.logp_BT, np.repeat(logp_QT, 2, 0), atol=1e-5)
  assert len(np.unique(got.token_BT)) > 4  # not a degenerate case


@pytest.mark.parametrize('temperature', [1.0, 0.7])
def test_logp_is_the_scoring_functions(params, temperature):
  completions = _generate(params, temperature=temperature)
  scores = jax.jit(functools.partial(
      scoring.score, MODEL, num_targets=T, temperature=temperature),
      compiler_options=QUICK)(params, *_sequence(completions, 3))
  np.testing.assert_allclose(completions.logp_BT, scores.logp_BT, rtol=0,
                             atol=1e-4)


def test_ends_at_each_of_several_eos_ids(params):
  """As if cut behind the first one: the draws do not depend on the ends."""
  free = _generate(params)
  assert not free.ended_B.any() and (free.length_B == T).all()
  # 0 is also what stands behind the end: only lengths say what is padding.
  eos_ids = (0, int(free.token_BT[1, 3]), int(free.token_BT[7, 0]))
  want = _cut(free, eos_ids)
  assert 0 < want.ended_B.sum() < len(want.ended_B)
  assert len(np.unique(want.length_B)) > 3 and want.length_B.min() == 1
  assert len(np.unique(free.token_BT[
      want.ended_B, want.length_B[want.ended_B] - 1])) > 1
  _assert_same(_generate(params, eos_ids=eos_ids), want)


def test_the_last_slot_can_end_a_completion(params):
  free = _generate(params)
  last = int(free.token_BT[1, -1])
  assert last not in free.token_BT[1, :-1]
  want = _cut(free, (last,))
  assert want.ended_B[1] and want.length_B[1] == T
  _assert_same(_generate(params, eos_ids=(last,)), want)


def test_draws_depend_on_key_prompt_sample_position_alone(params):
  """Not on the order of the prompts, their number, G, or T."""
  want = _generate(params)
  rows_QG = np.arange(12).reshape(4, 3)
  _assert_same(_generate(params, rows=(2, 0, 3, 1)), want,
               rows_QG[[2, 0, 3, 1]].reshape(-1))
  _assert_same(_generate(params, rows=(3, 1)), want,
               rows_QG[[3, 1]].reshape(-1))
  fewer = _generate(params, group_size=2)
  np.testing.assert_array_equal(fewer.token_BT,
                                want.token_BT[rows_QG[:, :2].reshape(-1)])
  one = _generate(params, max_tokens=1)
  np.testing.assert_array_equal(one.token_BT, want.token_BT[:, :1])
  np.testing.assert_array_equal(one.length_B, 1)


def test_draws_depend_on_each_of_them():
  """A uniform policy: every token is its own number, so all must differ."""
  params = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype),
                        transformer.abstract_params(MODEL))
  base = _generate(params)
  np.testing.assert_allclose(base.logp_BT, -np.log(V), rtol=1e-6)
  samples = [base.token_BT,
             _generate(params, seed=1).token_BT,
             _generate(params, id_Q=IDS + 1).token_BT]
  rows = np.concatenate(samples)
  assert len(np.unique(rows, axis=0)) == len(rows)
  assert len(np.unique(rows.T, axis=0)) == T
  # Any two of them agree in about one slot of V.
  flat = np.stack([s.reshape(-1) for s in samples])
  for a, b in ((0, 1), (0, 2), (1, 2)):
    assert (flat[a] == flat[b]).mean() < 4 / V


def test_filler_rows_are_empty_and_do_not_show(params):
  _, position_QP, _ = _prompts()
  position_QP[1] = -1
  base = _generate(params)
  eos_ids = (0, int(base.token_BT[0, 3]))
  want = _cut(base, eos_ids)
  got = _generate(params, position_QP=position_QP, eos_ids=eos_ids)
  for array in jax.tree.leaves(got):
    np.testing.assert_array_equal(array[3:6], np.zeros_like(array[3:6]))
  rest = np.r_[0:3, 6:12]
  _assert_same(jax.tree.map(lambda x: x[rest], got), want, rest)


def test_decoding_stops_when_every_row_has_ended(params, monkeypatch):
  """Counts the passes of one token that are really executed."""
  passes, forward = [], transformer.forward

  def counted(config, params, token_BS, position_BS, cache=None):
    if token_BS.shape[1] == 1:
      jax.debug.callback(lambda: passes.append(1))
    return forward(config, params, token_BS, position_BS, cache)

  free = _generate(params)
  eos_ids = tuple(int(t) for t in np.unique(free.token_BT[:, 4]))
  monkeypatch.setattr(transformer, 'forward', counted)
  generate = jax.jit(functools.partial(
      sampler.generate, MODEL, group_size=3, max_tokens=T, temperature=1.0,
      eos_ids=eos_ids), compiler_options=QUICK)

  def count(position_QP):
    passes.clear()
    token_QP, _, id_Q = _prompts()
    completions = generate(params, token_QP, position_QP, id_Q,
                           jax.random.key(0))
    jax.block_until_ready(completions)
    jax.effects_barrier()
    return len(passes), completions

  steps, completions = count(_prompts()[1])
  assert np.asarray(completions.ended_B).all()
  longest = int(completions.length_B.max())
  assert 1 < longest < T
  assert steps == longest - 1  # the prefill gives the first token
  steps, completions = count(np.full((4, P), -1, np.int32))
  assert steps == 0 and not np.asarray(completions.length_B).any()


def _counts(rng, rows, vocabulary, total=2**16):
  """Probabilities that are multiples of 1 / total: sums of them are exact."""
  weights = rng.random((rows, vocabulary)) ** 8 + 1e-9
  weights[rng.random((rows, vocabulary)) < 0.3] = 0
  weights[:, rng.integers(vocabulary)] += 1e-3
  weights /= weights.sum(1, keepdims=True)
  return np.stack([rng.multinomial(total, w) for w in weights]) / total


@pytest.mark.parametrize('vocabulary', [1, 40, 127, 128, 129, 1000])
def test_inverse_cdf_is_the_search_in_float64_sums(vocabulary):
  rng = np.random.default_rng(vocabulary)
  p_BV = _counts(rng, 500, vocabulary)
  uniform_B = rng.integers(0, 2**24, 500) / 2**24
  # Some targets hit a cumulative sum exactly: the next entry is meant.
  cdf_BV = np.cumsum(p_BV, 1)
  uniform_B[:100] = cdf_BV[np.arange(100), rng.integers(0, vocabulary, 100)]
  uniform_B[uniform_B == 1] = 0
  want = [np.searchsorted(cdf, u, side='right')
          for cdf, u in zip(cdf_BV, uniform_B)]
  got = jax.jit(sampler.inverse_cdf)(
      p_BV.astype(np.float32), uniform_B.astype(np.float32))
  np.testing.assert_array_equal(got, want)
  # The probabilities need not add up to 1; scaling by 2 is exact.
  scaled = jax.jit(sampler.inverse_cdf)(
      2 * p_BV.astype(np.float32), uniform_B.astype(np.float32))
  np.testing.assert_array_equal(scaled, want)


@pytest.mark.parametrize('vocabulary', [129, 3000])
def test_inverse_cdf_never_draws_the_impossible(vocabulary):
  """Whatever the sums round to, at both ends of the uniform and between."""
  rng = np.random.default_rng(vocabulary)
  rows = 2000
  p_BV = rng.random((rows, vocabulary)) ** 20
  p_BV[rng.random((rows, vocabulary)) < 0.9] = 0
  p_BV[:500, :rng.integers(1, vocabulary)] = 0
  p_BV[500:1000, -rng.integers(1, vocabulary):] = 0
  p_BV[np.arange(rows), rng.integers(0, vocabulary, rows)] += 1e-4
  p_BV /= p_BV.sum(1, keepdims=True)
  p_BV = np.where(p_BV > 1e-30, p_BV, 0).astype(np.float32)  # no denormals
  cdf_BV = np.cumsum(p_BV.astype(np.float64), 1)
  ends = [0.0, 2.0**-24, 1 - 2.0**-23, 1 - 2.0**-24]
  for uniform in ends + list(rng.random(4)):
    uniform_B = np.full(rows, uniform, np.float32)
    got = np.asarray(jax.jit(sampler.inverse_cdf)(p_BV, uniform_B))
    row = np.arange(rows)
    assert (p_BV[row, got] > 0).all()
    target_B = uniform * cdf_BV[:, -1]
    below_B = cdf_BV[row, got] - p_BV[row, got]
    assert (below_B <= target_B + 1e-6).all()
    assert (cdf_BV[row, got] >= target_B - 1e-6).all()
  first = (p_BV > 0).argmax(1)
  np.testing.assert_array_equal(
      jax.jit(sampler.inverse_cdf)(p_BV, np.zeros(rows, np.float32)), first)


def test_frequencies():
  """20,000 draws: Pearson's statistic within 5 deviations of its mean."""
  rng = np.random.default_rng(0)
  draws, vocabulary, temperature = 20_000, 150, 0.7
  logits_V = rng.normal(size=vocabulary).astype(np.float32)
  keys = jax.vmap(lambda i: jax.random.fold_in(jax.random.key(5), i))(
      jnp.arange(draws))
  token_B, logp_B = jax.jit(sampler.draw, static_argnums=1)(
      jnp.broadcast_to(logits_V, (draws, vocabulary)), temperature, keys, 3)
  p_V = np.exp(logits_V.astype(np.float64) / temperature)
  p_V /= p_V.sum()
  np.testing.assert_allclose(logp_B, np.log(p_V)[token_B], atol=1e-5)
  expected_V = draws * p_V
  counts_V = np.bincount(token_B, minlength=vocabulary)
  statistic = ((counts_V - expected_V) ** 2 / expected_V).sum()
  freedom = vocabulary - 1
  assert abs(statistic - freedom) < 5 * np.sqrt(2 * freedom)
