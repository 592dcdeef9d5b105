r"""Renders problems as token ids, by the name of a prompt template.

A template is a user turn, an optional system turn and the style in which the
answer is written. The tokenizer's own chat template, if any, formats the
turns, so R1-distills and Qwen3 keep their thinking format.
"""

import dataclasses
from collections.abc import Sequence

from tepo_jax import errors


@dataclasses.dataclass(frozen=True)
class Template:
  """`{problem}` is replaced by the problem; `style` is one of answers.STYLES.

  With is_chat=False the text itself is the prompt, for base models.
  """
  user: str
  style: str = 'boxed'
  system: str | None = None
  is_chat: bool = True


TEMPLATES = {
    'plain': Template('{problem}'),
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


def get(name: str) -> Template:
  """Returns the template; InputError if there is none of this name."""
  if name not in TEMPLATES:
    raise errors.InputError(
        f'no prompt template {name!r}; choose from {", ".join(TEMPLATES)}')
  return TEMPLATES[name]


def render(template: str, tokenizer, problem: str) -> list[int]:
  """Returns the token ids of the prompt, up to the start of the completion.

  Without a chat template, turns are plain text separated by a blank line.

  Raises:
    InputError: no such template, or the chat template rejects it.
  """
  row = get(template)
  turns = [{'role': 'user', 'content': row.user.replace('{problem}', problem)}]
  if row.system is not None:
    turns.insert(0, {'role': 'system', 'content': row.system})
  if not row.is_chat or tokenizer.chat_template is None:
    text = '\n\n'.join(turn['content'] for turn in turns)
    return tokenizer(text)['input_ids']
  import jinja2
  try:
    return tokenizer.apply_chat_template(
        turns, add_generation_prompt=True, return_dict=False)
  except jinja2.TemplateError as error:  # e.g. no system turns (Mistral)
    raise errors.InputError(f'prompt template {template!r}: rejected by the '
                            f'model\'s chat template: {error}') from error


def strip_dapo(text: str) -> str:
  """Returns the problem in a prompt of DAPO-Math-17k, other text unchanged."""
  before, after = TEMPLATES['dapo_answer'].user.split('{problem}')
  return text.removeprefix(before).removesuffix(after)


def render_short(problems: Sequence, template: str, tokenizer,
                 max_tokens: int) -> tuple[list[tuple], int]:
  """Returns [(problem, token ids)] up to max_tokens, and the number omitted.

  Longer prompts are omitted, never truncated; the caller reports how many.
  """
  rendered = [(problem, render(template, tokenizer, problem.problem))
              for problem in problems]
  short = [pair for pair in rendered if len(pair[1]) <= max_tokens]
  return short, len(problems) - len(short)
