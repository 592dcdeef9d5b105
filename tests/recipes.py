"""Carries out the recipes of configs/README.md in a copy of the code."""

import pathlib
import re
import shutil

import jax
import tokenizers
from tokenizers import decoders
from tokenizers import models
from tokenizers import pre_tokenizers
import transformers

from tepo_jax.policy import transformer
from tepo_jax.policy.huggingface import weights
from tests import runs

_CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
_SPECIAL = ('<|im_start|>', '<|im_end|>')


def section(title: str) -> str:
  """The text of a recipe."""
  text = (runs.ROOT / 'configs' / 'README.md').read_text('utf-8')
  return text.partition(f'## {title}\n')[2].partition('\n## ')[0]


def blocks(title: str, language: str) -> list[str]:
  """Its blocks of a language."""
  return [block for name, block in re.findall(
      r'^```(\w*)\n([\s\S]*?)^```$', section(title), re.M) if name == language]


def copy(folder: pathlib.Path, *names: str) -> pathlib.Path:
  """Copies these folders of the repository; returns `folder`."""
  for name in names:
    shutil.copytree(runs.ROOT / name, folder / name,
                    ignore=shutil.ignore_patterns('__pycache__'))
  return folder


def insert(path: pathlib.Path, block: str, *, after: str = '',
           before: str = '') -> None:
  """Inserts the block at the only place of a file where the text is."""
  text, place = path.read_text('utf-8'), after or before
  assert text.count(place) == 1, f'{path}: {place}'
  path.write_text(text.replace(
      place, place + block if after else block + place), 'utf-8')


def save_tokenizer(folder: pathlib.Path) -> None:
  """One token per byte, and those that begin and end a turn."""
  alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
  tokenizer = tokenizers.Tokenizer(models.BPE(
      vocab={text: i for i, text in enumerate((*alphabet, *_SPECIAL))},
      merges=[]))
  tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.decoder = decoders.ByteLevel()
  tokenizer.add_special_tokens(list(_SPECIAL))
  transformers.PreTrainedTokenizerFast(
      tokenizer_object=tokenizer, chat_template=_CHATML,
      eos_token='<|im_end|>', pad_token='<|im_end|>').save_pretrained(folder)


def save_model(folder: pathlib.Path, tokenizer: pathlib.Path) -> None:
  """A random model, with the tokenizer of that folder."""
  model = transformer.ModelConfig(
      vocab_size=258, d_model=16, num_layers=1, num_heads=2, num_kv_heads=1,
      head_dim=8, d_ff=16, max_position=512)
  weights.save(folder, model, transformer.init(model, jax.random.key(0)),
               source=tokenizer)
