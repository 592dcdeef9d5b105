"""The same work in other libraries, imported only when they are asked for."""

from collections.abc import Callable
import importlib.metadata
from typing import Any

import ml_collections
import numpy as np

from tepo_jax import errors
from tepo_jax.learning import batch as batch_lib
from tepo_jax.policy import transformer
from tepo_jax.tools.benchmark import workload as workload_lib

# What each needs besides the project's own requirements, as pip takes it.
PEERS = {
    'transformers': 'torch', 'trl': 'torch trl==1.16.0',
    # What is imported; all that it asks for would lower safetensors.
    'tunix': '--no-deps google-tunix==0.1.7 clu google-metrax jaxtyping '
             'perfetto sentencepiece wadler-lindig wrapt'}


def require(*names: str) -> None:
  """Refuses a peer that is unknown or not installed.

  Raises:
    errors.InputError: names what is missing.
  """
  for name in names:
    if name not in PEERS:
      raise errors.InputError(
          f'--peer: unknown peer {name!r}; one of: {", ".join(PEERS)}')
    for requirement in PEERS[name].removeprefix('--no-deps ').split():
      package, _, version = requirement.partition('==')
      try:
        found = importlib.metadata.version(package)
      except importlib.metadata.PackageNotFoundError:
        raise errors.InputError(
            f'--peer={name}: {package} is not installed here; '
            f'pip install {PEERS[name]}') from None
      if version and found != version:
        raise errors.InputError(
            f'--peer={name}: {package} {found} is installed here; '
            f'pip install {PEERS[name]}')


def require_group(library: str, workload: workload_lib.Workload) -> None:
  """Refuses groups of one for a library whose advantages need two.

  Raises:
    errors.InputError: says so.
  """
  if workload.samples < 2:
    raise errors.InputError(
        f'--peer={library.lower()}: config.rollout.samples=1, and {library} '
        'takes two or more')


def torch_model(model: transformer.ModelConfig):
  """The Qwen3 of that shape in transformers: fp32, random weights."""
  import transformers
  config = transformers.Qwen3Config(
      vocab_size=model.vocab_size, hidden_size=model.d_model,
      intermediate_size=model.d_ff, num_hidden_layers=model.num_layers,
      num_attention_heads=model.num_heads,
      num_key_value_heads=model.num_kv_heads, head_dim=model.head_dim,
      max_position_embeddings=model.max_position,
      tie_word_embeddings=model.tie_embeddings, use_cache=False)
  return transformers.Qwen3ForCausalLM(config)


class TorchUpdate:
  """Generate, score and update on padded rows, in torch.

  The loss is the clipped surrogate with a token's ratio (GRPO's, DAPO's), by
  transformers' model and torch's log-softmax on completion tokens.
  """

  def __init__(self, workload: workload_lib.Workload, batch: batch_lib.Batch,
               optimizer: ml_collections.ConfigDict):
    import torch
    self._torch, self._settings = torch, optimizer
    self._workload = workload
    self.model = torch_model(workload.model)
    self._optimizer = torch.optim.AdamW(
        self.model.parameters(), lr=optimizer.learning_rate,
        betas=(optimizer.beta1, optimizer.beta2), eps=optimizer.epsilon,
        weight_decay=optimizer.weight_decay)
    self._token_BS = torch.tensor(batch.token_BS).long()
    self._real_BS = torch.tensor(batch.position_BS >= 0)
    self._mask_BT = torch.tensor(batch.mask_BT)
    self._advantage_B1 = torch.tensor(batch.advantage_B)[:, None]

  def step(self) -> float:
    """A rollout without early end, its scores, one update; the loss."""
    width, samples = self._workload.prompt_tokens, self._workload.samples
    tokens = self._workload.max_tokens
    self.model.generate(
        self._token_BS[::samples, :width], do_sample=True, use_cache=True,
        attention_mask=self._real_BS[::samples, :width], top_k=0,
        num_return_sequences=samples, max_new_tokens=tokens,
        min_new_tokens=tokens, pad_token_id=0)
    self.score()
    return self.update()

  def score(self) -> Any:
    """log π of the completion tokens."""
    with self._torch.no_grad():
      return self._logp()

  def update(self) -> float:
    """The loss of one update."""
    torch = self._torch
    logp_BT = self._logp()
    ratio_BT = torch.exp(logp_BT - logp_BT.detach())
    loss_BT = -torch.minimum(
        ratio_BT * self._advantage_B1,
        ratio_BT.clamp(0.8, 1.28) * self._advantage_B1)
    loss = (loss_BT * self._mask_BT).sum() / self._mask_BT.sum()
    self._optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(
        self.model.parameters(), self._settings.max_grad_norm)
    self._optimizer.step()
    return loss.item()

  def _logp(self):
    slots = self._mask_BT.shape[1]
    logits_BTV = self.model(
        input_ids=self._token_BS, attention_mask=self._real_BS,
        logits_to_keep=slots + 1).logits[:, :-1]
    return -self._torch.nn.functional.cross_entropy(
        logits_BTV.transpose(1, 2), self._token_BS[:, -slots:],
        reduction='none')


class TorchGenerator:
  """transformers' `generate`, sampling batches whose rows have given lengths.

  A batch goes on until its longest row has its length.
  """

  def __init__(self, model: transformer.ModelConfig):
    import torch
    self._torch = torch
    self._model = torch_model(model).eval()
    self._model.generation_config.eos_token_id = None

  def run(self, token_QP: np.ndarray, length_QG: np.ndarray) -> None:
    """Samples of every prompt, as one batch."""
    torch, longest = self._torch, int(length_QG.max())
    token_BP = torch.tensor(np.repeat(token_QP, length_QG.shape[1], 0)).long()
    with torch.inference_mode():
      self._model.generate(
          token_BP, attention_mask=torch.ones_like(token_BP), do_sample=True,
          temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=longest,
          min_new_tokens=longest, pad_token_id=0, use_cache=True)


def functions(names: tuple[str, ...], what: str,
              workload: workload_lib.Workload, batch: batch_lib.Batch,
              optimizer: ml_collections.ConfigDict
              ) -> dict[str, Callable[[], object]]:
  """What each peer does as one 'score', 'update' or 'step'."""
  return {name: getattr(_peer(name)(workload, batch, optimizer), what)
          for name in names}


def repeated_texts(token_QP: np.ndarray, samples: int) -> list[str]:
  """Prompts for a tokenizer whose words are the ids, each `samples` times."""
  texts = [' '.join(map(str, tokens)) for tokens in token_QP]
  return [text for text in texts for _ in range(samples)]


def every_second(completions: list[str], **_) -> list[float]:
  """Rewards: half of the completions are good."""
  return [float(index % 2) for index in range(len(completions))]


def _peer(name: str):
  if name == 'trl':
    from tepo_jax.measure import trl_peer
    return trl_peer.TrlUpdate
  if name == 'tunix':
    from tepo_jax.measure import tunix_peer
    return tunix_peer.TunixUpdate
  return {'transformers': TorchUpdate}[name]
