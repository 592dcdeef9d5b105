"""The embedded task: chains of small sums.

  Start with 7 (1) * 6 (2) + 8 (3) - 5.

Nothing is downloaded: this module draws problems from a seed, writes their
solutions and builds the tokenizer. The task is sized for two CPU cores: a
prompt has at most 24 tokens, a solution at most 38.

A problem of level n has n operations on operands 1..9, evaluated from left to
right; `*` can only come first. Only the last operation may make the running
total negative.

A hash of a problem's text assigns it to a split, so the two splits are
disjoint for all seeds and levels.
"""

import hashlib
import json
import operator
import pathlib
import random
import re
from collections.abc import Sequence

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from tepo_jax.tasks import problem as problem_lib

LEVELS = (3, 4, 5)
SPLITS = ('train', 'test')
TEST_SHARE = 8  # one text in TEST_SHARE belongs to the test set

# Real corpora mix bare and worked answers; so do the demonstrations.
OPENINGS = {
    'direct': ('The answer is ', 'I guess '),
    'worked': ('Step by step:', 'Let us see:', 'One by one:'),
}

_OPERATIONS = {'+': operator.add, '-': operator.sub, '*': operator.mul}

_SPECIAL = ('<|endoftext|>', '<|im_start|>', '<|im_end|>', '<|unk|>')
_WORDS = (
    *'0123456789', *(f' ({number}) ' for number in range(1, 10)),
    '+ ', '- ', '* ', ' = ', '-', '.', ' ', '\n',
    'user\n', 'assistant\n', 'system\n', 'Start with ', '\\boxed{', '}',
    *OPENINGS['direct'], *OPENINGS['worked'])
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n'"
    " + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")


def problems(split: str, count: int, seed: int = 0,
             levels: Sequence[int] = LEVELS) -> list[problem_lib.Problem]:
  """Draws `count` distinct problems; problem i has level levels[i % len].

  The result depends on the arguments only; a larger count only appends.
  Levels go up to 9, the last step number in the tokenizer's vocabulary.

  Raises:
    ValueError: no such split, or a level has too few problems.
  """
  if split not in SPLITS:
    raise ValueError(f'arithmetic: no split {split!r}, only {SPLITS}')
  rng = random.Random(f'{split}/{seed}')
  drawn = {}
  for i in range(count):
    problem = _fresh(rng, levels[i % len(levels)], split, drawn)
    drawn[problem.problem] = problem
  return list(drawn.values())


def _fresh(rng, level, split, drawn):
  for _ in range(1000):
    text, answer = _draw(rng, level)
    digest = hashlib.sha256(text.encode()).hexdigest()
    is_test = int(digest, 16) % TEST_SHARE == 0
    if is_test == (split == 'test') and text not in drawn:
      return problem_lib.Problem(
          f'arithmetic/{digest[:16]}', text, (str(answer),), 'arithmetic',
          level=str(level))
  raise ValueError(f'arithmetic: level {level} has too few problems')


def _draw(rng, level):
  """Draws one problem: (its text, its answer)."""
  total = rng.randint(1, 9)
  text = f'Start with {total}'
  for number in range(1, level + 1):
    operand = rng.randint(1, 9)
    sign = rng.choice('+-*' if number == 1 else '+-')
    if sign == '-' and total < operand and number < level:
      sign = '+'
    total = _OPERATIONS[sign](total, operand)
    text += f' ({number}) {sign} {operand}'
  return f'{text}.', total


def demonstration(problem: problem_lib.Problem, rng: random.Random,
                  style: str) -> str:
  r"""Writes a correct solution, without the end-of-turn token.

  Args:
    problem: one of `problems`.
    rng: chooses among OPENINGS[style].
    style: 'direct', `I guess \boxed{45}`, which a small model cannot compute
      in one step; or 'worked', with the running total after each operation:
      `One by one: (1) * 6 = 42 (2) + 8 = 50 (3) - 5 = 45 \boxed{45}`.
  """
  chain = _chain(problem.problem) if style == 'worked' else ''
  return (f'{rng.choice(OPENINGS[style])}{chain}'
          f'\\boxed{{{problem.answers[0]}}}')


def _chain(text):
  total = int(re.search(r'\d+', text)[0])
  chain = ''
  for number, sign, operand in re.findall(r'\((\d+)\) (.) (\d+)', text):
    total = _OPERATIONS[sign](total, int(operand))
    chain += f' ({number}) {sign} {operand} = {total}'
  return f'{chain} '


def build_tokenizer(directory: str | pathlib.Path) -> None:
  """Writes tokenizer.json and tokenizer_config.json for AutoTokenizer.

  Each digit, operator and word of the task is one token, so its texts
  survive encoding and decoding. The chat format is ChatML as in Qwen:
  <|im_end|> ends a turn, <|endoftext|> pads. Reserved tokens fill the
  vocabulary up to a multiple of 16.
  """
  reserved = -(len(_SPECIAL) + len(_WORDS)) % 16
  words = _WORDS + tuple(f'<|reserved_{i}|>' for i in range(reserved))
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
