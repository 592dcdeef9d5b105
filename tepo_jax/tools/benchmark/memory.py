"""Temporary memory of scoring, as the compiler reports it; nothing runs."""

from collections.abc import Iterator
import dataclasses

import jax
import jax.numpy as jnp
import ml_collections

from tepo_jax.policy import scoring
from tepo_jax.policy import transformer
from tepo_jax.tools import workload as workload_lib
from tepo_jax.tools.benchmark import registry
from tepo_jax.tools.benchmark import timing

_COLUMNS = 512  # of a row
# Qwen2.5-7B's head; the layers before it are not measured.
_HEAD = transformer.ModelConfig(
    vocab_size=152_064, d_model=3584, num_layers=1, num_heads=1,
    num_kv_heads=1, head_dim=8, d_ff=8, max_position=_COLUMNS)
_TOKENS = tuple(2 ** i * 1024 for i in (0, 1, 2, 3, 4, 6))


def measure(config: ml_collections.ConfigDict,
            workload: workload_lib.Workload, peers: registry.Peers
            ) -> Iterator[timing.Measurement]:
  """Measures ℓ, H and their gradient over 1k to 64k tokens (V 152,064, D
  3,584), and a form that holds all logits, at 16k tokens."""
  del peers
  head = dataclasses.replace(
      _HEAD, dtype=workload.model.dtype, ops=workload.model.ops)
  for tokens in _TOKENS:
    yield timing.Measurement(f'memory/scoring/{tokens}', scoring_bytes(
        head, tokens, config.train.chunk_size), 'byte')
  yield timing.Measurement(
      'memory/all logits/16384', scoring_bytes(head, 16384, None), 'byte')


def scoring_bytes(model: transformer.ModelConfig, tokens: int,
                  chunk_size: int | None) -> int:
  """Returns the temporary bytes of Σ(ℓ + H) and its gradient with respect to
  hidden states and head; chunk_size None: with all logits at once."""
  def total(hidden_RSD, weight_DV, token_RS, scored_RS):
    rows = scoring.PackedRows(token_RS, None, None, scored_RS)
    score = _all_logits if chunk_size is None else scoring.score_states
    return sum(map(jnp.sum, jax.tree.leaves(score(
        model, hidden_RSD, weight_DV, rows, temperature=1.0,
        chunk_size=chunk_size))))

  shape = tokens // _COLUMNS, _COLUMNS
  abstract = jax.ShapeDtypeStruct
  compiled = jax.jit(jax.value_and_grad(total, (0, 1))).lower(
      abstract((*shape, model.d_model), model.dtype),
      abstract((model.d_model, model.vocab_size), 'float32'),
      abstract(shape, 'int32'), abstract(shape, 'bool')).compile()
  return compiled.memory_analysis().temp_size_in_bytes


def _all_logits(model, hidden_RSD, weight_DV, rows, *, temperature,
                chunk_size):
  """Computes ℓ and H from logits [R, S, V], which `scoring` avoids."""
  del chunk_size
  logits_RSV = transformer.logits(
      model, {'head': {'kernel': weight_DV}}, hidden_RSD)
  logp_RSV = jax.nn.log_softmax(logits_RSV / temperature)
  target_RS1 = jnp.roll(rows.token_RS, -1, axis=1)[..., None]
  return (jnp.take_along_axis(logp_RSV, target_RS1, -1),
          -jnp.sum(jnp.exp(logp_RSV) * logp_RSV, -1))
