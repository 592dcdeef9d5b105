"""Packing by hand-made cases and by properties of random ones."""

import jax
import numpy as np
import pytest

from tepo_jax.learning import packing
from tests.learning import batches
from tests.learning.batches import P
from tests.learning.batches import T


def _batch(prompts, lengths):
  """Completions whose tokens are 100 i + 1, 100 i + 2, … in sequence."""
  return batches.of_tokens(
      np.split(100 * i + 1 + np.arange(prompt + length), [prompt])
      for i, (prompt, length) in enumerate(zip(prompts, lengths)))


def _found(minibatch, i):
  """The tokens that follow the columns whose scores belong to completion i."""
  row = minibatch.microbatch_B[i], minibatch.row_B[i]
  columns = np.flatnonzero(minibatch.rows.scored_RS[row])
  start = minibatch.column_B[i]
  length = int(minibatch.mask_BT[i].sum())
  return minibatch.rows.token_RS[row][columns[start:start + length] + 1]


def test_two_sequences_in_a_row():
  """Tokens, positions, segments and scored columns, written out by hand."""
  pack = packing.Packer(row_tokens=11, microbatch_tokens=11, shards=1)
  minibatch = pack(_batch([2, 1, 3], [3, 4, 0]))  # the last one is filler
  rows = minibatch.rows
  assert rows.token_RS.shape == (3, 1, 11)  # at worst one row a completion
  assert minibatch.used == 1
  np.testing.assert_array_equal(minibatch.microbatch_B, [0, 0, -1])
  for name, want in {
      'token_RS': [1, 2, 3, 4, 5, 101, 102, 103, 104, 105, 0],
      'position_RS': [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, -1],
      'segment_RS': [0, 0, 0, 0, 0, 1, 1, 1, 1, 1, -1],
      'scored_RS': [0, 1, 1, 1, 0, 1, 1, 1, 1, 0, 0]}.items():
    np.testing.assert_array_equal(getattr(rows, name)[0, 0], want, name)
    unused = getattr(rows, name)[1:]
    empty = -1 if name in ('position_RS', 'segment_RS') else 0
    assert (unused == empty).all()
  np.testing.assert_array_equal(minibatch.column_B[:2], [0, 3])
  np.testing.assert_array_equal(_found(minibatch, 0), [3, 4, 5])
  np.testing.assert_array_equal(_found(minibatch, 1), [102, 103, 104, 105])
  assert packing.efficiency(minibatch) == 10 / 11


@pytest.mark.parametrize('row_tokens, microbatch_tokens, shards, padded', [
    (11, 30, 1, False), (32, 70, 2, False), (500, 1, 1, False),
    (11, 30, 2, True), (11, 1, 4, True)])
def test_every_completion_is_packed_once(
    row_tokens, microbatch_tokens, shards, padded):
  generator = np.random.default_rng(0)
  prompts = generator.integers(1, P + 1, 30)
  lengths = generator.integers(0, T + 1, 30)
  batch = _batch(prompts, lengths)
  pack = packing.Packer(row_tokens, microbatch_tokens, shards, padded)
  minibatch = pack(batch)
  for i in np.flatnonzero(lengths):
    np.testing.assert_array_equal(
        _found(minibatch, i), 100 * i + 1 + prompts[i] + np.arange(lengths[i]))
  packed, used = minibatch.rows, minibatch.used
  microbatches, rows, _ = packed.token_RS.shape
  assert rows % shards == 0 and microbatches * rows >= 30
  assert rows * row_tokens <= microbatch_tokens or rows == shards
  assert (packed.position_RS[used:] == -1).all()
  assert packed.scored_RS[:used].any(axis=(1, 2)).all()
  assert (packed.segment_RS is None) == padded
  filler = lengths == 0
  assert (packed.position_RS >= 0).sum() == (prompts + lengths)[~filler].sum()
  np.testing.assert_array_equal(minibatch.microbatch_B == -1, filler)
  if padded:
    tokens = (packed.position_RS >= 0).sum(-1)
    assert tokens.max() <= P + T and (tokens > 0).sum() == (~filler).sum()


def test_shapes_do_not_depend_on_the_lengths():
  pack = packing.Packer(row_tokens=22, microbatch_tokens=44, shards=1)
  shapes = {
      tuple(x.shape for x in jax.tree.leaves(m))
      for m in (pack(_batch([1] * 9, [n] * 9)) for n in (0, 1, 4, 7))}
  assert len(shapes) == 1


def test_a_microbatch_is_not_larger_than_the_minibatch():
  pack = packing.Packer(row_tokens=11, microbatch_tokens=10**6, shards=2)
  assert pack(_batch([1] * 6, [3] * 6)).rows.token_RS.shape == (1, 6, 11)


def test_first_fit_decreasing():
  """7 and 3, 6 and 2 and 2, 5: longest first, each where it first fits."""
  row = packing.first_fit_decreasing([2, 5, 7, 3, 6, 2], 10)
  np.testing.assert_array_equal(row, [1, 2, 0, 0, 1, 1])


def test_rows_are_evenly_full():
  """First-fit would fill one row and leave the rest to the last."""
  row = packing.spread_evenly([4, 4, 4, 4], 12, 2)
  np.testing.assert_array_equal(np.bincount(row), [2, 2])
  assert packing.spread_evenly([7, 7, 7], 12, 2) is None
  # 12 of 12 columns fit, 13 do not.
  assert sorted(packing.spread_evenly([6, 6, 6, 6], 12, 2)) == [0, 0, 1, 1]
  assert packing.spread_evenly([7, 7, 6], 12, 2) is None
  pack = packing.Packer(row_tokens=12, microbatch_tokens=24, shards=1)
  minibatch = pack(_batch([1] * 4, [3] * 4))
  tokens = (minibatch.rows.position_RS[0] >= 0).sum(-1)
  np.testing.assert_array_equal(tokens, [8, 8])


def test_a_sequence_that_does_not_fit_is_an_error():
  pack = packing.Packer(row_tokens=8, microbatch_tokens=8, shards=1)
  with pytest.raises(ValueError, match='9 tokens does not fit into rows of 8'):
    pack(_batch([2], [7]))


def test_nine_columns_of_ten_hold_a_token_on_the_papers_lengths():
  """Prompts around 81 tokens; completions mostly of 1k to 4k, at most 8,192;
  128 to a minibatch, rows of 10,240 columns."""
  generator = np.random.default_rng(0)
  for mean in 1000, 2000, 4000:
    tokens = generator.geometric(1 / 100, 128).clip(20, 2048) + np.minimum(
        generator.gamma(2, mean / 2, 128).astype(int) + 1, 8192)
    rows = packing.first_fit_decreasing(tokens, 10240).max() + 1
    assert tokens.sum() / (rows * 10240) >= 0.9


@pytest.mark.parametrize('prompt, tokens, microbatch, shards, row', [
    (24, 48, 1152, 1, 144), (24, 48, 1151, 1, 72), (24, 48, 1152, 2, 72),
    (24, 48, 4608, 4, 144), (2048, 8192, 16384, 1, 10240),
    (1024, 4096, 8 * 10240, 8, 5120), (256, 1024, 10240, 1, 1280)])
def test_a_row_holds_the_longest_sequence_or_two(
    prompt, tokens, microbatch, shards, row):
  for mode in packing.MODES:
    assert packing.make(
        mode, prompt_tokens=prompt, max_tokens=tokens, samples=8,
        microbatch_tokens=microbatch, shards=shards).row_tokens == row
