"""What is measured: a model's shape and the sizes of a rollout step."""

import dataclasses

import ml_collections
import numpy as np

from tepo_jax.job import base_model
from tepo_jax.job import programs as programs_lib
from tepo_jax.learning import packing
from tepo_jax.policy import transformer
from tepo_jax.policy.huggingface import hub
from tepo_jax.policy.huggingface import weights

MIXED_SHARE = 0.6
ROUNDS = 5


@dataclasses.dataclass(frozen=True)
class Workload:
  """Sizes of a workload with random weights and random prompts.

  model: with its execution fields. prompts, samples: Q and G.
  prompt_tokens, max_tokens: P and T.
  mean_tokens: mean completion length. At T, all completions have T tokens;
    below it, lengths follow a geometric distribution truncated at T.
  mixed_share: of groups, those with both right and wrong answers; dynamic
    sampling draws more prompts where it is below 1.
  rounds: how often each function is timed.
  folder: with the model's config.json; None: the embedded model.
  shared_prefix: of the P tokens, those with which all prompts begin.
  """
  model: transformer.ModelConfig
  prompts: int
  samples: int
  prompt_tokens: int
  max_tokens: int
  mean_tokens: int
  mixed_share: float
  rounds: int
  folder: str | None = None
  shared_prefix: int = 0

  def lengths(self, rows: int) -> np.ndarray:
    """Draws completion lengths, int32 [rows], each in 1…T."""
    if self.mean_tokens >= self.max_tokens:
      return np.full(rows, self.max_tokens, np.int32)
    return np.minimum(
        np.random.default_rng(0).geometric(1 / self.mean_tokens, rows),
        self.max_tokens).astype(np.int32)

  def random_batch(self) -> packing.Batch:
    """Makes random prompts with random completions, of `lengths`."""
    rows, width = self.prompts * self.samples, self.prompt_tokens
    length_B1 = self.lengths(rows)[:, None]
    mask_BT = np.arange(self.max_tokens) < length_B1
    column_S = np.arange(width + self.max_tokens, dtype=np.int32)
    token_BS = np.random.default_rng(0).integers(
        self.model.vocab_size, size=(rows, len(column_S)), dtype=np.int32)
    first_B = np.arange(rows) // self.samples * self.samples
    token_BS[:, :width] = token_BS[first_B, :width]
    token_BS[:, :self.shared_prefix] = token_BS[0, :self.shared_prefix]
    zeros_BT = np.zeros(mask_BT.shape, np.float32)
    return packing.Batch(
        token_BS=token_BS,
        position_BS=np.where(
            column_S < width + length_B1, column_S, np.int32(-1)),
        mask_BT=mask_BT.astype(np.float32),
        advantage_B=np.where(np.arange(rows) % 2, 1, -1).astype(np.float32),
        old_logp_BT=zeros_BT, old_entropy_BT=zeros_BT,
        sampler_logp_BT=zeros_BT)

  def forward_flops(self, shared: bool = False) -> float:
    """Returns the FLOPs of a forward pass; an update costs three times as much.

    Counted are the layers on every real token, causal attention, and the head
    on completion tokens; not padding and recomputation. `shared`: the layers
    process a prompt, except its last token, once; what several prompts share
    counts for each.
    """
    length_B = self.lengths(self.prompts * self.samples).astype(float)
    total_B = self.prompt_tokens + length_B
    tokens = total_B.sum()
    if shared:
      tokens -= (len(total_B) - self.prompts) * (self.prompt_tokens - 1)
    # Of attention, the causal half of the square.
    return flops(self.model, tokens, np.sum(total_B ** 2) / 2, length_B.sum())


def flops(model: transformer.ModelConfig, tokens: float, pairs: float,
          scored: float) -> float:
  """Returns the FLOPs that a forward pass must make: 2 per weight and token.

  Counted are matrix products: the layers on `tokens`, attention's two on
  `pairs` of a query and a key that it sees, and the head on `scored` tokens.
  """
  width = model.num_heads * model.head_dim
  kv_width = model.num_kv_heads * model.head_dim
  layer = model.d_model * (2 * width + 2 * kv_width + 3 * model.d_ff)
  return 2.0 * (model.num_layers * (layer * tokens + 2 * width * pairs)
                + model.d_model * model.vocab_size * scored)


def of(config: ml_collections.ConfigDict, prompt_tokens: int | None = None,
       mean_tokens: int | None = None, mixed_share: float = MIXED_SHARE,
       rounds: int = ROUNDS) -> Workload:
  """Returns a workload with the config's model and sizes.

  Only config.json of `config.model` is read. Without `config.model`, it is the
  embedded model with `config.pretrain.vocabulary` tokens.

  Args:
    prompt_tokens, mean_tokens: at most, and if None, the config's longest.
    mixed_share, rounds: of the Workload.
  """
  folder = None
  if config.model is None:
    model = base_model.model_config(
        config.pretrain, config.pretrain.vocabulary)
  else:
    folder = hub.folder(config.model, ('config.json',))
    model = weights.model_config(folder)
  longest, rollout = config.data.max_prompt_tokens, config.rollout
  prompt_tokens = min(prompt_tokens or longest, longest)
  return Workload(
      programs_lib.execution(model, config.compute), rollout.prompts,
      rollout.samples, prompt_tokens, rollout.max_tokens,
      min(mean_tokens or rollout.max_tokens, rollout.max_tokens), mixed_share,
      rounds, folder and str(folder),
      min(config.train.shared_prefix, prompt_tokens - 1))
