"""The same work in plain torch, with transformers' model and `generate`."""

import ml_collections
import numpy as np
import torch

from tepo_jax.learning import packing
from tepo_jax.tools import workload as workload_lib
from tepo_jax.tools.benchmark import peers


class TorchUpdate:
  """Generates, scores and updates on padded rows.

  The loss is the clipped surrogate of token ratios (GRPO, DAPO), computed from
  transformers' model and torch's log-softmax on completion tokens.
  """

  def __init__(self, workload: workload_lib.Workload, batch: packing.Batch,
               optimizer: ml_collections.ConfigDict):
    self._settings, self._workload = optimizer, workload
    self.model = peers.torch_model(workload)
    self._optimizer = torch.optim.AdamW(
        self.model.parameters(), lr=optimizer.learning_rate,
        betas=(optimizer.beta1, optimizer.beta2), eps=optimizer.epsilon,
        weight_decay=optimizer.weight_decay)
    self._token_BS = torch.tensor(batch.token_BS).long()
    self._real_BS = torch.tensor(batch.position_BS >= 0)
    self._mask_BT = torch.tensor(batch.mask_BT)
    self._advantage_B1 = torch.tensor(batch.advantage_B)[:, None]

  def step(self) -> float:
    width, samples = self._workload.prompt_tokens, self._workload.samples
    tokens = self._workload.max_tokens
    self.model.generate(
        self._token_BS[::samples, :width], do_sample=True, use_cache=True,
        attention_mask=self._real_BS[::samples, :width], top_k=0,
        num_return_sequences=samples, max_new_tokens=tokens,
        min_new_tokens=tokens, pad_token_id=0)
    self.score()
    return self.update()

  def score(self) -> torch.Tensor:
    with torch.no_grad():
      return self._logp()

  def update(self) -> float:
    logp_BT = self._logp()
    ratio_BT = torch.exp(logp_BT - logp_BT.detach())
    loss_BT = -torch.minimum(ratio_BT * self._advantage_B1,
                             ratio_BT.clamp(0.8, 1.28) * self._advantage_B1)
    loss = (loss_BT * self._mask_BT).sum() / self._mask_BT.sum()
    self._optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(
        self.model.parameters(), self._settings.max_grad_norm)
    self._optimizer.step()
    return loss.item()

  def _logp(self):
    tokens = self._mask_BT.shape[1]
    logits_BTV = self.model(
        input_ids=self._token_BS, attention_mask=self._real_BS,
        logits_to_keep=tokens + 1).logits[:, :-1]
    return -torch.nn.functional.cross_entropy(
        logits_BTV.transpose(1, 2), self._token_BS[:, -tokens:],
        reduction='none')


class TorchGenerator:
  """Samples with transformers' `generate`, up to a batch's longest length."""

  def __init__(self, workload: workload_lib.Workload):
    self._model = peers.torch_model(workload).eval()
    self._model.generation_config.eos_token_id = None

  def run(self, token_QP: np.ndarray, length_QG: np.ndarray) -> None:
    """Samples all completions of the prompts as one batch."""
    longest = int(length_QG.max())
    token_BP = torch.tensor(np.repeat(token_QP, length_QG.shape[1], 0)).long()
    with torch.inference_mode():
      self._model.generate(
          token_BP, attention_mask=torch.ones_like(token_BP), do_sample=True,
          temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=longest,
          min_new_tokens=longest, pad_token_id=0, use_cache=True)
