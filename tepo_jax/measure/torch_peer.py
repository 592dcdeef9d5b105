"""transformers' `generate` on a model of the same shape, to compare with."""

import numpy as np
import torch
import transformers

from tepo_jax.policy import families
from tepo_jax.policy import transformer


class Generator:
  """Samples batches whose rows have given lengths.

  The weights are random: what they are changes no time.
  """

  def __init__(self, model: transformer.ModelConfig):
    raw = families.to_json(model, model.dtype)
    name, = raw['architectures']
    config = transformers.AutoConfig.for_model(**raw)
    dtype = getattr(torch, model.dtype)
    self._model = getattr(transformers, name)(config).to(dtype).eval()
    self._model.generation_config.eos_token_id = None

  def run(self, token_QP: np.ndarray, length_QG: np.ndarray) -> None:
    """Every prompt's samples, as one batch, until the longest has its length."""
    prompts = torch.tensor(np.repeat(token_QP, length_QG.shape[1], 0)).long()
    longest = int(length_QG.max())
    with torch.inference_mode():
      out = self._model.generate(
          prompts, attention_mask=torch.ones_like(prompts), do_sample=True,
          temperature=1.0, top_k=0, top_p=1.0, max_new_tokens=longest,
          min_new_tokens=longest, pad_token_id=0)
    assert out.shape == (len(prompts), prompts.shape[1] + longest)
