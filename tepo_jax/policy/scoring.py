"""Log-probability, entropy and exact KL of given tokens, without [B, T, V].

The head is applied in chunks, and only to columns that predict a scored token.
The forward pass keeps a few numbers per token; the backward pass recomputes the
logits, except those of chunk 0, which the forward pass computes last and keeps
for the backward pass to start with.

Axes: R rows (B: rows of one completion each) · S columns (token indices) of a
row · T completion columns · C targets: the scored tokens of a row, without gaps
· w targets per row of a chunk · M = R w targets of a chunk · n shards of the
rows · V vocabulary · D model.
"""

import dataclasses
import functools
from typing import Any

import flax.struct
import jax
from jax import numpy as jnp
import numpy as np

from tepo_jax.policy import ops as ops_lib
from tepo_jax.policy import padding as padding_lib
from tepo_jax.policy import prompt_sharing
from tepo_jax.policy import transformer
from tepo_jax.runtime import mesh as mesh_lib


@flax.struct.dataclass
class PackedRows:
  """Sequences in rows of S columns, one or several per row.

  token_RS, position_RS, segment_RS: int32, as `transformer.forward` takes
    them; segment_RS None: a row is one sequence.
  scored_RS: bool, the columns whose next token is scored.
  sequences: where sequences share the columns of a prompt, the rows that
    attention processes; segment_RS is None then.
  """
  token_RS: jax.Array | np.ndarray
  position_RS: jax.Array | np.ndarray
  segment_RS: jax.Array | np.ndarray | None
  scored_RS: jax.Array | np.ndarray
  sequences: prompt_sharing.Sequences | None = None


@flax.struct.dataclass
class Scores:
  """A policy's scores of given tokens; masked columns are undefined.

  logp_BT: log π_θ(y_t | s_t) under the temperature-scaled full softmax, nats.
  entropy_BT: H(π_θ(· | s_t)) = −Σ_v π log π, nats.
  kl_BT: KL(π_θ ‖ π_old) = Σ_v π_θ log(π_θ / π_old) at s_t, nats; None unless
    requested. `score_states` leaves out ℓ − ℓ°, which `by_completion` adds.
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
    num_targets: T; the last T tokens of a row are scored.
    temperature, chunk_size: as in `score_states`.
    old_params: π_old's weights, for the exact KL.

  Returns:
    Scores over [B, T], float32.
  """
  later_S = jnp.arange(token_BS.shape[1] - 1, -1, -1)  # tokens after a column
  scored_BS = jnp.broadcast_to(
      (1 <= later_S) & (later_S <= num_targets), token_BS.shape)
  rows = PackedRows(token_BS, position_BS, None, scored_BS)
  head = functools.partial(score_states, config, rows=rows,
                           temperature=temperature, chunk_size=chunk_size)

  def states(params):
    return (transformer.forward(config, params, token_BS, position_BS)[0],
            transformer.head_weight(config, params))

  old = None
  if old_params is not None:
    old = jax.lax.stop_gradient(states(old_params))
  scores = head(*states(params), old=old)
  if old is not None:
    scores = _add_log_ratio(scores, head(*old).logp_BT)
  return jax.tree.map(lambda x: x[:, :num_targets], scores)


def score_states(config: transformer.ModelConfig, hidden_RSD: jax.Array,
                 weight: jax.Array, rows: PackedRows, *, temperature: float,
                 chunk_size: int, shards: int = 1,
                 old: tuple[jax.Array, jax.Array] | None = None) -> Scores:
  """Scores the tokens after the scored columns under the policy.

  Args:
    hidden_RSD: of `transformer.forward`. weight: the head's, in the stored
      dtype.
    rows: the sequences.
    temperature: divides the logits, as in the sampler.
    chunk_size: tokens whose logits exist at one time (at least one per row);
      peak memory is a few times [chunk_size, V] floats.
    shards: the number of pieces into which the mesh cuts R.
    old: hidden states and head of π_old; if given, the exact KL (TEPO Eq. 4) is
      computed too, less ℓ − ℓ°. Without gradient.

  Returns:
    Scores over [R, C], C >= S, float32, of each row's scored tokens in order.
    Entries beyond a row's scored tokens are undefined.
  """
  head = _Head(
      tied=config.tie_embeddings, dtype=config.dtype,
      vocab_size=config.vocab_size, temperature=temperature,
      width=chunk_width(*rows.token_RS.shape, chunk_size), shards=shards)
  target_RS = jnp.roll(rows.token_RS, -1, axis=1)
  return Scores(*_score(head, hidden_RSD, weight, target_RS, rows.scored_RS,
                        old))


