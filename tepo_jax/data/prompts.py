r"""Renders problems as token ids, by a named prompt template or a Jinja file.

A template is a user turn, an optional system turn and the style in which the
answer is written. The tokenizer's own chat template, if any, formats the
turns, so R1-distills and Qwen3 keep their thinking format.
"""

from collections.abc import Sequence
import dataclasses
import datetime
import functools
import re

from tepo_jax import errors
from tepo_jax import grading
from tepo_jax.data import chat_templates
from tepo_jax.data import problem as problem_lib
from tepo_jax.runtime import files

SUFFIX = '.jinja'  # of a file with a template

# What a file may set besides the user turn -> whether a value is one of it.
_FIELDS = {
    'style': lambda value: value in grading.STYLES,
    'system': lambda value: isinstance(value, str),
    'is_chat': lambda value: isinstance(value, bool)}


@dataclasses.dataclass(frozen=True)
class Template:
  """`{problem}` is replaced by the problem; `style` is one of grading.STYLES.

  With is_chat=False the text itself is the prompt, for base models. `examples`
  are worked ones: turns of user and assistant before the problem's. If `file`
  is given, `user` is its Jinja source instead. `arguments` are the chat
  template's, as Python writes them; `date` is what it reads as today's.
  """
  user: str
  style: str = 'boxed'
  system: str | None = None
  is_chat: bool = True
  examples: tuple[tuple[str, str], ...] = ()
  file: str | None = None
  arguments: str = ''
  date: datetime.date | None = None


TEMPLATES = {
    'plain': Template('{problem}'),
    # Of the embedded tasks for pretrained models.
    'sums': Template('{problem}', style='answer', examples=(
        ('What is 23 + 5?', 'Answer: 28'), ('What is 48 - 6?', 'Answer: 42'))),
    'word_problems': Template('{problem}', style='answer', examples=(
        ('Mia has 4 bags with 6 pens in each. How many pens are there in all?',
         '4 * 6 = 24. Answer: 24'),
        ('Tom has 15 balls and loses 7. How many balls are left?',
         '15 - 7 = 8. Answer: 8'),
        ('Leo shares 20 sweets equally among 5 children. How many sweets does '
         'each child get?', '20 / 5 = 4. Answer: 4'))),
    'qwen_boxed': Template(
        '{problem}',
        system='Please reason step by step, and put your final answer within '
               '\\boxed{}.'),
    # Verbatim from DAPO-Math-17k.
    'dapo_answer': Template(
        'Solve the following math problem step by step. The last line of your '
        'response should be of the form Answer: $Answer (without quotes) '
        'where $Answer is the answer to the problem.\n\n{problem}\n\n'
        'Remember to put your answer on its own line after "Answer:".',
        style='answer'),
    'dapo_boxed': Template(
        'Solve the following math problem step by step. The last line of your '
        'response should be of the form Answer: \\boxed{$Answer} where '
        '$Answer is the answer to the problem.\n\n{problem}\n\n'
        'Remember to put your answer on its own line after "Answer:".'),
    # From DeepSeek-R1-Zero, plus a sentence on where the grader looks.
    'r1_zero': Template(
        'A conversation between User and Assistant. The User asks a question, '
        'and the Assistant solves it. The Assistant first thinks about the '
        'reasoning process in the mind and then provides the User with the '
        'answer. The reasoning process is enclosed within <think> </think> '
        'and answer is enclosed within <answer> </answer> tags, respectively, '
        'i.e., <think> reasoning process here </think> <answer> answer here '
        '</answer>. Put your final answer within \\boxed{}.\n'
        'User: {problem}\nAssistant: <think>',
        is_chat=False),
}


