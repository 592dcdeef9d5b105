r"""Ends of a completion that only its text shows."""

from collections.abc import Callable

import numpy as np
import transformers

_OPENING = '\\boxed{'


def after_boxed(tokenizer: transformers.PreTrainedTokenizerBase
                ) -> Callable[[np.ndarray], int | None]:
  r"""A function of a completion's next tokens: where its \boxed{} closes.

  It is called with all the tokens, some at a time, and says up to how many of
  those at hand the completion goes, or None. The brace may share its token
  with what follows it. Braces are ASCII, so the tokens may be decoded one by
  one; an escaped brace (`\{`) is none.
  """
  text, depth = '', 0

  def closes(characters):
    """Whether the box is closed by these characters."""
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
