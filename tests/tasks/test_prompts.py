"""Verbatim templates, chat templates and the length filter."""

import tokenizers
from tokenizers import decoders, models, pre_tokenizers
import pytest
import transformers

from tepo_jax import errors
from tepo_jax.tasks import arithmetic
from tepo_jax.tasks import problem as problem_lib
from tepo_jax.tasks import prompts

CHAT = ("{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</>"
        "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}")
NO_SYSTEM = ("{% if messages[0]['role'] == 'system' %}"
             "{{ raise_exception('no system turn') }}{% endif %}" + CHAT)


def _bytes_tokenizer(chat_template):
  """A tokenizer with one token per byte: decoding is exact."""
  alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
  tokenizer = tokenizers.Tokenizer(models.BPE(
      vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
  tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.decoder = decoders.ByteLevel()
  return transformers.PreTrainedTokenizerFast(
      tokenizer_object=tokenizer, chat_template=chat_template)


def _rendered(template, problem, chat_template=CHAT):
  tokenizer = _bytes_tokenizer(chat_template)
  ids = prompts.render(template, tokenizer, problem)
  assert all(isinstance(i, int) for i in ids)
  return tokenizer.decode(ids)


def test_plain_and_qwen_boxed():
  assert _rendered('plain', 'What is {x}?') == (
      '<user>What is {x}?</><assistant>')
  assert _rendered('qwen_boxed', 'What is {x}?') == (
      '<system>Please reason step by step, and put your final answer within '
      '\\boxed{}.</><user>What is {x}?</><assistant>')


def test_dapo():
  assert _rendered('dapo_answer', 'Q?') == (
      '<user>Solve the following math problem step by step. The last line of '
      'your response should be of the form Answer: $Answer (without quotes) '
      'where $Answer is the answer to the problem.\n\nQ?\n\nRemember to put '
      'your answer on its own line after "Answer:".</><assistant>')
  assert '\\boxed{$Answer} where' in _rendered('dapo_boxed', 'Q?')
  assert prompts.strip_dapo(
      prompts.TEMPLATES['dapo_answer'].user.replace('{problem}', 'Q?')) == 'Q?'
  assert prompts.strip_dapo('Q?') == 'Q?'


def test_r1_zero_is_plain_text_that_ends_in_think():
  text = _rendered('r1_zero', 'Q?')
  assert text.startswith('A conversation between User and Assistant. ')
  assert text.endswith('\nUser: Q?\nAssistant: <think>')


def test_without_a_chat_template():
  assert _rendered('plain', 'Q?', None) == 'Q?'
  assert _rendered('qwen_boxed', 'Q?', None) == (
      'Please reason step by step, and put your final answer within '
      '\\boxed{}.\n\nQ?')


def test_answer_styles():
  assert {name: row.style for name, row in prompts.TEMPLATES.items()} == {
      'plain': 'boxed', 'qwen_boxed': 'boxed', 'dapo_answer': 'answer',
      'dapo_boxed': 'boxed', 'r1_zero': 'boxed'}


def test_refusals():
  with pytest.raises(errors.InputError, match="no prompt template 'qwen';"):
    prompts.get('qwen')
  with pytest.raises(errors.InputError, match='no system turn'):
    _rendered('qwen_boxed', 'Q?', NO_SYSTEM)
  assert _rendered('dapo_boxed', 'Q?', NO_SYSTEM).startswith('<user>')


def test_long_prompts_are_counted_not_cut():
  tokenizer = _bytes_tokenizer(None)
  problems = [problem_lib.Problem(str(n), 'x' * n, ('1',), '')
              for n in (3, 9, 4, 5)]
  kept, dropped = prompts.render_short(problems, 'plain', tokenizer, 4)
  assert [(p.id, len(ids)) for p, ids in kept] == [('3', 3), ('4', 4)]
  assert dropped == 2


def test_the_embedded_tokenizer(tmp_path):
  arithmetic.build_tokenizer(tmp_path)
  tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
  (problem,) = arithmetic.problems('test', 1)
  ids = prompts.render('plain', tokenizer, problem.problem)
  assert tokenizer.decode(ids) == (
      f'<|im_start|>user\n{problem.problem}<|im_end|>\n'
      '<|im_start|>assistant\n')
