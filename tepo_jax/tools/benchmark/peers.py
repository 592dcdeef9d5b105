"""What the peers share: prompts, rewards, and a model of the same shape."""

import numpy as np

from tepo_jax import errors
from tepo_jax.tools import workload as workload_lib


def require_group(library: str, workload: workload_lib.Workload) -> None:
  """Raises errors.InputError for groups of one completion.

  The library's advantages need at least two.
  """
  if workload.samples < 2:
    raise errors.InputError(
        f'--peer={library.lower()}: config.rollout.samples=1, but {library} '
        'needs at least 2')


def torch_model(workload: workload_lib.Workload):
  """Makes transformers' model of that shape, fp32, with random weights: of the
  folder's class, or for the embedded model a Qwen3."""
  import transformers  # imports torch, which is optional
  if workload.folder is not None:
    config = transformers.AutoConfig.from_pretrained(
        workload.folder, use_cache=False)
    return transformers.AutoModelForCausalLM.from_config(
        config, dtype='float32')
  model = workload.model
  config = transformers.Qwen3Config(
      vocab_size=model.vocab_size, hidden_size=model.d_model,
      intermediate_size=model.d_ff, num_hidden_layers=model.num_layers,
      num_attention_heads=model.num_heads,
      num_key_value_heads=model.num_kv_heads, head_dim=model.head_dim,
      max_position_embeddings=model.max_position,
      tie_word_embeddings=model.tie_embeddings, use_cache=False)
  return transformers.Qwen3ForCausalLM(config)


def repeated_texts(token_QP: np.ndarray, samples: int) -> list[str]:
  """Returns each prompt `samples` times as text: its token ids as words."""
  texts = [' '.join(map(str, tokens)) for tokens in token_QP]
  return [text for text in texts for _ in range(samples)]


def every_second(completions: list[str], **_) -> list[float]:
  """A reward function that alternates 0 and 1: every group is mixed."""
  return [float(index % 2) for index in range(len(completions))]
