"""The tokenizer's own chat template: its arguments and its clock."""

import ast
from collections.abc import Mapping, Sequence
import datetime
import functools
import inspect
import math
import re
from typing import Any

from tepo_jax import errors

CLOCK = 'strftime_now'  # transformers' function for templates, e.g. Llama 3.2's
_DIRECTIVES = [f'%{letter}' for letter in (
    *'aAbBcdDeFfHIjmMpRSTUwWxXyYzZ', *(f'-{letter}' for letter in 'dmjHIMS'),
    '%')]
# After a block. The settings of chat templates remove this newline, not the
# source's own white space.
_NEWLINE = '\n'
_RANDOM = re.compile(r'\|\s*random\b|\blipsum\s*\(')
_OURS = ('messages', CLOCK, 'raise_exception')


def render(tokenizer, turns: Sequence[Mapping[str, str]], arguments: str,
           date: datetime.date | None) -> list[int]:
  """The token ids of chat turns, up to the start of the next assistant turn.

  Args:
    turns: role and content of each.
    arguments: of the template, as `parsed_arguments` reads them.
    date: what the template reads as today's; None: the clock.

  Raises:
    InputError: the template does not know an argument.
    Exception: the template raises anything, draws at random, or leaves out a
      turn's text.
  """
  _check_known(tokenizer, arguments)
  source = tokenizer.get_chat_template()
  if _RANDOM.search(source):
    raise ValueError('it draws at random; a resumed run could not repeat that')
  if date is not None and CLOCK in source:
    source = _clock(date) + source
  text = tokenizer.apply_chat_template(
      turns, chat_template=source, add_generation_prompt=True,
      tokenize=False, **parsed_arguments(arguments))
  _check_whole(turns, text)
  return tokenizer(text, add_special_tokens=False)['input_ids']


def _check_whole(turns, text):
  """Refuses a rendered text without one of the turns; templates may leave out
  parts of the assistant's, such as its reasoning."""
  for turn in turns:
    if turn['role'] != 'assistant' and turn['content'].strip() not in text:
      remedy = ("; data.system='' makes no such turn"
                if turn['role'] == 'system' else '')
      raise ValueError(f'the text of the {turn["role"]} turn is not in what it '
                       f'renders{remedy}')


@functools.cache
def _clock(date):
  """A Jinja macro in place of the clock: transformers passes no functions."""
  midnight = datetime.datetime.combine(date, datetime.time())
  replaced = ''.join(
      f'.replace({directive!r}, {midnight.strftime(directive)!r})'
      for directive in _DIRECTIVES)
  return (f'{{%- macro {CLOCK}(format) -%}}{{{{ format{replaced} }}}}'
          f'{{%- endmacro %}}{_NEWLINE}')


def with_defaults(source: str, arguments: str) -> str:
  """A chat template that renders without arguments as with these."""
  return ''.join(
      f'{{%- if {name} is not defined %}}{{%- set {name} = {value!r} %}}'
      f'{{%- endif %}}{_NEWLINE}'
      for name, value in parsed_arguments(arguments).items()) + source


@functools.cache
def parsed_arguments(text: str) -> dict[str, Any]:
  """The names and values of 'enable_thinking=False, depth=2'.

  Raises:
    InputError: it is not of this form, a name is there twice, or a value is no
      constant that Jinja writes as Python does: `with_defaults` does so.
  """
  try:
    call = ast.parse(f'f({text})', mode='eval').body
    if call.args or any(keyword.arg is None for keyword in call.keywords):
      raise ValueError('every argument needs a name')
    found = {keyword.arg: ast.literal_eval(keyword.value)
             for keyword in call.keywords}
    if len(found) < len(call.keywords) or not all(
        map(_is_plain, found.values())):
      raise ValueError('a name is there twice, or Jinja has no such constant')
    return found
  except (AttributeError, MemoryError, RecursionError, SyntaxError, TypeError,
          ValueError) as error:
    raise errors.InputError(
        f'data.template_args={text}: not NAME=VALUE, NAME=VALUE with constant '
        'values') from error


def _is_plain(value):
  if isinstance(value, dict):
    return all(map(_is_plain, (*value, *value.values())))
  if isinstance(value, list | tuple):
    return all(map(_is_plain, value))
  return value is None or isinstance(value, str | int) or (
      isinstance(value, float) and math.isfinite(value))


@functools.cache
def _check_known(tokenizer, text):
  """Refuses arguments that the template does not read, or that are ours."""
  names = parsed_arguments(text)
  if not names:
    return
  from transformers.utils import chat_template_utils  # slow to import
  ours = {*_OURS, *tokenizer.special_tokens_map,
          *inspect.signature(tokenizer.apply_chat_template).parameters}
  read = chat_template_utils._get_template_variables(  # pylint: disable=protected-access
      tokenizer.get_chat_template())
  for name in names:
    if name in ours or name not in read:
      raise errors.InputError(
          f'data.template_args={text}: the model\'s chat template has no '
          f'argument {name}')
