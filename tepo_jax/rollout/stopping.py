r"""Stops a completion by its text: at given strings, or after `\boxed{…}`
closes.

A `Feed` takes a completion's tokens, some at a time, and returns how many of
those belong to the completion if it ends among them, else None. It depends on
the tokens alone, not on how many it takes at a time.
"""

from collections.abc import Callable, Sequence

import numpy as np
import transformers

from tepo_jax import errors

Feed = Callable[[np.ndarray], int | None]

_OPENING = '\\boxed{'
# More tokens than can be of a string are decoded before it: some tokenizers
# leave out the space with which a text begins.
_MARGIN = 4


def first_of(makers: Sequence[Callable[[], Feed]]
             ) -> Callable[[], Feed] | None:
  """Makes feeds that stop at the first of several ends; None without any."""
  if not makers:
    return None

  def make():
    feeds = [make_one() for make_one in makers]

    def feed(token_T):
      ends = [end for one in feeds if (end := one(token_T)) is not None]
      return min(ends, default=None)

    return feed

  return make


def check(tokenizer: transformers.PreTrainedTokenizerBase,
          strings: Sequence[str]) -> None:
  """Refuses strings that `at_strings` can never find.

  Raises:
    errors.InputError: one contains a special token; says what to set instead.
  """
  special = _special(tokenizer) if strings else {}
  for string in strings:
    for index, content in special.items():
      if content in string:
        raise errors.InputError(
            f'config.rollout.stop: {string!r} contains the special token '
            f'{content!r}, which the text of a completion never has; set '
            f'config.rollout.stop_ids=({index},) instead')


def _special(tokenizer):
  """{token id: content} of the special tokens."""
  return {index: token.content
          for index, token in tokenizer.added_tokens_decoder.items()
          if token.special}


def at_strings(tokenizer: transformers.PreTrainedTokenizerBase,
               strings: Sequence[str]) -> Callable[[], Feed]:
  """Makes feeds that stop with the token that completes one of the strings.

  The text is that of all tokens decoded together, without special tokens, so a
  string may begin and end anywhere in tokens. As each token has at least a
  byte, only as many as the longest string has bytes are decoded again.
  """
  special = _special(tokenizer)
  kept = max(len(text.encode()) for text in strings) + _MARGIN

  def is_complete(ids):
    text = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    return any(string in text for string in strings)

  def make():
    last = []  # of the tokens so far, `kept` that are not special

    def feed(token_T):
      nonlocal last
      ids, before = token_T.tolist(), last
      new = [token for token in ids if token not in special]
      last = (before + new)[-kept:]
      if not is_complete(before + new):
        return None
      for index, token in enumerate(ids):
        if token not in special:
          before = [*before, token]
          if is_complete(before):
            return index + 1
      return None

    return feed

  return make


def after_boxed(tokenizer: transformers.PreTrainedTokenizerBase
                ) -> Feed:
  r"""A feed that stops where the completion's \boxed{} closes.

  The token of the closing brace is kept whole. Braces are ASCII, so each token
  may be decoded by itself; an escaped brace (`\{`) does not count.
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
