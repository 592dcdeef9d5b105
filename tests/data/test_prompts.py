"""Verbatim templates, chat templates and the length filter."""

import pytest
import tokenizers
from tokenizers import decoders
from tokenizers import models
from tokenizers import pre_tokenizers
from tokenizers import processors
import transformers

from tepo_jax import errors
from tepo_jax.data import chat_templates
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


@pytest.mark.parametrize('change', [
    lambda text: text + '\n', lambda text: ' \n' + text,
    lambda text: text.replace('\n', '\r\n') + '\r\n',
    lambda text: text.replace('\n\n', '\n')])
def test_the_wrapper_of_dapo_is_removed_whatever_its_white_space(change):
  text = prompts.TEMPLATES['dapo_answer'].user.replace('{problem}', 'Q\nr?')
  assert prompts.strip_dapo(change(text)).split() == ['Q', 'r?']


CONVERSATION = (('system', 'Be brief.'), ('user', '1?'), ('assistant', '2.'))


def _render_turns(template, system=None, chat_template=CHAT):
  tokenizer = _bytes_tokenizer(chat_template)
  return tokenizer.decode(prompts.render(
      prompts.get(template, system), tokenizer, problem_lib.Problem(
          'mine', 'Q?', ('1',), 'a', turns=CONVERSATION, number=7)))


def test_a_system_turn_and_earlier_turns_are_rendered():
  expected = ('<system>Be brief.</><user>1?</><assistant>2.</><user>Q?</>'
              '<assistant>')
  assert _render_turns('plain') == expected
  assert _render_turns('qwen_boxed', system='') == expected


@pytest.mark.parametrize('template, system, chat_template, wrong', [
    ('plain', 'Hi.', CHAT, "has a system turn, and so has data.template or "
     "data.system; set data.system=''"),
    ('qwen_boxed', None, CHAT, 'has a system turn, and so has data.template'),
    ('r1_zero', None, CHAT, 'has 4 turns, but data.template is plain text'),
    ('plain', None, None, 'has 4 turns, but the tokenizer has no chat templ')])
def test_turns_that_cannot_be_rendered_are_refused_by_row(
    template, system, chat_template, wrong):
  with pytest.raises(errors.InputError) as error:
    _render_turns(template, system, chat_template)
  assert str(error.value).startswith(f'row 7 (mine) {wrong}')


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


def test_a_last_newline_of_a_jinja_file_needs_an_empty_line(tmp_path):
  """As configs/README.md says."""
  path = tmp_path / 'mine.jinja'
  path.write_text('{% set is_chat = false %}\nQ: {{ problem }}\n')
  assert _rendered(str(path), '3?') == 'Q: 3?'
  path.write_text('{% set is_chat = false %}\nQ: {{ problem }}\n\n')
  assert _rendered(str(path), '3?') == 'Q: 3?\n'


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


@pytest.mark.parametrize('template,wrong', [
    (CHAT + '{{ 1 / 0 }}', 'division by zero'),
    (CHAT + '{{ messages[9].role }}', 'has no element 9'),
    (CHAT + '{% if %}', 'Expected'),
    ('{{ messages[0].role }}', 'the text of the user turn is not in what it '),
    (CHAT + '{{ [1, 2]|random }}', 'it draws at random')])
def test_whatever_a_chat_template_does_is_refused_in_one_line(template, wrong):
  with pytest.raises(errors.InputError) as error:
    _rendered('plain', 'Q?', template)
  assert str(error.value).startswith(
      "the model's chat template rejects the prompt of a/1, user: ")
  assert wrong in str(error.value) and '\n' not in str(error.value)


def test_a_chat_template_keeps_what_it_is_given():
  user = '{% for m in messages %}{% if m.role == "user" %}{{ m.content }}'
  with pytest.raises(errors.InputError, match="system turn is not in what it "
                     "renders; data.system='' makes no such turn"):
    _rendered('plain', 'Q?', user + '{% endif %}{% endfor %}', system='Brief.')
  trims = '{% for m in messages %}{{ m.content | trim }}{% endfor %}'
  assert _rendered('plain', 'Q?', trims, system=' Brief.\n') == 'Brief.Q?'


CLOCK = "{{ strftime_now('%d %b %Y') }}" + CHAT
THINK = CHAT + '{% if not think %}<none>{% endif %}{{ depth }}'


