"""The same work by Tunix's GRPOLearner; written for Tunix 0.1.7."""

from flax import nnx
import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
from tunix.models.qwen3 import model as qwen3
from tunix.rl import rl_cluster
from tunix.rl.grpo import grpo_learner
from tunix.rl.rollout import base_rollout

from tepo_jax.learning import optimizer as optimizer_lib
from tepo_jax.learning import packing
from tepo_jax.policy import transformer
from tepo_jax.tools import workload as workload_lib
from tepo_jax.tools.benchmark import peers

_PADDING = -1  # outside the vocabulary; as an index it is the last token


class TunixUpdate:
  """Generates, scores and updates with the learner's own code.

  Everything that the workload does not state is Tunix's default: the loss is
  the mean of the sequences' means, and the backward pass recomputes nothing.
  There is no reference model. A step scores its rollout, as ours does; Tunix
  alone would skip this for a rollout with one update.
  """

  def __init__(self, workload: workload_lib.Workload, batch: packing.Batch,
               optimizer: ml_collections.ConfigDict):
    peers.require_group('Tunix', workload)
    width, samples = workload.prompt_tokens, workload.samples
    self._batch = grpo_learner.TrainExample(
        prompt_ids=jnp.array(batch.token_BS[:, :width]),
        prompt_mask=jnp.ones((len(batch.token_BS), width), bool),
        completion_ids=jnp.where(
            batch.mask_BT > 0, batch.token_BS[:, width:], _PADDING),
        completion_mask=jnp.array(batch.mask_BT > 0),
        advantages=jnp.array(batch.advantage_B),
        ref_per_token_logps=None, old_per_token_logps=None)
    self.prompts = peers.repeated_texts(
        batch.token_BS[::samples, :width], samples)
    self.cluster = rl_cluster.RLCluster(
        actor=_model(workload.model),
        tokenizer=_Tokenizer(workload.model.vocab_size),
        cluster_config=_cluster_config(workload, optimizer))
    self.trainer = self.cluster.actor_trainer
    # With one iteration Tunix would not score the rollout.
    self.learner = grpo_learner.GRPOLearner(
        self.cluster, grpo_learner.GRPOConfig(
            num_generations=samples, num_iterations=2, beta=0.0),
        reward_fns=peers.every_second)

  def step(self) -> float:
    return self._train(self.learner._generate_and_compute_advantage(
        {'prompts': self.prompts}))

  def score(self) -> jax.Array:
    return self.cluster.get_old_per_token_logps(
        self._batch.prompt_ids, self._batch.completion_ids)

  def update(self) -> float:
    return self._train(self._batch)

  def _train(self, batch: grpo_learner.TrainExample) -> float:
    self.cluster.update_actor([batch], None)
    self.cluster.global_steps += 1  # as Tunix's own loop does
    return float(self.trainer._prev_buffered_train_metrics.loss)


class _Tokenizer:
  """Makes a word of each token id; the end token is outside the vocabulary."""

  def __init__(self, vocab_size: int):
    self._end = vocab_size

  def encode(self, text: str) -> list[int]:
    return [int(word) for word in text.split()]

  def decode(self, tokens: list[int]) -> str:
    return ' '.join(map(str, tokens))

  def bos_id(self) -> None:
    return None

  def eos_id(self) -> int:
    return self._end

  def pad_id(self) -> int:
    return _PADDING


def _model(model: transformer.ModelConfig) -> qwen3.Qwen3:
  """Makes the Qwen3 of that shape: fp32, random weights."""
  rngs = nnx.Rngs(0)
  made = qwen3.Qwen3(qwen3.ModelConfig(
      vocab_size=model.vocab_size, embed_dim=model.d_model,
      hidden_dim=model.d_ff, num_layers=model.num_layers,
      num_heads=model.num_heads, num_kv_heads=model.num_kv_heads,
      head_dim=model.head_dim, rope_theta=int(model.rope_theta),
      norm_eps=model.norm_eps, use_tied_embedding=model.tie_embeddings),
                     rngs=rngs)
  # Tunix initialises these to zero, for weights that are loaded later.
  initializer = nnx.initializers.normal(.02)
  for layer in made.layers:
    for linear in (layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj):
      linear.kernel[...] = initializer(rngs.params(), linear.kernel.shape)
  return made


def _cluster_config(workload: workload_lib.Workload,
                    optimizer: ml_collections.ConfigDict
                    ) -> rl_cluster.ClusterConfig:
  """Returns settings for all devices, each pass as one batch."""
  mesh = jax.sharding.Mesh(
      np.array(jax.devices()).reshape(-1, 1), ('fsdp', 'tp'))
  return rl_cluster.ClusterConfig(
      role_to_mesh={role: mesh for role in rl_cluster.Role},
      training_config=rl_cluster.RLTrainingConfig(
          actor_optimizer=optimizer_lib.of(optimizer)[0],
          eval_every_n_steps=1, rollout_micro_batch_size=workload.prompts,
          compute_logps_micro_batch_size=workload.prompts),
      rollout_config=base_rollout.RolloutConfig(
          max_tokens_to_generate=workload.max_tokens,
          max_prompt_length=workload.prompt_tokens,
          kv_cache_size=workload.prompt_tokens + workload.max_tokens,
          temperature=1.0))
