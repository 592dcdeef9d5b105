r"""Stops a completion by its text: after `\boxed{…}` closes."""

from collections.abc import Callable

import numpy as np
import transformers

_OPENING = '\\boxed{'


def after_boxed(tokenizer: transformers.PreTrainedTokenizerBase
                ) -> Callable[[np.ndarray], int | None]:
  r"""A function that finds in a completion's tokens where its \boxed{} closes.

  It takes a completion's tokens, some at a time, and returns how many of those
  belong to the completion if the box closes among them, else None. The token
  of the closing brace is kept whole. Braces are ASCII, so each token may be
  decoded by itself; an escaped brace (`\{`) does not count.
  """
  text, depth = '', 0

  def closes(characters):
    """Whether these characters close the box."""
    nonlocal text, depth
    for character in characters:
      escaped = text.endswith('\\')
      text = (text + character)[-len(_OPENING):]
      if escaped and character == '\\':
        text = text[:-2]  # a line break of LaTeX escapes nothing
      elif depth and character in '{}' and not escaped:
        depth += 1 if character == '{' else -1
        if not depth:
          return True
      elif text == _OPENING:
        depth = 1
    return False

  def feed(token_T):
    for index, token in enumerate(token_T):
      if closes(tokenizer.decode([int(token)])):
        return index + 1
    return None

  return feed