def _with(chat_template, name='plain', **fields):
  tokenizer = _bytes_tokenizer(chat_template)
  return tokenizer.decode(prompts.render(
      prompts.get(name, **fields), tokenizer,
      problem_lib.Problem('a/1', 'Q?', ('1',), 'a')))


def test_a_chat_template_reads_the_date_of_the_run():
  assert _with(CLOCK, date='2024-02-29').startswith('29 Feb 2024<user>')
  assert not _with(CLOCK).startswith('29 Feb 2024<user>')
  assert _with(CHAT, date='2024-02-29') == _with(CHAT)
  llama = ('{%- if strftime_now is defined %}\n  {%- set today = strftime_now('
           "'%d %b %Y') %}\n{%- endif %}{{ today }}! Q?")
  for before in ('', '\n', '  ', ' \n  {% if true %}x{% endif %}\n\n'):
    assert _with(before + llama, date='2024-02-09') == _with(
        before + '{%- if true %}\n{%- endif %}09 Feb 2024! Q?')
  with pytest.raises(errors.InputError, match='data.date=1/2/24: not YYYY-'):
    prompts.get('plain', date='1/2/24')


def test_arguments_of_the_chat_template():
  assert _with(THINK) == '<user>Q?</><assistant><none>'
  assert _with(THINK, arguments="think=True, depth='7'") == (
      '<user>Q?</><assistant>7')
  assert _with(chat_templates.with_defaults('\n ' + THINK, 'think=1')) == (
      _with('\n ' + THINK, arguments='think=1'))
  saved = chat_templates.with_defaults(THINK, "think=True, depth='7'")
  assert _with(saved) == '<user>Q?</><assistant>7'
  assert _with(saved, arguments='think=False') == (
      '<user>Q?</><assistant><none>7')


@pytest.mark.parametrize('name,chat_template,arguments,wrong', [
    ('plain', THINK, 'thinks=True', "the model's chat template has no argument "
     'thinks'),
    ('plain', THINK, 'messages=[]', 'has no argument messages'),
    ('plain', THINK, 'tokenize=False', 'has no argument tokenize'),
    ('plain', THINK, 'm=1', 'has no argument m'),
    ('plain', THINK + '{{ think is none }}', 'none=1', 'no argument none'),
    ('plain', THINK, 'think=1,think=2', 'not NAME=VALUE'),
    ('plain', THINK, 'think={1}', 'not NAME=VALUE'),
    ('plain', THINK, "think=[{'a': b''}]", 'not NAME=VALUE'),
    ('plain', THINK, 'think=1e999', 'not NAME=VALUE'),
    ('plain', THINK, 'True', 'not NAME=VALUE'),
    ('plain', THINK, 'think=print(1)', 'not NAME=VALUE'),
    ('plain', THINK, 'think=', 'not NAME=VALUE'),
    ('plain', THINK, '**{"a": 1}', 'not NAME=VALUE'),
    ('plain', THINK, 'a=1) + (b', 'not NAME=VALUE'),
    ('plain', None, 'think=True', 'the tokenizer has no chat template'),
    ('r1_zero', THINK, 'think=True', 'is no chat')])
def test_arguments_without_effect_are_refused(
    name, chat_template, arguments, wrong):
  with pytest.raises(errors.InputError) as error:
    _with(chat_template, name, arguments=arguments)
  assert wrong in str(error.value) and 'data.template_args' in str(error.value)
  assert '\n' not in str(error.value)


@pytest.mark.parametrize('text,expected', [
    ('Q?', '<bos>Q?'), ('<bos>Q?', '<bos>Q?')])
def test_a_text_template_gets_the_ids_of_its_text(tmp_path, text, expected):
  """At most one BOS, and no EOS, whatever the tokenizer puts around texts."""
  tokenizer = _bytes_tokenizer(None)
  tokenizer.add_special_tokens({'bos_token': '<bos>', 'eos_token': '<eos>'})
  tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
      single='<bos> $A <eos>', special_tokens=[
          (name, tokenizer.convert_tokens_to_ids(name))
          for name in ('<bos>', '<eos>')])
  assert tokenizer.decode(tokenizer('a')['input_ids']) == '<bos>a<eos>'
  path = tmp_path / 'mine.jinja'
  path.write_text('{% set is_chat = false %}\n{{ problem }}')
  for name in ('plain', str(path)):
    ids = prompts.render(prompts.get(name), tokenizer, problem_lib.Problem(
        'a/1', text, ('1',), 'a'))
    assert tokenizer.decode(ids) == expected
