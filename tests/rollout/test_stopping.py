"""Where a box closes, in the tokens of a toy tokenizer."""

import numpy as np
import pytest

from tepo_jax.rollout import stopping


class _Tokenizer:
  """Token i of a completion is its i-th piece."""

  def __init__(self, pieces):
    self.pieces = pieces

  def decode(self, ids):
    return ''.join(self.pieces[i] for i in ids)


@pytest.mark.parametrize('pieces, want', [
    (['so \\', 'boxed', '{', '3', '}', ' done'], 5),
    (['\\boxed{3}$.', 'x'], 1),
    (['\\boxed{', '\\frac{1}{', '2}', '}'], 4),
    (['\\boxed{\\{1, 2', '\\}', '} ', 'x'], 3),
    (['\\', 'boxed{', '1 \\', '\\', '}'], 5),  # a line break, then the end
    (['a } b {', '\\text{no}', '\\boxed', ' {3}'], None),
    (['\\boxed{3', '{}'], None),
    ([], None)])
def test_the_completion_ends_after_the_closing_brace(pieces, want):
  """Whether the tokens are fed at once or one by one."""
  tokens = np.arange(len(pieces))
  assert stopping.after_boxed(_Tokenizer(pieces))(tokens) == want
  feed = stopping.after_boxed(_Tokenizer(pieces))
  ends = [i + 1 for i in tokens if feed(tokens[i:i + 1]) is not None]
  assert ends[:1] == ([] if want is None else [want])
