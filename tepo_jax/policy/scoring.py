"""Log-probability, entropy and exact KL of given tokens, without [B, T, V].

The head is applied to some columns of slots at a time, to those that predict
a scored token and no others. What is kept of a chunk is a few numbers a token;
its logits are computed again in the backward pass, but for those of one chunk:
the last of the forward pass is the first of the backward pass.

Axes: R rows (B: of one completion each) · S slots of a row · T completion
slots · C columns, the scored slots of a row moved together · w columns of a
chunk · M = R w tokens of a chunk · n shards of the rows · V vocabulary · D
model.
"""

import dataclasses
import functools
from typing import Any

import flax.struct
import jax
from jax import numpy as jnp

from tepo_jax.policy.cpu import products
from tepo_jax.policy.cpu import reductions
from tepo_jax.policy import padding as padding_lib
from tepo_jax.policy import prompt_sharing
from tepo_jax.policy import transformer


@flax.struct.dataclass
class Rows:
  """Sequences in rows of S slots, one or several to a row.

  token_RS, position_RS, segment_RS: int32, as `transformer.forward` takes
    them; segment_RS None: a row is one sequence.
  scored_RS: bool, the slots whose next token is scored.
  sequences: what attention sees where sequences share slots, else None;
    segment_RS is None then.
  """
  token_RS: jax.Array
  position_RS: jax.Array
  segment_RS: jax.Array | None
  scored_RS: jax.Array
  sequences: prompt_sharing.Sequences | None = None


@flax.struct.dataclass
class Scores:
  """What a policy says of given tokens; masked slots hold arbitrary values.

  logp_BT: log π_θ(y_t | s_t) under the temperature-scaled full softmax, nats.
  entropy_BT: H(π_θ(· | s_t)) = −Σ_v π log π, nats.
  kl_BT: Σ_v π_θ log(π_θ / π_old) at s_t, nats; None unless it was asked for.
  """
  logp_BT: jax.Array
  entropy_BT: jax.Array
  kl_BT: jax.Array | None = None


def score(config: transformer.ModelConfig, params: Any, token_BS: jax.Array,
          position_BS: jax.Array, *, num_targets: int,
          temperature: float = 1.0, chunk_size: int = 4096,
          old_params: Any = None) -> Scores:
  """Scores the last `num_targets` tokens of each row under the policy.

  Args:
    config, params: the policy.
    token_BS, position_BS: prompt and completion; position −1 is padding.
    num_targets: T, the columns at the end of S that are scored.
    temperature, chunk_size, old_params: as in `score_rows`.

  Returns:
    Scores over [B, T], float32.
  """
  slot_S = jnp.arange(token_BS.shape[1] - 1, -1, -1)  # tokens behind a slot
  scored_BS = jnp.broadcast_to(
      (1 <= slot_S) & (slot_S <= num_targets), token_BS.shape)
  scores = score_rows(
      config, params, Rows(token_BS, position_BS, None, scored_BS),
      temperature=temperature, chunk_size=chunk_size, old_params=old_params)
  return jax.tree.map(lambda x: x[:, :num_targets], scores)


def score_rows(config: transformer.ModelConfig, params: Any, rows: Rows, *,
               temperature: float, chunk_size: int, shards: int = 1,
               old_params: Any = None) -> Scores:
  """Scores the tokens behind the scored slots under the policy.

  Args:
    config, params: the policy.
    rows: what is scored.
    temperature: divides the logits, as it did in the sampler.
    chunk_size: tokens whose logits exist at one time (one a row at least);
      [chunk_size, V] floats, a few times, are the peak.
    shards: into how many pieces the mesh cuts R.
    old_params: π_old's weights; given, the exact KL is computed beside ℓ
      (TEPO Eq. 4), differentiable in `params` only.

  Returns:
    Scores over [R, C], C >= S, float32: column c of a row is its scored slot
    number c. Columns that no scored slot stands behind are arbitrary.
  """
  old = None
  if old_params is not None:
    old = jax.lax.stop_gradient(_policy(config, old_params, rows))
  return score_states(
      config, *_policy(config, params, rows), rows, temperature=temperature,
      chunk_size=chunk_size, shards=shards, old=old)


