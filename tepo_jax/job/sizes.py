"""Sizes that exceed this machine's memory, refused before they are allocated.

What depends on the model (slots, `lora.rank`) is bounded in `memory`.
"""

import ml_collections

from configs import fields as fields_lib
from tepo_jax import errors
from tepo_jax.runtime import host

_WORKER = 64 << 20  # bytes of a grading worker: Python with math-verify


def check(config: ml_collections.ConfigDict) -> None:
  """Refuses a config with a part that exceeds this machine's memory.

  For programs that run it here. Call it after `configuration.check_values`.

  Raises:
    errors.InputError: names the part, its fields and both numbers.
  """
  rollout, memory = config.rollout, host.memory_bytes()
  longest = config.data.max_prompt_tokens + rollout.max_tokens
  # Token ids and log-probabilities of the groups, and the rows of a `Batch`.
  completions = rollout.prompts * rollout.samples * (
      8 * longest + 24 * rollout.max_tokens)
  for what, size, names in (
      ('the completions of a rollout step', completions,
       ('rollout.prompts', 'rollout.samples', 'rollout.max_tokens',
        'data.max_prompt_tokens')),
      ('the grading workers', _WORKER * config.grading.workers,
       ('grading.workers',))):
    if size > memory:
      fields = fields_lib.flat(config)
      shown = ', '.join(f'config.{name}={fields[name]}' for name in names)
      raise errors.InputError(
          f'{shown}: {what} would take at least {size / 1e9:,.4g} GB; '
          f'this machine has {memory / 1e9:.4g} GB of memory')
