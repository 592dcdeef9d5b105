"""Verbatim templates, chat templates and the length filter."""

import pytest
import tokenizers
from tokenizers import decoders
from tokenizers import models
from tokenizers import pre_tokenizers
import transformers

from tepo_jax import errors
from tepo_jax.data import embedded
from tepo_jax.data import problem as problem_lib
from tepo_jax.data import prompts

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


def _rendered(template, problem, chat_template=CHAT, system=None, row=None):
  tokenizer = _bytes_tokenizer(chat_template)
  ids = prompts.render(
      prompts.get(template, system), tokenizer,
      problem_lib.Problem('a/1', problem, ('1',), 'a', row=row))
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
      'dapo_boxed': 'boxed', 'r1_zero': 'boxed', 'sums': 'answer',
      'word_problems': 'answer'}


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
  short, long = prompts.render_short(
      problems, prompts.get('plain'), tokenizer, 4)
  assert [(p.id, len(ids)) for p, ids in short] == [('3', 3), ('4', 4)]
  assert [(p.id, len(ids)) for p, ids in long] == [('9', 9), ('5', 5)]


def test_the_embedded_tokenizer(tmp_path):
  embedded.build_tokenizer('arithmetic', tmp_path)
  tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
  (problem,) = embedded.problems('arithmetic', 'test', 1)
  ids = prompts.render(prompts.get('plain'), tokenizer, problem)
  assert tokenizer.decode(ids) == (
      f'<|im_start|>user\n{problem.problem}<|im_end|>\n'
      '<|im_start|>assistant\n')


def test_a_system_turn_replaces_the_template_s():
  assert _rendered('plain', 'Q?', system='Be brief.') == (
      '<system>Be brief.</><user>Q?</><assistant>')
  assert _rendered('qwen_boxed', 'Q?', system='Be brief.') == (
      '<system>Be brief.</><user>Q?</><assistant>')
  assert _rendered('qwen_boxed', 'Q?', system='') == '<user>Q?</><assistant>'
  with pytest.raises(errors.InputError, match='data.system has no effect'):
    prompts.get('r1_zero', 'Be brief.')


def test_a_jinja_file(tmp_path):
  path = tmp_path / 'mine.jinja'
  path.write_text(
      "{% set style = 'answer' %}\n{% set system = 'Be brief.' %}\n"
      '{{ problem }} Use {{ row.numbers | join(", ") }}{% if row.hint %}'
      ' ({{ row.hint }}){% endif %}.\n')
  row = {'numbers': [1, 2], 'hint': None}
  assert _rendered(str(path), '{{ 3? }}', row=row) == (
      '<system>Be brief.</><user>{{ 3? }} Use 1, 2.</><assistant>')
  assert _rendered(str(path), '3?', system='', row=row | {'hint': '+'}) == (
      '<user>3? Use 1, 2 (+).</><assistant>')
  assert prompts.get(str(path)).style == 'answer'
  path.write_text('{% set is_chat = false %}\nQ: {{ problem }}\nA:')
  assert _rendered(str(path), '3?') == 'Q: 3?\nA:'
  assert prompts.get(str(path)).style == 'boxed'


def test_a_column_named_like_a_method_of_dict(tmp_path):
  path = tmp_path / 'mine.jinja'
  path.write_text('{{ row.values | sum }}{{ row.items }}')
  assert _rendered(str(path), '?', row={'values': [1, 2], 'items': 'x'}) == (
      '<user>3x</><assistant>')


@pytest.mark.parametrize('text, wrong', [
    ('{{ problem', 'line 1: '),
    ('a\n{% if %}', 'line 2: '),
    ('a\n{{ problem | uper }}', "line 2: No filter named 'uper'"),
    ('{{ question }}', "uses 'question'; there are only problem and row"),
    ('Solve it.', 'uses neither problem nor row'),
    ("{% set style = 'box' %}{{ problem }}", "style is 'box'"),
    ('{% set system = 3 %}{{ problem }}', 'system is 3'),
    ('{% set is_chat = 0 %}{{ problem }}', 'is_chat is 0'),
    ('\n{% set system = problem %}{{ problem }}',
     'line 2: system must be a constant'),
    ('{% set system %}Hi{% endset %}{{ problem }}',
     'line 1: system must be a constant'),
    ('{{ row.question }}', "1 of a: 'dict object' has no attribute 'question'; "
     'the columns of row: numbers, target'),
    ('{{ row.target + 1 }}', 'a/1 of a: '),
    ('{{ problem.__class__.__mro__ }}', 'a/1 of a: '),
])
def test_a_bad_jinja_file_is_refused_by_name(tmp_path, text, wrong):
  path = tmp_path / 'mine.jinja'
  path.write_text(text)
  with pytest.raises(errors.InputError) as error:
    _rendered(str(path), '3?', row={'numbers': [1], 'target': '2'})
  assert str(error.value).startswith(f'data.template={path}: ')
  assert wrong in str(error.value) and '\n' not in str(error.value)


def test_a_prompt_without_tokens_is_refused(tmp_path):
  path = tmp_path / 'mine.jinja'
  path.write_text('{% set is_chat = false %}{{ problem[1:] }}')
  assert _rendered(str(path), '23') == '3'
  with pytest.raises(errors.InputError, match='prompt of a/1 has no tokens'):
    _rendered(str(path), '2')


def test_an_unreadable_jinja_file_is_refused(tmp_path):
  with pytest.raises(errors.InputError, match='none.jinja: No such file'):
    prompts.get(str(tmp_path / 'none.jinja'))
  (tmp_path / 'latin.jinja').write_bytes(b'\xe9{{ problem }}')
  with pytest.raises(errors.InputError, match="latin.jinja: 'utf-8' codec"):
    prompts.get(str(tmp_path / 'latin.jinja'))
