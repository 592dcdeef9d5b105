"""The same work by TRL's GRPOTrainer; written for TRL 1.16."""

import tempfile
from typing import Any

import datasets
import ml_collections
import tokenizers
import torch
import transformers
import trl

from tepo_jax.learning import packing
from tepo_jax.tools import workload as workload_lib
from tepo_jax.tools.benchmark import peers


class TrlUpdate:
  """Generates, scores and updates with the trainer's own code, on the CPU.

  Everything that the workload does not state is TRL's default: the loss is
  'dapo', and a step has no scoring pass, since its one update is on-policy.
  """

  def __init__(self, workload: workload_lib.Workload, batch: packing.Batch,
               optimizer: ml_collections.ConfigDict):
    width, samples = workload.prompt_tokens, workload.samples
    token_BS = torch.tensor(batch.token_BS).long()
    mask_BT = torch.tensor(batch.mask_BT).long()
    self._rows = {
        'prompt_ids': token_BS[:, :width],
        'prompt_mask': torch.ones_like(token_BS[:, :width]),
        'completion_ids': token_BS[:, width:],
        'completion_mask': mask_BT,
        'advantages': torch.tensor(batch.advantage_B),
        'num_items_in_batch': mask_BT.sum()}
    self.prompts = [{'prompt': text} for text in peers.repeated_texts(
        batch.token_BS[::samples, :width], samples)]
    self.model = peers.torch_model(workload)
    # TRL creates the folder and writes nothing into it.
    with tempfile.TemporaryDirectory() as folder:
      self.trainer = _Trainer(
          model=self.model, reward_funcs=peers.every_second,
          args=_arguments(workload, optimizer, folder),
          train_dataset=datasets.Dataset.from_list(self.prompts),
          processing_class=_tokenizer(workload.model.vocab_size))
    # TRL's training loop does this before its first step.
    self.trainer.create_optimizer()
    self.trainer.current_gradient_accumulation_steps = 1

  def step(self) -> float:
    return self._train(self.prompts)

  def score(self) -> torch.Tensor:
    rows = self._rows
    with torch.no_grad():
      logp_BT, _, _ = self.trainer._get_per_token_logps_and_entropies(
          self.model,
          torch.cat([rows['prompt_ids'], rows['completion_ids']], 1),
          torch.cat([rows['prompt_mask'], rows['completion_mask']], 1),
          rows['completion_ids'].shape[1])
    return logp_BT

  def update(self) -> float:
    return self._train(self._rows)

  def _train(self, inputs: Any) -> float:
    trainer = self.trainer
    trainer.optimizer.zero_grad()
    loss = trainer.training_step(self.model, inputs, None)
    trainer.accelerator.clip_grad_norm_(
        self.model.parameters(), trainer.args.max_grad_norm)
    trainer.optimizer.step()
    return loss.item()


class _Trainer(trl.GRPOTrainer):
  """Also accepts completions that were generated before."""

  def _prepare_inputs(self, generation_batch):
    if isinstance(generation_batch, dict):
      return generation_batch
    return super()._prepare_inputs(generation_batch)


def _arguments(workload: workload_lib.Workload,
               optimizer: ml_collections.ConfigDict, folder: str
               ) -> trl.GRPOConfig:
  """Returns settings for the workload in fp32, as one batch."""
  peers.require_group('TRL', workload)
  # The model's config, which is for updates, disables the cache.
  return trl.GRPOConfig(
      folder, use_cpu=True, bf16=False, activation_checkpointing=False,
      report_to='none', save_strategy='no',
      per_device_train_batch_size=workload.prompts * workload.samples,
      gradient_accumulation_steps=1, num_generations=workload.samples,
      max_completion_length=workload.max_tokens,
      generation_kwargs={'use_cache': True}, epsilon=0.2, epsilon_high=0.28,
      learning_rate=optimizer.learning_rate, adam_beta1=optimizer.beta1,
      adam_beta2=optimizer.beta2, adam_epsilon=optimizer.epsilon,
      weight_decay=optimizer.weight_decay,
      max_grad_norm=optimizer.max_grad_norm)


def _tokenizer(vocab_size: int) -> transformers.PreTrainedTokenizerFast:
  """Makes a word of each token id; the end token is outside the vocabulary."""
  words = tokenizers.Tokenizer(tokenizers.models.WordLevel(
      {str(token): token for token in range(vocab_size)}, unk_token='0'))
  words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
  return transformers.PreTrainedTokenizerFast(
      tokenizer_object=words, eos_token='<end>')
