"""Bounds on the sizes of a config by this machine's memory.

Each row of BOUNDS is a part of a run, the fields that determine its size, and
the least bytes of host memory that it takes, as a function of the config. A
part larger than the memory is refused before anything is allocated. What
depends on the model (slots, `lora.rank`) is bounded in `memory`.

Axes: B completions of a rollout step · P prompt tokens · T completion tokens.
"""

from collections.abc import Callable
import dataclasses

import ml_collections

from configs import fields as fields_lib
from tepo_jax import errors
from tepo_jax.runtime import host

_WORKER = 64 << 20  # a grading worker: Python with math-verify
_DEMONSTRATION = 2 << 10  # two rows of arrays, their texts and token ids
_TOKENS = 64  # at least, of a demonstration's row


@dataclasses.dataclass(frozen=True)
class Bound:
  """A part of a run, its fields, and config -> the least bytes it takes."""
  what: str
  fields: tuple[str, ...]
  size: Callable[[ml_collections.ConfigDict], float]


def _completions(c):
  """Token ids and log-probabilities of B groups, and B rows of a `Batch`."""
  longest = c.data.max_prompt_tokens + c.rollout.max_tokens
  return c.rollout.prompts * c.rollout.samples * (
      8 * longest + 24 * c.rollout.max_tokens)


def _model(c):
  """Weights, two moments and gradients of the embedded model, in fp32."""
  p = c.pretrain
  heads = 2 * p.head_dim * (p.num_heads + p.num_kv_heads)
  return 16 * p.d_model * (
      p.num_layers * (heads + 3 * p.d_ff) + p.vocabulary)


BOUNDS = (
    Bound('the completions of a rollout step',
          ('rollout.prompts', 'rollout.samples', 'rollout.max_tokens',
           'data.max_prompt_tokens'), _completions),
    Bound('the metrics of the updates', ('train.epochs',),
          lambda c: 64 * c.train.epochs),
    Bound('the tokens of a microbatch', ('train.microbatch_tokens',),
          lambda c: 20 * c.train.microbatch_tokens),
    Bound('the tokens of a chunk of decoding', ('rollout.chunk',),
          lambda c: 8 * c.rollout.chunk),
    Bound('the completions of a problem in evaluation',
          ('eval.samples', 'eval.max_tokens'),
          lambda c: 8 * (c.eval.samples or 1) * c.eval.max_tokens),
    Bound('the grading workers', ('grading.workers',),
          lambda c: _WORKER * c.grading.workers),
    Bound('the weights, moments and gradients of the embedded model',
          ('pretrain.d_model', 'pretrain.num_layers', 'pretrain.num_heads',
           'pretrain.num_kv_heads', 'pretrain.head_dim', 'pretrain.d_ff',
           'pretrain.vocabulary'), _model),
    Bound('the demonstrations', ('pretrain.demonstrations',),
          lambda c: _DEMONSTRATION * c.pretrain.demonstrations),
    Bound('a batch of demonstrations', ('pretrain.batch', 'pretrain.d_model'),
          lambda c: 4 * _TOKENS * c.pretrain.batch * c.pretrain.d_model),
)


def check(config: ml_collections.ConfigDict) -> None:
  """Refuses a config with a part that exceeds this machine's memory.

  For programs that run it here. Call it after `configuration.check_values`.

  Raises:
    errors.InputError: names the part, its fields and both numbers.
  """
  memory = host.memory_bytes()
  fields = fields_lib.flat(config)
  for bound in BOUNDS:
    if not fields.keys() >= set(bound.fields):
      continue  # of a model that this config does not make
    size = bound.size(config)
    if size > memory:
      shown = ', '.join(
          f'config.{name}={fields[name]}' for name in bound.fields)
      raise errors.InputError(
          f'{shown}: {bound.what} would take at least {size / 1e9:,.4g} GB; '
          f'this machine has {memory / 1e9:.4g} GB of memory')