def score_states(config: transformer.ModelConfig, hidden_RSD: jax.Array,
                 weight: jax.Array, rows: Rows, *, temperature: float,
                 chunk_size: int, shards: int = 1, old: Any = None) -> Scores:
  """`score_rows` from the hidden states on.

  `weight` is the head's, as `transformer.head_weight` gives it; `old` the pair
  of hidden states and weight of π_old, without gradient.
  """
  plan = _Plan(
      tied=config.tie_embeddings, dtype=config.dtype,
      vocab_size=config.vocab_size, temperature=temperature,
      width=chunk_width(*rows.token_RS.shape, chunk_size), shards=shards)
  target_RS = jnp.roll(rows.token_RS, -1, axis=1)
  return Scores(*_score(plan, hidden_RSD, weight, target_RS, rows.scored_RS,
                        old))


def chunk_width(count: int, length: int, chunk_size: int) -> int:
  """Columns of a chunk, of `count` rows of `length` slots."""
  return min(length, max(1, chunk_size // count))


def _policy(config, params, rows):
  """Hidden states [R, S, D], and the head's weight as it is stored."""
  hidden_RSD, _ = transformer.forward(
      config, params, rows.token_RS, rows.position_RS,
      segment_BS=rows.segment_RS, sequences=rows.sequences)
  return hidden_RSD, transformer.head_weight(config, params)


@dataclasses.dataclass(frozen=True)
class _Plan:
  """What is static. tied: the weight is [V, D], else [D, V]."""
  tied: bool
  dtype: str
  vocab_size: int
  temperature: float
  width: int
  shards: int

  @property
  def weight_axes(self):
    """Of a weight by shards of rows: each has all but the vocabulary."""
    return ('batch', 'vocab', None) if self.tied else ('batch', None, 'vocab')

  def weight(self, stored):
    """In the compute dtype; whole but for the vocabulary, once for all."""
    return transformer.constrain(
        stored.astype(self.dtype), self.weight_axes[1:])

  def logits(self, hidden_MD, weight):
    """z / temperature, float32 [M, V]."""
    logits_MV = jax.lax.dot_general(
        hidden_MD, weight, (((1,), (1 if self.tied else 0,)), ((), ())),
        preferred_element_type=jnp.float32)
    logits_MV = padding_lib.without_padding(self.vocab_size, logits_MV)
    return transformer.constrain(
        logits_MV / self.temperature, ('batch', 'vocab'))

  def weight_gradient(self, hidden_MD, of_z_MV):
    """The share of each shard's tokens, float32 [n, V, D] or [n, D, V]."""
    pair = (of_z_MV, hidden_MD) if self.tied else (hidden_MD, of_z_MV)
    by_shard = (x.reshape(self.shards, -1, x.shape[-1]) for x in pair)
    product = functools.partial(products.weight_gradient, dtype=jnp.float32)
    return transformer.constrain(
        jax.vmap(product)(*by_shard), self.weight_axes)

  def columns(self, scored_RS):
    """Slots by column, int32 [R, C], C a multiple of the width; chunks used.

    Chunk 0 is computed in any case.
    """
    slot_RC = jnp.argsort(~scored_RS, axis=1, stable=True)
    padding = -slot_RC.shape[1] % self.width
    used = 1
    if self.width < slot_RC.shape[1]:
      used = -(-jnp.max(jnp.sum(scored_RS, axis=1)) // self.width)
    slot_RC = jnp.pad(slot_RC, ((0, 0), (0, padding)),
                      constant_values=scored_RS.shape[1])
    return slot_RC, used

  def cut(self, x_RC, index):
    return jax.lax.dynamic_slice_in_dim(
        x_RC, index * self.width, self.width, axis=1)

  def pick(self, x_RS, slot_Rw):
    """x at the slots: [M] or [M, D]."""
    slot = slot_Rw.reshape(*slot_Rw.shape, *(1,) * (x_RS.ndim - 2))
    return self.flat(jnp.take_along_axis(x_RS, slot, axis=1, mode='clip'))

  def flat(self, x_Rw):
    """[R, w, ...] -> [M, ...]."""
    x = x_Rw.reshape(-1, *x_Rw.shape[2:])
    return transformer.constrain(x, ('batch',) + (None,) * (x.ndim - 1))

  def put(self, into_RC, x_M, index):
    """Writes a chunk's [M, ...] to its columns."""
    x_Rw = x_M.reshape(len(into_RC), self.width, *x_M.shape[2:])
    return jax.lax.dynamic_update_slice_in_dim(
        into_RC, x_Rw.astype(into_RC.dtype), index * self.width, axis=1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _score(plan, hidden_RSD, weight, target_RS, scored_RS, old):
  """(ℓ, H, KL or None), each [R, C]; `old` is None or π_old's `_policy`."""
  return _forward(plan, hidden_RSD, weight, target_RS, scored_RS, old)[0][:3]


def _forward(plan, hidden_RSD, weight, target_RS, scored_RS, old):
  """(ℓ, H, KL, log Σ exp z, that of π_old), each [R, C] or None, and logits.

  These are `_both_logits` of chunk 0: it comes last, and the backward pass
  begins with it.
  """
  slot_RC, used = plan.columns(scored_RS)
  policies = (hidden_RSD, plan.weight(weight)), (
      None if old is None else (old[0], plan.weight(old[1])))

  def chunk(index, out):
    slot_Rw = plan.cut(slot_RC, index)
    z_MV, old_z_MV = logits = jax.lax.optimization_barrier(
        _both_logits(plan, slot_Rw, *policies))
    target_M = plan.pick(target_RS, slot_Rw)
    target_z_M1 = jnp.take_along_axis(z_MV, target_M[..., None], -1)
    lse_M1 = _apart(_log_sum_exp, z_MV)
    entropy_M1 = _apart(_entropy, z_MV, lse_M1)
    kl_M1 = old_lse_M1 = None
    if old is not None:
      old_lse_M1 = _apart(_log_sum_exp, old_z_MV)
      kl_M1 = _kl(z_MV, lse_M1, old_z_MV, old_lse_M1)
    values = target_z_M1 - lse_M1, entropy_M1, kl_M1, lse_M1, old_lse_M1
    return jax.tree.map(lambda x_RC, value_M1: plan.put(
        x_RC, value_M1[..., 0], index), out, values), logits

  zeros_RC = jnp.zeros(slot_RC.shape, jnp.float32)
  optional_RC = None if old is None else zeros_RC
  out = jax.lax.fori_loop(
      1, used, lambda index, out: chunk(index, out)[0],
      (zeros_RC, zeros_RC, optional_RC, zeros_RC, optional_RC))
  return chunk(0, out)


def _both_logits(plan, slot_Rw, policy, old):
  """z at the slots of both policies, [M, V]; None of one that is None."""
  return [None if pair is None else plan.logits(
      plan.pick(pair[0], slot_Rw), pair[1]) for pair in (policy, old)]


def _apart(function, *x):
  """Between barriers: what is fused with it, or shares terms with it, must not
  decide how it rounds.

  ℓ and H of one policy are the same to the last bit in every program, and the
  KL of a policy to itself is exactly 0.
  """
  return jax.lax.optimization_barrier(
      function(*jax.lax.optimization_barrier(x)))


def _log_sum_exp(z_MV):
  most_M1 = reductions.row_max(z_MV)
  return most_M1 + jnp.log(reductions.row_sum(
      z_MV, most_M1, term=lambda z, most: jnp.exp(z - most)))


def _entropy(*z_and_lse):
  return reductions.row_sum(
      *z_and_lse, term=lambda z, lse: jnp.exp(z - lse) * (lse - z))


def _kl(*both_z_and_lse):
  def term(z, lse, old_z, old_lse):
    logp = z - lse
    return jnp.exp(logp) * (logp - (old_z - old_lse))
  return reductions.row_sum(*both_z_and_lse, term=term)


def _score_forward(plan, *primals):
  # With symbolic zeros each array comes with whether it is differentiated.
  primals = jax.tree.map(
      lambda leaf: leaf.value, primals,
      is_leaf=lambda leaf: hasattr(leaf, 'perturbed'))
  out, logits = _forward(plan, *primals)
  return out[:3], (primals, out[1:], logits)


def _score_backward(plan, residuals, cotangents):
  """Products in the compute dtype, the weight's summed in fp32."""
  (hidden_RSD, stored, target_RS, scored_RS, old), kept, logits = residuals
  cotangents = tuple(
      None if isinstance(x, jax.custom_derivatives.SymbolicZero) else x
      for x in cotangents)
  slot_RC, used = plan.columns(scored_RS)
  weight = plan.weight(stored)
  old_policy = None
  if old is not None and cotangents[2] is not None:
    old_policy = old[0], plan.weight(old[1])
  by_rows = ('batch', None, None)

  def chunk(index, carry, logits=None):
    of_hidden_RSD, of_weight = carry
    slot_Rw = plan.cut(slot_RC, index)
    hidden_MD = plan.pick(hidden_RSD, slot_Rw)
    if logits is None:
      logits = _both_logits(plan, slot_Rw, (hidden_RSD, weight), old_policy)
    of_z_MV = _logits_gradient(
        plan, plan.pick(target_RS, slot_Rw)[..., None], *logits, *jax.tree.map(
            lambda x_RC: plan.flat(plan.cut(x_RC, index))[..., None],
            (kept, cotangents)))
    of_hidden_MD = jax.lax.dot_general(
        of_z_MV, weight, (((1,), (0 if plan.tied else 1,)), ((), ())))
    of_hidden_RwD = transformer.constrain(
        of_hidden_MD.reshape(*slot_Rw.shape, -1), by_rows)
    return (jax.vmap(_set)(of_hidden_RSD, slot_Rw, of_hidden_RwD),
            of_weight + plan.weight_gradient(hidden_MD, of_z_MV))

  carry = chunk(0, (
      transformer.constrain(jnp.zeros(hidden_RSD.shape, plan.dtype), by_rows),
      # The shards' shares meet behind the loop.
      transformer.constrain(
          jnp.zeros((plan.shards, *stored.shape), jnp.float32),
          plan.weight_axes)), logits)
  of_hidden_RSD, of_weight = jax.lax.fori_loop(1, used, chunk, carry)
  return (of_hidden_RSD, jnp.sum(of_weight, 0).astype(stored.dtype), None,
          None, None)


def _logits_gradient(plan, target_M1, z_MV, old_z_MV, kept, cotangents):
  """∂z = gˡ (1[y] − p) − gᴴ p (log p + H) + gᴷ p (log p/q − KL), over the
  temperature, in the compute dtype; a cotangent g that is 0 is None."""
  entropy_M1, kl_M1, lse_M1, old_lse_M1 = kept
  of_logp_M1, of_entropy_M1, of_kl_M1 = cotangents
  logp_MV = z_MV - lse_M1
  slope_MV = jnp.zeros(())
  if of_logp_M1 is not None:
    slope_MV -= of_logp_M1
  if of_entropy_M1 is not None:
    slope_MV -= of_entropy_M1 * (logp_MV + entropy_M1)
  if of_kl_M1 is not None:
    slope_MV += of_kl_M1 * (
        logp_MV - (old_z_MV - old_lse_M1) - kl_M1)
  of_z_MV = jnp.exp(logp_MV) * slope_MV
  if of_logp_M1 is not None:
    vocabulary_V = jnp.arange(z_MV.shape[-1])
    of_z_MV += jnp.where(vocabulary_V == target_M1, of_logp_M1, 0)
  return (of_z_MV / plan.temperature).astype(plan.dtype)


def _set(x_SD, slot_w, new_wD):
  """Columns without a slot of their own are dropped."""
  return x_SD.at[slot_w].set(new_wD, unique_indices=True, mode='drop')


_score.defvjp(_score_forward, _score_backward, symbolic_zeros=True)
