"""The embedded tasks: generated problems, demonstrations, and a tokenizer.

Nothing is downloaded. A row of TASKS is a module with

  LEVELS                              of the problems, in turn; a name such as
                                      'countdown:2,4' has others, 1 to HARDEST
  TEST_SHARE                          one problem in so many is for tests
  draw(rng, level)                    fields of a problem.Problem

and, unless it is only for pretrained models,

  WORDS                               the tokenizer's vocabulary
  demonstration(problem, rng, style)  a solution, 'worked' or 'direct'

A hash of a problem's text assigns it to a split, so the two splits are
disjoint for all seeds and levels.
"""

import hashlib
import json
import pathlib
import random
import re
import types

import tokenizers
from tokenizers import decoders
from tokenizers import models
from tokenizers import pre_tokenizers

from tepo_jax import errors
from tepo_jax.data import arithmetic
from tepo_jax.data import countdown
from tepo_jax.data import problem as problem_lib
from tepo_jax.data import sums
from tepo_jax.data import word_problems

_MADE = {'arithmetic': arithmetic, 'countdown': countdown}  # with a base model
TASKS = _MADE | {'sums': sums, 'word_problems': word_problems}
HARDEST = 9
SPLITS = ('train', 'test')

_SPECIAL = ('<|endoftext|>', '<|im_start|>', '<|im_end|>', '<|unk|>')
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n'"
    " + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")


def is_task(name: str) -> bool:
  """Whether `name` is a task, or a task with levels: 'countdown:2,4'."""
  return name.partition(':')[0] in TASKS


def task(name: str) -> types.ModuleType:
  """The module of a task, with or without levels.

  Raises:
    InputError: no such task.
  """
  if not is_task(name):
    raise errors.InputError(f'{name} is not {" or ".join(TASKS)}')
  return TASKS[name.partition(':')[0]]


def made_task(name: str) -> types.ModuleType:
  """The module of a task whose base model can be made.

  Raises:
    InputError: no such task, or it is for pretrained models only.
  """
  module = task(name)
  if module not in _MADE.values():
    raise errors.InputError(f'{name} is for pretrained models, not '
                            f'{" or ".join(_MADE)}: a model must be given')
  return module


def problems(name: str, split: str, count: int, seed: int = 0
             ) -> list[problem_lib.Problem]:
  """Draws `count` distinct problems of a task, with its levels in turn.

  The result depends on the arguments only; a larger count only appends.

  Raises:
    InputError: levels that are not 1 to HARDEST, or that have too few problems,
      or no such split.
  """
  if split not in SPLITS:
    raise errors.InputError(
        f'{name}: no split {split!r}, only {" and ".join(SPLITS)}')
  levels = _levels(name)
  rng = random.Random(f'{split}/{seed}')
  drawn = {}
  for i in range(count):
    level = levels[i % len(levels)]
    problem = _fresh(rng, name.partition(':')[0], level, split, drawn)
    if problem is None:
      raise errors.InputError(
          f'{name}: level {level} has too few problems for {count:,} of the '
          f'split {split}: set a limit, of {len(drawn):,} at most')
    drawn[problem.problem] = problem
  return list(drawn.values())


def _levels(name):
  _, colon, levels = name.partition(':')
  if not colon:
    return task(name).LEVELS
  if not re.fullmatch(f'[1-{HARDEST}](,[1-{HARDEST}])*', levels):
    raise errors.InputError(
        f'{name}: the levels after the colon must be numbers from 1 to '
        f'{HARDEST}, with commas between them')
  return tuple(map(int, levels.split(',')))


def _fresh(rng, name, level, split, drawn):
  for _ in range(1000):
    fields = TASKS[name].draw(rng, level)
    text = fields['problem']
    digest = hashlib.sha256(text.encode()).hexdigest()
    is_test = int(digest, 16) % TASKS[name].TEST_SHARE == 0
    if is_test == (split == 'test') and text not in drawn:
      return problem_lib.Problem(f'{name}/{digest[:16]}', source=name,
                                 level=str(level), **fields)
  return None


def build_tokenizer(name: str, directory: str | pathlib.Path) -> None:
  """Writes tokenizer.json and tokenizer_config.json for AutoTokenizer.

  Each digit, operator and word of the task is one token, so its texts
  survive encoding and decoding. The chat format is ChatML as in Qwen:
  <|im_end|> ends a turn, <|endoftext|> pads. Reserved tokens fill the
  vocabulary up to a multiple of 16.

  Raises:
    InputError: as `made_task`.
  """
  words = made_task(name).WORDS
  reserved = -(len(_SPECIAL) + len(words)) % 16
  words += tuple(f'<|reserved_{i}|>' for i in range(reserved))
  vocabulary = {word: i for i, word in enumerate(_SPECIAL + words)}
  tokenizer = tokenizers.Tokenizer(
      models.WordLevel(vocabulary, unk_token='<|unk|>'))
  longest_first = sorted(words, key=len, reverse=True)
  tokenizer.pre_tokenizer = pre_tokenizers.Split(
      tokenizers.Regex('|'.join(
          re.sub(r'([^\w\s,<>])', r'\\\1', word) for word in longest_first)),
      'isolated')
  tokenizer.decoder = decoders.Fuse()
  tokenizer.add_special_tokens(list(_SPECIAL))
  directory = pathlib.Path(directory)
  directory.mkdir(parents=True, exist_ok=True)
  tokenizer.save(str(directory / 'tokenizer.json'))
  (directory / 'tokenizer_config.json').write_text(json.dumps({
      'tokenizer_class': 'PreTrainedTokenizerFast',
      'chat_template': _CHAT_TEMPLATE,
      'eos_token': '<|im_end|>',
      'pad_token': '<|endoftext|>',
      'unk_token': '<|unk|>',
      'clean_up_tokenization_spaces': False,
      'model_max_length': 1_000_000,
  }, indent=2) + '\n')
