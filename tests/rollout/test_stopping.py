"""Where a box closes, in the tokens of a toy tokenizer; where a string is
complete, in those of a byte-level one."""

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from transformers.generation import stopping_criteria

from tepo_jax import errors
from tepo_jax.rollout import stopping


class _Tokenizer:
  """Token i of a completion is its i-th piece."""

  added_tokens_decoder = {}

  def __init__(self, pieces):
    self.pieces = pieces

  def decode(self, ids, **_):
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


TEXT = 'Stop here. </answer> 数学 é\n\nQ: 1 + 1 = 2. Stop\nStopping Stop!'


@pytest.fixture(name='tokenizer', scope='module')
def _tokenizer():
  """Byte-level BPE: most tokens have several letters, 数 has three tokens."""
  made = tokenizers.Tokenizer(tokenizers.models.BPE())
  made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
      add_prefix_space=False)
  made.decoder = tokenizers.decoders.ByteLevel()
  made.train_from_iterator(
      [TEXT.replace('学', ' ')], tokenizers.trainers.BpeTrainer(
          vocab_size=330, special_tokens=['<eos>'], show_progress=False,
          initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()))
  return transformers.PreTrainedTokenizerFast(
      tokenizer_object=made, eos_token='<eos>')


def _completions(tokenizer):
  """Random tokens of TEXT, and pieces of it, with a special token between."""
  generator = np.random.default_rng(0)
  ids = np.array(tokenizer.encode(TEXT) + [tokenizer.eos_token_id])
  cut = generator.integers(1, len(TEXT), 40)
  return [generator.choice(ids, 40) for _ in range(40)] + [
      np.array(tokenizer.encode(TEXT[:i]) + tokenizer.encode(TEXT[i:]))
      for i in cut]


def _end(feed, token_T, sizes):
  """Where a completion ends that is fed in chunks of these sizes."""
  start = 0
  for size in sizes:
    end = feed(token_T[start:start + size])
    if end is not None:
      return start + end
    start += size
  return None


@pytest.mark.parametrize('strings', [
    ('</answer>',), ('\n\n', 'Stop!'), ('Stop',), ('op h', '. S'), ('数学',),
    ('é\n',)])
def test_a_completion_ends_with_the_token_that_completes_a_string(
    tokenizer, strings):
  """The first after which the decoded text has it, however it is fed; and
  where transformers' own criterion stops, which is for whole characters."""
  theirs = None
  if all(map(str.isascii, strings)):
    theirs = stopping_criteria.StopStringCriteria(tokenizer, list(strings))
  wants, generator = [], np.random.default_rng(1)
  for token_T in _completions(tokenizer):
    wants.append(next((
        i for i in range(1, len(token_T) + 1) if any(
            text in tokenizer.decode(token_T[:i], skip_special_tokens=True)
            for text in strings)), None))
    for sizes in ([len(token_T)], len(token_T) * [1],
                  generator.integers(1, 9, len(token_T))):
      feed = stopping.at_strings(tokenizer, strings)()
      assert _end(feed, token_T, sizes) == wants[-1]
    if theirs is not None and tokenizer.eos_token_id not in token_T:
      ids = torch.tensor(token_T)[None]
      assert wants[-1] == next((i for i in range(1, len(token_T) + 1)
                                if theirs(ids[:, :i], None)), None)
  assert None in wants or strings == ('Stop',)
  assert len(set(wants)) > 3


def test_a_special_token_is_refused_as_a_text(tokenizer):
  with pytest.raises(errors.InputError, match=(
      r"config.rollout.stop: 'a<eos>' contains the special token '<eos>'.*"
      rf'stop_ids=\({tokenizer.eos_token_id},\)')):
    stopping.check(tokenizer, ['eos>', 'a<eos>'])


def test_the_first_of_several_ends():
  pieces = ['a', '\\boxed{1}', 'STOP']
  tokenizer = _Tokenizer(pieces)
  make = stopping.first_of([
      lambda: stopping.after_boxed(tokenizer),
      stopping.at_strings(tokenizer, ['aSTOP'])])
  assert make()(np.array([0, 2, 1])) == 2
  assert make()(np.array([0, 1, 2])) == 2
  assert make()(np.array([2, 0])) is None
  assert stopping.first_of([]) is None