def by_completion(scores: Scores, row_B: jax.Array | np.ndarray,
                  column_B: jax.Array | np.ndarray, mine_B: jax.Array,
                  old_logp_BT: jax.Array | np.ndarray) -> Scores:
  """The scores [B, T] of the completions in these rows; zeros of the others.

  Args:
    scores: of `score_states`, [R, C].
    row_B, column_B: where the scores of a completion begin.
    mine_B: whether a completion is in these rows.
    old_logp_BT: ℓ°, or zeros: its shape is the result's, and its values
      complete the exact KL, if there is one.

  Takes T scores from each completion's first. Past its end these are
  the scores of whatever follows in the row; the mask hides them.
  """
  length = old_logp_BT.shape[1]

  def take(x_RC):
    flat = jnp.pad(x_RC.reshape(-1), (0, length))
    start_B = row_B * x_RC.shape[1] + column_B
    start_B = jnp.where(mine_B, start_B, x_RC.size)
    return jax.vmap(lambda start: jax.lax.dynamic_slice_in_dim(
        flat, start, length))(start_B)

  scores = jax.tree.map(take, scores)
  return scores if scores.kl_BT is None else _add_log_ratio(
      scores, jnp.where(mine_B[:, None], old_logp_BT, 0))


def _add_log_ratio(scores, old_logp_BT):
  """Completes the exact KL of `score_states`; old_logp_BT: ℓ°.

  KL = E_π[z − z°] − (z_y − z°_y) + (ℓ − ℓ°). As ℓ° is known, log Σ exp z° takes
  no pass over π_old's logits; and if its bits are those of ℓ, the KL is 0. The
  log-ratio counts as a constant: `score_states` has the KL's whole gradient.
  """
  return scores.replace(kl_BT=scores.kl_BT + jax.lax.stop_gradient(
      scores.logp_BT - old_logp_BT))