def get(name: str, system: str | None = None, arguments: str | None = None,
        date: str | None = None) -> Template:
  """Returns a template of TEMPLATES, or reads it from a file.

  Args:
    name: a key of TEMPLATES, or a .jinja file (see `_read`).
    system: replaces the template's system turn; '' leaves it out.
    arguments: of the tokenizer's chat template, 'enable_thinking=False'.
    date: YYYY-MM-DD, for a chat template that reads the clock; None: it does.

  Raises:
    InputError: no such template, a bad file, `system` or `arguments` without a
      chat, or arguments or a date that cannot be read.
  """
  if name in TEMPLATES:
    template = TEMPLATES[name]
  elif name.endswith(SUFFIX):
    template = _read(name)
  else:
    raise errors.InputError(
        f'no prompt template {name!r}; choose from {", ".join(TEMPLATES)}, or '
        f'give a {SUFFIX} file')
  for field, value in (('system', system), ('template_args', arguments)):
    if value is not None and not template.is_chat:
      raise errors.InputError(
          f'data.{field} has no effect: data.template={name} is no chat, its '
          'text is the whole prompt')
  chat_templates.parsed_arguments(arguments or '')
  return dataclasses.replace(
      template, system=template.system if system is None else system or None,
      arguments=arguments or '', date=date and _date(date))


def _date(text):
  try:
    return datetime.date.fromisoformat(text)
  except ValueError as error:
    raise errors.InputError(f'data.date={text}: not YYYY-MM-DD') from error


def _read(file: str) -> Template:
  """Reads a template from a Jinja file.

  Its text is the user turn; it may use `problem` and `row`, the problem's
  columns. At its top level `{% set style = 'answer' %}`, and in the same way
  `system` and `is_chat`, set the other fields of Template, by constants.
  """
  import jinja2
  import jinja2.meta
  where = f'data.template={file}'
  try:
    source = files.path(file).read_text('utf-8')
    tree = _environment().parse(source)
    used = jinja2.meta.find_undeclared_variables(tree)
  except (OSError, UnicodeDecodeError) as error:
    raise errors.InputError(
        f'{where}: {getattr(error, "strerror", None) or error}') from error
  except jinja2.TemplateSyntaxError as error:
    raise errors.InputError(
        f'{where}: line {error.lineno}: {error.message}') from error
  except RecursionError as error:
    raise errors.InputError(f'{where}: {errors.one_line(error)}') from error
  used -= set(_environment().globals)
  if unknown := used - {'problem', 'row'}:
    raise errors.InputError(
        f'{where}: uses {min(unknown)!r}; there are only problem and row, '
        'whose columns are row.NAME')
  if not used:
    raise errors.InputError(
        f'{where}: uses neither problem nor row, so all prompts would be equal')
  return Template(source, file=file, **_fields(tree, where))


def _fields(tree, where):
  """The fields of Template that a parsed file sets."""
  from jinja2 import nodes
  fields = {}
  for node in tree.body:
    name = getattr(getattr(node, 'target', None), 'name', None)
    if name not in _FIELDS or not isinstance(
        node, nodes.Assign | nodes.AssignBlock):
      continue
    try:
      fields[name] = node.node.as_const()
    except (AttributeError, nodes.Impossible) as error:  # a block has no node
      raise errors.InputError(f'{where}: line {node.lineno}: {name} must be a '
                              'constant') from error
    if not _FIELDS[name](fields[name]):
      raise errors.InputError(
          f'{where}: {name} is {fields[name]!r}; style is one of '
          f'{", ".join(grading.STYLES)}, system a text, is_chat true or false')
  return fields


@functools.cache
def _environment():
  """Of templates by users: safe, as the chat templates of transformers."""
  import jinja2
  from jinja2 import sandbox

  class Environment(sandbox.ImmutableSandboxedEnvironment):

    def getattr(self, obj, attribute):
      """Reads row.values as a column if there is one, not as dict.values."""
      if isinstance(obj, dict) and attribute in obj:
        return obj[attribute]
      return super().getattr(obj, attribute)

  return Environment(
      undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)


@functools.cache
def _compiled(source):
  return _environment().from_string(source)


def user_turn(template: Template, problem: problem_lib.Problem) -> str:
  """The text in which the template puts the problem.

  Raises:
    InputError: the template's file fails on the problem.
  """
  if template.file is None:
    return template.user.replace('{problem}', problem.problem)
  row = problem.row or {}
  try:
    return _compiled(template.user).render(problem=problem.problem, row=row)
  except Exception as error:  # The expressions of a user's file raise anything.
    raise errors.InputError(
        f'data.template={template.file}: {problem.id} of {problem.source}: '
        f'{errors.one_line(error)}; the columns of row: '
        f'{", ".join(map(str, row)) or "none"}') from error


