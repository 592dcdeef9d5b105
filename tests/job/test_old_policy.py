"""π_old's hidden states: where they are kept, where an update finds them."""

import dataclasses

import jax
import numpy as np
import pytest

from configs import tiny
from tepo_jax.job import memory as memory_lib
from tepo_jax.job import old_policy
from tepo_jax.job import programs as programs_lib
from tepo_jax.learning import batch as batch_lib
from tepo_jax.policy import transformer
from tepo_jax.runtime import mesh as mesh_lib

pytestmark = pytest.mark.usefixtures('quick_compile')

MODEL = transformer.ModelConfig(
    vocab_size=32, d_model=16, num_layers=1, num_heads=2, num_kv_heads=2,
    head_dim=8, d_ff=16, max_position=32, tie_embeddings=True)
P, T = 4, 6
LENGTHS = np.array([6, 2, 5, 1, 0, 6, 3, 4])  # 0: filler
FIRST = np.arange(8).reshape(2, 4)
LATER = np.array([[6, 1, 3, 4], [0, 5, 7, 2]])
LAYOUTS = [('segments', dict(data=1, fsdp=1, tensor=1)),
           ('segments', dict(data=1, fsdp=2, tensor=2)),
           ('shared', dict(data=1, fsdp=2, tensor=1))]


def programs_of(packing, shape, **settings):
  """Several microbatches a minibatch."""
  config = tiny.get_config('tepo')
  config.data.max_prompt_tokens = P
  config.rollout.update(prompts=4, samples=2, max_tokens=T)
  config.train.update(minibatch_prompts=2, row_tokens=P + T,
                      microbatch_tokens=2 * (P + T), packing=packing)
  config.compute.update(unroll=1, **settings)
  mesh = mesh_lib.make(shape, jax.devices()[:np.prod(list(shape.values()))])
  return programs_lib.make(
      config, programs_lib.prepare_model(MODEL, config, mesh), mesh)


def params_of(programs):
  return jax.device_put(
      jax.tree.map(lambda x: 4 * x, transformer.init(MODEL, jax.random.key(0))),
      programs.state_sharding.params)


def batch_of():
  rng = np.random.default_rng(0)
  mask_BT = np.arange(T) < LENGTHS[:, None]
  position_BS = np.concatenate([
      np.tile(np.arange(P), (8, 1)),
      np.where(mask_BT, P + np.arange(T), -1)], 1).astype(np.int32)
  zeros_BT = np.zeros((8, T), np.float32)
  return batch_lib.Batch(
      token_BS=rng.integers(0, 32, (8, P + T), np.int32),
      position_BS=position_BS, mask_BT=mask_BT.astype(np.float32),
      advantage_B=np.ones(8, np.float32), old_logp_BT=zeros_BT,
      old_entropy_BT=zeros_BT, sampler_logp_BT=zeros_BT)


def packed_of(programs, rows):
  """A minibatch on the host and on the devices."""
  packed = programs.pack(jax.tree.map(lambda x: x[rows], batch_of()))
  return packed, mesh_lib.put(packed, programs.minibatch_sharding)


def start(programs, params):
  """π_old after the first epoch is scored, ready for updates."""
  old = old_policy.OldPolicy(programs, params, ())
  old.score(packed_of(programs, LATER[1])[1])  # as for the noise floor
  for rows in FIRST:
    old.score_and_keep(rows, *packed_of(programs, rows))
  old.start_updates()
  return old


def states(programs, policy, packed):
  """Hidden states of the scored columns [N, D], in the order of the rows."""
  def of(policy, m):
    return policy.of_microbatch(m)[0]

  of = programs_lib.compiled(programs.mesh, of, programs.model.dtype)
  hidden_MRSD = np.stack([of(policy, m) for m in range(packed.used)])
  return hidden_MRSD[packed.rows.scored_RS[:packed.used]]


@pytest.mark.long_after_first
@pytest.mark.parametrize('packing, shape', LAYOUTS)
def test_hidden_states_move_with_their_completions(packing, shape):
  """Against π_old's forward over the same minibatch: to the bit where the
  packing is the same."""
  programs = memory_lib.keeping(programs_of(packing, shape), 2)
  params = params_of(programs)
  old = start(programs, params)
  for epoch, order in enumerate((FIRST, LATER)):
    for rows in order:
      packed, minibatch = packed_of(programs, rows)
      got, want = (states(programs, policy, packed) for policy in (
          old.of_minibatch(rows, packed, minibatch),
          programs.old_policy(params, minibatch)))
      assert len(got) == LENGTHS[rows].sum() and packed.used > 1
      assert len(np.unique(want.round(3), axis=0)) == len(want)
      np.testing.assert_allclose(got, want, atol=0 if epoch == 0 else 2e-6)


@pytest.mark.long
def test_states_that_do_not_fit_are_computed_anew():
  """From a copy of the weights: updates donate those of the state."""
  programs = programs_of(*LAYOUTS[0])
  rows, least, *rest = programs.kept.shape
  used = sum(packed_of(programs, rows)[0].used for rows in FIRST)
  assert least < used
  params = params_of(programs)
  packed, minibatch = packed_of(programs, LATER[0])
  want = states(programs, programs.old_policy(params, minibatch), packed)
  for count in used, used - 1:
    programs = dataclasses.replace(programs, kept=programs.kept.update(
        shape=(rows, int(count), *rest)))
    mine = jax.tree.map(jax.numpy.copy, params)
    old = start(programs, mine)
    jax.tree.map(lambda x: x.delete(), mine)
    policy = old.of_minibatch(LATER[0], packed, minibatch)
    assert policy.states_RKSD.shape[1] == (count if count == used else least)
    np.testing.assert_allclose(
        states(programs, policy, packed), want, atol=2e-6)


def test_as_many_states_as_fit():
  """Of one minibatch in any case, of all if a fifth of what is free holds
  them."""
  programs = programs_of(*LAYOUTS[0])
  rows, least, *rest = programs.kept.shape
  each = rows * np.prod(rest) * 4
  held = sum(memory_lib.held(programs).values())
  assert memory_lib.held(programs)['hidden states of π_old'] == least * each
  for free, count in ((0, least), (5 * each - 5, least), (5 * each, least + 1),
                      (10 * each, least + 2), (10**9, 3 * least)):
    kept = memory_lib.keeping(programs, 3, held + free).kept
    assert kept.shape == (rows, count, *rest)
    assert kept.sharding == programs.kept.sharding
  no_kl = dataclasses.replace(programs, kept=None)
  assert memory_lib.keeping(no_kl, 3, held) is no_kl