def chunk_width(count: int, length: int, chunk_size: int) -> int:
  """Targets per row of a chunk, of `count` rows of `length` columns."""
  return min(length, max(1, chunk_size // count))


@dataclasses.dataclass(frozen=True)
class _Head:
  """The head and its chunks; static. tied: the weight is [V, D], else [D, V].
  """
  tied: bool
  dtype: str
  vocab_size: int
  temperature: float
  width: int
  shards: int

  @property
  def weight_axes(self):
    """Logical axes of [n, *weight.shape]: sharded by rows and vocabulary."""
    return ('batch', 'vocab', None) if self.tied else ('batch', None, 'vocab')

  def weight(self, stored):
    """The weight in the compute dtype, sharded by vocabulary only."""
    return mesh_lib.constrain(
        stored.astype(self.dtype), self.weight_axes[1:])

  def logits(self, hidden_MD, weight):
    """z / temperature, float32 [M, V]."""
    logits_MV = padding_lib.without_padding(
        self.vocab_size, ops_lib.logits(hidden_MD, weight, self.tied))
    return mesh_lib.constrain(
        logits_MV / self.temperature, ('batch', 'vocab'))

  def weight_gradient(self, hidden_MD, d_z_MV):
    """Each row shard's summand, float32 [n, V, D] or [n, D, V]."""
    pair = (d_z_MV, hidden_MD) if self.tied else (hidden_MD, d_z_MV)
    by_shard = (x.reshape(self.shards, -1, x.shape[-1]) for x in pair)
    return mesh_lib.constrain(
        jnp.einsum('nMI,nMO->nIO', *by_shard,
                   preferred_element_type=jnp.float32), self.weight_axes)

  def target_columns(self, scored_RS):
    """Each target's predicting column, int32 [R, C]; how many chunks to run.

    C is a multiple of the width. At least one chunk runs, scored or not.
    """
    column_RC = jnp.argsort(~scored_RS, axis=1, stable=True)
    padding = -column_RC.shape[1] % self.width
    used = 1
    if self.width < column_RC.shape[1]:
      used = -(-jnp.max(jnp.sum(scored_RS, axis=1)) // self.width)
    column_RC = jnp.pad(column_RC, ((0, 0), (0, padding)),
                        constant_values=scored_RS.shape[1])
    return column_RC, used

  def cut(self, x_RC, index):
    """The entries of chunk `index`, [R, w]."""
    return jax.lax.dynamic_slice_in_dim(
        x_RC, index * self.width, self.width, axis=1)

  def pick(self, x_RS, column_Rw):
    """x at the columns: [M] or [M, D]."""
    column = column_Rw.reshape(*column_Rw.shape, *(1,) * (x_RS.ndim - 2))
    return self.flat(jnp.take_along_axis(x_RS, column, axis=1, mode='clip'))

  def flat(self, x_Rw):
    """[R, w, ...] -> [M, ...]."""
    x = x_Rw.reshape(-1, *x_Rw.shape[2:])
    return mesh_lib.constrain(x, ('batch',) + (None,) * (x.ndim - 1))

  def put(self, into_RC, x_M, index):
    """Writes the values of chunk `index`, [M]."""
    x_Rw = x_M.reshape(len(into_RC), self.width)
    return jax.lax.dynamic_update_slice_in_dim(
        into_RC, x_Rw.astype(into_RC.dtype), index * self.width, axis=1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _score(head, hidden_RSD, weight, target_RS, scored_RS, old):
  """(ℓ, H, KL − (ℓ − ℓ°) or None), each [R, C]; old: as in `score_states`.

  With ℓ − ℓ° as a constant: the third has the gradient of the KL.
  """
  return _forward(head, hidden_RSD, weight, target_RS, scored_RS, old)[0][:3]


def _forward(head, hidden_RSD, weight, target_RS, scored_RS, old):
  """(ℓ, H, KL − (ℓ − ℓ°), log Σ exp z, E_π[z − z°]), [R, C] or None; logits.

  The logits are `_both_logits` of chunk 0, which is computed last here and
  first in the backward pass.
  """
  column_RC, used = head.target_columns(scored_RS)
  policies = (hidden_RSD, head.weight(weight)), (
      None if old is None else (old[0], head.weight(old[1])))

  def chunk(index, out):
    column_Rw = head.cut(column_RC, index)
    z_MV, old_z_MV = logits = _both_logits(head, column_Rw, *policies)
    target_M = head.pick(target_RS, column_Rw)
    at_target = functools.partial(
        jnp.take_along_axis, indices=target_M[..., None], axis=-1)
    target_z_M1 = at_target(z_MV)
    lse_M1, entropy_M1 = _isolated(_log_sum_exp_and_entropy, z_MV)
    kl_M1 = shift_M1 = None
    if old is not None:
      shift_M1 = jnp.sum(
          jnp.exp(z_MV - lse_M1) * _shift(z_MV, lse_M1, old_z_MV), axis=-1,
          keepdims=True)
      kl_M1 = shift_M1 - _shift(target_z_M1, lse_M1, at_target(old_z_MV))
    values = target_z_M1 - lse_M1, entropy_M1, kl_M1, lse_M1, shift_M1
    return jax.tree.map(lambda x_RC, value_M1: head.put(
        x_RC, value_M1[..., 0], index), out, values), logits

  zeros_RC = jnp.zeros(column_RC.shape, jnp.float32)
  optional_RC = None if old is None else zeros_RC
  out = jax.lax.fori_loop(
      1, used, lambda index, out: chunk(index, out)[0],
      (zeros_RC, zeros_RC, optional_RC, zeros_RC, optional_RC))
  return chunk(0, out)


def _both_logits(head, column_Rw, policy, old):
  """z of both policies at the columns, [M, V]; None for an absent policy."""
  return [None if pair is None else head.logits(
      head.pick(pair[0], column_Rw), pair[1]) for pair in (policy, old)]


def _isolated(function, x):
  """function(x) between barriers, so that its rounding does not depend on the
  fusion context: ℓ and H of one policy are bit-identical in every program.
  """
  return jax.lax.optimization_barrier(
      function(jax.lax.optimization_barrier(x)))


def _log_sum_exp_and_entropy(z_MV):
  """log Σ exp z and the entropy of softmax z, float32 [M, 1].

  With m = max z, s = Σ exp(z − m) and t = Σ exp(z − m) (m − z) they are
  m + log s and log s + t / s: two passes over z.
  """
  total = functools.partial(jnp.sum, axis=-1, keepdims=True)
  most_M1 = jnp.max(z_MV, axis=-1, keepdims=True)
  weight_MV = jnp.exp(z_MV - most_M1)
  s_M1 = total(weight_MV)
  log_s_M1 = jnp.log(s_M1)
  return most_M1 + log_s_M1, (
      log_s_M1 + total(weight_MV * (most_M1 - z_MV)) / s_M1)


def _shift(z, lse, old_z):
  """z − z°; exactly 0 for equal policies, as both are rounded alike, also where
  XLA fuses the temperature's product with one difference."""
  return (z - lse) - (old_z - lse)


def _score_forward(head, *primals):
  # symbolic_zeros wraps each array together with a flag, `perturbed`.
  primals = jax.tree.map(
      lambda leaf: leaf.value, primals,
      is_leaf=lambda leaf: hasattr(leaf, 'perturbed'))
  out, logits = _forward(head, *primals)
  return out[:3], (primals, (out[1], *out[3:]), logits)


def _score_backward(head, residuals, cotangents):
  """Products in the compute dtype; the weight's gradient is summed in fp32."""
  (hidden_RSD, stored, target_RS, scored_RS, old), kept, logits = residuals
  cotangents = tuple(
      None if isinstance(x, jax.custom_derivatives.SymbolicZero) else x
      for x in cotangents)
  column_RC, used = head.target_columns(scored_RS)
  weight = head.weight(stored)
  old_policy = None
  if old is not None and cotangents[2] is not None:
    old_policy = old[0], head.weight(old[1])
  by_rows = ('batch', None, None)

  def chunk(index, carry, logits=None):
    d_hidden_RSD, d_weight = carry
    column_Rw = head.cut(column_RC, index)
    hidden_MD = head.pick(hidden_RSD, column_Rw)
    if logits is None:
      logits = _both_logits(head, column_Rw, (hidden_RSD, weight), old_policy)
    target_M = head.pick(target_RS, column_Rw)
    d_z_MV = _logits_gradient(
        head, target_M[..., None], *logits, *jax.tree.map(
            lambda x_RC: head.flat(head.cut(x_RC, index))[..., None],
            (kept, cotangents)))
    d_hidden_MD = jax.lax.dot_general(
        d_z_MV, weight, (((1,), (0 if head.tied else 1,)), ((), ())))
    d_hidden_RwD = mesh_lib.constrain(
        d_hidden_MD.reshape(*column_Rw.shape, -1), by_rows)
    return (jax.vmap(_set)(d_hidden_RSD, column_Rw, d_hidden_RwD),
            d_weight + head.weight_gradient(hidden_MD, d_z_MV))

  carry = chunk(0, (
      mesh_lib.constrain(jnp.zeros(hidden_RSD.shape, head.dtype), by_rows),
      # Summed over the shards after the loop.
      mesh_lib.constrain(
          jnp.zeros((head.shards, *stored.shape), jnp.float32),
          head.weight_axes)), logits)
  d_hidden_RSD, d_weight = jax.lax.fori_loop(1, used, chunk, carry)
  return (d_hidden_RSD, jnp.sum(d_weight, 0).astype(stored.dtype), None,
          None, None)


def _logits_gradient(head, target_M1, z_MV, old_z_MV, kept, cotangents):
  """∂z = gˡ (1[y] − p) − gᴴ p (log p + H) + gᴷ p (z − z° − E_p[z − z°]), over
  the temperature, in the compute dtype. A cotangent g of None means 0."""
  entropy_M1, lse_M1, shift_M1 = kept
  d_logp_M1, d_entropy_M1, d_kl_M1 = cotangents
  logp_MV = z_MV - lse_M1
  slope_MV = jnp.zeros(())
  if d_logp_M1 is not None:
    slope_MV -= d_logp_M1
  if d_entropy_M1 is not None:
    slope_MV -= d_entropy_M1 * (logp_MV + entropy_M1)
  if d_kl_M1 is not None:
    slope_MV += d_kl_M1 * (_shift(z_MV, lse_M1, old_z_MV) - shift_M1)
  d_z_MV = jnp.exp(logp_MV) * slope_MV
  if d_logp_M1 is not None:
    vocabulary_V = jnp.arange(z_MV.shape[-1])
    d_z_MV += jnp.where(vocabulary_V == target_M1, d_logp_M1, 0)
  return (d_z_MV / head.temperature).astype(head.dtype)


def _set(x_SD, column_w, new_wD):
  """Drops the entries of padding, whose column is S."""
  return x_SD.at[column_w].set(new_wD, unique_indices=True, mode='drop')


_score.defvjp(_score_forward, _score_backward, symbolic_zeros=True)