def render(template: Template, tokenizer, problem: problem_lib.Problem
           ) -> list[int]:
  """Returns the token ids of the prompt, up to the start of the completion.

  Without a chat template, turns are plain text separated by a blank line.

  Raises:
    InputError: the template's file fails on the problem, the tokenizer's chat
      template rejects the turns, or there is no token.
  """
  token_ids = _render(template, tokenizer, problem)
  if not token_ids:
    raise errors.InputError(
        f'the prompt of {problem.id} has no tokens: its template yields no '
        'text')
  return token_ids


def _turns(template, problem):
  """The chat turns: a system turn, the template's examples, the row's turns,
  the problem."""
  examples = [turn for example in template.examples
              for turn in zip(('user', 'assistant'), example)]
  texts = [*problem.turns, ('user', user_turn(template, problem))]
  place = 1 if texts[0][0] == 'system' else 0
  turns = [{'role': role, 'content': text}
           for role, text in texts[:place] + examples + texts[place:]]
  if template.system is not None:
    if any(turn['role'] == 'system' for turn in turns):
      raise errors.InputError(
          f'{_name(problem)} has a system turn, and so has data.template or '
          "data.system; set data.system='' to use the row's")
    turns.insert(0, {'role': 'system', 'content': template.system})
  return turns


def _name(problem):
  return problem.id if problem.number is None else (
      f'row {problem.number} ({problem.id})')


def _render(template, tokenizer, problem):
  turns = _turns(template, problem)
  if not template.is_chat or tokenizer.chat_template is None:
    if problem.turns:
      reason = ('the tokenizer has no chat template' if template.is_chat else
                'data.template is plain text')
      raise errors.InputError(
          f'{_name(problem)} has {len(turns)} turns, but {reason}; use a chat '
          'template, or rows with the problem alone')
    if template.arguments:
      raise errors.InputError(
          f'data.template_args={template.arguments} has no effect: the '
          'tokenizer has no chat template')
    return _text_ids(tokenizer, '\n\n'.join(turn['content'] for turn in turns))
  try:
    return chat_templates.render(
        tokenizer, turns, template.arguments, template.date)
  except errors.InputError:
    raise
  except Exception as error:  # A model's template raises anything.
    raise errors.InputError(
        f'the model\'s chat template rejects the prompt of {problem.id}, '
        f'{" and ".join(turn["role"] for turn in turns)}: '
        f'{errors.one_line(error) or type(error).__name__}') from error


def _text_ids(tokenizer, text):
  """The ids of a text, after the BOS token if the tokenizer puts one before
  texts and this one does not have it. A text that the model continues does not
  end: no EOS."""
  ids = tokenizer(text, add_special_tokens=False)['input_ids']
  bos = [tokenizer.bos_token_id]
  adds_bos = bos != [None] and tokenizer(text)['input_ids'][:1] == bos
  return bos + ids if adds_bos and ids[:1] != bos else ids


@functools.cache
def _dapo_wrapper():
  """What stands before and after a problem, with any white space between."""
  before, after = (
      r'\s+'.join(map(re.escape, text.split()))
      for text in TEMPLATES['dapo_answer'].user.split('{problem}'))
  return re.compile(rf'\A\s*{before}\s*'), re.compile(rf'\s*{after}\s*\Z')


def strip_dapo(text: str) -> str:
  """Returns the problem in a prompt of DAPO-Math-17k, other text unchanged."""
  before, after = _dapo_wrapper()
  return after.sub('', before.sub('', text))


def render_short(
    problems: Sequence[problem_lib.Problem], template: Template, tokenizer,
    max_tokens: int) -> tuple[list[tuple[problem_lib.Problem, list[int]]],
                              list[tuple[problem_lib.Problem, list[int]]]]:
  """Returns (problem, token ids) up to max_tokens, and those that are longer.

  Longer prompts are omitted, never truncated; the caller reports them.
  """
  short, long = [], []
  for problem in problems:
    ids = render(template, tokenizer, problem)
    (short if len(ids) <= max_tokens else long).append((problem, ids))
  return short, long
